"""Attention in Triton: the portable reference on GPUs (`pyvmem.attention.triton_kernels`).

It takes what no other kernel takes, on every GPU that Triton supports, and never reads past a length. With
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
_JOINED = 4  # parts, at most, that the last program joins: a second launch takes longer on the host than this loop
_SEATS = 3  # programs of decode that a multiprocessor runs at once


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def interpreted() -> bool:
    """True if Triton's interpreter stands in for its compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _splits(programs: int, rows: int, device: torch.device) -> int:
    """How many parts a request's rows are split into: what was fastest on an H200 (docs/results/attention.md).

    With few programs, parts bring them to two per multiprocessor. More programs run in rounds of `_SEATS` per
    multiprocessor, and parts fill the last round. Each further part costs another pass over its result.
    """
    units = multiprocessors(device.index) if device.type == "cuda" else 1
    if programs <= 2 * units:
        return max(min(2 * units // programs, rows // 128, 128), 1)

    def cost(splits: int) -> float:
        rounds = programs * splits / (_SEATS * units)
        return 0.2 * (math.ceil(rounds) - rounds) / rounds + (splits - 1) * 48 / max(rows, 1)

    return min(range(1, 5), key=cost)


class _Parts:
    """How many parts a request's rows are split into, and where their results are stored."""

    def __init__(self, call: Call) -> None:
        self._shape, self._asked, self._device = call.shape, call.num_splits, call.q.device
        self._n = len(call.batch)
        self.splits = 0
        self.refresh(call.batch)

    def refresh(self, batch: Batch) -> None:
        """Adapt to a batch's new lengths. A batch with a `max_length` is always launched for that length."""
        shape = self._shape
        rows = min(batch.max_length, shape.window or batch.max_length)
        splits = self._asked or _splits(self._n * shape.kv_heads, rows, self._device)
        if splits == self.splits:
            return
        self.splits = splits
        size = splits * self._n * shape.query_heads if splits > 1 else 0
        self.partial = torch.empty(size * shape.head_dim, dtype=torch.float32, device=self._device)
        self.lse = torch.empty(size, dtype=torch.float32, device=self._device)
        # How many parts have ended, for each request and KV head. Every launch leaves zeros.
        self.ended = batch.zeros(self._n * shape.kv_heads)


class Triton(Kernel):
    """Split-KV decode and prefill in Triton."""

    name = "triton"
    devices = ("cuda", "cpu")
    capability = (7, 5)
    dtypes = (BF16, FP16, FP32, FP8)
    mixed = ((BF16, FP8), (FP16, FP8), (FP32, FP8))
    appends = True

    def unavailable(self, shape: Shape) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (pip install triton)"
        if shape.device == "cpu" and not interpreted():
            return "Triton does not run on CPUs (except in its interpreter, TRITON_INTERPRET=1)"
        return None

    def plan(self, call: Call) -> _Parts | None:
        return _Parts(call) if call.shape.phase == "decode" else None

    def run(self, call: Call) -> torch.Tensor:
        shape, q = call.shape, call.q
        out = call.out
        if out is None:
            out = torch.empty(q.shape, dtype=BF16 if q.dtype == FP8 else q.dtype, device=q.device)
        (decode if shape.phase == "decode" else prefill)(call, out)
        return out


def _scale(call: Call) -> float:
    """The factor that makes scores exponents of 2. With a soft cap, the kernel applies it after the cap."""
    return call.softmax_scale if call.shape.softcap else call.softmax_scale * LOG2E


def _compute(call: Call) -> Any:
    """The type that q, K and V are multiplied in."""
    import triton.language as tl

    return {BF16: tl.bfloat16, FP16: tl.float16, FP32: tl.float32, FP8: tl.bfloat16}[call.q.dtype]


def _tile(pad: int) -> tuple[int, int, int]:
    """Rows, warps and stages of decode at a padded head_dim; `_SEATS` goes with them."""
    return 128 if pad <= 64 else 64, 4, 3 if pad <= 128 else 2


def decode(call: Call, out: torch.Tensor, table: torch.Tensor | None = None) -> None:
    """Decode into `out`. table: int32[n, pages], a block table; K and V are then ``[pages, page rows, heads, dim]``."""
    from pyvmem.attention import triton_kernels as kernels

    shape, batch, parts, q, k, v = call.shape, call.batch, call.plan, call.q, call.k, call.v
    n, dim = len(batch), shape.head_dim
    pad = max(_power(dim), 16)
    k_new, v_new = call.new or (k, v)
    block, warps, stages = _tile(pad)
    table_row = 0 if table is None else table.stride(0)
    strides = [s for x in (q, out, *(call.new or ())) for s in x.stride()[:2]]
    strides += [0] * (8 - len(strides))  # of the new K and V, if there are none
    numbers = (
        _scale(call), shape.softcap, shape.window, parts.splits, n, *strides, *k.stride()[:3], *v.stride()[:3],
        table_row,
    )  # fmt: skip
    constants = {
        "GROUP": shape.group, "GROUP_PAD": max(_power(shape.group), 16), "DIM": dim, "DIM_PAD": pad,
        "BLOCK_N": block, "PAGE": 0 if table is None else k.shape[1], "WINDOW": shape.window > 0,
        "SOFTCAP": shape.softcap > 0, "SPLIT": parts.splits > 1, "JOIN": 1 < parts.splits <= _JOINED,
        "APPEND": call.new is not None, "COMPUTE": _compute(call),
    }  # fmt: skip
    shared = (
        parts.partial, parts.lse, parts.ended, batch.slots_t, batch.lengths_t, batch.slots_t if table is None else table
    )  # fmt: skip
    grid = n, shape.kv_heads, parts.splits
    kernels.decode[grid](q, k, v, out, k_new, v_new, *shared, *numbers, **constants, num_warps=warps, num_stages=stages)
    if parts.splits > _JOINED:
        _join(call, out)


def _join(call: Call, out: torch.Tensor) -> None:
    from pyvmem.attention import triton_kernels as kernels

    shape, parts, n = call.shape, call.plan, len(call.batch)
    kernels.join[n, shape.query_heads, 1](
        out, parts.partial, parts.lse, parts.splits, n, *out.stride()[:2],
        DIM=shape.head_dim, DIM_PAD=max(_power(shape.head_dim), 16), PARTS=_power(parts.splits),
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
