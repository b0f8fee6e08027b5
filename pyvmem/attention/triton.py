"""Attention in Triton: the portable reference on GPUs (`pyvmem.attention.triton_kernels`).

Takes what no other kernel does, on every GPU that Triton supports, and never reads past a length. With
``TRITON_INTERPRET=1`` it runs on CPUs, slowly, for tests.

SPDX-License-Identifier: MIT
"""

import importlib.util
import math
import os
from typing import Any

import torch

from pyvmem.attention.batch import Batch
from pyvmem.attention.kernel import BF16, FP8, FP16, FP32, Call, Kernel, Shape, multiprocessors

LOG2E = math.log2(math.e)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for its compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Parts:
    """How many parts a request's rows are split into, and where those leave their results."""

    def __init__(self, batch: Batch, shape: Shape, call: Call) -> None:
        n, heads = len(batch), shape.query_heads
        programs = n * shape.kv_heads
        wanted = 2 * (multiprocessors(call.q.device.index) if call.q.is_cuda else 2)
        rows = min(batch.max_length, shape.window or batch.max_length)
        self.splits = call.num_splits or min(-(-wanted // programs), max(rows // 256, 1), 128)
        size = self.splits * n * heads if self.splits > 1 else 0
        self.partial = torch.empty(size * shape.head_dim, dtype=torch.float32, device=call.q.device)
        self.lse = torch.empty(size, dtype=torch.float32, device=call.q.device)


class Triton(Kernel):
    """Split-KV decode and prefill in Triton."""

    name = "triton"
    devices = ("cuda", "cpu")
    capability = (7, 5)
    dtypes = (BF16, FP16, FP32, FP8)
    mixed = ((BF16, FP8), (FP16, FP8), (FP32, FP8))

    def unavailable(self, shape: Shape) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (pip install triton)"
        if shape.device == "cpu" and not interpreted():
            return "Triton has no CPU (but for its interpreter, TRITON_INTERPRET=1)"
        return None

    def plan(self, batch: Batch, shape: Shape, call: Call) -> _Parts | None:
        return _Parts(batch, shape, call) if shape.phase == "decode" else None

    def run(self, call: Call) -> torch.Tensor:
        shape, q = call.shape, call.q
        out = call.out
        if out is None:
            out = torch.empty(q.shape, dtype=BF16 if q.dtype == FP8 else q.dtype, device=q.device)
        (decode if shape.phase == "decode" else prefill)(call, out)
        return out


def _scale(call: Call) -> float:
    """The factor that makes scores exponents of 2; the soft cap comes before it, so the kernel applies it then."""
    return call.softmax_scale if call.shape.softcap else call.softmax_scale * LOG2E


def _compute(call: Call) -> Any:
    """The type that q, K and V are multiplied in."""
    import triton.language as tl

    return {BF16: tl.bfloat16, FP16: tl.float16, FP32: tl.float32, FP8: tl.bfloat16}[call.q.dtype]


def decode(call: Call, out: torch.Tensor, table: torch.Tensor | None = None) -> None:
    """Decode into `out`. table: int32[n, pages], a block table; K and V are then ``[pages, page rows, heads, dim]``."""
    from pyvmem.attention import triton_kernels as kernels

    shape, batch, parts, q, k, v = call.shape, call.batch, call.plan, call.q, call.k, call.v
    n, dim = len(batch), shape.head_dim
    pad = max(_power(dim), 16)
    kernels.decode[(n, shape.kv_heads, parts.splits)](
        q, k, v, out, parts.partial, parts.lse, batch.slots_t, batch.lengths_t,
        batch.slots_t if table is None else table, _scale(call), shape.softcap, shape.window, parts.splits, n,
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], out.stride(0), out.stride(1),
        0 if table is None else table.stride(0),
        GROUP=shape.group, GROUP_PAD=max(_power(shape.group), 16), DIM=dim, DIM_PAD=pad,
        BLOCK_N=128 if pad <= 64 else 64, PAGE=0 if table is None else k.shape[1],
        WINDOW=shape.window > 0, SOFTCAP=shape.softcap > 0,
        SPLIT=parts.splits > 1, COMPUTE=_compute(call), num_warps=4, num_stages=3 if pad <= 128 else 2,
    )  # fmt: skip
    if parts.splits > 1:
        kernels.join[(n, shape.query_heads)](
            out, parts.partial, parts.lse, parts.splits, n, out.stride(0), out.stride(1),
            DIM=dim, DIM_PAD=pad, PARTS=_power(parts.splits),
        )  # fmt: skip


def prefill(call: Call, out: torch.Tensor) -> None:
    """Prefill into `out`."""
    from pyvmem.attention import triton_kernels as kernels

    shape, batch, q, k, v = call.shape, call.batch, call.q, call.k, call.v
    pad = max(_power(shape.head_dim), 16)
    wide = q.dtype == FP32
    m, n = (64, 32) if pad > 128 or wide else (128, 64)
    kernels.prefill[(-(-batch.max_query // m), shape.query_heads, len(batch))](
        q, k, v, out, batch.slots_t, batch.lengths_t, batch.cu_seqlens_q,
        _scale(call), shape.softcap, shape.window,
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], out.stride(0), out.stride(1),
        GROUP=shape.group, DIM=shape.head_dim, DIM_PAD=pad, BLOCK_M=m, BLOCK_N=n,
        WINDOW=shape.window > 0, SOFTCAP=shape.softcap > 0, COMPUTE=_compute(call),
        num_warps=4 if pad <= 64 else 8, num_stages=2,
    )  # fmt: skip
