"""vLLM on vMem answers as vLLM does, feature by feature (`make test-vllm`: a GPU, and vLLM installed).

Pairs of processes run the same engines one after the other (vllm_cases.py), one of each pair with VMEM_VLLM=1. All
run at once, but those of test_vllm_sleep.py. VMEM_TEST_VLLM_CASES names some of the cases, VMEM_TEST_VLLM_PROCESSES
says how many pairs, VMEM_TEST_VLLM_LOGS where answers and logs go.

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
# vLLM alone runs them
DIFFER = {
    "refused": "model runner V2",
    "refused_groups": "layers of several kinds",
    "refused_ngram": "n-grams",
}
PROCESSES = 4  # pairs
ATTENTION = {"fp8_kv": "FLASH_ATTN", "triton_attention": "TRITON_ATTN", "chosen_by_name": "FLASH_ATTN"}
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


def ask(names, folder, processes=1):
    """{case: (vLLM's answer, its answer on vMem)}, by so many pairs of processes."""
    parts = [names[i::processes] for i in range(min(processes, len(names)))]
    children = [[Child(vmem, i, part, folder) for i, part in enumerate(parts)] for vmem in (0, 1)]
    found = [{k: v for child in side for k, v in child.read().items()} for side in children]
    return {name: tuple(f.get(name, dict(error="the process ended")) for f in found) for name in names}


def logs(tmp_path_factory):
    return Path(os.environ.get("VMEM_TEST_VLLM_LOGS") or tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    names = [name for name in asked() or vllm_cases.CASES if name not in ALONE]
    return ask(names, logs(tmp_path_factory), int(os.environ.get("VMEM_TEST_VLLM_PROCESSES") or PROCESSES))


def check_attention(case, on_vmem):
    """The case ran with the attention backend that it should have: by slots, CUSTOM, is a default on Hopper alone."""
    import torch

    asked_for = vllm_cases.CASES[case][0].get("VMEM_VLLM_ATTENTION")
    slots = asked_for != "table" and torch.cuda.get_device_capability()[0] == 9
    wanted = ATTENTION.get(case, "CUSTOM" if slots or case == "slots_chosen_by_name" else "FLASH_ATTN")
    if "attention" in on_vmem:  # workers in processes of their own do not say it
        assert on_vmem["attention"] == [wanted]


def cases(wanted):
    return [
        c
        for c in vllm_cases.CASES
        if c not in DIFFER and c not in ALONE and c.startswith("slots") == wanted and (not asked() or c in asked())
    ]


@pytest.mark.parametrize("case", cases(wanted=False))
def test_the_tokens_are_vllms(answers, case):
    compare(case, *answers[case])


def compare(case, own, on_vmem):
    if "error" in own:
        pytest.skip(f"vLLM alone does not run this here: {own['error']}")
    assert "error" not in on_vmem, on_vmem["error"]
    assert on_vmem["steps"], "the KV cache was not vMem's"
    check_attention(case, on_vmem)
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
    check_attention(case, on_vmem)
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
