"""Attention kernels on the GPU's backends, each in processes of its own (attention_cases.py).

SPDX-License-Identifier: MIT
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BACKENDS

import pyvmem

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
CASES = (
    "bf16 D128 MHA;bf16 D128 GQA 4;graph;fp16 D64 GQA 8;bf16 D256;bf16 D64 MHA fused;bf16 D128 window;"
    "bf16 D128 window, passed rows given up;bf16 D128 softcap;fp8 D128;bf16 over fp8;fp8 D64;fp8 D256;"
    "bf16 D128 tile_rows 1;bf16 D128 tile_rows 176;bf16 D128 splits 3;bf16 D80;fp16 D256 window softcap"
).split(";")
GPU = [name for name in BACKENDS if name != "host" and "cuda_pointer" in pyvmem.Context(name).info().capabilities]


def installed():
    """Kernels that are installed here; what the others lack is in the test's name."""
    from pyvmem.attention.kernel import Shape, capability
    from pyvmem.attention.table import KERNELS

    shape = Shape("decode", 8, 8, 128, torch.bfloat16, torch.bfloat16, "cuda", capability(0))
    return [name for name, kernel in KERNELS.items() if kernel.unavailable(shape) is None]


def results(backend, kernel, cases):
    """{case: what it said}, from as few processes as the cases leave alive."""
    left, said = list(cases), {}
    while left:
        command = [sys.executable, str(HERE / "attention_cases.py"), backend, kernel, *left]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        finished = {line["case"]: line for line in lines if "ok" in line}
        started = [line["case"] for line in lines if line.get("started")]
        if len(started) > len(finished) or not started:  # it died there, or before the first
            case = started[-1] if started else left[0]
            finished[case] = {"ok": False, "error": f"exit status {done.returncode}\n{done.stderr[-4000:]}"}
        said.update(finished)
        left = [case for case in left if case not in said]
    return said


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kernel", installed() if GPU else [])
@pytest.mark.parametrize("backend", GPU)
def test_attention(backend, kernel, part):
    said = results(backend, kernel, CASES[part::3])
    assert not {case: one["error"] for case, one in said.items() if not one["ok"]}
