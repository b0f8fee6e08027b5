"""Where the tensors of a model lie, and what of them an engine may take from another one.

An `Image` places the storages of all parameters and buffers one after the other. Two engines whose images have equal
digests place equal names, shapes and types at equal bytes, so that the weights of one are those of the other.

An engine that takes weights makes its model with tensors that nobody fills. A `Trace` follows them: what is computed
from the configuration must equal what is taken, and nothing may stay that was computed from memory without contents.

`common` calls it. It calls nothing of pyvmem's but `pyvmem.tensor`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import enum
import gc
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALIGN = 512  # bytes, as of the blocks of torch's allocator
LARGE = 1 << 20  # bytes from which a tensor without contents gets no memory of its own


class Different(Exception):
    """These weights are not those of the model at hand. The text says how they differ."""


def _plain(thing: Any) -> list[str]:
    """A thing's class, and those of its attributes that are numbers, words or choices."""
    kinds = (str, int, float, bool, enum.Enum, torch.dtype)
    state = sorted(f"{k}={v}" for k, v in getattr(thing, "__dict__", {}).items() if isinstance(v, kinds))
    return [f"{type(thing).__module__}.{type(thing).__qualname__}", *state]


def _methods(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The class of each module, and how its weights are laid out: what vLLM and SGLang call its quant_method."""
    return [
        (path, type(module).__qualname__, _plain(getattr(module, "quant_method", None)))
        for top in modules for path, module in top.named_modules()
    ]  # fmt: skip


def _tensors(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, top in enumerate(modules):
        for path, module in top.named_modules():
            for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None:
                    yield f"{number}.{path}.{name}", tensor


class Image:
    """The places of a model's storages on one device.

    Attributes
    ----------
    bytes : int
        Of all storages, with what is unused between them.
    digest : str
        Of names, types, shapes and places, and of how each module lays its weights out.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._tensors: list[tuple[torch.Tensor, int]] = []  # and the number of its storage
        self.storages: list[torch.UntypedStorage] = []
        self.places: list[int] = []
        self.bytes = 0
        numbers: dict[int, int] = {}
        described = []
        for name, tensor in _tensors(modules):
            storage, number = tensor.untyped_storage(), -1
            if tensor.device.type == device.type and storage.nbytes() and storage.data_ptr():
                number = numbers.setdefault(storage.data_ptr(), len(numbers))
                if number == len(self.storages):
                    self.storages.append(storage)
                    self.places.append(self.bytes)
                    self.bytes += -(-storage.nbytes() // ALIGN) * ALIGN
                self._tensors.append((tensor, number))
            described.append((name, type(tensor).__name__, str(tensor.dtype), list(tensor.shape), list(tensor.stride()),
                              tensor.storage_offset(), number, storage.nbytes(), tensor.device.type))  # fmt: skip
        about = json.dumps([described, _methods(modules)])
        self.digest = hashlib.sha256(about.encode()).hexdigest()

    def move(self, memory: Callable[[int, int], torch.Tensor], which: Callable[[int], bool] = lambda i: True) -> None:
        """Have the tensors of some storages in other memory: memory(number of the storage, bytes) is uint8[bytes]."""
        new: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for tensor, i in self._tensors:
                if not which(i):
                    continue
                if i not in new:
                    new[i] = memory(i, self.storages[i].nbytes()).untyped_storage()
                view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = view.set_(new[i], tensor.storage_offset(), tensor.size(), tensor.stride())
        for i, storage in new.items():
            self.storages[i] = storage

    def keep(self, thing: Any) -> None:
        """Have something live as long as the tensors."""
        for tensor, _ in self._tensors:
            tensor._vmem_pool = thing  # type: ignore[attr-defined]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8[n] over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(things: Any) -> list[torch.UntypedStorage]:
    found = []
    for thing in tree_leaves(things):
        if isinstance(thing, torch.Tensor) and not thing.is_meta:  # whose contents nobody can read
            with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse, and others without one
                found.append(thing.untyped_storage())
    return found


class Trace(TorchDispatchMode):
    """Follows tensors without contents while a model is made, in one thread.

    room : called with a size in bytes for each large tensor without contents: memory that several may share, as nobody
        reads it, or None.
    """

    def __init__(self, device: torch.device, room: Callable[[int], torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._room = device, room
        # By a storage's address: a weak reference, and what left it without contents; "": it has some.
        self._seen: dict[int, tuple[Any, str]] = {}
        self.escaped = ""  # what has read memory without contents, and is no tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        empty = name.startswith(("empty", "new_empty", "rand"))
        out = self._allocate(func, args, kwargs) if name == "empty" else None
        fills = name in ("zero_", "fill_", "copy_")
        whole = fills and args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes()
        blank = any(not self._has_contents(s) for s in _storages((args[1:] if whole else args, kwargs)))
        if out is None:
            out = func(*args, **kwargs)
        if blank and any(not isinstance(leaf, torch.Tensor) and leaf is not None for leaf in tree_leaves(out)):
            self.escaped = str(func)
        if blank or empty:  # what is written from memory without contents, or is a view of it, has none either
            for storage in _storages(out):
                if storage.nbytes():
                    self._note(storage, f"{name} of {storage.nbytes()} bytes")
        elif whole:
            self._note(args[0].untyped_storage(), "")
        return out

    def _allocate(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        device, dtype = torch.device(kwargs.get("device") or "cpu"), kwargs.get("dtype") or torch.get_default_dtype()
        size = torch.Size(args[0]).numel() * dtype.itemsize
        if device.type != self._device.type or size < LARGE or kwargs.get("pin_memory") or kwargs.get("memory_format"):
            return None
        memory = self._room(size)
        return None if memory is None else memory[:size].view(dtype).view(tuple(args[0]))

    def _note(self, storage: torch.UntypedStorage, lost: str) -> None:
        self._seen[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), lost)

    def _has_contents(self, storage: torch.UntypedStorage) -> bool:
        ref, lost = self._seen.get(storage._cdata, (None, ""))
        return not lost or ref is None or ref.expired()

    def forget(self, tensor: torch.Tensor) -> None:
        """The file would be read into this tensor now: whatever is there has no contents any more."""
        for storage in _storages(tensor):
            self._note(storage, "a tensor of the files")

    def check(self, image: Image, taken: Callable[[int], torch.Tensor]) -> None:
        """Raise `Different` unless what has contents equals what is taken, uint8[] by the number of the storage."""
        if self.escaped:
            raise Different(f"{self.escaped} has computed something from the weights that is no tensor")
        for i, storage in enumerate(image.storages):
            if self._has_contents(storage) and not torch.equal(as_bytes(storage), taken(i)):
                raise Different(f"storage {i} of {storage.nbytes()} bytes comes from the configuration and differs")

    def check_left(self) -> None:
        """Raise `Different` if a tensor without contents is left, once all that can be taken have been replaced."""
        gc.collect()
        left = [lost for ref, lost in self._seen.values() if lost and not ref.expired()]
        if left:
            raise Different(f"{len(left)} tensors come from the weights, and are no parameters or buffers: "
                            f"{', '.join(left[:3])}")  # fmt: skip
