"""Reservations and pages: the objects that a context creates, each of which cleans up after itself.

Every object holds one reference to a native owner (pyvmem/native/owner.c). A call passes the owner, or a pointer that
keeps it, as an argument. If another thread closes the object meanwhile, the object therefore ends only after the call.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
import operator
import os
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from pyvmem._checks import UInts, flag, integer, one_of, shown, uint, uints
from pyvmem._ffi import ffi, lib
from pyvmem.errors import InvalidArgument, OutOfMemory, VmemError, _check, structure

if TYPE_CHECKING:
    from pyvmem.core import Context

MAP_OP = np.dtype([("addr", np.uint64), ("page", np.uint64)])
UNMAP_OP = np.dtype([("addr", np.uint64), ("length", np.uint64)])
COPY_OP = np.dtype([("dst", np.uint64), ("src", np.uint64), ("length", np.uint64)])

Self = TypeVar("Self", bound="_Owned")


def make_ops(dtype: np.dtype[Any], **columns: Any) -> npt.NDArray[Any]:
    """Return an array of C structures from columns in the order of the dtype's fields. Scalars are repeated."""
    arrays = [uints(name, values) for name, values in columns.items()]
    try:
        rows = np.broadcast_arrays(*arrays)
    except ValueError:
        sizes = ", ".join(f"{name} has {len(array)}" for name, array in zip(columns, arrays))
        raise ValueError(f"the arrays must have as many elements each, or one: {sizes}") from None
    ops = np.empty(rows[0].shape, dtype)
    for name, column in zip(dtype.names or (), rows):
        ops[name] = column
    return ops


_SIZE, _NO_INDEX = ffi.typeof("size_t *"), lib.PV_NO_INDEX


def no_index() -> Any:
    """Return the variable that receives the index of a batch's failing element."""
    return ffi.new(_SIZE, _NO_INDEX)


def map_flags(replace: bool, fine: bool) -> int:
    return (lib.VMEM_MAP_REPLACE if flag("replace", replace) else 0) | (lib.VMEM_MAP_FINE if flag("fine", fine) else 0)


def create_flags(zero: bool) -> int:
    return lib.VMEM_CREATE_ZERO if flag("zero", zero) else 0


def commit_flags(zero: bool, fine: bool) -> int:
    return create_flags(zero) | map_flags(False, fine)


def new_handles(n: SupportsIndex) -> UInts:
    """Return an uninitialized array for n page handles."""
    try:
        return np.empty(uint("n", n), np.uint64)
    except InvalidArgument:
        raise
    except (MemoryError, ValueError):  # numpy raises ValueError for sizes beyond any address space
        raise OutOfMemory(errno.ENOMEM, f"n {n}: no memory for so many handles") from None


def _index(value: Any) -> int:
    """value as an int; raises TypeError for what is none: an array, which `uints` takes, or what it will name."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


class Uncopyable:
    """Base of objects that own something native. They cannot be copied: a copy would free it a second time."""

    _instead = ""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns native memory and cannot be copied or pickled{self._instead}")


class _Owned(Uncopyable):
    """Holds one reference to a native owner until close(), the end of a with block, or garbage collection."""

    _what = "object"
    _owner: Any = None
    _handle: Any = None  # a pointer for native calls that keeps the owner

    @staticmethod
    def _new_owner(parent: Any = None) -> Any:
        """Create an empty owner.

        It is created before the objects that it will own, so that an exception at any later moment leaks nothing, even
        one that a signal handler raises.
        """
        owner = lib.pv_owner_new()
        if owner == ffi.NULL:
            raise OutOfMemory(errno.ENOMEM, "no memory for bookkeeping")
        owner = ffi.gc(owner, lib.pv_owner_drop)
        if parent is not None:
            lib.pv_owner_set_parent(owner, parent)
        return owner

    def _own(self, owner: Any, thing: Any = None) -> None:
        if thing is not None:
            # A destructor that does nothing, but keeps the owner as long as the pointer. It is no Python function, in
            # which a signal's handler could raise.
            self._handle = ffi.gc(thing, (owner,).count)
        self._owner = owner

    def _owned(self) -> Any:
        """Return the owner, to be passed directly to a native call: as an argument, it outlives the call.

        No variable may hold it.
        """
        owner = self._owner
        if owner is None:
            raise ValueError(f"the {self._what} is closed")
        return owner

    def _use(self) -> Any:
        """Return the pointer that libvmem's own calls take; otherwise as `_owned`."""
        thing = self._handle
        if thing is None:
            raise ValueError(f"the {self._what} is closed")
        return thing

    @property
    def closed(self) -> bool:
        """True if close() was called."""
        return self._owner is None

    def _drop(self) -> None:
        # If calls in other threads still use the owner, the last of them drops the last reference.
        self._owner = self._handle = None

    def close(self) -> None:
        self._drop()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_context(context: Any) -> None:
    if not isinstance(context, _Owned) or context._what != "context":
        raise TypeError(f"context must be a Context, not {shown(context)}")


