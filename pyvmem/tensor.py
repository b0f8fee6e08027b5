"""Torch tensors over reserved addresses: any part of a tensor can be backed with memory when it is needed.

SPDX-License-Identifier: MIT
"""

import atexit
import copy
import ctypes
import errno
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, cast

import torch
import torch.utils.dlpack

from pyvmem import checked
from pyvmem._checks import flag, integer, one_of, shown
from pyvmem._ffi import ffi, lib
from pyvmem.checked import Checker
from pyvmem.core import Context, Reservation, default_context
from pyvmem.errors import InvalidArgument, OutOfMemory, keep_raised
from pyvmem.owned import Uncopyable, backed_bytes, check_process, first_unbacked

_DEVICE_CPU, _DEVICE_CUDA = 1, 2  # DLPack's DLDeviceType

Rows = SupportsIndex | slice | range

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_free_capsule = int(ffi.cast("uintptr_t", ffi.addressof(lib, "pv_dlpack_capsule_free")))

MAX_BYTES = 1 << 46  # of a reservation


@ffi.def_extern(error=1, onerror=keep_raised)  # type: ignore[untyped-decorator]
def pv_is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Whatever ends meanwhile is put off (pyvmem/native/owner.c).
lib.pv_watch_captures(lib.pv_is_capturing)
atexit.register(lib.pv_watch_captures, ffi.NULL)


def tensor_at(
    owner: Any,
    addr: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | torch.device,
    strides: Sequence[int] | None = None,
    checker: Checker | None = None,
) -> torch.Tensor:
    """Make a torch tensor over memory that the caller manages.

    Parameters
    ----------
    owner : cdata ``pv_owner *``
        Kept alive by the tensor and every view of it.
    addr : int
        Address of the first byte: a CPU or CUDA address, according to `device`.
    shape, strides : sequence of int
        In elements, as in torch; contiguous by default.
    checker : optional
        With ``VMEM_CHECK=1``, says what of the memory must not be touched (`pyvmem.checked`).

    Returns
    -------
    torch.Tensor
        Not a view: it is the base of its own storage. The storage is imported through DLPack
        (https://dmlc.github.io/dlpack) as plain bytes, so that every torch dtype works.
    """
    device = torch.device(device)
    if strides is None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    elements = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    kind = _DEVICE_CPU if device.type == "cpu" else _DEVICE_CUDA
    length = max(elements * dtype.itemsize, 1)
    managed = lib.pv_dlpack_bytes(addr, length, kind, device.index or 0)
    if managed == ffi.NULL:
        raise OutOfMemory(errno.ENOMEM, "no memory for a tensor's description")
    capsule = _new_capsule(int(ffi.cast("uintptr_t", managed)), b"dltensor", _free_capsule)
    lib.pv_dlpack_keep(managed, owner)  # only now: the capsule releases the owner
    # The memory outlives the caller's mode: a tensor made in inference mode could not be written to after it.
    with torch.inference_mode(False):
        storage = torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, tuple(shape), tuple(strides))
        return tensor if checker is None or not checked.ON else checked.Checked.of(tensor, checker)


