"""A PyTorch memory pool in the budget of a `KVPool`: activations, or a trainer, beside a KV cache.

PyTorch's caching allocator asks for segments and splits them into blocks. A lease provides the segments. Between two
``with`` blocks, their pages belong to whoever needs them, and their addresses stay with PyTorch, whose free lists thus
stay valid. docs/lease.md explains the design.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, SupportsIndex

import torch

from pyvmem import _ffi
from pyvmem._checks import flag, one_of, shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.core import Context
from pyvmem.errors import OutOfMemory, VmemError, _check, structure
from pyvmem.kv.pool import KVPool
from pyvmem.kv.shortage import Shortage, shortage_of
from pyvmem.kv.view import count, documented, gauge
from pyvmem.owned import _Owned

__all__ = ["Lease", "LeaseStats", "torch_pool"]

MIB = 1 << 20


@documented
@dataclass(frozen=True)
class LeaseStats:
    """The state of a lease and what it has counted since its creation."""

    segments: int = gauge("That PyTorch has")
    parked_segments: int = gauge("Of these, those that have no pages now")
    bytes: int = gauge("Of all segments")
    parked_bytes: int = gauge("Of the parked ones")
    held_bytes: int = gauge("Of pages")
    allocs: int = count("Segments allocated")
    frees: int = count("Segments freed")
    refused: int = count("Allocations that found too little memory")
    waits: int = count("How often a call waited for another member of the pool")
    parks: int = count("Segments parked")
    unparks: int = count("Segments unparked")
    strangers: int = count("Addresses that PyTorch freed and that were no segment's")
    short_bytes: int = gauge("What the last allocation or entry that found too little memory was short of; 0: none was")
    lacking_bytes: int = gauge("What an allocation or an entry waits for now")


class TorchPools:
    """Every call of PyTorch's that a lease makes, those with private names included.

    ``torch._C._cuda_beginAllocateToPool`` routes the allocations of all threads to a pool;
    ``torch.cuda.use_mem_pool`` only those of one thread, and backward runs in others.
    """

    def __init__(self, device: int) -> None:
        self.device = device

    def check(self) -> None:
        """Raise what prevents a lease here."""
        if not torch.cuda.is_available():
            raise VmemError(errno.ENODEV, "torch sees no CUDA device, and a lease is a torch.cuda.MemPool")
        if not hasattr(torch.cuda, "MemPool"):
            raise VmemError(errno.EOPNOTSUPP, f"torch {torch.__version__} has no torch.cuda.MemPool")

    def new_pool(self, pair: int) -> Any:
        """A MemPool over pair number `pair` of libvmem's functions."""
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool(_allocator(pair))

    def snapshot(self, pool: Any) -> list[dict[str, Any]]:
        """The segments of the pool, with their blocks."""
        segments: list[dict[str, Any]]
        try:
            segments = pool.snapshot(include_traces=False)
        except TypeError:  # torch before 2.12
            segments = pool.snapshot()
        ids = tuple(pool.id)
        return [s for s in segments if tuple(s.get("segment_pool_id", ids)) == ids and s["device"] == self.device]

    def is_shared(self, pool: Any) -> bool:
        """True if somebody beside the lease holds the pool: a captured graph does until it is reset."""
        return bool(pool.use_count() > 1)

    @property
    def routes_all_threads(self) -> bool:
        names = ("_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
        return all(hasattr(torch._C, name) for name in names)

    def route(self, pool: Any, all_threads: bool) -> Callable[[], None]:
        """Route allocations to the pool; returns what ends it."""
        if all_threads:
            torch._C._cuda_beginAllocateToPool(self.device, pool.id)

            def end() -> None:
                torch._C._cuda_endAllocateToPool(self.device, pool.id)
                torch._C._cuda_releasePool(self.device, pool.id)

            return end
        stack = contextlib.ExitStack()
        stack.enter_context(torch.cuda.use_mem_pool(pool, self.device))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        return stack.close

    def settle(self) -> None:
        """Let PyTorch look at the events of blocks that were passed to record_stream. It does so when it allocates,
        but not while allocations are routed.
        """
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            torch.empty(1, device=torch.device("cuda", self.device))

    def graph(self, graph: Any, pool: Any, options: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool=pool.id, **options)


# PyTorch calls an allocator as long as it has a segment of it, which may be longer than a lease lives.
_allocators: dict[int, Any] = {}


def _allocator(pair: int) -> Any:
    if pair not in _allocators:
        names = f"vmem_torch_alloc_{pair}", f"vmem_torch_free_{pair}"
        _allocators[pair] = torch.cuda.memory.CUDAPluggableAllocator(_ffi.__file__, *names)
    return _allocators[pair].allocator()


# PyTorch ends the process if a pool ends while allocations are routed to another one. Pools that are dropped then wait.
_routed = 0
_late: list[Any] = []
_routing = threading.RLock()  # garbage collection may drop a lease at any moment, also in these functions


def _begin_routing(begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    global _routed
    with _routing:
        _routed += 1
        try:
            return begin()
        except BaseException:
            _routed -= 1
            raise


def _end_routing(end: Callable[[], None]) -> None:
    global _routed
    with _routing:
        end()
        _routed -= 1
        if not _routed:
            _late.clear()


class _Pools:
    """The MemPools of a lease: for eager code, and for captured graphs."""

    def __init__(self, torch_pools: TorchPools, pair: int) -> None:
        self.torch_pools = torch_pools
        self.pair = pair
        self.eager = torch_pools.new_pool(pair)
        self.graphs: Any = None

    def __del__(self) -> None:
        with _routing:
            if _routed:
                _late.extend(self.__dict__.values())
            self.__dict__.clear()  # in the lock: no routing begins while PyTorch ends the pools


class Lease(_Owned):
    """Memory for PyTorch out of a `KVPool`, lent for the time of a ``with`` block. Made by `torch_pool`.

    Within the block, PyTorch allocates in the lease. When the block is entered, the pages of all its segments are
    there; exactly what is missing comes from what the pool's KV caches can spare. When it is left, the pages of
    segments in which no tensor lives are offered to the pool, which takes them when another member asks. What was there
    is lost. Addresses stay.

    Notes
    -----
    Neither entering nor leaving waits for kernels. The pool's thread does so before it takes pages. A tensor that was
    passed to ``record_stream`` inside the block is reused only after the block, as in every ``torch.cuda.MemPool``.

    While PyTorch is out of memory in the block, it does not empty its caches. Leave the block and call `reset`.
    """

    _what = "lease"

    def __init__(
        self,
        pool: KVPool,
        context: Context,
        torch_pools: TorchPools,
        *,
        name: str,
        page_size: int,
        most: int = 0,
        threads: str = "all",
        wait: float = 10.0,
        alloc_wait: float = 10.0,
        small: bool = False,
    ) -> None:
        raw = structure("vmem_torch_config")
        raw.flags = lib.VMEM_TORCH_SMALL if small else 0
        text = ffi.new("char[]", name.encode(errors="replace")[:63])
        raw.most, raw.page_size, raw.wait_ms, raw.name = most, page_size, round(alloc_wait * 1000), text
        owner, place = self._new_owner(context._owned()), ffi.new("uint32_t *")
        _check(lib.pv_own_torch(owner, context._owned(), context._use(), pool._use(), raw, place))
        self._own(owner)
        self.pool = pool
        self.context = context
        self._place = int(place[0])
        self._pair = self._place % lib.VMEM_TORCH_PLACES
        self._page_size = page_size
        self._all_threads = threads == "all" and torch_pools.routes_all_threads
        self._wait_ms = round(wait * 1000)
        self._torch = torch_pools
        self._pools: _Pools | None = _Pools(torch_pools, self._pair)
        self._end: Callable[[], None] | None = None  # what ends the routing, within a block
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "in use" if self._end else "parked"
        return f"<pyvmem.Lease on {self.context.backend}, {state}>"

    @property
    def mem_pool(self) -> Any:
        """The ``torch.cuda.MemPool``. PyTorch may allocate in it only within a ``with`` block of the lease."""
        return self._open().eager

    def _open(self) -> _Pools:
        self._owned()
        assert self._pools is not None
        return self._pools

    # ---- the block -------------------------------------------------------------------------------------------

    def __enter__(self) -> Lease:
        """Take the pages.

        Raises
        ------
        OutOfMemory
            The pool cannot give all of them (`shortage`). No page was taken. `reset` drops what cannot come back.
        RuntimeError
            The lease is in use already.
        """
        with self._lock:
            self._open()  # not kept: an error's frames would hold the pools over a reset() in its handler
            if self._end:
                raise RuntimeError("the lease is in use: its with blocks do not nest")
            missing = ffi.new("uint64_t *")
            rc = lib.vmem_torch_unpark(self._place, self._wait_ms, missing)
            if rc == -errno.ENOMEM:
                raise self._out_of_memory(int(missing[0]))
            _check(rc)
            self._torch.settle()
            self._route(self._open())
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            end, self._end = self._end, None
            if end is None:
                return
            _end_routing(end)  # before anything is parked: other threads must not get a parked block
            if not self.closed:
                self._torch.settle()
                self._park()

    def _route(self, pools: _Pools) -> None:
        self._end = _begin_routing(lambda: self._torch.route(pools.eager, self._all_threads))

    def _park(self) -> None:
        pools = self._open()
        idle: list[int] = []
        for pool in (pools.eager, pools.graphs):
            if pool is None or self._torch.is_shared(pool):
                continue
            # A block that waits for another stream's event is idle, too: libvmem waits for all kernels before pages go.
            for segment in self._torch.snapshot(pool):
                if all(block["state"] != "active_allocated" for block in segment["blocks"]):
                    idle.append(segment["address"])
        _check(lib.vmem_torch_park(self._place, ffi.new("uint64_t[]", idle), len(idle), ffi.NULL))

    def _out_of_memory(self, missing: int) -> OutOfMemory:
        shortage = self.shortage
        why = f"{shortage.reason or 'memory'}{f', {shortage.refusal}' if shortage.refusal else ''}"
        error = OutOfMemory(
            errno.ENOMEM,
            f"the lease lacks {missing / MIB:.1f} MiB of the {self.stats().parked_bytes / MIB:.1f} MiB that it parked "
            f"({why}): end a request, or call reset()",
        )
        error.shortage = shortage
        return error

    # ---- segments with tensors -------------------------------------------------------------------------------

    def _segments(self) -> dict[int, int]:
        """The segments in which a tensor lives: bytes by address."""
        found = self._torch.snapshot(self._open().eager)
        return {
            int(s["address"]): int(s["total_size"]) for s in found
            if any(b["state"] == "active_allocated" for b in s["blocks"])
        }  # fmt: skip

    def _park_segments(self, segments: Sequence[int]) -> None:
        """Offer the pages of segments that no kernel uses until they are unparked, whatever lives there."""
        with self._lock:
            self._open()
            _check(lib.vmem_torch_park(self._place, ffi.new("uint64_t[]", segments), len(segments), ffi.NULL))

    def _unpark_segments(self, segments: Sequence[int], wait: float, most: int) -> tuple[list[int], list[int]]:
        """Back parked segments again, or none; returns those that lost their contents, and those to call again for.

        wait: the most seconds that the other members of the pool have to give what is missing. most: bytes that come at
        once; what the other segments take is claimed, until the next call that fails or parks some. Raises
        `OutOfMemory`, whose `missing` is the number of bytes that did not become free.
        """
        with self._lock:
            self._open()
            missing, lost = ffi.new("uint64_t *"), ffi.new("uint8_t[]", len(segments))
            rc = lib.vmem_torch_unpark_segments(self._place, ffi.new("uint64_t[]", segments), len(segments), most,
                                                round(wait * 1000), missing, lost)  # fmt: skip
            if rc == -errno.ENOMEM:
                error = self._out_of_memory(int(missing[0]))
                error.missing = int(missing[0])  # type: ignore[attr-defined]
                raise error
            _check(rc)
            went, left = ([a for a, what in zip(segments, lost) if what == n] for n in (1, lib.VMEM_TORCH_CLAIMED))
            return went, left

    def _reserve(self, size: int) -> None:
        """Have the pool give so many bytes for segments to come, which stay with the lease; 0: no more.

        `LeaseStats.lacking_bytes` says how many have not come. Meanwhile, allocations wait although others refuse.
        Raises `OutOfMemory` if the minimums of all members would exceed the pool.
        """
        self._owned()
        _check(lib.vmem_torch_reserve(self._place, size))

    # ---- graphs ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        """Capture a CUDA graph whose memory is in the lease: ``with lease.graph(g): ...``, within a block of the lease.

        The graph gets segments of its own, which are not parked while any graph of the lease exists, so that it can be
        replayed at any time.

        Parameters
        ----------
        graph : torch.cuda.CUDAGraph
        options
            As for ``torch.cuda.graph``, except `pool`.
        """
        with self._lock:
            pools = self._open()
            if not self._end:
                raise RuntimeError("capture within a with block of the lease: its segments may be parked now")
            if pools.graphs is None:
                pools.graphs = self._torch.new_pool(self._pair)
            # PyTorch 2.10 and older prefer the pool that was routed first, which would be the eager one.
            with self._aside(), self._torch.graph(graph, pools.graphs, options):
                yield

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A part of a ``with`` block in which PyTorch allocates outside the lease. No segment is parked."""
        with self._lock:
            pools, end = self._open(), self._end
            assert end is not None
            self._end = None
            _end_routing(end)
            try:
                yield
            finally:
                self._route(pools)

    # ---- memory ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all segments in which no tensor lives, and begin anew with none.

        PyTorch never gives a pool's segments back by itself, so use it when ``reserved`` is much more than
        ``allocated``, or between phases whose tensors have other sizes. Segments with a living tensor, and those of
        captured graphs, go when PyTorch next empties its cache after their end.

        Raises RuntimeError within a block.
        """
        with self._lock:
            self._open()
            if self._end:
                raise RuntimeError("reset() must not be called within a with block of the lease")
            self._pools = None  # before the new ones: PyTorch frees the old segments now
            self._pools = _Pools(self._torch, self._pair)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use."""
        pools = self._open()
        segments = [s for pool in (pools.eager, pools.graphs) if pool is not None for s in self._torch.snapshot(pool)]
        return sum(b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")

    def trim(self) -> None:
        """Give back the pages of all parked segments now, and return device memory that the lease does not use to the
        system, for users outside the `KVPool`. Waits until all kernels of the device have ended.

        Raises `VmemError` (EBUSY) while a CUDA graph is being captured.
        """
        self._owned()
        _check(lib.vmem_torch_trim(self._place))

    def stats(self) -> LeaseStats:
        """Return the current `LeaseStats`."""
        self._owned()
        raw = structure("vmem_torch_stats")
        _check(lib.vmem_torch_get_stats(self._place, raw))
        return LeaseStats(**{field.name: int(getattr(raw, field.name)) for field in fields(LeaseStats)})

    @property
    def shortage(self) -> Shortage:
        """The `Shortage` of the last allocation or entry, in any thread, that found too little memory.

        ``torch.OutOfMemoryError`` does not carry it. Its pages are the lease's: 2 MiB, or with ``fine=True`` the
        smallest of the backend.
        """
        self._owned()
        raw = structure("vmem_kv_shortage")
        _check(lib.vmem_torch_last_shortage(self._place, raw))
        return shortage_of(raw)

    def close(self) -> None:
        """End the lease. The memory of a segment in which a tensor lives goes when PyTorch frees it.

        Raises RuntimeError within a block.
        """
        with self._lock:
            if self._end:
                raise RuntimeError("close() must not be called within a with block of the lease")
            self._pools = None
            self._drop()


def torch_pool(
    pool: KVPool,
    most: SupportsIndex | None = None,
    *,
    fine: bool = False,
    threads: Literal["all", "this"] = "all",
    wait: float = 10.0,
    context: Context | None = None,
    device: SupportsIndex = 0,
    name: str = "torch",
) -> Lease:
    """Make a `Lease`: PyTorch allocates in the budget of a pool of KV caches.

    ::

        lease = pyvmem.torch_pool(pool, most=40 << 30)
        with lease:                                        # pages come: exactly what is missing
            loss = model(batch)
            loss.backward()
            optimizer.step()
        # others may have the pages, if no tensor of the lease lives

    Parameters
    ----------
    pool : KVPool
        The lease becomes a member with a minimum of 0.
    most : int, optional
        The largest number of bytes of pages; by default the pool's budget.
    fine : bool
        Use the smallest pages of the backend instead of 2 MiB. They fit wherever the KV caches left a gap, and
        scattered ones take much longer to map.
    threads : {"all", "this"}
        Whose allocations go to the lease within a block. "this" runs backward in the thread that calls it. Use it if
        other threads of the process allocate memory on the device that is to outlive the block.
    wait : float
        The most seconds that entering a block waits for what the KV caches give back. An allocation waits 10 s at
        most, and not if no member can give.
    context : Context, optional
        By default, that of a KV cache of this process in the pool, or else a new one. Members of one context exchange
        pages without allocating device memory (on cuda, leases among themselves).
    device : int
        CUDA device ordinal, if a new context is created.
    name : str
        Of the pool's member.

    Returns
    -------
    Lease
        For use in ``with`` blocks.

    Raises
    ------
    VmemError
        EOPNOTSUPP: the context has no GPU; PyTorch has no memory pools for CPU memory. EMFILE: the process has 16
        leases. ENODEV: PyTorch sees no GPU.
    InvalidArgument
        `most` is less than a page.
    """
    if not isinstance(pool, KVPool):
        raise TypeError(f"pool must be a KVPool, not {shown(pool)}")
    if not isinstance(context, Context | None):
        raise TypeError(f"context must be a Context, not {shown(context)}")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {shown(name)}")
    if not isinstance(wait, Real) or not 0 <= wait <= 1e6:
        raise ValueError(f"wait must be a number of seconds between 0 and 1000000, not {shown(wait)}")
    bytes = 0 if most is None else uint("most", most)
    if most is not None and not bytes:
        raise ValueError("most 0 must be at least a page")
    fine = flag("fine", fine)
    threads = one_of("threads", threads, ("all", "this"))
    own = context or pool._context(uint("device", device, 31)) or Context(device=device)
    if "gpu" not in own.capabilities:
        raise VmemError(
            errno.EOPNOTSUPP,
            f"the pool's memory is on the {own.backend} backend: PyTorch has memory pools only for CUDA, not for "
            "CPU tensors",
        )
    torch_pools = TorchPools(own.device)
    torch_pools.check()
    page_size = min(own.page_sizes) if fine else 2 * MIB
    return Lease(pool, own, torch_pools, name=name, page_size=page_size, most=bytes, threads=threads, wait=float(wait))
