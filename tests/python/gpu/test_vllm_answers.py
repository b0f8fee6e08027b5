"""vLLM on vMem answers as vLLM does, feature by feature (`make test-vllm`: a GPU, and vLLM installed).

Two processes run the same engines one after the other (vllm_cases.py), one with VMEM_VLLM=1. Both run at once, so that
the whole takes the time of one.

SPDX-License-Identifier: MIT
"""

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import vllm_cases  # noqa: E402

pytestmark = pytest.mark.skipif(
    not os.environ.get("VMEM_TEST_VLLM") or importlib.util.find_spec("vllm") is None,
    reason="make test-vllm: needs a GPU and vLLM",
)
DIFFER = "refused"  # vLLM alone runs it


class Child:
    def __init__(self, vmem, log):
        read, write = os.pipe()
        environment = dict(os.environ, VMEM_VLLM=str(vmem), VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
                           VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")  # fmt: skip
        script = str(Path(vllm_cases.__file__))
        with open(log, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen([sys.executable, script, str(write), *asked()], env=environment,
                                            pass_fds=(write,), stdout=file, stderr=file)  # fmt: skip
        os.close(write)
        self.lines = os.fdopen(read, encoding="utf-8")
        self.log = log


def asked():
    return os.environ.get("VMEM_TEST_VLLM_CASES", "").split()


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    """{case: (vLLM's answer, its answer on vMem)}"""
    folder = Path(os.environ.get("VMEM_TEST_VLLM_LOGS") or tmp_path_factory.mktemp("vllm"))
    children = [Child(vmem, folder / f"vllm{vmem}.log") for vmem in (0, 1)]
    found = [{}, {}]
    for answers, child in zip(found, children):
        for line in child.lines:
            answer = json.loads(line)
            answers[answer.pop("name")] = answer
        child.process.wait()
    return {name: tuple(f.get(name, dict(error="the process ended")) for f in found) for name in vllm_cases.CASES}


def cases(wanted):
    return [
        c for c in vllm_cases.CASES if c != DIFFER and c.startswith("slots") == wanted and (not asked() or c in asked())
    ]


@pytest.mark.parametrize("case", cases(wanted=False))
def test_the_tokens_are_vllms(answers, case):
    own, on_vmem = answers[case]
    if "error" in own:
        pytest.skip(f"vLLM alone does not run this here: {own['error']}")
    assert "error" not in on_vmem, on_vmem["error"]
    assert on_vmem["steps"], "the KV cache was not vMem's"
    assert on_vmem["tokens"] == own["tokens"]
    assert on_vmem["preemptions"] == own["preemptions"]
    if case.startswith("preemption"):
        assert own["preemptions"]
    if vllm_cases.CASES[case][1] == "shared" or case.endswith(("_cached", "_two_gpus")):
        assert on_vmem["hits"]


def flat(tokens):
    return [t for part in tokens for t in flat(part)] if isinstance(tokens[0][0], list) else tokens


@pytest.mark.parametrize("case", cases(wanted=True))
def test_attention_by_slots_chooses_vllms_tokens_but_for_roundings(answers, case):
    own, on_vmem = answers[case]
    if "error" in own:
        pytest.skip(f"vLLM alone does not run this here: {own['error']}")
    assert "error" not in on_vmem, on_vmem["error"]
    pairs = list(zip(flat(own["tokens"]), flat(on_vmem["tokens"])))
    # A prompt's first token does not come from this kernel; the next does, and later ones follow from it.
    assert all(a[0] == b[0] for a, b in pairs)
    assert sum(a[1] == b[1] for a, b in pairs) >= 0.9 * len(pairs)


@pytest.mark.skipif(bool(asked()), reason="cases were named")
def test_groups_of_kv_caches_are_refused_with_one_line(answers):
    own, on_vmem = answers[DIFFER]
    if "error" in own:
        pytest.skip(f"vLLM alone does not run this here: {own['error']}")
    assert "2 groups of KV caches" in on_vmem["error"]


# ---- the stand-ins of tests/python/vllm_standins.py ---------------------------------------------------------------


def test_the_stand_ins_have_the_interface_of_vllms_own():
    import vllm_standins
    from vllm.v1.core import block_pool, kv_cache_utils

    for own, stand_in in ((block_pool.BlockPool, vllm_standins.BlockPool),
                          (kv_cache_utils.FreeKVCacheBlockQueue, vllm_standins.FreeQueue)):  # fmt: skip
        for name, method in inspect.getmembers(stand_in, inspect.isfunction):
            if name.startswith("_") or name == "cache":
                continue
            theirs = list(inspect.signature(getattr(own, name)).parameters)
            assert len(theirs) == len(inspect.signature(method).parameters), name
    block = kv_cache_utils.KVCacheBlock(3)
    for name in vars(vllm_standins.Block(3)):
        assert hasattr(block, name), name


def test_every_patched_function_is_where_it_was():
    import vllm

    from pyvmem.vllm import patches

    assert vllm.__version__ in patches.CHECKED
    for patch in patches.PATCHES:
        owner, name, found = patches._find(patch)
        assert callable(found)


def test_a_step_of_the_runner_calls_in_the_order_that_is_relied_on():
    from vllm.v1.worker.gpu import model_runner

    tree = ast.parse(inspect.getsource(model_runner))
    runner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GPUModelRunner")
    execute = next(n for n in runner.body if isinstance(n, ast.FunctionDef) and n.name == "execute_model")
    calls = [n.func.attr for n in ast.walk(execute) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    order = [calls.index(c) for c in ("finish_requests", "add_requests", "update_requests", "apply_staged_writes")]
    assert order == sorted(order)
