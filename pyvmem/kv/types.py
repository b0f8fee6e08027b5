"""Types of a KV cache: specifications of tensors, slots, prefixes, statistics, shortages.

SPDX-License-Identifier: MIT
"""

import errno
import math
from dataclasses import dataclass
from typing import Any

import torch

from pyvmem._checks import one_of, shown, uint
from pyvmem.errors import InvalidArgument
from pyvmem.kv.view import REASONS

LAYOUTS = ("separate", "fused", "token-major")


@dataclass(frozen=True)
class TensorSpec:
    """The specification of one tensor: what it stores of every token.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Shape of one token's row: ``(heads, head_dim)``, MLA's ``(latent,)``, or any other.
    dtype : torch.dtype
    window : int
        Sliding window in tokens. Rows further back are given up. 0 keeps all.
    max_tokens : int
        Rows per slot; 0 for the cache's `max_tokens`.

    Raises
    ------
    ValueError, TypeError
        An element of the shape is less than 1, or the dtype is not torch's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {shown(self.dtype)}")
        if not isinstance(self.shape, tuple | list) or not all(uint("shape", n) for n in self.shape):
            raise ValueError(f"shape {self.shape!r} must be a tuple of numbers of at least 1")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))  # products of numpy's integers wrap

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return math.prod(self.shape) * self.dtype.itemsize


_MOST_LAYERS = 32768  # two tensors each


@dataclass(frozen=True)
class SlotInfo:
    """One slot: its state (free, active or swapped), length, and pages over all tensors together.

    absent_steps: for an active slot, the steps since it last took part in one or was allocated. after: the step whose
    kernels must have ended before a free slot can be had; 0: none.
    """

    state: str
    tokens: int
    shared_tokens: int
    pages: int
    shared_pages: int
    needed_pages: int
    absent_steps: int = 0
    after: int = 0


# reason, in the order of vmem_kv.h: (the shortage in words, the remedy besides ending requests)
_CAUSES = {
    "budget": ("the budget is used up", "raise the budget"),
    "device": ("the device has less memory than the budget", "free memory elsewhere"),
    "mappings": ("the process has all its mappings", "raise vm.max_map_count or use larger pages"),
    "slots": ("all slots are taken", "create the cache with more slots"),
}
# refusal: the remedy of a pool's member
_POOL_HELPS = {
    "at maximum": "raise its share's maximum",
    "at minimum": "use a pool with a larger budget, or lower the minimum of another member",
    "in use": "use a pool with a larger budget, or end requests of other members",
    "no memory": "free memory elsewhere",
    "file damaged": "restart the pool's processes",
    "no answer": "continue or end the process that does not answer",
}


@dataclass(frozen=True)
class Shortage:
    """Why a call found too little memory, or no slot.

    Attributes
    ----------
    reason : str or None
        "budget": end or swap out a request, drop prefixes, or raise the budget. "device": the budget allows more than
        the device has; free memory elsewhere, or end a request. "mappings": the host's ``vm.max_map_count``; raise it,
        use larger pages, or end a request. "slots": end a request. None: nothing was short.
    missing_pages : int
    prefix_pages : int
        Pages that dropping all prefixes would free.
    requests : int
        Requests that hold pages.
    ending_pages : int
        Pages of requests that end when the kernels in flight have ended; `KVCache.retire` ends them earlier.
    watermark_pages : int
        Missing pages that only the watermark requires (`KVCache.fit`).
    coming_pages : int
        Pages that the pool may still provide (`KVPool.wait`).
    step : int
        The first step whose kernels' end makes good what is missing: wait for it, `KVCache.retire` it, and call again.
        0: kernels in flight do not hold that much, so a request must give way.
    refusal : str or None
        Of a member of a pool: why the others give no more, as in `PoolMember.reason`.

    Notes
    -----
    ``str(shortage)`` is one line that says what is short and what would help.
    """

    reason: str | None
    missing_pages: int
    prefix_pages: int
    requests: int
    ending_pages: int = 0
    watermark_pages: int = 0
    coming_pages: int = 0
    step: int = 0
    refusal: str | None = None

    @property
    def remedy(self) -> str:
        """The remedy besides ending requests and dropping prefixes."""
        return _POOL_HELPS.get(self.refusal or "") or _CAUSES[self.reason or "budget"][1]

    def __str__(self) -> str:
        if self.reason is None:
            return "nothing is short"
        if self.reason == "slots":
            return "all slots are taken: end a request"
        helps = []
        if self.coming_pages:
            helps.append(f"wait for the pool, which may give {self.coming_pages}")
        if self.ending_pages:
            helps.append(f"retire the steps of requests that end, which hold {self.ending_pages}")
        if self.watermark_pages:
            helps.append(f"lower the watermark, which keeps {self.watermark_pages}")
        if self.prefix_pages:
            helps.append(f"drop prefixes, which hold {self.prefix_pages}")
        if self.requests:
            helps.append("end or swap out a request")
        helps.append(self.remedy)
        cause = _CAUSES[self.reason][0]
        if self.refusal:
            cause += f", and the pool gives no more ({self.refusal})"
        return f"{self.missing_pages} pages are missing: {cause}; {', or '.join(helps)}"


NO_SHORTAGE = Shortage(None, 0, 0, 0)


@dataclass(frozen=True)
class Run:
    """Rows [first, first + tokens) that a request wrote, held for others (`KVCache.share`).

    min_tokens: of a run from row 0, the fewest tokens that a request can begin with; windows may have given up some.
    """

    id: int
    first: int
    tokens: int
    min_tokens: int = 0


def model_specs(
    layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str = "separate", window: int = 0
) -> list[TensorSpec]:
    """Describe the tensors of a model with equal layers.

    Parameters
    ----------
    layers, kv_heads, head_dim : int
        Of this worker, at least 1.
    dtype : torch.dtype
    layout : {"separate", "fused", "token-major"}
        "separate": K and V of each layer, 2 x layers tensors. "fused": both in one, layers tensors of rows ``(2,
        kv_heads, head_dim)``. "token-major": one tensor of rows ``(layers, 2, kv_heads, head_dim)``.
    window : int
        Tokens, as in `TensorSpec`; 0 for none.

    Returns
    -------
    list of TensorSpec

    Raises
    ------
    ValueError
        Another layout, or a number that is not at least 1.
    """
    one_of("layout", layout, LAYOUTS)
    if not 1 <= uint("layers", layers) <= _MOST_LAYERS:
        raise InvalidArgument(errno.EINVAL, f"layers {layers} must lie between 1 and {_MOST_LAYERS}")
    if layout == "separate":
        return [TensorSpec(f"{n}{i}", (kv_heads, head_dim), dtype, window) for i in range(layers) for n in "kv"]
    if layout == "fused":
        return [TensorSpec(f"kv{i}", (2, kv_heads, head_dim), dtype, window) for i in range(layers)]
    return [TensorSpec("kv", (layers, 2, kv_heads, head_dim), dtype, window)]


def shortage_of(raw: Any) -> Shortage:
    """The `Shortage` of a struct vmem_kv_shortage."""
    numbers = (
        raw.missing_pages, raw.prefix_pages, raw.requests, raw.ending_pages, raw.watermark_pages, raw.coming_pages,
        raw.step,
    )  # fmt: skip
    return Shortage((None, *_CAUSES)[raw.reason], *numbers, refusal=REASONS[raw.refusal])
