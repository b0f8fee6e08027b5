"""Weights that engines of vLLM's read in common, on host memory: who loads them, and who takes them."""

import os
import uuid

import engines
import models
import pytest
from test_sleep import Llm, own


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def write(name):
        engines.in_child(lambda: str(models.write(name, root / name)), vmem=False)
        return root / name

    return write


@pytest.fixture(scope="session", autouse=True)
def imported():
    os.environ["VMEM_VLLM"] = "1"
    import vllm.v1.engine.core  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401


POOL = 256 << 20


@pytest.fixture
def environ():
    return dict(VMEM_VLLM_POOL=uuid.uuid4().hex[:12], VMEM_VLLM_POOL_SIZE=str(POOL), VMEM_VLLM_SLEEP="keep",
                VMEM_VLLM_WEIGHTS="1", VMEM_VLLM_PAGE_SIZE="64K", VMEM_VLLM_COMMON="30")  # fmt: skip


def state():
    """What the owner of this process's pool has."""
    from pyvmem.kv.view import view_folder
    from pyvmem.sleep.link import Link

    link = Link(str(view_folder() / f"{os.environ['VMEM_VLLM_POOL']}.pool"), "", 30)
    link._open()
    told = link.ask("state")[0]
    link.close()
    return told


def serve(folder, **options):
    """An engine's tokens, and what there was before and after it had begun."""
    made = Llm(folder, **options)
    weights = made.weights
    told = dict(tokens=made.tokens(), common=weights.is_common, bytes=weights.bytes, alone=weights.lease.stats().bytes,
                state=state())  # fmt: skip
    return told


def test_the_second_engine_takes_what_the_first_has_loaded(model, environ):
    folder = model("llama")
    expected = engines.in_child(own, folder, vmem=False)
    first = engines.in_child(serve, folder, vmem=True, environ=environ)
    assert first["tokens"] == expected and first["common"] and first["alone"] == 0
    second = engines.in_child(serve, folder, vmem=True, environ=environ)
    assert second["tokens"] == expected and second["common"] and second["alone"] == 0
    assert len(second["state"]) == 1 and second["state"][0]["key"] == first["state"][0]["key"]
    assert second["state"][0]["model"] == first["state"][0]["model"]
