"""The calls of the vAttention paper (Prabhu et al., ASPLOS 2025, Table 2) under their own names.

Addresses and page handles are plain integers; `Context`, `Reservation` and `Pages` are the same as objects.

SPDX-License-Identifier: MIT
"""

from pyvmem._checks import uint
from pyvmem._ffi import ffi, lib
from pyvmem.errors import _check


def vMemReserve(context, length, *, backdrop=False):
    """Reserve `length` bytes of addresses; returns the first. The caller owes `vMemFree`."""
    addr = ffi.new("uint64_t *")
    flags = lib.VMEM_RESERVE_BACKDROP if backdrop else 0
    _check(lib.vMemReserve(context._use(), uint("length", length), flags, addr))
    return addr[0]


def vMemFree(context, addr):
    """Free what `vMemReserve` returned. Raises `VmemError` (EBUSY) while anything is mapped there."""
    _check(lib.vMemFree(context._use(), uint("addr", addr)))


def vMemCreate(context, page_size, n=1, *, zero=False):
    """Create `n` physical pages; returns their handles, uint64[n]. The caller owes `vMemRelease`."""
    return context.create_handles(page_size, n, zero=zero)


def vMemMap(context, addr, page):
    """Map one page at an address, with access: cuMemMap and cuMemSetAccess in one."""
    _check(lib.vMemMap(context._use(), uint("addr", addr), uint("page", page)))


def vMemMapBatch(context, addrs, pages, *, replace=False, fine=False):
    """Map many pages at as many addresses, all or none."""
    context.map(addrs, pages, replace=replace, fine=fine)


def vMemUnmap(context, addr, length):
    """Unmap `length` bytes at `addr`; the pages stay."""
    _check(lib.vMemUnmap(context._use(), uint("addr", addr), uint("length", length)))


def vMemUnmapBatch(context, addrs, lengths):
    """Unmap many ranges, all or none."""
    context.unmap(addrs, lengths)


def vMemRelease(context, pages):
    """Unmap a page, or an array of pages, wherever they are mapped, and free them."""
    context.release(pages)


vMemReleaseBatch = vMemRelease
