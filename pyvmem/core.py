"""Contexts, reservations and pages: libvmem's objects, each with its own undo.

A context owns address ranges (`Reservation`) and physical pages (`Pages`); mapping joins the two. Separating them is
the idea of CUDA's virtual memory management and, for small pages, of vAttention (Prabhu et al., ASPLOS 2025, Table 2).
This module keeps no page state: it passes handles and addresses to libvmem as numpy arrays, one call per batch.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from pyvmem._checks import UInts, flag, one_of, shown, uint, uints
from pyvmem._ffi import ffi, lib
from pyvmem.errors import VmemError, _check, _error, structure
from pyvmem.owned import (
    COPY_OP,
    MAP_OP,
    UNMAP_OP,
    Pages,
    Reservation,
    _Owned,
    commit_flags,
    make_ops,
    map_flags,
    no_index,
)

__all__ = [
    "COPY_OP",
    "MAP_OP",
    "UNMAP_OP",
    "Context",
    "Info",
    "PageInfo",
    "Pages",
    "Reservation",
    "Stats",
    "backends",
    "default_context",
    "probe",
]

KIB = 1 << 10
MIB = 1 << 20

_FIRST_ADDRESS, _END_OF_ADDRESSES = 64 * KIB, 1 << 57  # what Linux lets a process map; x86-64 with five levels

_CAPS = {
    "gpu": lib.VMEM_CAP_GPU,
    "cuda_pointer": lib.VMEM_CAP_CUDA_POINTER,
    "live_remap": lib.VMEM_CAP_LIVE_REMAP,
    "backdrop": lib.VMEM_CAP_BACKDROP,
    "fault": lib.VMEM_CAP_FAULT,
}


@dataclass(frozen=True)
class Info:
    """The backend and device of a context, which never change. Sizes are in bytes."""

    backend: str
    device_name: str
    driver: str
    device_uuid: bytes
    capabilities: frozenset[str]
    device: int
    page_sizes: tuple[int, ...]
    reserve_align: int
    memory_total: int


@dataclass(frozen=True)
class Stats:
    """Memory that a context holds, in bytes, and counts of its calls so far; see ``struct vmem_stats`` in vmem.h."""

    reserved: int
    created: int
    mapped: int
    overhead: int
    budget: int
    syscalls: int
    map_ops: int
    map_runs: int
    unmap_ops: int
    unmap_runs: int
    absent: int


@dataclass(frozen=True)
class PageInfo:
    """One physical page: its size in bytes, its position in units of 64 KiB, and how many addresses it is mapped at."""

    page_size: int
    frame: int
    mappings: int


def _names() -> dict[str, Any]:
    """Return the names of all backends, best first, with libvmem's own strings, which are never freed."""
    names = lib.vmem_backends()
    found: dict[str, Any] = {}
    while names[len(found)] != ffi.NULL:
        name = names[len(found)]
        found[ffi.string(name).decode()] = name
    return found


def backends() -> list[str]:
    """Return the names of all backends, best first.

    Returns
    -------
    list of str
        Whether or not they work here: see `probe`.
    """
    return list(_names())


def probe(
    backend: str, device: SupportsIndex = 0, *, unknown_driver: bool = False, by_default: bool = False
) -> VmemError | None:
    """Say what prevents a context of this backend here, if anything does.

    Parameters
    ----------
    backend : str
        "uvm", "stock", "cuda" or "host".
    device, unknown_driver
        As in `Context`.
    by_default : bool
        Also say what prevents its choice where no backend is named: "uvm" is chosen only if its self-test has passed
        here.

    Returns
    -------
    VmemError or None
        None: it works.
    """
    try:
        one_of("backend", backend, backends())
        options = _options(backend, device, 0, unknown_driver)
        if flag("by_default", by_default):
            options.flags |= lib.VMEM_OPT_BY_DEFAULT
        _check(lib.vmem_probe(options))
    except VmemError as error:
        return error
    return None


def _options(backend: str | None, device: SupportsIndex, budget: SupportsIndex, unknown_driver: bool) -> Any:
    names = _names()
    options = ffi.new("struct vmem_options *")
    options.size = ffi.sizeof("struct vmem_options")
    options.flags = lib.VMEM_OPT_UNKNOWN_DRIVER if flag("unknown_driver", unknown_driver) else 0
    options.backend = ffi.NULL if backend is None else names[one_of("backend", backend, names)]
    options.device = uint("device", device, 31)
    options.budget = uint("budget", budget)
    return options


