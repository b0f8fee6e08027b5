"""VMEM_CHECK=1: tensors of vMem that raise an error, which names the row, where an operation would touch unbacked rows.

Without it such an operation ends the process, or a GPU's context, because torch knows nothing of pages. Each operation
takes tens of microseconds more, so this is for debugging alone. What it cannot see: kernels that are called with a
pointer, ``gather`` and ``scatter``, and rows that a sliding window has given up.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import torch
from torch.utils._pytree import tree_leaves, tree_map

ON = os.environ.get("VMEM_CHECK", "0") not in ("", "0")

# A function and a number of bytes. The function gets two addresses, and whether the operation writes; it names what
# must not be touched between them, or returns None. Pieces of memory that lie closer together than the bytes are
# checked as one.
Checker = tuple[Callable[[int, int, bool], str | None], int]

_BY_DIM = {"aten::index_select", "aten::index_copy_", "aten::index_add_", "aten::index_fill_"}
_UNSEEN = {"aten::gather", "aten::scatter_", "aten::scatter_add_", "aten::set_"}


class Checked(torch.Tensor):
    """A tensor that checks what each operation touches. So do its views."""

    checker: Checker

    @staticmethod
    def of(tensor: torch.Tensor, checker: Checker) -> Checked:
        checked: Checked = torch.Tensor._make_subclass(Checked, tensor)
        checked.checker = checker
        return checked

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle, and torch.save, the values: an ordinary tensor again, wherever they are read."""
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def _plain(self) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            storage, (check, _) = self.untyped_storage(), self.checker
            why = check(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), False)
            if why is not None:
                raise IndexError(f"a copy, which takes all that the tensor is a view of, would read {why}")
            return self.as_subclass(torch.Tensor)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema, found = func._schema, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Checked)]
        aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
        if not aliases or any(alias.is_write for alias in aliases):  # otherwise it makes a view
            for i, argument in enumerate(schema.arguments):
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(given):
                    if isinstance(tensor, Checked):
                        _check(tensor, schema.name, args if i == 0 else (), writes)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
            storages = {x.untyped_storage().data_ptr(): x.checker for x in found}

            def wrapped(x: Any) -> Any:
                if not isinstance(x, torch.Tensor) or isinstance(x, Checked):
                    return x
                checker = storages.get(x.untyped_storage().data_ptr())
                return x if checker is None else Checked.of(x, checker)

            return tree_map(wrapped, result)


def _check(tensor: Checked, name: str, args: Any, writes: bool) -> None:
    """Raise IndexError if the operation `name` touches what must not be touched of its argument `tensor`."""
    if name in _UNSEEN:
        return
    with torch._C._DisableTorchDispatch():
        check, unit = tensor.checker
        for first, end in _pieces(tensor, name, args, unit):
            why = check(first, end, writes)
            if why is not None:
                raise IndexError(f"{name.removeprefix('aten::')} would {'write' if writes else 'read'} {why}")


def _pieces(tensor: torch.Tensor, name: str, args: Any, unit: int) -> Iterator[tuple[int, int]]:
    """(first byte, end) of each piece of memory that an operation touches of its argument."""
    size, at = tensor.element_size(), tensor.data_ptr()
    dims = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride())]
    offsets = [0]
    index = None
    if args and name in _BY_DIM:
        index = [None] * (args[1] % max(tensor.dim(), 1)) + [args[2]]
    elif args and name.startswith(("aten::index.", "aten::index_put", "aten::_index_put")) or name == "aten::index":
        index = args[1] if args else None
    if index is not None:
        offsets, dims = _indexed(dims, index)
    outer = []
    for n, stride in sorted((d for d in dims if d[1]), key=lambda d: d[1]):
        if not n:
            return
        if stride - size < unit:
            size += stride * (n - 1)
        else:
            outer.append([i * stride for i in range(n)])
    if any(n == 0 for n, _ in dims):
        return
    for each in itertools.product(offsets, *outer):
        yield at + sum(each), at + sum(each) + size


def _indexed(dims: list[tuple[int, int]], index: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Offsets in bytes of the parts that an index by tensors chooses, and the dimensions of a part."""
    left, chosen, at = [], [], 0
    for entry in index:
        if entry is None:
            left.append(dims[at])
            at += 1
            continue
        for each in entry.nonzero().unbind(1) if entry.dtype == torch.bool else [entry]:
            n, stride = dims[at]
            chosen.append(torch.where(each < 0, each + n, each).cpu().long() * stride)
            at += 1
    total = sum(chosen[1:], chosen[0]) if chosen else torch.zeros(1, dtype=torch.long)
    return total.unique().tolist(), left + dims[at:]
