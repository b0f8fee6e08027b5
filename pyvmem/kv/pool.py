"""One budget for several KV caches, in one process or in several processes on one device.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
import os
import re
import weakref
from numbers import Real
from typing import Any, Protocol, SupportsIndex

from pyvmem._checks import shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.core import Context
from pyvmem.errors import InvalidArgument, VmemError, _check, structure
from pyvmem.kv.view import ANSWERS, PoolMember, pool_member, view_folder
from pyvmem.owned import _Owned


class Member(Protocol):
    """What a pool knows of a `KVCache`."""

    options: Any

    def _use(self) -> Any: ...


class KVPool(_Owned):
    """One budget for several KV caches, which moves to the cache that needs it.

    ``KVCache(..., budget=most, pool=pool, pool_min=least)`` makes a cache a member. Its budget changes between
    `pool_min`, which is guaranteed, and `budget`.

    Parameters
    ----------
    budget : int, optional
        Bytes of all members together. None, with a name or a path: the budget that another process has set.
    name : str, optional
        Name of a pool for several processes of this user: letters, digits, ``_``, ``.`` and ``-``. Its file is in the
        folder that ``pyvmem top`` reads.
    path : str or os.PathLike, optional
        The file of such a pool, if it is in another folder.

    Raises
    ------
    VmemError
        EBADMSG: the file is not a pool's. EPERM: other users may write to it. ENOSPC: 64 others have it open.
    InvalidArgument
        The pool exists with another budget.

    Notes
    -----
    A step that needs more than its budget takes what is free in the pool at once. If that is too little, it returns
    False, and the pool asks the other members; `KVCache.shortage` says how much may come (``coming_pages``), and `wait`
    waits for the answer. The pool's thread gives back what another member needs: unused budget, kept pages and pages
    ahead of need, but never what a request needs.
    """

    _what = "pool"

    path: str | None

    def __init__(
        self,
        budget: SupportsIndex | None = None,
        *,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if name is not None and path is not None:
            raise TypeError("name and path exclude each other")
        if name is not None:
            path = _named(name)
        if not isinstance(path, str | bytes | os.PathLike | None):
            raise TypeError(f"path must be a path, not {shown(path)}")
        self.path = None if path is None else os.fspath(path)
        if self.path is not None and "\0" in os.fsdecode(self.path):
            raise ValueError(f"path {self.path!r} must not contain a NUL byte")
        raw = ffi.new("struct vmem_kv_pool_config *", {"size": ffi.sizeof("struct vmem_kv_pool_config")})
        raw.budget = 0 if budget is None else uint("budget", budget)
        if budget is not None and not raw.budget:
            raise ValueError("budget 0 must be at least 1")
        text = ffi.NULL if self.path is None else ffi.new("char[]", os.fsencode(self.path))
        raw.path = text
        owner, pool = self._new_owner(), ffi.new("vmem_kv_pool **")
        _check(lib.pv_own_pool(owner, raw, pool))
        self._own(owner, pool[0])
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()  # of members of this process

    def __repr__(self) -> str:
        return f"<pyvmem.KVPool {self.path or 'of this process'}{', closed' if self.closed else ''}>"

    def _context(self, device: int) -> Context | None:
        """The context of a member of this process on the device, or None. A host's members are on any device."""
        found = [
            c for c in list(self._contexts) if not c.closed and ("gpu" not in c.capabilities or c.device == device)
        ]
        return found[0] if found else None

    def _join(self, kv: Any, min: int, max: int, name: str, context: Context) -> None:
        share = structure("vmem_kv_pool_share")
        share.min, share.max = min, max
        text = ffi.new("char[]", name.encode(errors="replace")[:63])
        share.name = text
        _check(lib.vmem_kv_pool_join(self._use(), kv, share))
        self._contexts.add(context)

    def _info(self) -> Any:
        raw = structure("vmem_kv_pool_info")
        _check(lib.vmem_kv_pool_query(self._use(), raw))
        return raw

    @property
    def budget(self) -> int:
        """Bytes of all members together."""
        return int(self._info().budget)

    @property
    def free(self) -> int:
        """Bytes of the budget that no member has."""
        return int(self._info().free)

    def members(self) -> list[PoolMember]:
        """List the members of all processes, as they are at one moment.

        Returns
        -------
        list of PoolMember
        """
        raw = [structure("vmem_kv_pool_member") for _ in range(lib.VMEM_KV_POOL_MEMBERS)]
        found = ffi.new("uint32_t *")
        _check(lib.vmem_kv_pool_get_members(self._use(), ffi.new("struct vmem_kv_pool_member *[]", raw), found))
        return [pool_member(member) for member in raw[: found[0]]]

    def look(self, seconds: float) -> None:
        """Have every member look at itself now. Else what `members` says that one could give may be 0.2 s old.

        Parameters
        ----------
        seconds : float
            At most so long, up to 1,000,000, for processes that do not answer.
        """
        _check(lib.vmem_kv_pool_look(self._use(), _ms(seconds)))

    def _member(self, cache: Member) -> Any:
        """The C pointer of a cache, which must be a member of this pool."""
        if not hasattr(cache, "_use") or not hasattr(cache, "options"):
            raise TypeError(f"cache must be a KVCache, not {shown(cache)}")
        self._use()
        kv = cache._use()
        if cache.options.pool is not self:
            where = "no pool" if cache.options.pool is None else "another pool"
            raise InvalidArgument(errno.EINVAL, f"cache {cache!r} is a member of {where}, not of {self!r}")
        return kv

    def set_share(self, cache: Member, min: SupportsIndex, max: SupportsIndex) -> None:
        """Change a member's minimum and maximum.

        The member gives back what exceeds the maximum and no request needs.

        Parameters
        ----------
        cache : KVCache
            A member of this pool.
        min, max : int
            Bytes.

        Raises
        ------
        InvalidArgument
            `min` is over `max`.
        OutOfMemory
            The minimums of all members would exceed the pool's budget.
        """
        _check(lib.vmem_kv_pool_set_share(self._member(cache), uint("min", min), uint("max", max)))

    def wait(self, cache: Member, seconds: float) -> str:
        """Wait until a member's last request for budget is answered.

        Parameters
        ----------
        cache : KVCache
            A member of this pool.
        seconds : float
            At most so long, up to 1,000,000.

        Returns
        -------
        {"applied", "deferred", "refused", "unasked"}
            "deferred": the time is over.
        """
        answer = ffi.new("uint32_t *")
        _check(lib.vmem_kv_pool_wait(self._member(cache), _ms(seconds), answer))
        return ANSWERS[answer[0]]


