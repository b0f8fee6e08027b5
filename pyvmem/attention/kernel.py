"""The interface of the attention kernels: their limits, and the arguments of one call.

SPDX-License-Identifier: MIT
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from pyvmem.attention.batch import Batch

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def dtype_name(dtype: torch.dtype) -> str:
    """The name without the module: bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Shape:
    """The properties of a call that decide whether a kernel can take it. Layers of one model share it.

    Attributes
    ----------
    phase : str
        "decode" (one query a request) or "prefill" (queries of any length at the end of a slot).
    query_heads, kv_heads, head_dim : int
    q_dtype, kv_dtype : torch.dtype
    device : str
        "cuda" or "cpu".
    capability : tuple of int
        Compute capability of the GPU; (0, 0) on a CPU.
    window : int
        Tokens that a query sees, including itself; 0 for all.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0 for none.
    tile_rows : int
        The cache's `tile_rows`.
    requests : int
        Requests in the batch; 0 if no batch is known.
    rows : int
        Rows of the longest request; 0 if no batch is known.
    """

    phase: str
    query_heads: int
    kv_heads: int
    head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    window: int = 0
    softcap: float = 0.0
    tile_rows: int = 1
    requests: int = 0
    rows: int = 0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads


@dataclass
class Call:
    """One layer's checked call, the argument of `Kernel.run`.

    q: ``[tokens, query_heads, head_dim]``. k, v: ``[slots, max_tokens, kv_heads, head_dim]``, strided views of the
    cache. out: as q, or None. plan: the result of `Kernel.plan` for the batch. new: K and V of the requests' last
    tokens, ``[requests, kv_heads, head_dim]`` each, for a kernel that `appends`; None if the cache has them already.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: Batch
    shape: Shape
    softmax_scale: float
    num_splits: int
    out: torch.Tensor | None
    plan: Any
    new: tuple[torch.Tensor, torch.Tensor] | None = None


class Kernel:
    """One attention kernel. Each kernel's module has one subclass, and `table` has an instance of each.

    Attributes
    ----------
    name : str
        The name by which callers select it.
    devices : tuple of str
    capability : tuple of int
        The lowest compute capability, on a GPU.
    dtypes : tuple of torch.dtype
        Dtypes of q, K and V, which must be equal except for the pairs in `mixed`.
    mixed : tuple of (torch.dtype, torch.dtype)
        Additional pairs: the dtype of q, and that of K and V.
    max_head_dim, head_dim_multiple : int
    softcap : bool
        Whether the kernel takes it.
    appends : bool
        Whether decode itself stores the last token's K and V, in the same launch.
    capturable : bool
        Whether a call can be captured in a CUDA graph. `Batch.update` then changes the graph's slots and lengths.
    """

    name = ""
    devices: tuple[str, ...] = ("cuda",)
    capability: tuple[int, int] = (8, 0)
    dtypes: tuple[torch.dtype, ...] = (BF16, FP16)
    mixed: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    max_head_dim = 256
    head_dim_multiple = 8
    softcap = True
    appends = False
    capturable = True

    def unavailable(self, shape: Shape) -> str | None:
        """Why the kernel cannot run on this machine, in one line; None if it can."""
        return None

    def tile_rows(self, shape: Shape) -> int:
        """Rows that the kernel loads together, also past the length; 1 if loads are masked."""
        return 1

    def refusal(self, shape: Shape) -> str | None:
        """The first property that the kernel cannot take, in one line that names the argument; None if it can."""
        if shape.device not in self.devices:
            return f"device {shape.device} (only {' and '.join(self.devices)})"
        if shape.device == "cuda" and shape.capability < self.capability:
            have, need = (".".join(map(str, c)) for c in (shape.capability, self.capability))
            return f"a GPU of compute capability {have} (from {need} on)"
        pair = shape.q_dtype, shape.kv_dtype
        if pair not in self.pairs():
            takes = ", ".join(dtype_name(q) if q == kv else f"{dtype_name(q)} over {dtype_name(kv)}"
                              for q, kv in self.pairs())  # fmt: skip
            over = "" if pair[0] == pair[1] else f" over a cache of {dtype_name(pair[1])}"
            return f"dtype {dtype_name(pair[0])}{over} (only {takes})"
        if shape.head_dim > self.max_head_dim or shape.head_dim % self.head_dim_multiple:
            return f"head_dim {shape.head_dim} (multiples of {self.head_dim_multiple} up to {self.max_head_dim})"
        if shape.softcap and not self.softcap:
            return f"softcap {shape.softcap} (none)"
        tile = self.tile_rows(shape)
        if shape.tile_rows % tile:
            return f"a cache of tile_rows {shape.tile_rows} (a multiple of {tile}, since it loads whole tiles)"
        return None

    def reluctance(self, shape: Shape) -> str | None:
        """Why another kernel is preferable although this one takes the shape, in one line; None by default."""
        return None

    def pairs(self) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
        """The pairs of dtypes (q, K and V) that it takes."""
        return tuple((d, d) for d in self.dtypes) + tuple(self.mixed)

    def plan(self, call: Call) -> Any:
        """Data that an iteration needs besides its batch. `Batch.update` calls its ``refresh(batch)`` if it has one."""

    def run(self, call: Call) -> torch.Tensor:
        """The attention of a `Call`: ``[tokens, query_heads, head_dim]``."""
        raise NotImplementedError


@functools.lru_cache
def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) for None, a CPU."""
    return (0, 0) if index is None else torch.cuda.get_device_capability(index)


@functools.lru_cache
def multiprocessors(index: int | None) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(index).multi_processor_count
