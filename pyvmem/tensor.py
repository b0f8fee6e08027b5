"""Torch tensors over reserved memory: as large as you like, backed where you say.

SPDX-License-Identifier: MIT
"""

import ctypes
import math
import threading
from collections.abc import Iterable

import torch

from pyvmem._checks import integer, one_of
from pyvmem._ffi import ffi, lib
from pyvmem.core import Context, Reservation, default_context

_DEVICE_CPU, _DEVICE_CUDA = 1, 2  # DLPack's DLDeviceType

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_free_capsule = int(ffi.cast("uintptr_t", ffi.addressof(lib, "pv_dlpack_capsule_free")))


def tensor_at(owner, addr, shape, dtype, device, strides=None):
    """A torch tensor over memory that somebody else manages.

    Parameters
    ----------
    owner : cdata ``pv_owner *``
        Kept alive by the tensor and every view of it.
    addr : int
        First byte; a CPU or CUDA address, as the device says.
    shape, strides : sequence of int
        In elements, as in torch; contiguous by default.

    Returns
    -------
    torch.Tensor
        No view: it is the base of its own storage, made through DLPack (https://dmlc.github.io/dlpack), as plain bytes
        so that every dtype of torch will do.
    """
    device = torch.device(device)
    if strides is None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    elements = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    kind = _DEVICE_CPU if device.type == "cpu" else _DEVICE_CUDA
    length = max(elements * dtype.itemsize, 1)
    managed = lib.pv_dlpack_bytes(owner, addr, length, kind, device.index or 0)
    if managed == ffi.NULL:
        raise MemoryError("no memory for a tensor's description")
    capsule = _new_capsule(int(ffi.cast("uintptr_t", managed)), b"dltensor", _free_capsule)
    storage = torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, tuple(shape), tuple(strides))


