"""Attention in Triton: split-KV decode, its second pass, and prefill. Triton compiles the kernels from this file.

Split-KV decode is Flash-Decoding's idea (Dao et al., 2023): parts of one request's rows go to different programs. Their
results are joined by the logarithms of their sums. The last of these programs does that, or, if there are many parts, a
second pass. Every load is masked, so no row past a length or before a window is read. With PAGE, the kernel looks
rows up in a block table; benchmarks use this paged variant. With APPEND, each request's last row comes from `k_new` and
`v_new`, and the kernel stores it in the cache.

SPDX-License-Identifier: MIT
"""

import triton
import triton.language as tl


@triton.jit
def _scaled(s, scale_log2, softcap, SOFTCAP: tl.constexpr):
    """Products of q and k as scores for exp2."""
    if SOFTCAP:
        # scale_log2 is the scale alone here. tanh(x) = 1 - 2 / (exp(2x) + 1)
        x = s * (scale_log2 / softcap)
        return (softcap * 1.4426950408889634) * (1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1))
    return s * scale_log2


@triton.jit
def decode(
    q, k, v, out, k_new, v_new, partial, lse, ended, slots, lengths, table,
    scale_log2, softcap, window, splits, requests,
    q_token, q_head, o_token, o_head, k_new_token, k_new_head, v_new_token, v_new_head,
    k_slot, k_row, k_head, v_slot, v_row, v_head, table_row,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, JOIN: tl.constexpr,
    APPEND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One request, one KV head with its GROUP of query heads, one part of the rows."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    stored = length - 1 if APPEND else length
    each = tl.cdiv(tl.cdiv(stored - first, BLOCK_N), splits) * BLOCK_N
    begin = first + part * each
    end = tl.minimum(begin + each, stored)

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    g_ok = g < GROUP
    d_ok = d < DIM
    qs = tl.load(q + request.to(tl.int64) * q_token + (head * GROUP + g)[:, None] * q_head + d[None, :],
                 mask=g_ok[:, None] & d_ok[None, :], other=0.0).to(COMPUTE)  # fmt: skip
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for n in range(begin, end, BLOCK_N):
        rows = n + tl.arange(0, BLOCK_N)
        ok = rows < end
        if PAGE:
            page = tl.load(table + request.to(tl.int64) * table_row + rows // PAGE, mask=ok, other=0).to(tl.int64)
            k_at = page * k_slot + (rows % PAGE).to(tl.int64) * k_row
            v_at = page * v_slot + (rows % PAGE).to(tl.int64) * v_row
        else:
            k_at = slot * k_slot + rows.to(tl.int64) * k_row
            v_at = slot * v_slot + rows.to(tl.int64) * v_row
        ks = tl.load(k + head * k_head + k_at[None, :] + d[:, None], mask=ok[None, :] & d_ok[:, None], other=0.0)
        s = tl.dot(qs, ks.to(COMPUTE), input_precision="ieee")
        s = tl.where(ok[None, :], _scaled(s, scale_log2, softcap, SOFTCAP), float("-inf"))
        new = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        old = tl.exp2(best - new)
        vs = tl.load(v + head * v_head + v_at[:, None] + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        acc = acc * old[:, None] + tl.dot(p.to(COMPUTE), vs.to(COMPUTE), input_precision="ieee")
        total = total * old + tl.sum(p, 1)
        best = new
    if APPEND:
        if part == 0:  # no program may read this row from the cache, because this one writes it
            row = stored.to(tl.int64)
            k1 = tl.load(k_new + request.to(tl.int64) * k_new_token + head * k_new_head + d, mask=d_ok, other=0.0)
            v1 = tl.load(v_new + request.to(tl.int64) * v_new_token + head * v_new_head + d, mask=d_ok, other=0.0)
            k1 = k1.to(k.dtype.element_ty)
            v1 = v1.to(v.dtype.element_ty)
            tl.store(k + slot * k_slot + row * k_row + head * k_head + d, k1, mask=d_ok)
            tl.store(v + slot * v_slot + row * v_row + head * v_head + d, v1, mask=d_ok)
            s1 = tl.sum(qs.to(tl.float32) * k1.to(tl.float32)[None, :], 1)
            s1 = _scaled(s1, scale_log2, softcap, SOFTCAP)
            new = tl.maximum(best, s1)
            p1 = tl.exp2(s1 - new)
            old = tl.exp2(best - new)
            acc = acc * old[:, None] + p1[:, None] * v1.to(tl.float32)[None, :]
            total = total * old + p1
            best = new
    ok = g_ok[:, None] & d_ok[None, :]
    heads_at = head * GROUP + g
    if SPLIT:
        # [part, request, head]. A part without rows has -inf, and its rows of `partial` are never read.
        at = (part.to(tl.int64) * requests + request) * heads + heads_at
        some = total > 0
        result = acc / tl.where(some, total, 1.0)[:, None]
        tl.store(partial + at[:, None] * DIM + d[None, :], result, mask=ok)
        tl.store(lse + at, tl.where(some, best + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=g_ok)
    last = not SPLIT
    if JOIN:
        tl.debug_barrier()  # the stores of every thread come before the count
        count = ended + request * tl.num_programs(1) + head
        last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            tl.store(count, 0)  # for the next launch
            best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
            total = tl.zeros([GROUP_PAD], tl.float32)
            acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
            for i in range(0, splits):
                # Not from the L1 cache: a program before on this multiprocessor may have read lines of `lse` too early.
                at = (i * requests + request).to(tl.int64) * heads + heads_at
                log = tl.load(lse + at, mask=g_ok, other=float("-inf"), cache_modifier=".cg")
                some = log > float("-inf")
                values = tl.load(partial + at[:, None] * DIM + d[None, :], mask=ok & some[:, None], other=0.0,
                                 cache_modifier=".cg")  # fmt: skip
                new = tl.maximum(best, log)
                safe = tl.where(new == float("-inf"), 0.0, new)
                old, weight = tl.exp2(best - safe), tl.exp2(log - safe)
                acc = acc * old[:, None] + values * weight[:, None]
                total = total * old + weight
                best = new
    if last:
        result = acc / total[:, None]
        tl.store(out + request.to(tl.int64) * o_token + heads_at[:, None] * o_head + d[None, :],
                 result.to(out.dtype.element_ty), mask=ok)  # fmt: skip


@triton.jit
def join(out, partial, lse, splits, requests, o_token, o_head, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
         PARTS: tl.constexpr):  # fmt: skip
    """The parts of one request and query head."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    parts = tl.arange(0, PARTS)
    d = tl.arange(0, DIM_PAD)
    at = (parts.to(tl.int64) * requests + request) * tl.num_programs(1) + head
    logs = tl.load(lse + at, mask=parts < splits, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    ok = (logs > float("-inf"))[:, None] & (d < DIM)[None, :]
    values = tl.load(partial + at[:, None] * DIM + d[None, :], mask=ok, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + request.to(tl.int64) * o_token + head * o_head + d, result.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def prefill(
    q, k, v, out, slots, lengths, cu_seqlens_q,
    scale_log2, softcap, window,
    q_token, q_head, k_slot, k_row, k_head, v_slot, v_row, v_head, o_token, o_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One request, one query head, BLOCK_M of its queries."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with the most rows first
    head = tl.program_id(1)
    request = tl.program_id(2)
    start = tl.load(cu_seqlens_q + request)
    queries = tl.load(cu_seqlens_q + request + 1) - start
    if tile * BLOCK_M >= queries:
        return
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PAD)
    d_ok = d < DIM
    m_ok = m < queries
    position = length - queries + m
    token = (start + m).to(tl.int64)
    qs = tl.load(q + token[:, None] * q_token + head * q_head + d[None, :],
                 mask=m_ok[:, None] & d_ok[None, :], other=0.0).to(COMPUTE)  # fmt: skip
    end = tl.minimum(length - queries + (tile + 1) * BLOCK_M, length)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - queries + tile * BLOCK_M - window + 1, 0)
    kv_head = head // GROUP
    k_base = k + slot * k_slot + kv_head * k_head
    v_base = v + slot * v_slot + kv_head * v_head
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    for n in range(begin, end, BLOCK_N):
        rows = n + tl.arange(0, BLOCK_N)
        ok = rows < end
        at = rows.to(tl.int64)
        ks = tl.load(k_base + at[None, :] * k_row + d[:, None], mask=ok[None, :] & d_ok[:, None], other=0.0)
        s = _scaled(tl.dot(qs, ks.to(COMPUTE), input_precision="ieee"), scale_log2, softcap, SOFTCAP)
        sees = ok[None, :] & (rows[None, :] <= position[:, None])
        if WINDOW:
            sees = sees & (rows[None, :] > position[:, None] - window)
        s = tl.where(sees, s, float("-inf"))
        new = tl.maximum(best, tl.max(s, 1))
        # A query may see none of the first rows of a window's tile: exp2(-inf - -inf) is no number.
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        old = tl.exp2(best - safe)
        vs = tl.load(v_base + at[:, None] * v_row + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        acc = acc * old[:, None] + tl.dot(p.to(COMPUTE), vs.to(COMPUTE), input_precision="ieee")
        total = total * old + tl.sum(p, 1)
        best = new
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + token[:, None] * o_token + head * o_head + d[None, :], result.to(out.dtype.element_ty),
             mask=m_ok[:, None] & d_ok[None, :])  # fmt: skip