class Hold(_Owned):
    """A member of a pool that stands for memory which is not libvmem's, such as common memory (vmem_kv_pool.h).

    Parameters
    ----------
    pool : KVPool
    context : Context
        Any context of this process, such as one of the host's.
    name : str
        What others see.
    device : bytes, optional
        The UUID of the GPU whose memory it is, 16 bytes; None: of the host's.
    """

    _what = "hold"

    def __init__(self, pool: KVPool, context: Context, name: str, device: bytes | None = None) -> None:
        cfg = structure("vmem_kv_hold_config")
        text = ffi.new("char[]", name.encode(errors="replace")[:63])
        cfg.name, cfg.gpu = text, device is not None
        if device is not None:
            cfg.device = list(device)
        owner, out = self._new_owner(context._owned()), ffi.new("vmem_kv_hold **")
        _check(lib.pv_own_hold(owner, context._use(), pool._use(), cfg, out))
        self._own(owner, out[0])

    def set(self, bytes: int) -> int:
        """Hold so many bytes altogether, a multiple of 2 MiB; returns how many the pool has not got.

        If that is not 0, it holds what it did, and the others are asked until 250 ms after the last such call.
        """
        missing = ffi.new("uint64_t *")
        _check(lib.vmem_kv_hold_set(self._use(), bytes, missing))
        return int(missing[0])

    def offer(self, bytes: int) -> int:
        """Say how many bytes of what is held can be given up; returns how many of them others want."""
        wanted = ffi.new("uint64_t *")
        _check(lib.vmem_kv_hold_offer(self._use(), bytes, wanted))
        return int(wanted[0])


def _ms(seconds: float) -> int:
    if not isinstance(seconds, Real) or not 0 <= seconds <= 1e6:
        raise ValueError(f"seconds must be a number between 0 and 1000000, not {shown(seconds)}")
    return round(float(seconds) * 1000)


def _named(name: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name) or name.startswith("."):
        raise ValueError(f"name {name!r} must consist of letters, digits, _, . and -, and not begin with a dot")
    folder = view_folder()
    if folder is None:
        raise VmemError(errno.EPERM, f"name {name}: no folder is this user's only, with mode 0700; pass a path")
    return str(folder / f"{name}.pool")
