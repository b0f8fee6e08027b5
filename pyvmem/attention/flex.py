"""FlexAttention over the rows of all slots as one sequence, with a block mask that selects each request's rows.

The mask is built on the GPU from slots and lengths. Blocks of 128 rows are read whole. The first call of a process
compiles the kernel.

SPDX-License-Identifier: MIT
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from pyvmem.attention.batch import Batch
from pyvmem.attention.kernel import BF16, FP16, FP32, Call, Kernel, Shape, flat_rows, slot_rows

BLOCK = 128


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa)


@functools.cache
def _attention(shape: Shape) -> Callable[..., torch.Tensor]:
    """FlexAttention compiled for a shape. Each shape has a function of its own: torch limits recompilations of one.

    Without compilation, every score of every slot is computed, including those of unbacked rows. `fullgraph` therefore
    forbids a silent fallback. On a CPU nothing is compiled: that path only tests the mask.
    """
    if shape.device != "cuda":
        return _call
    # torch counts compilations by code object.
    own = types.FunctionType(_call.__code__.replace(co_name=f"flex_{shape.phase}"), globals())
    return torch.compile(own, dynamic=True, fullgraph=True)


def _ranges(first: torch.Tensor, count: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 rows ``first .. first + count - 1``, padded to `columns` with the numbers that follow."""
    return (first[..., None] + torch.arange(columns, device=first.device, dtype=torch.int32)).to(torch.int32)


class _Mask:
    """The block mask of a batch, and the function that modifies its scores."""

    def __init__(self, batch: Batch, shape: Shape, rows: int, total_rows: int) -> None:
        self.rows, self.window, self.score_mod = rows, shape.window, _soft_cap(shape.softcap)
        self.total = total_rows
        self.queries = batch.max_query
        self.refresh(batch)

    def refresh(self, batch: Batch) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        tiles = -(-self.queries // BLOCK)
        columns = -(-batch.max_length // BLOCK)
        count = (batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1])[:, None]
        start, length = (batch.slots_t * self.rows)[:, None], batch.lengths_t[:, None]
        first_query = torch.arange(tiles, device=batch.device, dtype=torch.int32)[None] * BLOCK
        low = length - count + first_query  # position of the tile's first query
        high = length - count + torch.minimum(first_query + BLOCK, count) - 1  # and of its last
        used = first_query < count
        begin = torch.clamp(low - self.window + 1, min=0) // BLOCK if self.window else torch.zeros_like(low)
        end = high // BLOCK + 1
        # Blocks that every query of the tile sees completely need no mask.
        full_end = torch.clamp((low + 1) // BLOCK, min=0)
        full_begin = (torch.clamp(high - self.window + 1, min=0) + BLOCK - 1) // BLOCK if self.window else begin
        full_begin = torch.minimum(torch.maximum(full_begin, begin), end)
        full_end = torch.minimum(torch.maximum(full_end, full_begin), end)
        head = full_begin - begin
        partial = torch.where(used, head + end - full_end, 0)
        full = torch.where(used, full_end - full_begin, 0)
        base = start // BLOCK
        column = torch.arange(columns, device=batch.device, dtype=torch.int32)
        which = torch.where(column < head[..., None], begin[..., None] + column,
                            full_end[..., None] + column - head[..., None])  # fmt: skip
        limit = self.total // BLOCK
        partial_at = torch.clamp(base[..., None] + which, max=limit).to(torch.int32)
        full_at = torch.clamp(base[..., None] + full_begin[..., None] + column, max=limit).to(torch.int32)
        window, starts, lengths = self.window, batch.slots_t * self.rows, batch.lengths_t
        offset = batch.lengths_t - (batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1])

        def sees(b: Any, h: Any, i: Any, row: Any) -> Any:
            at, position = row - starts[b], offset[b] + i
            seen = (at >= 0) & (at < lengths[b]) & (at <= position)
            return seen & (at > position - window) if window else seen

        self.block_mask = BlockMask.from_kv_blocks(
            partial.to(torch.int32)[:, None], partial_at[:, None], full.to(torch.int32)[:, None], full_at[:, None],
            BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(self.queries, self.total), compute_q_blocks=False,
        )  # fmt: skip


@functools.cache
def _soft_cap(cap: float) -> Any:
    """The soft cap as a function for FlexAttention; None without one.

    The cap is a literal in the function's source. A captured number would become an input of the compiled graph on the
    CPU, which the kernel cannot read.
    """
    return eval(f"lambda score, b, h, i, row: {cap!r} * torch.tanh(score / {cap!r})", globals()) if cap else None


class FlexAttention(Kernel):
    """torch's FlexAttention."""

    name = "flex"
    dtypes = (BF16, FP16, FP32)
    capturable = False

    def tile_rows(self, shape: Shape) -> int:
        """FlexAttention's block size."""
        return BLOCK

    def refusal(self, shape: Shape) -> str | None:
        reason = super().refusal(shape)
        if reason is None and shape.slot_rows % BLOCK:
            reason = f"slots of {shape.slot_rows} rows (multiples of {BLOCK}: so must max_tokens be)"
        if reason is None and shape.slots * shape.slot_rows * shape.kv_heads * shape.head_dim >= 2**31:
            reason = f"{shape.slots} slots of {shape.slot_rows} rows (together under 2^31 elements)"
        return reason

    def plan(self, call: Call) -> _Mask:
        return _Mask(call.batch, call.shape, slot_rows(call.k), flat_rows(call.k).shape[0])

    def run(self, call: Call) -> torch.Tensor:
        batch, shape, q = call.batch, call.shape, call.q
        n, most = len(batch), batch.max_query
        even = batch.total_queries == n * most
        if even:
            queries = q.unflatten(0, (n, most))
        else:
            queries = q.new_zeros((n, most, *q.shape[1:]))
            request = torch.repeat_interleave(
                torch.arange(n, device=q.device), batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1],
                output_size=batch.total_queries,
            )  # fmt: skip
            place = torch.arange(batch.total_queries, device=q.device) - batch.cu_seqlens_q[request]
            queries[request, place] = q
        k, v = (flat_rows(x).transpose(0, 1)[None] for x in (call.k, call.v))
        mask = call.plan
        out = _attention(shape)(
            queries.transpose(1, 2), k, v, mask.score_mod, mask.block_mask, call.softmax_scale, shape.group > 1
        ).transpose(1, 2)
        out = out.flatten(0, 1) if even else out[request, place]
        return out.contiguous() if call.out is None else call.out.copy_(out)
