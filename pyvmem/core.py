"""Contexts, reservations and pages: libvmem's objects, each with its own undo.

A context owns address ranges (`Reservation`) and physical pages (`Pages`); mapping joins the two. The idea of
separating them is CUDA's virtual memory management and, for small pages, vAttention's (Prabhu et al., ASPLOS 2025,
Table 2).
No page state is kept here: handles and addresses go to libvmem as numpy arrays, one call a batch.

SPDX-License-Identifier: MIT
"""

import errno
import os
import threading
import weakref
from dataclasses import dataclass

import numpy as np

from pyvmem._checks import one_of, uint, uints
from pyvmem._ffi import ffi, lib
from pyvmem.errors import OutOfMemory, VmemError, _check

KIB = 1 << 10
MIB = 1 << 20

MAP_OP = np.dtype([("addr", np.uint64), ("page", np.uint64)])
UNMAP_OP = np.dtype([("addr", np.uint64), ("length", np.uint64)])
COPY_OP = np.dtype([("dst", np.uint64), ("src", np.uint64), ("length", np.uint64)])

_CAPS = {
    "gpu": lib.VMEM_CAP_GPU,
    "cuda_pointer": lib.VMEM_CAP_CUDA_POINTER,
    "live_remap": lib.VMEM_CAP_LIVE_REMAP,
    "backdrop": lib.VMEM_CAP_BACKDROP,
    "fault": lib.VMEM_CAP_FAULT,
}


@dataclass(frozen=True)
class Info:
    """What a context runs on. Sizes in bytes."""

    backend: str
    device_name: str
    driver: str
    device_uuid: bytes
    capabilities: frozenset
    device: int
    page_sizes: tuple
    reserve_align: int
    memory_total: int
    memory_free: int


@dataclass(frozen=True)
class Stats:
    """What a context holds (bytes) and has done (counts) so far; see ``struct vmem_stats`` in vmem.h."""

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


@dataclass(frozen=True)
class PageInfo:
    """One physical page: its size in bytes, its position in units of 64 KiB, and how many addresses it is mapped at."""

    page_size: int
    frame: int
    mappings: int


def backends():
    """Names of all backends, best first."""
    names = lib.vmem_backends()
    found = []
    while names[len(found)] != ffi.NULL:
        found.append(ffi.string(names[len(found)]).decode())
    return found


def probe(backend, device=0, *, unknown_driver=False):
    """None if a context of this backend could be created here, else the `VmemError` that stops it.

    Arguments as in `Context`; the backend must be named.
    """
    try:
        _check(lib.vmem_probe(_options(backend, device, 0, unknown_driver)[0]))
    except VmemError as error:
        return error
    return None


def _options(backend, device, budget, unknown_driver):
    name = ffi.NULL if backend is None else ffi.new("char[]", one_of("backend", backend, backends()).encode())
    options = ffi.new("struct vmem_options *")
    options.size = ffi.sizeof("struct vmem_options")
    options.flags = lib.VMEM_OPT_UNKNOWN_DRIVER if unknown_driver else 0
    options.backend = name
    options.device = uint("device", device, 31)
    options.budget = uint("budget", budget)
    return options, name  # the name must live as long as the options


def _ops(dtype, **columns):
    """Columns (scalars are repeated), in the order of the dtype's fields, as an array of C structures."""
    arrays = [uints(name, values) for name, values in columns.items()]
    try:
        columns = np.broadcast_arrays(*arrays)
    except ValueError:
        sizes = ", ".join(f"{name} has {len(array)}" for name, array in zip(columns, arrays))
        raise ValueError(f"the arrays must have as many elements each, or one: {sizes}") from None
    ops = np.empty(columns[0].shape, dtype)
    for name, column in zip(dtype.names, columns):
        ops[name] = column
    return ops


def _buffer(ctype, array):
    return ffi.from_buffer(ctype, array)


def _bad():
    return ffi.new("size_t *", lib.PV_NO_INDEX)