class Context(_Owned):
    """A backend on one device, with all reservations and pages made there.

    Parameters
    ----------
    backend : str, optional
        "uvm", "stock", "cuda" or "host"; by default ``$VMEM_BACKEND``, or else the best one that works.
    device : int
        CUDA device ordinal, as CUDA_VISIBLE_DEVICES numbers them. The host backend ignores it.
    budget : int
        The largest number of bytes of pages that may exist at once; 0 for no limit but the device's.
    unknown_driver : bool
        Let the stock backend try a driver release that its table does not know.

    Raises
    ------
    VmemError
        No such backend works here; the message gives the reason.
    InvalidArgument
        An unknown backend, or a device or budget that is negative.

    Notes
    -----
    Every method may be called from any thread. The context belongs to the process that made it: after a fork, the
    child's calls raise `VmemError` (EPERM).
    """

    _what = "context"

    backend: str
    device: int
    capabilities: frozenset[str]
    page_sizes: tuple[int, ...]

    def __init__(
        self,
        backend: str | None = None,
        device: SupportsIndex = 0,
        budget: SupportsIndex = 0,
        *,
        unknown_driver: bool = False,
    ) -> None:
        options = _options(backend, device, budget, unknown_driver)
        owner, ctx = self._new_owner(), ffi.new("vmem_context **")
        _check(lib.pv_own_context(owner, options, ctx))
        self._own(owner, ctx[0])
        self._pid = os.getpid()
        self._children: weakref.WeakValueDictionary[int, _Owned] = weakref.WeakValueDictionary()
        self._info = info = self._describe()
        self.backend = info.backend
        self.device = info.device
        self.capabilities = info.capabilities
        self.page_sizes = info.page_sizes

    def __repr__(self) -> str:
        return f"<pyvmem.Context {self.backend} on {self._info.device_name}{', closed' if self.closed else ''}>"

    def close(self) -> None:
        """Close every reservation and release all pages. Tensors that still exist keep their memory.

        Calls in progress in other threads finish first; the last of them ends the context.
        """
        for child in self._children.valuerefs():
            if owned := child():
                owned.close()
        self._drop()

    # ---- what it is and holds --------------------------------------------------------------------------------

    def info(self) -> Info:
        """Describe the backend and the device.

        Returns
        -------
        Info
        """
        self._use()
        return self._info

    def _describe(self) -> Info:
        raw = structure("vmem_info")
        _check(lib.vmem_context_info(self._use(), raw))
        return Info(
            backend=ffi.string(raw.backend).decode(),
            device_name=ffi.string(raw.device_name).decode(errors="replace"),
            driver=ffi.string(raw.driver).decode(),
            device_uuid=bytes(ffi.buffer(raw.device_uuid)),
            capabilities=frozenset(name for name, bit in _CAPS.items() if raw.caps & bit),
            device=raw.device,
            page_sizes=tuple(1 << bit for bit in range(64) if raw.page_sizes >> bit & 1),
            reserve_align=raw.reserve_align,
            memory_total=raw.memory_total,
        )

    @property
    def memory_free(self) -> int:
        """Bytes of the device that are free now. Reading it asks the driver or the system (about 0.2 ms)."""
        free = ffi.new("uint64_t *")
        _check(lib.vmem_context_memory(self._use(), ffi.NULL, free))
        return int(free[0])

    def stats(self) -> Stats:
        """Return what the context holds at this moment, and counts of its calls.

        Returns
        -------
        Stats
        """
        raw = structure("vmem_stats")
        _check(lib.vmem_context_stats(self._use(), raw))
        return Stats(*(int(getattr(raw, name)) for name in Stats.__dataclass_fields__))

    def set_budget(self, bytes: SupportsIndex) -> None:
        """Limit the bytes of pages.

        Pages beyond a lower limit stay; only further creation fails.

        Parameters
        ----------
        bytes : int
            0 for no limit but the device's.
        """
        _check(lib.vmem_set_budget(self._use(), uint("bytes", bytes)))

    def prealloc(self, bytes: SupportsIndex) -> None:
        """Allocate device memory in advance, so that creating pages in it needs no driver call.

        Parameters
        ----------
        bytes : int
            Of pages, at least.

        Raises
        ------
        OutOfMemory
            Less memory is available.
        """
        _check(lib.vmem_prealloc(self._use(), uint("bytes", bytes)))

    def trim(self) -> int:
        """Return unused device memory to the system.

        Returns
        -------
        int
            Bytes returned.
        """
        freed = ffi.new("uint64_t *")
        lib.pv_end_put_off()
        _check(lib.vmem_trim(self._use(), freed))
        return int(freed[0])

    # ---- address space and pages -----------------------------------------------------------------------------

    def reserve(self, length: SupportsIndex, *, backdrop: bool = False) -> Reservation:
        """Reserve addresses. This uses almost no physical memory.

        Parameters
        ----------
        length : int
            Bytes, a multiple of 64 KiB, at most 2^46.
        backdrop : bool
            Unbacked addresses read as finite data instead of faulting.

        Returns
        -------
        Reservation

        Raises
        ------
        InvalidArgument
            Another length.
        OutOfMemory
            The addresses are not available.
        """
        return Reservation(self, length, backdrop=backdrop)

    def create(self, page_size: int, n: SupportsIndex = 1, *, zero: bool = False) -> Pages:
        """Create pages, physically consecutive where possible; all or none.

        Parameters
        ----------
        page_size : int
            Bytes; one of the context's ``page_sizes``.
        n : int
            How many.
        zero : bool
            Clear memory that this context used before. Fresh memory is always zero.

        Returns
        -------
        Pages
            They are freed with this object.

        Raises
        ------
        OutOfMemory
            The device's memory or the budget is exhausted. Nothing was changed.
        InvalidArgument
            Another page size.
        """
        return Pages(self, page_size, n, zero=zero)

    def _handles(self, pages: Any) -> Any:
        """Return the handles of `pages`, which may be `Pages` of this context or handles already."""
        return pages._handles_for(self) if isinstance(pages, Pages) else pages

    def release(self, pages: Any) -> None:
        """Unmap pages from every address, then free them; all or none.

        Parameters
        ----------
        pages : Pages, int or array of int
            Pages of this context, or their handles.

        Raises
        ------
        InvalidArgument
            An element is not a page, or no longer; ``index`` says which.
        """
        bad = no_index()
        if type(pages) is int:  # one page: no array is needed
            _check(lib.vMemReleaseBatch(self._use(), ffi.new("vmem_page *", uint("pages", pages)), 1, bad), bad)
        else:
            handles = uints("pages", self._handles(pages))
            _check(lib.vMemReleaseBatch(self._use(), ffi.from_buffer("vmem_page[]", handles), len(handles), bad), bad)

    def page_info(self, page: SupportsIndex) -> PageInfo:
        """Describe a page.

        Parameters
        ----------
        page : int
            Its handle.

        Returns
        -------
        PageInfo
        """
        raw = structure("vmem_page_info")
        _check(lib.vmem_page_query(self._use(), uint("page", page), raw))
        return PageInfo(raw.page_size, raw.frame, raw.mappings)

    # ---- mapping ---------------------------------------------------------------------------------------------

    def map(self, addrs: Any, pages: Any, *, replace: bool = False, fine: bool = False) -> None:
        """Map pages at addresses, all or none.

        Parameters
        ----------
        addrs : int or array of int
            One address for each page, each a multiple of the page's size.
        pages : Pages, int or array of int
            The pages to map. Bare handles do not keep pages alive.
        replace : bool
            Replace pages that are mapped there; otherwise, they are an error (EEXIST). Unless the context has the
            capability "live_remap", no kernel may touch the addresses meanwhile.
        fine : bool
            Keep every page separately unmappable while kernels run.

        Raises
        ------
        VmemError
            The error has the ``index`` of the failing element.
        """
        if type(addrs) is int and type(pages) is int:  # one page: no array is needed
            op, bad = ffi.new("struct vmem_map_op *", (uint("addrs", addrs), uint("pages", pages))), no_index()
            _check(lib.vMemMapBatch(self._use(), op, 1, map_flags(replace, fine), bad), bad)
        else:
            ops, bad = make_ops(MAP_OP, addrs=addrs, pages=self._handles(pages)), no_index()
            buffer = ffi.from_buffer("struct vmem_map_op[]", ops)
            _check(lib.vMemMapBatch(self._use(), buffer, len(ops), map_flags(replace, fine), bad), bad)

    def unmap(self, addrs: Any, lengths: Any) -> None:
        """Unmap ranges, all or none. Unbacked parts are skipped.

        Parameters
        ----------
        addrs : int or array of int
            Addresses in the context's reservations.
        lengths : int or array of int
            Bytes. A range must not cut a page.

        Raises
        ------
        InvalidArgument
            A range cuts a page, or lies outside all reservations; ``index`` says which.
        """
        if type(addrs) is int and type(lengths) is int:
            _check(lib.vMemUnmap(self._use(), uint("addrs", addrs), uint("lengths", lengths)))
        else:
            ops, bad = make_ops(UNMAP_OP, addrs=addrs, lengths=lengths), no_index()
            _check(lib.vMemUnmapBatch(self._use(), ffi.from_buffer("struct vmem_range[]", ops), len(ops), bad), bad)

    def query(self, addr: SupportsIndex) -> tuple[int, int]:
        """Say which page is mapped at an address.

        Parameters
        ----------
        addr : int
            In one of the context's reservations.

        Returns
        -------
        (int, int)
            The page's handle and the offset in it, in bytes; (0, 0) if nothing is mapped.

        Raises
        ------
        InvalidArgument
            No reservation contains the address.
        OutOfMemory
            A call failed there, and the driver refuses to restore what it changed: see ``absent`` in `Stats`.
        """
        page, offset = ffi.new("vmem_page *"), ffi.new("uint64_t *")
        _check(lib.vmem_query(self._use(), uint("addr", addr), page, offset))
        return (page[0], offset[0]) if page[0] else (0, 0)

    def commit(self, addrs: Any, lengths: Any, page_size: int, *, zero: bool = False, fine: bool = False) -> int:
        """Back every unbacked part of ranges with new pages, all or none.

        The pages belong to the addresses: `decommit` releases them.

        Parameters
        ----------
        addrs : int or array of int
            Addresses in the context's reservations.
        lengths : int or array of int
            Bytes. Addresses and lengths are multiples of `page_size`; ranges do not overlap.
        page_size : int
            Bytes; one of the context's ``page_sizes``.
        zero : bool
            Clear memory that this context used before. Fresh memory is always zero.
        fine : bool
            Keep every page separately unmappable while kernels run.

        Returns
        -------
        int
            Bytes newly backed.

        Raises
        ------
        OutOfMemory
            The device's memory or the budget is exhausted. Nothing was changed.
        VmemError
            EBUSY: another call works in the ranges.
        """
        one_of("page_size", page_size, self.page_sizes)
        (ranges, n), done = _ranges(addrs, lengths), ffi.new("uint64_t *")
        _check(lib.vmem_commit(self._use(), ranges, n, page_size, commit_flags(zero, fine), done))
        return int(done[0])

    def decommit(self, addrs: Any, lengths: Any) -> int:
        """Release every page mapped in ranges.

        Parameters
        ----------
        addrs, lengths
            As in `unmap`.

        Returns
        -------
        int
            Bytes that were backed there.
        """
        (ranges, n), done = _ranges(addrs, lengths), ffi.new("uint64_t *")
        _check(lib.vmem_decommit(self._use(), ranges, n, done))
        return int(done[0])

    # ---- data ------------------------------------------------------------------------------------------------

    def copy(self, dst: Any, src: Any, lengths: Any) -> None:
        """Copy between addresses, in order. The copies are done on return.

        Parameters
        ----------
        dst, src : int or array of int
            Addresses of the device or of the CPU.
        lengths : int or array of int
            Bytes.

        Raises
        ------
        VmemError
            EFAULT: addresses of a reservation are unbacked. With a backdrop, they can be read.

        Notes
        -----
        Other addresses are the caller's own and are not checked: if no memory is mapped there, the process crashes.
        """
        ops = make_ops(COPY_OP, dst=dst, src=src, lengths=lengths)
        for name in ("dst", "src"):
            _check_addresses(name, ops[name][ops["length"] > 0])
        _check(lib.vmem_copy_batch(self._use(), ffi.from_buffer("struct vmem_copy_op[]", ops), len(ops)))

    def fill(self, addr: SupportsIndex, value: SupportsIndex, length: SupportsIndex) -> None:
        """Set bytes to a value. It is done on return.

        Parameters
        ----------
        addr : int
            The first address.
        value : int
            0 to 255.
        length : int
            Bytes.

        Raises
        ------
        VmemError
            As in `copy`.
        """
        addr, value, length = uint("addr", addr), uint("value", value, 8), uint("length", length)
        if length:
            _check_addresses("addr", np.array([addr], np.uint64))
        _check(lib.vmem_fill(self._use(), addr, value, length))

    def read(self, addr: SupportsIndex, length: SupportsIndex) -> bytes:
        """Read bytes at an address.

        Parameters
        ----------
        addr : int
            The first address.
        length : int
            Bytes.

        Returns
        -------
        bytes

        Raises
        ------
        VmemError
            As in `copy`.
        """
        length = uint("length", length)
        try:
            data = np.empty(length, np.uint8)
        except (MemoryError, ValueError):
            raise _error(errno.ENOMEM, f"length {length}: no memory for so many bytes") from None
        self.copy(data.ctypes.data, uint("addr", addr), length)
        return data.tobytes()

    def write(self, addr: SupportsIndex, data: Any) -> None:
        """Write bytes to an address. They are there on return.

        Parameters
        ----------
        addr : int
            The first address.
        data : bytes-like
            Contiguous, of any element type.

        Raises
        ------
        VmemError
            As in `copy`.
        """
        try:
            view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        except TypeError:
            raise TypeError(f"data must be a contiguous bytes-like object, not {shown(data)}") from None
        source = np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)
        self.copy(uint("addr", addr), source.ctypes.data, source.nbytes)


