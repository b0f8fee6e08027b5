"""Decode attention by slots, in Triton, which compiles the kernels from this file. This module does not import vLLM.

Each request's rows are contiguous, so a program computes the address of a row and reads no block table. The tiles of
all requests form one sequence, which is cut into equal parts, one per program. This is the idea of stream-K (Osama et
al., 2023) and LeanAttention (Sanovar et al., 2024): no program waits for another that has a longer request. Loads are
masked and read no row past a length, so pages can be mapped there while a kernel runs. With APPEND, each request's last
row comes from `k_new` and `v_new`. The program that has the row's tile stores it, and no program reads it. The last
program that has a part of a request's head joins the parts.

SPDX-License-Identifier: MIT
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from pyvmem.attention.kernel import multiprocessors
from pyvmem.attention.triton import LOG2E, _power
from pyvmem.attention.triton_kernels import _scaled

LEAST = 32  # requests in a step; with fewer, FlashAttention is faster
TILE = 64  # rows that are loaded together


# Compiled once for all numbers of requests: CUDA graphs are captured for many.
@triton.jit(do_not_specialize=["requests"])
def plan_kernel(ends, lengths, requests, window, REQUESTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The end of each request's tiles in the sequence, for one head. REQUESTS: a power of 2, at least `requests`."""
    r = tl.arange(0, REQUESTS)
    rows = tl.load(lengths + r, mask=r < requests, other=0)
    if window > 0:
        rows = tl.minimum(rows, window)
    tl.store(ends + r, tl.cumsum(tl.cdiv(rows, BLOCK_N), 0), mask=r < requests)