class _Owned:
    """Holds one count of a native owner; ends with close(), the end of a with block, or garbage collection."""

    _owner = None

    def _own(self, owner):
        self._owner = ffi.gc(owner, lib.pv_owner_drop)

    @property
    def closed(self):
        """Whether close() was called."""
        return self._owner is None

    def _drop(self):
        owner, self._owner = self._owner, None
        if owner is not None:
            ffi.release(owner)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Context(_Owned):
    """A backend on one device, and everything that is reserved and created there.

    Parameters
    ----------
    backend : str, optional
        "uvm", "stock", "cuda" or "host"; by default ``$VMEM_BACKEND``, else the best that works.
    device : int
        CUDA device ordinal, as CUDA_VISIBLE_DEVICES numbers them. The host backend ignores it.
    budget : int
        Most bytes of pages that may exist at once; 0 for no limit but the device's.
    unknown_driver : bool
        Let the stock backend try a driver release that its table does not know.

    Raises
    ------
    VmemError
        When no such backend works here; the text is the one fact that stops it.
    InvalidArgument
        An unknown backend, or a device or budget that is negative.

    Notes
    -----
    Every method may be called from any thread. The context belongs to the process that made it: after a fork the
    child's calls raise `VmemError` (EPERM).
    """

    def __init__(self, backend=None, device=0, budget=0, *, unknown_driver=False):
        options, name = _options(backend, device, budget, unknown_driver)
        owner, ctx = ffi.new("pv_owner **"), ffi.new("vmem_context **")
        _check(lib.pv_own_context(options, owner, ctx))
        self._own(owner[0])
        self._ctx = ctx[0]
        self._pid = os.getpid()
        self._children = weakref.WeakSet()
        self._info = self.info()
        self.backend = self._info.backend
        self.page_sizes = self._info.page_sizes

    def _use(self):
        if self._owner is None:
            raise ValueError("the context is closed")
        return self._ctx

    def __repr__(self):
        return f"<pyvmem.Context {self.backend} on {self._info.device_name}{', closed' if self.closed else ''}>"

    def close(self):
        """Close every reservation and release all pages. Tensors that still stand keep their memory."""
        for child in list(self._children):
            child.close()
        self._drop()

    # ---- what it is and holds --------------------------------------------------------------------------------

    def info(self):
        """The context's `Info`, with the memory that is free now."""
        raw = ffi.new("struct vmem_info *")
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
            memory_free=raw.memory_free,
        )

    def stats(self):
        """The context's `Stats` at this moment."""
        raw = ffi.new("struct vmem_stats *")
        _check(lib.vmem_context_stats(self._use(), raw))
        return Stats(*(int(getattr(raw, name)) for name in Stats.__dataclass_fields__))

    def set_budget(self, bytes):
        """Limit the bytes of pages that may exist; 0 for no limit. Less than exists only stops further creation."""
        _check(lib.vmem_set_budget(self._use(), uint("bytes", bytes)))

    def prealloc(self, bytes):
        """Take and keep device memory for at least `bytes` of pages, so that creating them needs no driver call.

        Raises `OutOfMemory` when there is not so much.
        """
        _check(lib.vmem_prealloc(self._use(), uint("bytes", bytes)))

    def trim(self):
        """Give unused device memory back to the system; returns how many bytes."""
        freed = ffi.new("uint64_t *")
        _check(lib.vmem_trim(self._use(), freed))
        return freed[0]

    # ---- address space and pages -----------------------------------------------------------------------------

    def reserve(self, length, *, backdrop=False):
        """Reserve `length` bytes of addresses (a multiple of 64 KiB); no physical memory to speak of.

        With `backdrop`, unbacked addresses read as finite data instead of faulting. Returns a `Reservation`. Raises
        `InvalidArgument` for another length, or one over 2^46, and `OutOfMemory` when the addresses are not to be had.
        """
        return Reservation(self, length, backdrop=backdrop)

    def create(self, page_size, n=1, *, zero=False):
        """Create `n` pages of `page_size` bytes, physically consecutive where possible; all or none.

        With `zero`, pages whose memory this context used before are cleared (fresh memory is always zero).
        Returns `Pages`. Raises `OutOfMemory` when memory or the budget is exhausted, and `InvalidArgument` for a
        `page_size` that is none of the context's ``page_sizes``.
        """
        return Pages(self, page_size, n, zero=zero)

    def create_handles(self, page_size, n=1, *, zero=False):
        """As `create`, but returns the bare handles, uint64[n]: they exist until `release` or the context's end."""
        one_of("page_size", page_size, self.page_sizes)
        try:
            handles = np.empty(uint("n", n), np.uint64)
        except MemoryError:
            raise OutOfMemory(errno.ENOMEM, f"n {n}: no memory for so many handles") from None
        flags = lib.VMEM_CREATE_ZERO if zero else 0
        _check(lib.vMemCreate(self._use(), page_size, n, flags, _buffer("vmem_page[]", handles)))
        return handles

    def release(self, pages):
        """Unmap pages wherever they are mapped, then free them: `Pages`, a handle or an array of them, all or none.

        Raises `InvalidArgument`, with the element's ``index``, for what is no page (any more).
        """
        handles, bad = uints("pages", _handles(pages)), _bad()
        _check(lib.vMemReleaseBatch(self._use(), _buffer("vmem_page[]", handles), len(handles), bad), bad)

    def page_info(self, page):
        """The `PageInfo` of a page handle."""
        raw = ffi.new("struct vmem_page_info *")
        _check(lib.vmem_page_query(self._use(), uint("page", page), raw))
        return PageInfo(raw.page_size, raw.frame, raw.mappings)

    # ---- mapping ---------------------------------------------------------------------------------------------

    def map(self, addrs, pages, *, replace=False, fine=False):
        """Map pages at addresses, all or none.

        Parameters
        ----------
        addrs : int or array of int
            One address for each page, each a multiple of the page's size.
        pages : Pages, int or array of int
            What to map; bare handles are kept alive by nobody.
        replace : bool
            Take the place of what is mapped there; otherwise that is an error (EEXIST). Unless the context is capable
            of "live_remap", no kernel may touch the addresses meanwhile.
        fine : bool
            Keep every page separately unmappable beside running kernels (VMEM_MAP_FINE).

        Raises
        ------
        VmemError
            With the ``index`` of the element at fault.
        """
        self.map_ops(_ops(MAP_OP, addrs=addrs, pages=_handles(pages)), replace=replace, fine=fine)

    def map_ops(self, ops, *, replace=False, fine=False):
        """As `map`, for a contiguous array of dtype `MAP_OP`, which is handed over as it is."""
        flags = (lib.VMEM_MAP_REPLACE if replace else 0) | (lib.VMEM_MAP_FINE if fine else 0)
        ops, bad = np.ascontiguousarray(ops, MAP_OP), _bad()
        buffer = _buffer("struct vmem_map_op[]", ops)
        _check(lib.vMemMapBatch(self._use(), buffer, len(ops), flags, bad), bad)

    def unmap(self, addrs, lengths):
        """Unmap ranges (scalars or arrays, bytes), all or none.

        A range must not cut a page; its unbacked parts are skipped.
        """
        ops, bad = _ops(UNMAP_OP, addrs=addrs, lengths=lengths), _bad()
        _check(lib.vMemUnmapBatch(self._use(), _buffer("struct vmem_unmap_op[]", ops), len(ops), bad), bad)

    def query(self, addr):
        """The page mapped at an address and the address's offset in it; (0, 0) where nothing is mapped.

        Raises `InvalidArgument` for an address in no reservation.
        """
        page, offset = ffi.new("vmem_page *"), ffi.new("uint64_t *")
        _check(lib.vmem_query(self._use(), uint("addr", addr), page, offset))
        return (page[0], offset[0]) if page[0] else (0, 0)

    def commit(self, addrs, lengths, page_size, *, zero=False):
        """Back every unbacked part of the ranges with new pages, all or none; returns the bytes newly backed.

        The ranges (scalars or arrays, multiples of `page_size`) do not overlap. The pages belong to the addresses:
        `decommit` releases them. Raises `OutOfMemory`.
        """
        one_of("page_size", page_size, self.page_sizes)
        ops, done = _ops(UNMAP_OP, addrs=addrs, lengths=lengths), ffi.new("uint64_t *")
        flags = lib.VMEM_CREATE_ZERO if zero else 0
        buffer = _buffer("struct vmem_range[]", ops)
        _check(lib.vmem_commit(self._use(), buffer, len(ops), page_size, flags, done))
        return done[0]

    def decommit(self, addrs, lengths):
        """Release every page mapped in the ranges (scalars or arrays, bytes); returns the bytes that were backed there.

        A range must not cut a page.
        """
        ops, done = _ops(UNMAP_OP, addrs=addrs, lengths=lengths), ffi.new("uint64_t *")
        _check(lib.vmem_decommit(self._use(), _buffer("struct vmem_range[]", ops), len(ops), done))
        return done[0]

    # ---- data ------------------------------------------------------------------------------------------------

    def copy(self, dst, src, lengths):
        """Copy between addresses (scalars or arrays; device or CPU; lengths in bytes), in order; done on return.

        Raises `VmemError` (EFAULT) for unbacked addresses of a reservation. CPU addresses are not checked.
        """
        ops = _ops(COPY_OP, dst=dst, src=src, lengths=lengths)
        _check(lib.vmem_copy_batch(self._use(), _buffer("struct vmem_copy_op[]", ops), len(ops)))

    def fill(self, addr, value, length):
        """Set `length` bytes at `addr` to `value` (0 to 255); done on return. Raises as `copy` does."""
        _check(lib.vmem_fill(self._use(), uint("addr", addr), uint("value", value, 8), uint("length", length)))

    def read(self, addr, length):
        """`length` bytes at `addr`, as a bytes object. Raises as `copy` does."""
        data = np.empty(uint("length", length), np.uint8)
        self.copy(data.ctypes.data, addr, length)
        return data.tobytes()

    def write(self, addr, data):
        """Write a bytes-like object to `addr`. Raises as `copy` does."""
        data = np.frombuffer(data, np.uint8)
        self.copy(addr, data.ctypes.data, data.nbytes)