def _ranges(addrs: Any, lengths: Any) -> tuple[Any, int]:
    """Return ranges (scalars or arrays, bytes) as a ``struct vmem_range[n]``, and n."""
    if type(addrs) is int and type(lengths) is int:  # one range: no array is needed
        return ffi.new("struct vmem_range *", (uint("addrs", addrs), uint("lengths", lengths))), 1
    ops = make_ops(UNMAP_OP, addrs=addrs, lengths=lengths)
    return ffi.from_buffer("struct vmem_range[]", ops), len(ops)


def _check_addresses(name: str, addrs: UInts) -> None:
    """Refuse addresses that no process can map on any machine. Other addresses fault if this process lacks them."""
    if addrs.size and (addrs.min() < _FIRST_ADDRESS or addrs.max() >= _END_OF_ADDRESSES):
        wrong = addrs[(addrs < _FIRST_ADDRESS) | (addrs >= _END_OF_ADDRESSES)][0]
        raise _error(
            errno.EFAULT, f"{name} {wrong:#x} is not an address: addresses begin at 64 KiB and end before 2^57"
        )


_defaults: dict[tuple[str | None, int], Context] = {}
_defaults_lock = threading.RLock()  # reentrant: a signal handler or a finalizer may ask too


def _new_lock() -> None:
    """Replace the lock in a forked child: a thread that held it does not exist there and would never release it."""
    global _defaults_lock
    _defaults_lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def default_context(backend: str | None = None, device: SupportsIndex = 0) -> Context:
    """Return the process's context for a backend and device, made at first use.

    Parameters
    ----------
    backend : str, optional
        As in `Context`, or "gpu": the best backend that works and has GPU addresses.
    device : int
        As in `Context`.

    Returns
    -------
    Context

    Raises
    ------
    VmemError, InvalidArgument
        As in `Context`.
    """
    if backend is not None:
        one_of("backend", backend, ["gpu", *backends()])
    key = backend, uint("device", device, 31)
    with _defaults_lock:
        context = _default(key)
        if context is None:
            made = Context(_best_gpu(key[1]) if backend == "gpu" else backend, key[1])
            context = _defaults[key] = _default(key) or made  # a signal handler may have made one
        return context


def _default(key: tuple[str | None, int]) -> Context | None:
    """Return the existing default context, if usable. A forked child cannot use its parent's and makes its own."""
    context = _defaults.get(key)
    return None if context is None or context.closed or context._pid != os.getpid() else context


def _best_gpu(device: int) -> str:
    error = None
    for name in backends():
        if name != "host":
            error = probe(name, device, by_default=True)
            if error is None:
                return name
    assert error is not None  # the host backend is not the only one
    raise error
