"""Attention kernels on the GPU's backends, each in processes of its own (attention_cases.py).

SPDX-License-Identifier: MIT
"""

import pytest
from gpu_cases import GPU, results

torch = pytest.importorskip("torch")

CASES = (
    "bf16 D128 MHA;bf16 D128 GQA 4;graph;fp16 D64 GQA 8;bf16 D256;bf16 D64 MHA fused;bf16 D128 window;"
    "bf16 D128 window, passed rows given up;bf16 D128 softcap;fp8 D128;bf16 over fp8;fp8 D64;fp8 D256;"
    "bf16 D128 tile_rows 1;bf16 D128 tile_rows 176;bf16 D128 splits 3;bf16 D80;fp16 D256 window softcap"
).split(";")


def installed():
    """Kernels that are installed here; what the others lack is in the test's name."""
    from pyvmem.attention.kernel import Shape, capability
    from pyvmem.attention.table import KERNELS

    shape = Shape("decode", 8, 8, 128, torch.bfloat16, torch.bfloat16, "cuda", capability(0))
    return [name for name, kernel in KERNELS.items() if kernel.unavailable(shape) is None]


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kernel", installed() if GPU else [])
@pytest.mark.parametrize("backend", GPU)
def test_attention(backend, kernel, part):
    said = results("attention_cases.py", [backend, kernel], CASES[part::3], seconds=1800)
    assert not {case: one["error"] for case, one in said.items() if not one["ok"]}