@triton.jit
def _joined(partial, lse, first, final, start, tiles, programs, g, d,
            GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):  # fmt: skip
    """Combine what the programs from `first` to `final` computed for the head whose tiles begin with `start`."""
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for program in range(first, final + 1):
        # The head is the program's first, unless the program begins with another.
        part = tl.where(program * tiles // programs < start, 1, 0)
        slot = (program * 2 + part) * GROUP
        # With fewer tiles than programs some have none, and what stands in their place is another step's.
        has = g < tl.where((program + 1) * tiles // programs > program * tiles // programs, GROUP, 0)
        # Not from the L1 cache: a program before on this multiprocessor may have read these lines too early.
        logs = tl.load(lse + slot + g, mask=has, other=float("-inf"), cache_modifier=".cg")
        logs = tl.where(g < GROUP, logs, 0.0)
        ok = has[:, None] & (d < DIM)[None, :]
        values = tl.load(partial + (slot + g)[:, None] * DIM + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
        new = tl.maximum(best, logs)
        old = tl.exp2(best - new)
        weight = tl.exp2(logs - new)
        acc = acc * old[:, None] + values * weight[:, None]
        total = total * old + weight
        best = new
    return acc / total[:, None]


@triton.jit(do_not_specialize=["requests"])
def decode_kernel(
    q, kv, out, k_new, v_new, places, partial, lse, ended, table, lengths, ends,
    scale_log2, softcap, window, requests,
    q_token, q_head, k_token, k_head, v_token, v_head, table_row, kv_block, kv_row, kv_head, v_offset, o_token, o_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, REQUESTS: tl.constexpr,
    APPEND: tl.constexpr,
):  # fmt: skip
    """Compute one part of the sequence of tiles.

    The sequence has all requests' tiles of the first KV head, then those of the next. Neighbouring programs therefore
    read rows of the same tokens, which are adjacent.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    r = tl.arange(0, REQUESTS)
    all_ends = tl.load(ends + r, mask=r < requests, other=0)
    tiles_of_head = tl.max(all_ends, 0)
    tiles = tiles_of_head.to(tl.int64) * HEADS
    tile = (program * tiles // programs).to(tl.int32)
    last = ((program + 1) * tiles // programs).to(tl.int32)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    d_ok = d < DIM
    ok = (g < GROUP)[:, None] & d_ok[None, :]
    part = 0
    while tile < last:
        head = tile // tiles_of_head
        passed = all_ends <= tile % tiles_of_head
        request = tl.sum((passed & (r < requests)).to(tl.int32), 0)
        before = tl.max(tl.where(passed, all_ends, 0), 0)
        each = tl.min(tl.where(passed, 2147483647, all_ends), 0) - before  # tiles of the request and one head
        start = head * tiles_of_head + before  # where they begin in the row
        stop = tl.minimum(start + each, last)
        length = tl.load(lengths + request)
        first = 0  # the row that the head's tiles begin with
        if WINDOW:
            first = tl.maximum(length - window, 0)
        begin = first + (tile - start) * BLOCK_N
        stored = length - 1 if APPEND else length
        end = tl.minimum(first + (stop - start) * BLOCK_N, stored)
        base = tl.load(table + request.to(tl.int64) * table_row).to(tl.int64)
        heads_at = head * GROUP + g
        qs = tl.load(q + request.to(tl.int64) * q_token + heads_at[:, None] * q_head + d[None, :], mask=ok, other=0.0)
        best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        at_head = kv + head.to(tl.int64) * kv_head
        for n in range(begin, end, BLOCK_N):
            rows = n + tl.arange(0, BLOCK_N)
            seen = rows < end
            at = (base + rows // TOKENS) * kv_block + (rows % TOKENS).to(tl.int64) * kv_row
            ks = tl.load(at_head + at[None, :] + d[:, None], mask=seen[None, :] & d_ok[:, None], other=0.0)
            s = tl.where(seen[None, :], _scaled(tl.dot(qs, ks), scale_log2, softcap, SOFTCAP), float("-inf"))
            new = tl.maximum(best, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
            old = tl.exp2(best - new)
            vs = tl.load(at_head + v_offset + at[:, None] + d[None, :], mask=seen[:, None] & d_ok[None, :], other=0.0)
            acc = acc * old[:, None] + tl.dot(p.to(vs.dtype), vs)
            total = total * old + tl.sum(p, 1)
            best = new
        if APPEND:
            if stop == start + each:
                k1 = tl.load(k_new + request.to(tl.int64) * k_token + head * k_head + d, mask=d_ok, other=0.0)
                v1 = tl.load(v_new + request.to(tl.int64) * v_token + head * v_head + d, mask=d_ok, other=0.0)
                place = tl.load(places + request)  # negative: not stored, as in vLLM's own kernel
                k1 = k1.to(kv.dtype.element_ty)
                v1 = v1.to(kv.dtype.element_ty)
                to = at_head + (place // TOKENS) * kv_block + (place % TOKENS) * kv_row
                stored_dims = d < tl.where(place >= 0, DIM, 0)
                tl.store(to + d, k1, mask=stored_dims)
                tl.store(to + v_offset + d, v1, mask=stored_dims)
                s1 = _scaled(tl.sum(qs.to(tl.float32) * k1.to(tl.float32)[None, :], 1), scale_log2, softcap, SOFTCAP)
                new = tl.maximum(best, s1)
                p1 = tl.exp2(s1 - new)
                old = tl.exp2(best - new)
                acc = acc * old[:, None] + p1[:, None] * v1.to(tl.float32)[None, :]
                total = total * old + p1
                best = new
        result = acc / total[:, None]
        if (tile == start) & (stop == start + each):
            tl.store(out + request.to(tl.int64) * o_token + heads_at[:, None] * o_head + d[None, :],
                     result.to(out.dtype.element_ty), mask=ok)  # fmt: skip
        else:  # the beginning or the end of a head that other programs have the rest of
            slot = (program * 2 + part) * GROUP
            tl.store(partial + (slot + g)[:, None] * DIM + d[None, :], result, mask=ok)
            tl.store(lse + slot + g, best + tl.log2(total), mask=g < GROUP)
            tl.debug_barrier()  # the stores of every thread come before the count
            count = ended + request * HEADS + head
            at = start.to(tl.int64)
            # A program with a tile of the head has a part. With fewer tiles than programs, each tile is a part.
            opening = ((at + 1) * programs - 1) // tiles
            closing = ((at + each) * programs - 1) // tiles
            parts = tl.where(tiles < programs, each, closing - opening + 1)
            if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(count, 0)  # for the next launch
                whole = _joined(partial, lse, opening, closing, at, tiles, programs, g, d, GROUP, GROUP_PAD, DIM,
                                DIM_PAD)  # fmt: skip
                tl.store(out + request.to(tl.int64) * o_token + heads_at[:, None] * o_head + d[None, :],
                         whole.to(out.dtype.element_ty), mask=ok)  # fmt: skip
        part = 1
        tile = stop


class Work:
    """A decode step's work, the same for all layers: how many tiles each request has.

    Parameters
    ----------
    requests : int
        The most requests in a step.
    device : torch.device
    kv_heads : int
    window : int
        Tokens that a query sees, including itself; 0 for all.

    Attributes
    ----------
    ends : torch.Tensor
        int32[most]: where each request's tiles end. Its address is constant, so that CUDA graphs can read it.
    ended : torch.Tensor
        int32[most * kv_heads]: how many parts of a request's head have ended. All 0 between kernels.
    """

    def __init__(self, requests: int, device: torch.device, kv_heads: int, window: int = 0) -> None:
        self.most = max(_power(requests), 2)
        self.window = window
        self.ends = torch.zeros(self.most, dtype=torch.int32, device=device)
        self.ended = torch.zeros(self.most * kv_heads, dtype=torch.int32, device=device)

    def plan(self, lengths: torch.Tensor) -> None:
        """Plan a step. lengths: int32[requests], 0 for an unused entry."""
        plan_kernel[(1,)](self.ends, lengths, lengths.shape[0], self.window, REQUESTS=self.most, BLOCK_N=TILE)


@functools.cache
def _parts(device: torch.device, group: int, dim: int) -> Any:
    """(programs, results of parts, logarithms of their sums). All layers use the same buffers in turn."""
    programs = 2 * multiprocessors(device.index) if device.type == "cuda" else 6
    shape = (2 * programs, group)
    return programs, torch.empty(*shape, dim, device=device), torch.empty(*shape, device=device)


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    work: Work,
    scale: float,
    softcap: float = 0.0,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attention of one new token of each request.

    Parameters
    ----------
    query, out : torch.Tensor
        ``[requests, heads, dim]``
    kv_cache : torch.Tensor
        ``[blocks, KV heads, tokens, 2 * dim]``: K, then V.
    table : torch.Tensor
        int32[requests, ...]. Only the first column is read: the request's first block. The others follow it.
    lengths : torch.Tensor
        int32[requests]: rows, including the new token's. `work` must be planned for them.
    new : tuple of three tensors, optional
        The new tokens' K and V, ``[requests, KV heads, dim]``, and their places, int64[requests]: the block's number
        times its tokens, plus the row in the block, as in vLLM's slot mapping. The kernel stores the rows there, except
        where the place is negative. Without `new`, the rows are in the cache already.
    """
    requests, heads, dim = query.shape
    kv_heads, tokens = kv_cache.shape[1:3]
    group = heads // kv_heads
    programs, partial, lse = _parts(query.device, group, dim)
    k, v, places = new or (query, query, lengths)  # without new rows, nothing is read there
    decode_kernel[(programs,)](
        query, kv_cache, out, k, v, places, partial, lse, work.ended, table, lengths, work.ends,
        scale if softcap else scale * LOG2E, softcap, work.window, requests,
        query.stride(0), query.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0),
        kv_cache.stride(0), kv_cache.stride(2), kv_cache.stride(1), dim, out.stride(0), out.stride(1),
        HEADS=kv_heads, GROUP=group, GROUP_PAD=max(_power(group), 16), DIM=dim, DIM_PAD=max(_power(dim), 16),
        TOKENS=tokens, BLOCK_N=TILE, WINDOW=work.window > 0, SOFTCAP=softcap > 0, REQUESTS=work.most,
        APPEND=new is not None, num_warps=4, num_stages=3 if dim <= 128 else 2,
    )  # fmt: skip
