"""torch's scaled_dot_product_attention, request by request. It works everywhere and is the default on CPUs.

Each request's K and V are views of exactly its length, so nothing is read past it. Query heads that share a KV head are
folded into the query's length, so K and V are read once and never repeated.

SPDX-License-Identifier: MIT
"""

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pyvmem.attention.kernel import BF16, FP16, FP32, Call, Kernel

# cuDNN is left out: it makes a plan for each length, which takes up to half a second, and may read past the length.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _mask(queries: int, first: int, length: int, window: int, device: torch.device) -> torch.Tensor | None:
    """The rows from first to length that the last `queries` tokens see; None for all of them."""
    if queries == 1:
        return None
    position = torch.arange(length - queries, length, device=device)[:, None]
    row = torch.arange(first, length, device=device)[None]
    mask = row <= position
    return mask & (row > position - window) if window else mask


class SDPA(Kernel):
    """torch's scaled_dot_product_attention."""

    name = "sdpa"
    devices = ("cuda", "cpu")
    capability = (5, 0)
    dtypes = (BF16, FP16, FP32, torch.float64)
    max_head_dim = 1 << 16
    head_dim_multiple = 1
    softcap = False
    capturable = False

    def run(self, call: Call) -> torch.Tensor:
        out = torch.empty_like(call.q, memory_format=torch.contiguous_format) if call.out is None else call.out
        with sdpa_kernel(_BACKENDS) if call.shape.device == "cuda" else contextlib.nullcontext():
            for slot, length, rows in call.batch.requests():
                self._request(call, out, slot, length, rows)
        return out

    def _request(self, call: Call, out: torch.Tensor, slot: int, length: int, rows: slice) -> None:
        shape, queries = call.shape, rows.stop - rows.start
        first = max(0, length - queries - shape.window + 1) if shape.window else 0
        k = call.k[slot, first:length].transpose(0, 1)[None]
        v = call.v[slot, first:length].transpose(0, 1)[None]
        if queries == length and not shape.window and queries > 1:  # a whole prompt: the kernels' own causal mask
            q = call.q[rows].transpose(0, 1)[None]
            gqa = shape.group > 1
            o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.softmax_scale, enable_gqa=gqa)
            out[rows] = o[0].transpose(0, 1)
            return
        # [kv_heads, group * queries, head_dim]: the queries that share a KV head are adjacent.
        q = call.q[rows].unflatten(1, (shape.kv_heads, shape.group)).permute(1, 2, 0, 3).flatten(1, 2)[None]
        mask = _mask(queries, first, length, shape.window, q.device)
        if mask is not None:
            mask = mask.repeat(shape.group, 1)
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.softmax_scale)
        o = o[0].unflatten(1, (shape.group, queries)).permute(2, 0, 1, 3)
        out[rows] = o.flatten(1, 2)