class Reservation(_Owned):
    """A range of addresses: `addr` and `length`, in bytes. Made by `Context.reserve`.

    Closing it, or dropping the last reference, unmaps everything there, releases the pages that `commit` created, and
    frees the addresses, when the last tensor over them is gone and all kernels of the device have ended. It keeps pages
    that were mapped through `map` alive until they are closed. No kernel in flight may access what `unmap` or
    `decommit` gives up.

    Offsets and lengths are in bytes and must lie within the reservation; otherwise, `InvalidArgument` names the one
    that does not.
    """

    _what = "reservation"

    context: Context
    addr: int
    length: int

    def __init__(self, context: Context, length: SupportsIndex, *, backdrop: bool = False) -> None:
        _check_context(context)
        length = uint("length", length)
        if flag("backdrop", backdrop) and "backdrop" not in context.capabilities:
            raise VmemError(errno.EOPNOTSUPP, f"backdrop=True: the {context.backend} backend has no backdrop")
        flags = lib.VMEM_RESERVE_BACKDROP if backdrop else 0
        owner, addr = self._new_owner(context._owned()), ffi.new("uint64_t *")
        _check(lib.pv_own_range(owner, length, flags, addr))
        self._own(owner, context._use())
        self.context = context
        self.addr = addr[0]
        self.length = length
        self._pages: set[Pages] = set()
        context._children[id(self)] = self

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<pyvmem.Reservation {self.length} bytes at {self.addr:#x}{state}>"

    def close(self) -> None:
        """Unmap everything and free the addresses, now or when the last tensor over them is gone."""
        self._drop()
        self._pages.clear()  # a concurrent map() removes what it adds after this

    def _part(self, offset: SupportsIndex, length: SupportsIndex | None) -> tuple[int, int]:
        """Check and return offset and length; by default, the length reaches to the end."""
        self._owned()
        offset = uint("offset", offset)
        if offset > self.length:
            raise self._outside(f"offset {offset} must lie")
        if length is None:
            return offset, self.length - offset
        length = uint("length", length)
        if length > self.length - offset:
            raise self._outside(f"length {length} at offset {offset} must end")
        return offset, length

    def _parts(self, offsets: UInts, lengths: UInts | int) -> UInts:
        """Return the addresses of the offsets, after checking that `lengths` bytes there lie within the reservation."""
        self._owned()
        total = np.uint64(self.length)
        lengths = np.broadcast_to(np.asarray(lengths, np.uint64), offsets.shape)
        outside = (offsets > total) | (lengths > total - np.minimum(offsets, total))
        if outside.any():
            i = int(outside.argmax())
            raise self._outside(f"length {lengths[i]} at offset {offsets[i]} must end", i)
        return offsets + np.uint64(self.addr)

    def _outside(self, what: str, index: int | None = None) -> InvalidArgument:
        return InvalidArgument(errno.EINVAL, f"{what} within the reservation's {self.length} bytes", index)

    def map(self, pages: Pages, offset: Any = 0, *, replace: bool = False, fine: bool = False) -> None:
        """Map pages here, all or none.

        Parameters
        ----------
        pages : Pages
        offset : int or array of int
            Bytes. One offset: the pages follow each other from there. Several: one for each page.
        replace, fine
            As in `Context.map`.

        Raises
        ------
        VmemError
            As in `Context.map`.
        """
        if not isinstance(pages, Pages):
            raise TypeError(f"pages must be Pages, not {type(pages).__name__}: Context.map takes handles")
        handles, size = pages._handles_for(self.context), pages.page_size
        flags, bad = map_flags(replace, fine), no_index()
        try:
            first = _index(offset)
        except TypeError:
            ops = make_ops(MAP_OP, offset=self._parts(uints("offset", offset), size), pages=handles)
            buffer = ffi.from_buffer("struct vmem_map_op[]", ops)
            _check(lib.vMemMapBatch(self._use(), buffer, len(ops), flags, bad), bad)
        else:
            n = len(handles)
            self._part(first, n * size)
            _check(lib.pv_map(self._use(), self.addr + first, size, pages._buffer, n, flags, bad), bad)
        # The pages are mapped now, whatever another thread did with them. Only closing removes them from the set.
        if pages not in self._pages:
            self._pages.add(pages)
            pages._homes[id(self)] = self
        if self._owner is None or pages._owner is None:
            self._pages.discard(pages)

    def unmap(self, offset: Any = 0, length: Any = None) -> None:
        """Unmap ranges, all or none.

        Pages that `commit` created are released if they are mapped nowhere else.

        Parameters
        ----------
        offset : int or array of int
            Bytes; 0 by default.
        length : int or array of int, optional
            Bytes; by default, up to the end.
        """
        try:
            first, size = _index(offset), None if length is None else _index(length)
        except TypeError:
            offsets = uints("offset", offset)
            left = np.uint64(self.length) - np.minimum(offsets, np.uint64(self.length))
            ops, bad = make_ops(UNMAP_OP, offset=offsets, length=left if length is None else length), no_index()
            ops["addr"] = self._parts(ops["addr"], ops["length"])
            buffer = ffi.from_buffer("struct vmem_range[]", ops)
            _check(lib.vMemUnmapBatch(self._use(), buffer, len(ops), bad), bad)
        else:
            first, size = self._part(first, size)
            _check(lib.vMemUnmap(self._use(), self.addr + first, size))

    # ---- pages that belong to the addresses ------------------------------------------------------------------

    def commit(
        self,
        offset: SupportsIndex = 0,
        length: SupportsIndex | None = None,
        page_size: int | None = None,
        *,
        zero: bool = False,
        fine: bool = False,
    ) -> int:
        """Back every unbacked part of a range with new pages, all or none.

        The pages belong to the addresses: `decommit` or closing the reservation releases them.

        Parameters
        ----------
        offset, length : int, optional
            Bytes; by default, from the beginning and up to the end.
        page_size : int, optional
            Bytes; by default the smallest. Offset and length are multiples of it.
        zero, fine : bool
            As in `Context.commit`.

        Returns
        -------
        int
            Bytes newly backed.

        Raises
        ------
        OutOfMemory
            The device's memory or the budget is exhausted. Nothing was changed.
        VmemError
            EEXIST: over pages smaller than `page_size`. EBUSY: another call works in the range.
        """
        sizes = self.context.page_sizes
        page_size = min(sizes) if page_size is None else one_of("page_size", page_size, sizes)
        first, size = self._part(offset, length)
        part, done = ffi.new("struct vmem_range *", (self.addr + first, size)), ffi.new("uint64_t *")
        _check(lib.vmem_commit(self._use(), part, 1, page_size, commit_flags(zero, fine), done))
        return int(done[0])

    def decommit(self, offset: SupportsIndex = 0, length: SupportsIndex | None = None) -> int:
        """Release the pages that `commit` created in a range.

        `Pages` that are mapped there are unmapped but keep their memory; `Context.decommit` releases them too.

        Parameters
        ----------
        offset, length : int, optional
            Bytes; by default, from the beginning and up to the end. The range must not cut a page.

        Returns
        -------
        int
            Bytes that were backed there.
        """
        first, size = self._part(offset, length)
        if not size:
            return 0
        backed = sum(length for _, length in self.backed(first, size))
        _check(lib.vMemUnmap(self._use(), self.addr + first, size))
        return backed

    def backdrop(self, offset: SupportsIndex = 0, length: SupportsIndex | None = None) -> None:
        """Make the unbacked addresses of a range readable now.

        Only for a reservation with ``backdrop=True``. GPU backends establish a backdrop in blocks of tens of MiB, where
        pages are mapped; a kernel that reads further away needs this call first.

        Parameters
        ----------
        offset, length : int, optional
            Bytes; by default, from the beginning and up to the end.
        """
        first, size = self._part(offset, length)
        _check(lib.vmem_backdrop(self._use(), self.addr + first, size))

    @property
    def resident_bytes(self) -> int:
        """Bytes that are backed now, by pages of any origin; 0 once the reservation is closed."""
        return 0 if self._owner is None else backed_bytes(self._use(), self.addr)

    def backed(self, offset: SupportsIndex = 0, length: SupportsIndex | None = None) -> list[tuple[int, int]]:
        """List the backed parts of a range. Adjacent parts are joined.

        Parameters
        ----------
        offset, length : int, optional
            Bytes; by default, from the beginning and up to the end.

        Returns
        -------
        list of (int, int)
            Offset and length of each part, in bytes and in order.
        """
        at, left = self._part(offset, length)
        end, found = at + left, ffi.new("struct vmem_range *")
        parts: list[tuple[int, int]] = []
        while at < end:
            _check(lib.vmem_next_mapped(self._use(), self.addr + at, end - at, found))
            if not found.length:
                break
            first = found.addr - self.addr
            if parts and sum(parts[-1]) == first:
                parts[-1] = (parts[-1][0], parts[-1][1] + found.length)
            else:
                parts.append((first, found.length))
            at = first + found.length
        return parts


def first_unbacked(context: Any, addr: int, end: int) -> int | None:
    """Return the first unbacked address before `end`, if there is one. context: a pointer for native calls."""
    found = ffi.new("struct vmem_range *")
    while addr < end:
        if lib.vmem_next_mapped(context, addr, end - addr, found):
            return None  # a forked child is refused, and can read what was backed
        if not found.length or found.addr > addr:
            return addr
        addr = int(found.addr + found.length)
    return None


def backed_bytes(context: Any, addr: int) -> int:
    """Return the bytes that are backed of the reservation at an address. context: a pointer for native calls."""
    raw = structure("vmem_reservation_info")
    _check(lib.vmem_reservation_query(context, addr, raw))
    return int(raw.mapped)


class Pages(_Owned):
    """Physical pages of one size: ``handles`` (uint64[n], read-only) and ``page_size`` (bytes).

    Made by `Context.create`. Closing them, or dropping the last reference, unmaps them wherever they are mapped and
    frees them, once all kernels of the device have ended. A `Reservation` that they were mapped into holds a reference
    until it is closed.
    """

    _what = "pages object"

    context: Context
    handles: UInts
    page_size: int

    def __init__(self, context: Context, page_size: int, n: SupportsIndex = 1, *, zero: bool = False) -> None:
        _check_context(context)
        one_of("page_size", page_size, context.page_sizes)
        self.handles = new_handles(n)
        owner = self._new_owner(context._owned())
        self._buffer = ffi.from_buffer("vmem_page[]", self.handles)
        _check(lib.pv_own_pages(owner, page_size, len(self.handles), create_flags(zero), self._buffer))
        self._own(owner)
        self.handles.flags.writeable = False
        self.context = context
        self.page_size = integer("page_size", page_size)
        self._homes: weakref.WeakValueDictionary[int, Reservation] = weakref.WeakValueDictionary()
        context._children[id(self)] = self

    def __len__(self) -> int:
        return len(self.handles)

    def __repr__(self) -> str:
        return f"<pyvmem.Pages {len(self)} x {self.page_size} bytes{', closed' if self.closed else ''}>"

    def _handles_for(self, context: Context) -> UInts:
        """Return the handles, after checking that the pages are open and belong to this context."""
        if self._owner is None:
            raise ValueError("the pages are closed")
        if self.context is not context:
            raise InvalidArgument(errno.EINVAL, f"pages: {self!r} are pages of another context")
        return self.handles

    def close(self) -> None:
        """Unmap the pages wherever they are mapped and free them. Pages that were released individually are skipped."""
        self._drop()
        for home in self._homes.valuerefs():
            if reservation := home():
                reservation._pages.discard(self)


def check_process(pid: int) -> None:
    """Raise unless this is process `pid`. Call it before taking a lock that a thread may have held during a fork."""
    if os.getpid() != pid:
        raise VmemError(errno.EPERM, "the context belongs to the process that forked this one")
