"""The copies of `pyvmem.sleep.to_device` in Triton, which compiles the kernel from this file.

SPDX-License-Identifier: MIT
"""

import torch
import triton
import triton.language as tl

PROGRAMS = 4  # they copy as fast as 8, which delay the driver's mappings: a GiB of blocks takes 43 instead of 23 ms
BLOCK = 4096  # words that a program copies at once


@triton.jit(do_not_specialize=["n"])
def copy_kernel(to, source, n, BLOCK: tl.constexpr):
    """Copy source[n] to to[n]."""
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(to + places, tl.load(source + places, mask=places < n), mask=places < n)


def copy(to: torch.Tensor, source: torch.Tensor, programs: int = PROGRAMS) -> None:
    """Copy int64[n] from pinned host memory to the device; n must be less than 2**31."""
    if to.is_cuda:
        with torch.cuda.device(to.device):  # on which Triton launches
            copy_kernel[(programs,)](to, source, len(to), BLOCK=BLOCK)
    else:  # in Triton's interpreter
        copy_kernel[(programs,)](to, source, len(to), BLOCK=BLOCK)
