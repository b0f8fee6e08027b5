"""vLLM on vMem answers as vLLM does, feature by feature (`make test-vllm`: a GPU, and vLLM installed).

Pairs of processes run the same engines one after the other (vllm_cases.py), one of each pair with VMEM_VLLM=1. All
run at once. VMEM_TEST_VLLM_CASES names some of the cases, VMEM_TEST_VLLM_PROCESSES says how many pairs,
VMEM_TEST_VLLM_LOGS where answers and logs go.

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
DIFFER = {"refused": "model runner V2", "refused_groups": "2 groups of KV caches"}  # vLLM alone runs them
PROCESSES = 4  # pairs
ALONE = ("sleep",)  # vLLM requires that no other process takes device memory meanwhile


class Child:
    """A process that runs some of the cases. Its answers become lines of a file, so that none waits for a reader."""

    def __init__(self, vmem, part, names, folder):
        environment = dict(os.environ, VMEM_VLLM=str(vmem), VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
                           VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")  # fmt: skip
        self.answers = folder / f"answers{vmem}.{part}.jsonl"
        with open(folder / f"vllm{vmem}.{part}.log", "w", encoding="utf-8") as log:
            self.process = subprocess.Popen([sys.executable, vllm_cases.__file__, str(self.answers), *names],
                                            env=environment, stdout=log, stderr=log)  # fmt: skip

    def read(self):
        self.process.wait()
        lines = self.answers.read_text().splitlines() if self.answers.exists() else []
        return {answer.pop("name"): answer for answer in map(json.loads, lines)}


def asked():
    return os.environ.get("VMEM_TEST_VLLM_CASES", "").split()


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    """{case: (vLLM's answer, its answer on vMem)}"""
    folder = Path(os.environ.get("VMEM_TEST_VLLM_LOGS") or tmp_path_factory.mktemp("vllm"))
    names = asked() or list(vllm_cases.CASES)
    together = [name for name in names if name not in ALONE]
    n = int(os.environ.get("VMEM_TEST_VLLM_PROCESSES", PROCESSES))
    parts = [together[i::n] for i in range(min(n, len(together)))]
    children = [[Child(vmem, i, part, folder) for i, part in enumerate(parts)] for vmem in (0, 1)]
    found = [{k: v for child in side for k, v in child.read().items()} for side in children]
    for name in set(names).intersection(ALONE):
        for vmem in (0, 1):
            found[vmem].update(Child(vmem, name, [name], folder).read())
    return {name: tuple(f.get(name, dict(error="the process ended")) for f in found) for name in names}


def cases(wanted):
    return [
        c
        for c in vllm_cases.CASES
        if c not in DIFFER and c.startswith("slots") == wanted and (not asked() or c in asked())
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
    if vllm_cases.CASES[case][1] == "shared" or case.endswith("_cached"):
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


@pytest.mark.parametrize("case", [c for c in DIFFER if not asked() or c in asked()])
def test_what_cannot_work_is_refused_with_one_line(answers, case):
    _, on_vmem = answers[case]
    assert DIFFER[case] in on_vmem["error"]
    assert "\n" not in on_vmem["error"]


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