class Reservation(_Owned):
    """A range of addresses: `addr` and `length`, in bytes. Made by `Context.reserve`.

    Closing it unmaps what is mapped there and frees the addresses, once no tensor stands over them any more.
    Pages mapped through `map` are kept alive by it, unless they are closed.
    """

    def __init__(self, context, length, *, backdrop=False, with_pages=False):
        flags = lib.VMEM_RESERVE_BACKDROP if backdrop else 0
        ctx = context._use()
        owner, addr = ffi.new("pv_owner **"), ffi.new("uint64_t *")
        length = uint("length", length)
        _check(lib.pv_own_range(context._owner, ctx, length, flags, with_pages, owner, addr))
        self._own(owner[0])
        self.context = context
        self.addr = addr[0]
        self.length = length
        self._pages = set()
        context._children.add(self)

    def __len__(self):
        return self.length

    def __repr__(self):
        state = ", closed" if self.closed else ""
        return f"<pyvmem.Reservation {self.length} bytes at {self.addr:#x}{state}>"

    def close(self):
        """Unmap everything and free the addresses, now or with the last tensor over them."""
        self._pages.clear()
        self._drop()

    def _at(self, offsets):
        if self._owner is None:
            raise ValueError("the reservation is closed")
        offsets = np.asarray(offsets)
        if offsets.size and offsets.dtype.kind not in "iu":
            raise TypeError(f"offset must be an integer or an array of them, not of {offsets.dtype}")
        if offsets.size and (offsets.min() < 0 or offsets.max() >= self.length):
            raise ValueError(f"offset must be within the reservation's {self.length} bytes")
        return offsets.astype(np.uint64) + np.uint64(self.addr)

    def map(self, pages, offset=0, *, replace=False, fine=False):
        """Map `Pages` here: at one offset, one after another, or at an array of offsets (bytes), one for each page.

        `replace` and `fine`, and errors, as in `Context.map`.
        """
        if not isinstance(pages, Pages):
            raise TypeError(f"pages must be Pages, not {type(pages).__name__}: Context.map takes handles")
        addrs = self._at(offset)
        if addrs.ndim == 0:
            addrs = addrs + np.arange(len(pages), dtype=np.uint64) * np.uint64(pages.page_size)
        self.context.map(addrs, pages, replace=replace, fine=fine)
        self._pages.add(pages)
        pages._homes.add(self)

    def unmap(self, offset=0, length=None):
        """Unmap `length` bytes from `offset` on (arrays for several ranges); by default everything."""
        addrs = self._at(offset)
        self.context.unmap(addrs, self.length - np.asarray(offset) if length is None else length)


