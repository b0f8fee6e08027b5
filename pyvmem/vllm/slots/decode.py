"""Decode attention by slots: launches `pyvmem.vllm.slots.kernels`. This module does not import vLLM.

SPDX-License-Identifier: MIT
"""

import functools
from typing import Any

import torch

from pyvmem.attention.kernel import multiprocessors
from pyvmem.attention.triton import LOG2E, _power
from pyvmem.vllm.slots import kernels

LEAST = 32  # requests in a step; with fewer, FlashAttention is faster
BLOCK_N = 64  # rows that are loaded together


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
        kernels.plan[(1,)](self.ends, lengths, lengths.shape[0], self.window, REQUESTS=self.most, BLOCK_N=BLOCK_N)


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
    kernels.decode[(programs,)](
        query, kv_cache, out, k, v, places, partial, lse, work.ended, table, lengths, work.ends,
        scale if softcap else scale * LOG2E, softcap, work.window, requests,
        query.stride(0), query.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0),
        kv_cache.stride(0), kv_cache.stride(2), kv_cache.stride(1), dim, out.stride(0), out.stride(1),
        HEADS=kv_heads, GROUP=group, GROUP_PAD=max(_power(group), 16), DIM=dim, DIM_PAD=max(_power(dim), 16),
        TOKENS=tokens, BLOCK_N=BLOCK_N, WINDOW=work.window > 0, SOFTCAP=softcap > 0, REQUESTS=work.most,
        APPEND=new is not None, num_warps=4, num_stages=3 if dim <= 128 else 2,
    )  # fmt: skip
