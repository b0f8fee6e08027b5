"""The kernel that `benchmarks.attention` measures the bandwidth of memory with. Triton compiles it from this file.

SPDX-License-Identifier: MIT
"""

import triton
import triton.language as tl


@triton.jit
def stream(x, out, BLOCK: tl.constexpr):
    """out[i] = sum of the i-th BLOCK elements of x."""
    block = tl.program_id(0).to(tl.int64)
    tl.store(out + block, tl.sum(tl.load(x + block * BLOCK + tl.arange(0, BLOCK))))