class Pages(_Owned):
    """Physical pages of one size: ``handles`` (uint64[n], read-only) and ``page_size`` (bytes).

    Made by `Context.create`. Closing them, or dropping the last reference, unmaps them wherever they are mapped and
    frees them. A `Reservation` that they were mapped into holds a reference until it is closed.
    """

    def __init__(self, context, page_size, n=1, *, zero=False):
        self.handles = context.create_handles(page_size, n, zero=zero)
        owner = ffi.new("pv_owner **")
        buffer = _buffer("vmem_page[]", self.handles)
        rc = lib.pv_own_pages(context._owner, context._ctx, buffer, len(self.handles), owner)
        if rc:
            context.release(self.handles)
            _check(rc)
        self._own(owner[0])
        self.handles.flags.writeable = False
        self.context = context
        self.page_size = page_size
        self._homes = weakref.WeakSet()
        context._children.add(self)

    def __len__(self):
        return len(self.handles)

    def __repr__(self):
        return f"<pyvmem.Pages {len(self)} x {self.page_size} bytes{', closed' if self.closed else ''}>"

    def close(self):
        """Unmap the pages wherever they are mapped and free them. Pages released one by one before are skipped."""
        for home in list(self._homes):
            home._pages.discard(self)
        self._drop()

    release = close


def _handles(pages):
    if isinstance(pages, Pages):
        if pages.closed:
            raise ValueError("the pages are closed")
        return pages.handles
    return pages


_defaults = {}
_defaults_lock = threading.Lock()


def default_context(backend=None, device=0):
    """The process's context for a backend and device, made at its first use. backend: as in `Context`, or "gpu".

    "gpu" is the best backend that works and has GPU addresses. Raises as `Context` does.
    """
    with _defaults_lock:
        context = _defaults.get((backend, device))
        # A forked child cannot use its parent's: it makes its own.
        if context is None or context.closed or context._pid != os.getpid():
            name = _best_gpu(device) if backend == "gpu" else backend
            context = _defaults[backend, device] = Context(name, device)
        return context


def _best_gpu(device):
    error = None
    for name in backends():
        if name != "host":
            error = probe(name, device)
            if error is None:
                return name
    raise error
