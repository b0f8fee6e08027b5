"""The calls of the vAttention paper (Prabhu et al., ASPLOS 2025) under their own names, for code that is written so.

Table 2: addresses and page handles are plain integers; `Context`, `Reservation` and `Pages` are the same as objects.
Table 3: what a serving engine calls, with the paper's answers 0 and -1. `init` makes a `pyvmem.KVCache`, which the
others take as their first argument.

SPDX-License-Identifier: MIT
"""

from typing import TYPE_CHECKING, Any, SupportsIndex

from pyvmem._checks import UInts, flag, one_of, shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.core import Context
from pyvmem.errors import _check
from pyvmem.owned import create_flags, new_handles

if TYPE_CHECKING:
    from pyvmem.kv.arguments import Lengths
    from pyvmem.kv.cache import KVCache


__all__ = [
    "alloc_reqid",
    "free_reqid",
    "init",
    "step",
    "vMemCreate",
    "vMemFree",
    "vMemMap",
    "vMemMapBatch",
    "vMemRelease",
    "vMemReleaseBatch",
    "vMemReserve",
    "vMemUnmap",
    "vMemUnmapBatch",
]


def _context(context: Context) -> Context:
    if not isinstance(context, Context):
        raise TypeError(f"context must be a Context, not {shown(context)}")
    return context


def vMemReserve(context: Context, length: SupportsIndex, *, backdrop: bool = False) -> int:
    """Reserve addresses. The caller owes `vMemFree`.

    Parameters
    ----------
    context : Context
    length : int
        Bytes.
    backdrop : bool
        As in `Context.reserve`.

    Returns
    -------
    int
        The first address.
    """
    addr = ffi.new("uint64_t *")
    flags = lib.VMEM_RESERVE_BACKDROP if flag("backdrop", backdrop) else 0
    _check(lib.vMemReserve(_context(context)._use(), uint("length", length), flags, addr))
    return int(addr[0])


def vMemFree(context: Context, addr: SupportsIndex) -> None:
    """Free what `vMemReserve` returned.

    Parameters
    ----------
    context : Context
    addr : int
        The first address.

    Raises
    ------
    VmemError
        EBUSY: something is mapped there.
    """
    _check(lib.vMemFree(_context(context)._use(), uint("addr", addr)))


def vMemCreate(context: Context, page_size: int, n: SupportsIndex = 1, *, zero: bool = False) -> UInts:
    """Create physical pages. The caller owes `vMemRelease`.

    Parameters
    ----------
    context : Context
    page_size, n, zero
        As in `Context.create`.

    Returns
    -------
    numpy.ndarray
        Their handles, uint64[n].
    """
    one_of("page_size", page_size, _context(context).page_sizes)
    handles, owner = new_handles(n), context._new_owner(context._owned())
    buffer = ffi.from_buffer("vmem_page[]", handles)
    _check(lib.pv_own_pages(owner, page_size, len(handles), create_flags(zero), buffer))
    lib.pv_disown_pages(owner)  # must be last: until here, the owner frees the pages on an exception
    return handles


def vMemMap(context: Context, addr: SupportsIndex, page: SupportsIndex) -> None:
    """Map one page, with access: cuMemMap and cuMemSetAccess in one.

    Parameters
    ----------
    context : Context
    addr : int
        A multiple of the page's size.
    page : int
        Its handle.
    """
    _check(lib.vMemMap(_context(context)._use(), uint("addr", addr), uint("page", page)))


def vMemMapBatch(context: Context, addrs: Any, pages: Any, *, replace: bool = False, fine: bool = False) -> None:
    """Map many pages at as many addresses, all or none.

    Parameters
    ----------
    context : Context
    addrs, pages, replace, fine
        As in `Context.map`.
    """
    _context(context).map(addrs, pages, replace=replace, fine=fine)


def vMemUnmap(context: Context, addr: SupportsIndex, length: SupportsIndex) -> None:
    """Unmap a range; the pages stay.

    Parameters
    ----------
    context : Context
    addr : int
        The first address.
    length : int
        Bytes.
    """
    _check(lib.vMemUnmap(_context(context)._use(), uint("addr", addr), uint("length", length)))


def vMemUnmapBatch(context: Context, addrs: Any, lengths: Any) -> None:
    """Unmap many ranges, all or none.

    Parameters
    ----------
    context : Context
    addrs, lengths
        As in `Context.unmap`.
    """
    _context(context).unmap(addrs, lengths)


def vMemRelease(context: Context, pages: Any) -> None:
    """Unmap a page, or an array of pages, wherever they are mapped, and free them.

    Parameters
    ----------
    context : Context
    pages : int or array of int
        Their handles.
    """
    _context(context).release(pages)


vMemReleaseBatch = vMemRelease


def init(
    layers: int, kv_heads: int, head_dim: int, batch: int, max_tokens: int, budget: int, **options: Any
) -> "KVCache":
    """`KVCache.for_model` by the paper's names.

    Parameters
    ----------
    layers, kv_heads, head_dim, batch, max_tokens : int
        The paper's N', H, D, B and L.
    budget : int
        Bytes.
    **options
        As in `KVCache.for_model`.

    Returns
    -------
    KVCache
    """
    from pyvmem.kv.cache import KVCache

    return KVCache.for_model(layers, kv_heads, head_dim, batch, max_tokens, budget, **options)


def alloc_reqid(cache: "KVCache", tokens: SupportsIndex = 0) -> int:
    """`KVCache.alloc` by the paper's name.

    Parameters
    ----------
    cache : KVCache
    tokens : int
        As in `KVCache.alloc`.

    Returns
    -------
    int
        The request's number, or -1 if all are taken.
    """
    slot = cache.alloc(tokens)
    return -1 if slot is None else slot


def free_reqid(cache: "KVCache", slot: SupportsIndex) -> None:
    """`KVCache.free`, after the kernels of every step so far.

    Parameters
    ----------
    cache : KVCache
    slot : int
        The request's number.
    """
    cache.free(slot, after=cache.last_step)


def step(cache: "KVCache", lengths: "Lengths") -> int:
    """`KVCache.step` by the paper's name.

    Parameters
    ----------
    cache : KVCache
    lengths
        As in `KVCache.step`: a request of length 0 takes no part and keeps its rows. In microsoft/vattention it ends
        (`examples/vattention_loop.py`).

    Returns
    -------
    int
        0, or -1 if memory is short.
    """
    return 0 if cache.step(lengths) else -1
