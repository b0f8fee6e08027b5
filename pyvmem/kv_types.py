"""What a KV cache is made of and says of itself: specifications of tensors, slots, prefixes, statistics, shortages.

SPDX-License-Identifier: MIT
"""

import errno
import math
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING

import torch

from pyvmem._checks import one_of, uint
from pyvmem.errors import InvalidArgument
from pyvmem.kv_view import STATS

LAYOUTS = ("separate", "fused", "token-major")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a cache: what it keeps of every token.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Of one token's row: ``(heads, head_dim)``, MLA's ``(latent,)``, or anything else.
    dtype : torch.dtype
    window : int
        Sliding window, tokens: rows further back are given up. 0 keeps all.
    max_tokens : int
        Rows of a slot; 0 for the cache's.

    Raises
    ------
    ValueError, TypeError
        An element of the shape is not at least 1; the dtype is none of torch's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {self.dtype!r}")
        if not isinstance(self.shape, tuple | list) or not all(uint("shape", n) for n in self.shape):
            raise ValueError(f"shape {self.shape!r} must be a tuple of numbers from 1 on")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return math.prod(self.shape) * self.dtype.itemsize


_MOST_LAYERS = 32768  # two tensors each
if TYPE_CHECKING:

    @dataclass(frozen=True)
    class KVStats:
        def __getattr__(self, name: str) -> int: ...

else:
    KVStats = make_dataclass(
        "KVStats",
        [(name, int) for name in STATS],
        frozen=True,
        namespace={"__doc__": "What a cache holds and has done, in pages, bytes and counts: struct vmem_kv_stats."},
    )


@dataclass(frozen=True)
class SlotInfo:
    """One slot: its state ("free", "active", "swapped", "ending"), length, and pages over all tensors together.

    absent_steps: of an active slot, the steps since it took part in one, or was allocated.
    """

    state: str
    tokens: int
    shared_tokens: int
    pages: int
    shared_pages: int
    needed_pages: int
    absent_steps: int = 0


@dataclass(frozen=True)
class GroupInfo:
    """A group: the tensors of one row size, window and max_tokens. Their pages come and go together.

    Attributes
    ----------
    tensors : tuple of int
        Which of the cache's specs.
    page_size, tile_rows : int
        The cache's.
    row_bytes, max_tokens, window : int
        As in `TensorSpec`; max_tokens is the cache's where the spec has none.
    page_tokens : int
        Whole rows in a page; 0: a row is larger than a page. ``page_size / row_bytes`` need not be whole.
    held_pages : int
        Mapped in slots, in all tensors of the group together, kept and ahead ones included.
    needed_pages : int
        Of these, for the lengths of active requests.
    tokens : int
        Rows that active requests have in each tensor.
    free_pages : int
        What a step could get; all groups share it.
    free_tokens : int
        Rows in each tensor of the group if it alone got all of them: what a long request still gets where the other
        groups have windows, and what any request gets where there is one group.
    """

    tensors: tuple[int, ...]
    page_size: int
    tile_rows: int
    row_bytes: int
    max_tokens: int
    window: int
    page_tokens: int
    held_pages: int
    needed_pages: int
    tokens: int
    free_pages: int
    free_tokens: int

    def pages(self, tokens: int) -> int:
        """Return the pages that a new request of so many tokens needs in this group, in all its tensors."""
        rows = min(uint("tokens", tokens, 32), self.max_tokens)
        rows = -(-rows // self.tile_rows) * self.tile_rows
        return -(-rows * self.row_bytes // self.page_size) * len(self.tensors)


@dataclass(frozen=True)
class Shortage:
    """Why a call found too little.

    Attributes
    ----------
    reason : str or None
        "budget": end or swap out a request, drop prefixes, or raise the budget. "device": the budget allows more than
        the device has; free memory elsewhere, or end a request. "mappings": the host's ``vm.max_map_count``; raise it,
        use larger pages, or end a request. "slots": end a request. None: nothing was short.
    missing_pages : int
    prefix_pages : int
        What dropping all prefixes would free.
    requests : int
        That hold pages.
    ending_pages : int
        Of requests that end when the kernels in flight have ended: `KVCache.retire` their steps.
    watermark_pages : int
        Of the missing ones, those that only the watermark asks for (`KVCache.fit`).
    coming_pages : int
        That the pool has been asked for and may still give: `KVPool.wait`.
    """

    reason: str | None
    missing_pages: int
    prefix_pages: int
    requests: int
    ending_pages: int = 0
    watermark_pages: int = 0
    coming_pages: int = 0


@dataclass(frozen=True)
class Prefix:
    """Rows that a request wrote, held for others. `min_tokens` to `tokens` of them can be attached."""

    id: int
    tokens: int
    min_tokens: int


def model_specs(
    layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str = "separate", window: int = 0
) -> list[TensorSpec]:
    """The `TensorSpec` list of a model whose layers are alike.

    layout: "separate" (K and V of each layer: 2 x layers tensors), "fused" (both in one: layers tensors of rows
    ``(2, kv_heads, head_dim)``) or "token-major" (one tensor of rows ``(layers, 2, kv_heads, head_dim)``).
    window: tokens, as in `TensorSpec`. Raises ValueError for another layout, or numbers that are not at least 1.
    """
    one_of("layout", layout, LAYOUTS)
    if not 1 <= uint("layers", layers) <= _MOST_LAYERS:
        raise InvalidArgument(errno.EINVAL, f"layers {layers} must lie between 1 and {_MOST_LAYERS}")
    if layout == "separate":
        return [TensorSpec(f"{n}{i}", (kv_heads, head_dim), dtype, window) for i in range(layers) for n in "kv"]
    if layout == "fused":
        return [TensorSpec(f"kv{i}", (2, kv_heads, head_dim), dtype, window) for i in range(layers)]
    return [TensorSpec("kv", (layers, 2, kv_heads, head_dim), dtype, window)]
