"""Tensors that a model carries to the attention ``"vmem"`` without reading them: new keys and values, the padding.

For that attention the cache returns only the new rows, and the mask is only the padding. A model that computes with
them would compute something else than with sdpa. So they are tensors that raise an error if anything reads them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pyvmem.transformers.plan import Plan

if TYPE_CHECKING:
    from pyvmem.transformers.layers import VMemLayer


class OpaqueTensor(torch.Tensor):
    """A tensor that raises RuntimeError if it is read. Its attribute ``vmem`` is its owner, which has the data."""

    vmem: PendingKV | Padding

    @staticmethod
    def of(tensor: torch.Tensor, owner: PendingKV | Padding) -> OpaqueTensor:
        opaque: OpaqueTensor = tensor.as_subclass(OpaqueTensor)
        opaque.vmem = owner
        return opaque

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(func.__self__, "__name__", name)
        of_queries = name == "__getitem__" and isinstance(args[0].vmem, Padding) and _of_queries(args[1])
        if of_queries or name in _HARMLESS or name in _USUALLY_HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                if of_queries:
                    return OpaqueTensor.of(result, args[0].vmem.of_queries(args[1]))
            if name in _HARMLESS or result is args[0]:
                return result
        found = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, OpaqueTensor)]
        found[0].vmem.read(name)

    def __repr__(self) -> str:  # type: ignore[override]
        return "OpaqueTensor(...)"


# They tell nothing of what is in a tensor; the others change nothing, as a rule.
_HARMLESS = {"device", "dim", "dtype", "ndim", "requires_grad", "shape", "size"}
_USUALLY_HARMLESS = {"contiguous", "to"}


def _of_queries(index: Any) -> bool:
    """True if an index of a 4D mask chooses among the queries alone, as Gemma 4 does where it trims a prompt."""
    whole = slice(None)
    return isinstance(index, tuple) and len(index) == 4 and (*index[:2], index[3]) == (whole,) * 3


class PendingKV:
    """K and V of one layer on their way to the attention ``"vmem"``. Only that attention knows the padding.

    The `OpaqueTensor` that `VMemLayer.update` returns as K and as V has it as its attribute ``vmem``.
    """

    __slots__ = ("layer", "start", "tokens", "key", "value", "plan")

    def __init__(self, layer: VMemLayer, start: int, tokens: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.layer = layer
        self.start = start
        self.tokens = tokens
        self.key = key
        self.value: torch.Tensor | None = value  # None: its rows are stored
        self.plan: Plan | None = None

    def opaque(self, columns: int) -> OpaqueTensor:
        """A tensor of the shape that K and V have for other attentions. It has no memory of its own."""
        batch, heads, _, dim = self.key.shape
        return OpaqueTensor.of(self.layer.rows.blank.expand(batch, heads, columns, dim), self)

    def read(self, what: str) -> NoReturn:
        """Raises RuntimeError: `what` reads K or V before the attention."""
        self.refuse(f"computes with the keys or values that the cache returned ({what})")

    def refuse(self, does: str) -> NoReturn:
        """Raises RuntimeError: the model `does` what this attention cannot follow."""
        self.layer.rows.pending = None
        raise RuntimeError(
            f"layer {self.layer.index}: the model {does}: use another attention than vmem for this model"
        )

    def write(
        self, key: torch.Tensor, mask: torch.Tensor | None = None, uniform: bool = False, by_kernel: bool = False
    ) -> Plan:
        """Store the rows, once, and return the pass's `Plan`.

        mask: as in `Rows.begin`. uniform: padding is stored as well, unless the cache has left out some. by_kernel: the
        attention kernel may store a decode step's rows; `PendingKV.value` is then not None.
        """
        if self.plan is None:
            layer, rows = self.layer, self.layer.rows
            rows.pending = None
            plan = rows.begin(self.start, self.tokens, key.shape[0], None if uniform and not rows.ragged else mask)
            self.plan = plan
            by_kernel = by_kernel and not plan.masked and (mask is None or rows.ragged)
            if by_kernel and self.tokens == 1 and plan.kept is None:
                layer.length = self.start + 1
                return plan
            assert self.value is not None  # until the rows are stored
            layer.store(plan, key, self.value)
        self.value = None
        return self.plan


@dataclass(frozen=True)
class Padding:
    """The padding of a pass: bool ``[batch, columns]``, False for padding, or None; and the mask that sdpa has."""

    mask: torch.Tensor | None
    dense: Callable[[], torch.Tensor | None]

    def of_queries(self, index: Any) -> Padding:
        """The same padding, for the queries that an index of the 4D mask chooses."""

        def dense() -> torch.Tensor | None:
            mask = self.dense()
            return None if mask is None else mask[index]

        return Padding(self.mask, dense)

    def read(self, what: str) -> None:
        """Raises RuntimeError: `what` reads the mask."""
        raise RuntimeError(
            f"the model computes with the attention mask ({what}), which is not sdpa's here: use another attention "
            "than vmem for padded batches of this model"
        )


class KVLength(int):
    """The length of K for a mask. `layer` tells `vmem_mask` that a `VMemCache` asked for it."""

    layer: VMemLayer

    @staticmethod
    def of(length: int, layer: VMemLayer) -> KVLength:
        marked = KVLength(length)
        marked.layer = layer
        return marked
