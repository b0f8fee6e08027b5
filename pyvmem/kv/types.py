"""Types of a KV cache: specifications of tensors, slots, runs.

SPDX-License-Identifier: MIT
"""

import errno
import math
from dataclasses import dataclass

import torch

from pyvmem._checks import one_of, shown, uint
from pyvmem.errors import InvalidArgument

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
