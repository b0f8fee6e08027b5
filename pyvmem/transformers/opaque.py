"""Tensors that a model carries to the attention ``"vmem"`` without reading them: new keys and values, the padding.

For that attention the cache returns only the new rows, and the mask is only the padding. A model that computes with
them would compute something else than with sdpa. So they are tensors that raise an error if anything reads them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Owner(Protocol):
    """What an `OpaqueTensor` stands for."""

    def read(self, what: str) -> None:
        """Raises RuntimeError: `what` reads it."""


class OpaqueTensor(torch.Tensor):
    """A tensor that raises RuntimeError if it is read. Its attribute ``vmem`` is its owner, which has the data."""

    vmem: Owner

    @staticmethod
    def of(tensor: torch.Tensor, owner: Owner) -> OpaqueTensor:
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