def _device(device: str | torch.device) -> torch.device:
    """Return the torch.device. A CUDA device always has its ordinal."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"device {shown(device)} must be cpu or cuda[:ordinal]") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {shown(device)} must be cpu or cuda[:ordinal]")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {shown(device)}: torch sees no CUDA device")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _unbacked(
    context: Any, addr: int, row_bytes: int, readable: bool, first: int, end: int, writes: bool
) -> str | None:
    """Name the first row between two addresses that is not backed (`pyvmem.checked`)."""
    at = None if readable and not writes else first_unbacked(context, first, end)
    if at is None:
        return None
    return f"row {(at - addr) // max(row_bytes, 1)} of a virtual tensor, which is not backed: commit it first"


def left_its_pages(tensor: torch.Tensor, addr: int) -> bool:
    """True if torch has moved a tensor to other memory, which the pages at its address know nothing of."""
    return tensor.untyped_storage().data_ptr() != addr


def moved(what: str) -> RuntimeError:
    return RuntimeError(
        f"torch has moved {what} off its pages to other memory, as share_memory_() and queues of torch.multiprocessing "
        "do: make a new one, and share clones of its rows"
    )


def _alias(tensor: weakref.ref[torch.Tensor], backed: Callable[[], int], nbytes: int, what: str) -> torch.Tensor:
    """Return a tensor over the same memory, without the attributes that `_guard` sets. Raise unless all is backed."""
    found, there = cast(torch.Tensor, tensor()), backed()
    if there < nbytes:
        raise RuntimeError(
            f"{what} would read all {nbytes} bytes of the tensor, of which {there} are backed: use "
            "a clone of the rows that are backed"
        )
    alias = found.detach().requires_grad_(found.requires_grad)
    alias.grad = found.grad
    return alias


def _share_memory() -> None:
    raise RuntimeError("share_memory_ would move the tensor off its pages: share a clone of it, or of its backed rows")


def _guard(tensor: torch.Tensor, range_: Reservation, nbytes: int) -> None:
    """Make the tensor refuse operations that would read unbacked parts or move it off its pages.

    torch looks these methods up on the tensor itself, so its views are not guarded.
    """
    own: dict[str, Any] = tensor.__dict__
    whole = functools.partial(
        _alias, weakref.ref(tensor), functools.partial(backed_bytes, range_._use(), range_.addr), nbytes
    )
    own["__reduce_ex__"] = lambda protocol: whole("pickling or torch.save").__reduce_ex__(protocol)
    own["__deepcopy__"] = lambda memo: copy.deepcopy(whole("copy.deepcopy"), memo)
    own["share_memory_"] = _share_memory


class VirtualTensor(Uncopyable):
    """A tensor whose addresses are all reserved, but of which only parts are backed. Made by `virtual_empty`.

    Attributes
    ----------
    tensor : torch.Tensor
        A tensor of the requested shape, dtype and device. The tensor and all its views keep the memory alive: pages and
        addresses are freed with the last of them and of this object.
    page_size : int
        The unit in which the tensor is backed, in bytes.
    nbytes : int
        Size of the whole tensor in bytes.
    resident_bytes : int
        Bytes that are backed now, in whole pages.

    Notes
    -----
    An operation that reads a whole tensor also reads its unbacked parts. While parts are unbacked, ``torch.save``,
    pickling and ``copy.deepcopy`` of `tensor` therefore raise RuntimeError. ``share_memory_`` always raises it, because
    it would move the tensor off its pages. To store the backed rows, save a clone of them. Views of `tensor` cannot be
    protected in this way, nor can tensors that a ``multiprocessing`` queue or a DataLoader worker sends: clone the rows
    first.

    After a fork, the calls of this class raise `VmemError` (EPERM) in the child.
    """

    _instead = ": copy a clone of the rows that are backed"

    def __init__(
        self,
        shape: SupportsIndex | Iterable[SupportsIndex],
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        page_size: int | None = None,
        backdrop: bool | None = None,
        zero: bool = False,
        context: Context | None = None,
    ) -> None:
        shape = tuple(integer("shape", n) for n in (shape if isinstance(shape, Iterable) else (shape,)))
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {shape} must not be negative")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {shown(dtype)}")
        if not isinstance(context, Context | None):
            raise TypeError(f"context must be a Context, not {shown(context)}")
        if math.prod(max(n, 1) for n in shape) * dtype.itemsize > MAX_BYTES:
            raise InvalidArgument(errno.EINVAL, f"shape {shape} of {dtype} is more than 2^46 bytes")
        device = _device(device)
        gpu = device.type == "cuda"
        readable = backdrop is True  # whoever asked for it reads unbacked rows, and others by mistake
        if context is None:
            context = default_context("gpu" if gpu else "host", device.index or 0)
        if ("gpu" in context.capabilities) != gpu:
            raise ValueError(f"a context of the {context.backend} backend cannot hold a tensor on {device}")
        if gpu and context.device != device.index:
            raise ValueError(f"device {device}: the context's device is cuda:{context.device}")
        if page_size is None:
            page_size = min(context.page_sizes)
        one_of("page_size", page_size, context.page_sizes)
        if backdrop is None:
            backdrop = "backdrop" in context.capabilities
        self.context = context
        self.page_size = page_size
        self.zero = flag("zero", zero)
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._rows = shape[0] if shape else 1
        self._row_bytes = self.nbytes // self._rows if self._rows else 0
        # Reentrant, because a signal handler may commit while this thread does.
        self._lock = threading.RLock()
        length = max(-(-self.nbytes // page_size) * page_size, page_size)
        self._range = Reservation(context, length, backdrop=backdrop)
        self._tensor: torch.Tensor | None = tensor_at(
            self._range._owned(), self._range.addr, shape, dtype, device,
            checker=(functools.partial(_unbacked, self._range._use(), self._range.addr, self._row_bytes, readable),
                     page_size),
        )  # fmt: skip
        _guard(self._tensor, self._range, self.nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor over all rows, backed or not."""
        if self._tensor is None:
            raise ValueError("the virtual tensor is closed")
        return self._tensor

    @property
    def closed(self) -> bool:
        """True if this object or its context was closed."""
        return self._range.closed

    @property
    def addr(self) -> int:
        """Address of the first byte."""
        return self._range.addr

    @property
    def resident_bytes(self) -> int:
        """Bytes that are backed now; 0 once the virtual tensor is closed."""
        return self._range.resident_bytes

    def __repr__(self) -> str:
        if self._tensor is None:
            return "<pyvmem.VirtualTensor, closed>"
        shape = tuple(self._tensor.shape)
        return f"<pyvmem.VirtualTensor {shape}, {self.resident_bytes} of {self.nbytes} bytes resident>"

    def _span(self, rows: Rows | None) -> tuple[int, int]:
        """Return (first byte, end byte) of rows of the first dimension; of the tensor by default."""
        if self._range.closed:
            raise ValueError("the virtual tensor is closed")
        check_process(self.context._pid)
        if self._tensor is not None and left_its_pages(self._tensor, self.addr):
            raise moved("the tensor")
        if rows is None:
            return 0, self.nbytes
        if not isinstance(rows, slice | range):
            first = integer("rows", rows)
            rows = slice(first, first + 1)
        if rows.step not in (None, 1):
            raise ValueError(f"rows {rows} must have step 1")
        start = 0 if rows.start is None else integer("rows", rows.start)
        stop = self._rows if rows.stop is None else integer("rows", rows.stop)
        if not 0 <= start <= stop <= self._rows:
            raise IndexError(f"rows {start}:{stop} must lie within 0:{self._rows}")
        return start * self._row_bytes, stop * self._row_bytes

    def commit(self, rows: Rows | None = None) -> int:
        """Back rows with pages.

        Whole pages are backed, so neighbouring rows may become resident too. Rows that are already backed keep their
        contents. Fresh memory is zero. Memory that this context used before is cleared only if the tensor was made with
        `zero`.

        Parameters
        ----------
        rows : int, slice or range, optional
            Of the first dimension; by default everything.

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
        ValueError
            The tensor is closed.
        """
        start, stop = self._span(rows)
        if start == stop:
            return 0
        first = start // self.page_size * self.page_size
        end = -(-stop // self.page_size) * self.page_size
        with self._lock:
            return self._range.commit(first, end - first, self.page_size, zero=self.zero)

    def decommit(self, rows: Rows | None = None) -> int:
        """Release the pages that lie wholly within rows; their contents are lost.

        No kernel in flight may touch these pages.

        Parameters
        ----------
        rows
            As in `commit`.

        Returns
        -------
        int
            Bytes freed.

        Raises
        ------
        IndexError, ValueError
            As in `commit`.
        """
        start, stop = self._span(rows)
        first = -(-start // self.page_size) * self.page_size
        end = self._range.length if stop == self.nbytes else stop // self.page_size * self.page_size
        if first >= end:
            return 0
        with self._lock:
            return self._range.decommit(first, end - first)

    def backdrop(self, rows: Rows | None = None) -> None:
        """Make unbacked rows readable now. The tensor must have been made with a backdrop.

        GPU backends establish the backdrop lazily, around the backed pages. Call this before a kernel reads unbacked
        rows further away. On the host backend, the backdrop is always present.

        Parameters
        ----------
        rows
            As in `commit`.
        """
        start, stop = self._span(rows)
        self._range.backdrop(start, stop - start)

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory, now or when the last tensor over it is gone."""
        self._tensor = None
        self._range.close()

    def __enter__(self) -> "VirtualTensor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def virtual_empty(
    shape: SupportsIndex | Iterable[SupportsIndex],
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    page_size: int | None = None,
    backdrop: bool | None = None,
    zero: bool = False,
    context: Context | None = None,
) -> VirtualTensor:
    """Reserve a tensor without backing it.

    Parameters
    ----------
    shape : int or sequence of int
        May be far larger than memory: a reservation uses almost none.
    dtype : torch.dtype, optional
        Any torch dtype, float8 included; by default, torch's default dtype.
    device : str or torch.device
        "cpu" (host backend) or "cuda[:ordinal]" (the best GPU backend that works there).
    page_size : int, optional
        Bytes; by default, the smallest page size that the backend supports.
    backdrop : bool, optional
        Let unbacked rows read as finite data instead of faulting; by default, if the backend supports it. On GPUs, this
        holds near backed rows and wherever `VirtualTensor.backdrop` was called. With or without a backdrop, writes to
        unbacked rows are lost or fault.
    zero : bool
        Clear pages at every commit, even if this context used the memory before.
    context : Context, optional
        The context in which to reserve; by default, the device's default context.

    Returns
    -------
    VirtualTensor
        Its `tensor` is the torch tensor; its `commit` backs rows, and its `decommit` releases them.

    Raises
    ------
    VmemError
        No backend works for the device, or (`OutOfMemory`) the addresses are not available.
    ValueError, TypeError
        An argument is invalid; the message names it. A tensor may have at most 2^46 bytes.

    Examples
    --------
    >>> v = virtual_empty((1 << 20, 4096), torch.bfloat16)    # 8 GiB of addresses
    >>> v.commit(rows=slice(0, 16))                           # 128 KiB of memory
    131072
    >>> v.tensor[:16].fill_(1.0).sum().item()
    65536.0
    """
    if dtype is None:
        dtype = torch.get_default_dtype()
    return VirtualTensor(shape, dtype, device, page_size=page_size, backdrop=backdrop, zero=zero, context=context)