def _device(device):
    """The torch.device meant, with its ordinal where it is CUDA's."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device {device!r} must be cpu or cuda[:ordinal]") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} must be cpu or cuda[:ordinal]")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch sees no CUDA device")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


class VirtualTensor:
    """A tensor that is reserved whole and backed in parts. Made by `virtual_empty`.

    Attributes
    ----------
    tensor : torch.Tensor
        Of the shape, dtype and device asked for. It, and every view of it, keeps the memory: pages and addresses go
        with the last of them and of this object.
    page_size : int
        Bytes; the unit in which it is backed.
    nbytes : int
        Of the whole tensor.
    resident_bytes : int
        Backed now, in whole pages.
    """

    def __init__(self, shape, dtype, device, *, page_size=None, backdrop=None, zero=False, context=None):
        shape = tuple(integer("shape", n) for n in (shape if isinstance(shape, Iterable) else (shape,)))
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {shape} must not be negative")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
        if not isinstance(context, Context | None):
            raise TypeError(f"context must be a Context, not {context!r}")
        device = _device(device)
        if context is None:
            gpu = device.type == "cuda"
            context = default_context("gpu" if gpu else "host", device.index or 0)
        if ("gpu" in context.info().capabilities) != (device.type == "cuda"):
            raise ValueError(f"a context of the {context.backend} backend cannot hold a tensor on {device}")
        if page_size is None:
            page_size = min(context.page_sizes)
        one_of("page_size", page_size, context.page_sizes)
        if backdrop is None:
            backdrop = "backdrop" in context.info().capabilities
        self.context = context
        self.page_size = page_size
        self.zero = zero
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.resident_bytes = 0
        self._row_bytes = self.nbytes // shape[0] if shape and shape[0] else self.nbytes
        self._lock = threading.Lock()
        length = max(-(-self.nbytes // page_size) * page_size, page_size)
        self._range = Reservation(context, length, backdrop=backdrop, with_pages=True)
        self.tensor = tensor_at(self._range._owner, self._range.addr, shape, dtype, device)

    @property
    def addr(self):
        """Address of the first byte."""
        return self._range.addr

    def __repr__(self):
        t = self.tensor
        shape = None if t is None else tuple(t.shape)
        return f"<pyvmem.VirtualTensor {shape}, {self.resident_bytes} of {self.nbytes} bytes resident>"

    def _span(self, rows, bytes):
        """(first byte, end byte) of a range given as rows of the first dimension or as bytes."""
        if rows is not None and bytes is not None:
            raise TypeError("give rows or bytes, not both")
        name, given, unit = ("bytes", bytes, 1) if rows is None else ("rows", rows, self._row_bytes)
        limit = self.nbytes // unit if unit else 0
        if given is None:
            return 0, self.nbytes
        if not isinstance(given, slice | range):
            first = integer(name, given)
            given = slice(first, first + 1)
        if given.step not in (None, 1):
            raise ValueError(f"{name} {given} must have step 1")
        start = 0 if given.start is None else integer(name, given.start)
        stop = limit if given.stop is None else integer(name, given.stop)
        if not 0 <= start <= stop <= limit:
            raise IndexError(f"{name} {start}:{stop} must lie within 0:{limit}")
        return start * unit, stop * unit

    def commit(self, rows=None, *, bytes=None):
        """Back rows (of the first dimension) or bytes with pages: an int, a slice or a range; by default everything.

        Whole pages are backed, so neighbouring rows may become resident too. What is backed already keeps its contents.
        Fresh memory is zero; memory that was used before by this context is cleared if the tensor was made with `zero`.

        Returns
        -------
        int
            Bytes newly resident.

        Raises
        ------
        OutOfMemory
            Nothing was changed.
        IndexError
            The range lies outside the tensor. Negative numbers do not count from the end.
        """
        start, stop = self._span(rows, bytes)
        first = start // self.page_size * self.page_size
        end = -(-stop // self.page_size) * self.page_size
        if start == stop:
            return 0
        with self._lock:
            done = self.context.commit(self.addr + first, end - first, self.page_size, zero=self.zero)
            self.resident_bytes += done
        return done

    def decommit(self, rows=None, *, bytes=None):
        """Give back the pages that lie wholly within rows or bytes; their contents are lost.

        Arguments and errors as in `commit`. No kernel in flight may touch them. Returns the bytes that became free.
        """
        start, stop = self._span(rows, bytes)
        first = -(-start // self.page_size) * self.page_size
        end = self._range.length if stop == self.nbytes else stop // self.page_size * self.page_size
        if first >= end:
            return 0
        with self._lock:
            done = self.context.decommit(self.addr + first, end - first)
            self.resident_bytes -= done
        return done

    def close(self):
        """Let go of the memory: it is freed at once, unless a tensor over it still stands somewhere."""
        self.tensor = None
        self._range.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def virtual_empty(shape, dtype=None, device="cpu", *, page_size=None, backdrop=None, zero=False, context=None):
    """Reserve a tensor without backing it.

    Parameters
    ----------
    shape : int or sequence of int
        May be far larger than memory: a reservation costs none.
    dtype : torch.dtype, optional
        Any of torch's, float8 included; torch's default dtype otherwise.
    device : str or torch.device
        "cpu" (host backend) or "cuda[:ordinal]" (the best GPU backend that works there).
    page_size : int, optional
        Bytes; the smallest that the backend supports by default.
    backdrop : bool, optional
        Let unbacked rows read as finite data instead of faulting; by default wherever the backend can. Writes to
        unbacked rows are lost or fault in either case.
    zero : bool
        Clear pages at every commit, also where this context used the memory before.
    context : Context, optional
        Where to reserve; the device's default context otherwise.

    Returns
    -------
    VirtualTensor
        Its `tensor` is the torch tensor, its `commit` and `decommit` back rows and give them back.

    Raises
    ------
    VmemError
        No backend works for the device, or (`OutOfMemory`) the addresses are not to be had.
    ValueError, TypeError
        Name the argument; a tensor may have 2^46 bytes.

    Examples
    --------
    >>> v = virtual_empty((1 << 20, 4096), torch.bfloat16)    # 8 GiB of addresses
    >>> v.commit(rows=slice(0, 16))                           # 128 KiB of memory
    131072
    >>> v.tensor[:16].fill_(1.0).sum().item()
    65536.0
    """
    dtype = dtype or torch.get_default_dtype()
    return VirtualTensor(
        shape, dtype, device, page_size=page_size, backdrop=backdrop, zero=zero, context=context
    )
