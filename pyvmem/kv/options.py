"""The options of a `KVCache`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from pyvmem._checks import flag, shown, uint
from pyvmem._ffi import lib
from pyvmem.core import Context
from pyvmem.errors import InvalidArgument
from pyvmem.kv.pool import KVPool


@dataclass(frozen=True, kw_only=True)
class Spare:
    """Use that a `KVCache` makes of memory which no request needs at the moment. The defaults suit a server.

    Attributes
    ----------
    overlap : bool
        A background thread maps what the next steps need.
    defer : bool
        A freed slot keeps its pages for the next request until they are needed elsewhere.
    eager : bool
        The slot that will be allocated next is kept backed for `eager_tokens` tokens. Needs `overlap`.
    generous : bool
        While memory is plentiful, whole blocks of 2 MiB are backed. Under pressure, unneeded pages are taken back.
    ahead_tokens, ahead_min : int
        Tokens that stay backed past a request's length while memory is plentiful (0: 128) or scarce (0: 4). Up to twice
        as many may be backed.
    eager_tokens : int
        Tokens for which the next slot is backed (0: 512).
    reclaim_percent : int
        Memory counts as scarce when less than this percentage of the budget is free, at most 50 (0: 10 %).
    """

    overlap: bool = True
    defer: bool = True
    eager: bool = True
    generous: bool = True
    ahead_tokens: int = 0
    ahead_min: int = 0
    eager_tokens: int = 0
    reclaim_percent: int = 0

    def __post_init__(self) -> None:
        for name in ("overlap", "defer", "eager", "generous"):
            flag(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class KVCacheOptions:
    """How a `KVCache` gets and keeps its pages. The defaults suit a server that has the GPU to itself.

    Attributes
    ----------
    context : Context, optional
        The context that provides the memory. By default, the cache creates its own on `backend` and `device`. Backed
        rows are guaranteed to have finite values only if nothing else creates pages in the context.
    backend : str, optional
        "uvm", "stock", "cuda" or "host"; by default, the context's, or the best that works.
    device : int
        CUDA device ordinal. Ignored if a context is given.
    page_size : int, optional
        Bytes; by default, the smallest that the backend supports.
    tile_rows : int
        Rows that the attention kernel loads together, also past the length. FlashAttention-3 loads up to 224.
        Kernels that mask their loads, as most in Triton do, need 1. `pyvmem.attention.tile_rows` gives the number for
        a kernel.
    steps_in_flight : int
        Steps whose kernels may still be running when `KVCache.step` is called, 1 to 16. An engine that schedules ahead
        needs 2 or more.
    zero : bool
        Each request gets pages of zeros. A slot that is freed keeps none, as without ``Spare.defer``: a request's first
        step creates its pages.
    lazy : bool
        Device memory is allocated when pages are needed, instead of the whole budget at creation.
    idle_seconds : float
        After this time without a request and without a call, a cache returns its kept pages and preallocated memory to
        the system. From then on it allocates memory when needed. Prefixes stay. inf: never. Needs `Spare.overlap`.
    name : str, optional
        The name in ``pyvmem top``; None publishes nothing.
    pool : KVPool, optional
        The cache shares the pool's budget with the other members. Its own `budget` is then its maximum, and the pool
        sets its current budget. Implies `lazy`.
    pool_min : int
        Bytes of the pool's budget that are guaranteed to this cache.
    check : bool
        Every operation verifies the bookkeeping. Slow; for tests.
    spare : Spare
        What happens with memory that no request needs at the moment.
    """

    context: Context | None = None
    backend: str | None = None
    device: int = 0
    page_size: int | None = None
    tile_rows: int = 1
    steps_in_flight: int = 1
    zero: bool = False
    lazy: bool = False
    idle_seconds: float = 1.0
    name: str | None = "kv"
    pool: KVPool | None = None
    pool_min: int = 0
    check: bool = False
    spare: Spare = Spare()

    def __post_init__(self) -> None:
        if not isinstance(self.context, Context | None):
            raise TypeError(f"context must be a Context, not {self.context!r}")
        if self.context is not None and self.backend not in (None, self.context.backend):
            raise ValueError(f"backend {self.backend!r} is not the context's, {self.context.backend!r}: leave it out")
        if not isinstance(self.pool, KVPool | None):
            raise TypeError(f"pool must be a KVPool, not {self.pool!r}")
        if uint("pool_min", self.pool_min) and self.pool is None:
            raise ValueError(f"pool_min {self.pool_min} needs a pool")
        if not isinstance(self.name, str | None):
            raise TypeError(f"name must be a string, not {shown(self.name)}")
        if not isinstance(self.idle_seconds, float | int) or not self.idle_seconds >= 0.001:
            raise ValueError(
                f"idle_seconds must be a number of seconds, at least 0.001, not {shown(self.idle_seconds)}"
            )
        for name in ("tile_rows", "steps_in_flight"):  # in C, 0 is the default
            if not uint(name, getattr(self, name), 32):
                raise InvalidArgument(errno.EINVAL, f"{name} 0 must be at least 1")
        if not isinstance(self.spare, Spare):
            raise TypeError(f"spare must be a Spare, not {shown(self.spare)}")
        for name in ("zero", "lazy", "check"):
            flag(name, getattr(self, name))

    def _flags(self) -> int:
        """The switches as C flags."""
        pooled: int = 0 if self.pool is None else lib.VMEM_KV_LAZY
        switches = vars(self) | vars(self.spare)
        flags: int = sum(bit for name, bit in _SWITCHES.items() if switches[name])
        return flags | pooled

    def _numbers(self) -> dict[str, int]:
        """The numbers for the fields of ``struct vmem_kv_config``."""
        milliseconds = self.idle_seconds * 1000
        idle_ms = round(milliseconds) if milliseconds < 2**32 - 1 else 0
        numbers = vars(self) | vars(self.spare)
        return {name: numbers[name] for name in _NUMBERS} | {"idle_ms": idle_ms}


_SWITCHES = {
    "overlap": lib.VMEM_KV_OVERLAP,
    "defer": lib.VMEM_KV_DEFER,
    "eager": lib.VMEM_KV_EAGER,
    "generous": lib.VMEM_KV_GENEROUS,
    "zero": lib.VMEM_KV_ZERO,
    "check": lib.VMEM_KV_CHECK,
    "lazy": lib.VMEM_KV_LAZY,
}
_NUMBERS = ("tile_rows", "ahead_tokens", "ahead_min", "eager_tokens", "reclaim_percent", "steps_in_flight")


def options_of(given: KVCacheOptions | None, keywords: dict[str, Any]) -> KVCacheOptions:
    """The options of a call that takes them as an object, as keywords, or both. Keywords override the object."""
    if not isinstance(given, KVCacheOptions | None):
        raise TypeError(f"options must be KVCacheOptions, not {given!r}")
    names = KVCacheOptions.__dataclass_fields__
    for name in keywords:
        if name in Spare.__dataclass_fields__:
            raise TypeError(f"{name} is an option of Spare: use spare=Spare({name}=...)")
        if name not in names:
            raise TypeError(f"unknown KVCache option {name}: the options are {', '.join(sorted(names))}")
    return KVCacheOptions(**{**(vars(given) if given else {}), **keywords})
