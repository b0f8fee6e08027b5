"""The sums of `pyvmem.sleep.sums` in Triton, which compiles the kernel from this file.

SPDX-License-Identifier: MIT
"""

import torch
import triton
import triton.language as tl

from pyvmem.sleep import sums

STEP, MIX = tl.constexpr(sums.STEP), tl.constexpr(sums.MIX)
BLOCK, ROUNDS = 1024, 8  # words that a program mixes at once, and how often


@triton.jit
def _folded(x):
    return x ^ (x >> 32)


@triton.jit(do_not_specialize=["n", "key"])
def sum_kernel(words, total, n, key, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Add words[n], mixed with their places, to total[1]."""
    places = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    added = tl.zeros((BLOCK,), tl.uint64)
    for _ in range(ROUNDS):
        x = tl.load(words + places, mask=places < n, other=0).to(tl.uint64, bitcast=True)
        x = _folded(x ^ (places.to(tl.uint64) * STEP + key.to(tl.uint64)))
        x = _folded(x * MIX)
        x = _folded(x * MIX)
        added += tl.where(places < n, x, 0)
        places += BLOCK
    tl.atomic_add(total, tl.sum(added, 0).to(tl.int64, bitcast=True))


def add(words: torch.Tensor, total: torch.Tensor, key: int) -> None:
    """Add the words int64[n], mixed, to the total int64[]."""
    grid = (triton.cdiv(len(words), BLOCK * ROUNDS),)
    if words.is_cuda:
        with torch.cuda.device(words.device):  # on which Triton launches
            sum_kernel[grid](words, total, len(words), key, BLOCK=BLOCK, ROUNDS=ROUNDS)
    else:  # in Triton's interpreter
        sum_kernel[grid](words, total, len(words), key, BLOCK=BLOCK, ROUNDS=ROUNDS)
