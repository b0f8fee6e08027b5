"""The weights of a model in the pool of its engine: they sleep without a copy, and wake with what nobody took.

While the model is loaded, all allocations of the process go to a lease of the pool (`pyvmem.lease`). A thread copies
the weights to pinned host memory once. To sleep, the segments are parked: their pages stay until another member of the
pool asks. A segment that has no copy yet stays on the device, and is parked as soon as the thread has copied it. To
wake is to take back what went, all or nothing, and to copy that alone.

Weights may change in place, by reinforcement learning, adapters or a rebalancing of experts. Before they are parked,
each segment is therefore compared with its copy by a sum over the device's memory, and copied again if it differs.

`sleeper` calls it. It calls `sums`, `to_device` and the pool's `pyvmem.lease`. Begin with `Weights.park` and
`Weights.wake`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pyvmem._ffi import ffi, lib
from pyvmem.core import Context
from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.kv.pool import KVPool
from pyvmem.lease import MIB, Lease, TorchPools
from pyvmem.sleep.sums import Sums
from pyvmem.sleep.to_device import ToDevice
from pyvmem.tensor import tensor_at

LOG = logging.getLogger(__name__)
PAGE = 2 * MIB
AT_ONCE = 256 * MIB  # of memory that comes back while a kernel copies into what came before
AHEAD = 1536 * MIB  # is claimed first, and copied in about the time in which another model gives the rest
PORTION, BUSY = 256 * MIB, 1.0  # while requests run, so many bytes are copied, and then none for so many seconds
ARENA = 32 * MIB  # pinned at once, in which few kernels begin; a power of two, to which torch's allocator rounds
ALIGN = 512  # bytes, as of the blocks of torch's allocator
AGAIN = 10.0  # seconds after which a model that sleeps tries to copy what the host had no memory for
LOAD_WAIT = 60.0  # seconds in which a model that is loaded gets memory from the other members of the pool


class HostPool:
    """Segments on the host, where torch has no memory pools."""

    numbers = itertools.count(1)

    def __init__(self, place: int) -> None:
        self.id = 0, next(self.numbers)
        self._alloc = getattr(lib, f"vmem_torch_alloc_{place}")
        self._free = getattr(lib, f"vmem_torch_free_{place}")
        self.segments: dict[int, int] = {}

    def alloc(self, size: int) -> int:
        """Allocate a segment; returns its address. Raises MemoryError."""
        address = int(ffi.cast("uintptr_t", self._alloc(size, 0, ffi.NULL)))
        if not address:
            raise MemoryError(f"the pool has no {size} bytes for weights")
        self.segments[address] = size
        return address

    def __del__(self) -> None:
        for address, size in self.segments.items():
            self._free(ffi.cast("void *", address), size, 0, ffi.NULL)


class HostPools(TorchPools):
    """Takes the place of torch's memory pools where there is no GPU."""

    def __init__(self) -> None:
        super().__init__(0)

    def check(self) -> None:
        pass

    def new_pool(self, place: int) -> HostPool:
        return HostPool(place)

    def snapshot(self, pool: HostPool) -> list[dict[str, Any]]:
        return [dict(address=a, total_size=n, blocks=[dict(state="active_allocated")])
                for a, n in pool.segments.items()]  # fmt: skip

    def is_shared(self, pool: HostPool) -> bool:
        return False

    def route(self, pool: HostPool, all_threads: bool) -> Callable[[], None]:
        return lambda: None

    def settle(self) -> None:
        pass


class HostCopy:
    """A copy of segments in host memory, pinned if they are on a GPU."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._arenas: list[torch.Tensor] = []
        self._at: dict[int, int] = {}  # where the copy of the segment at an address begins
        self._end = 0

    def __contains__(self, address: int) -> bool:
        """Return whether there is memory for the copy of this segment."""
        return address in self._at

    @property
    def bytes(self) -> int:
        """Bytes of the segments for which there is memory."""
        return self._end

    def reserve(self, address: int, size: int) -> None:
        """Allocate the memory of a segment's copy, which takes long. Raises RuntimeError if the host has none."""
        if address not in self._at:
            while len(self._arenas) * ARENA < self._end + size:
                self._arenas.append(torch.empty(ARENA, dtype=torch.uint8, pin_memory=self._pinned))
            self._at[address] = self._end
            self._end += size

    def parts(self, address: int, size: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The parts of a reserved segment's copy: (memory, first byte of the segment, its end)."""
        at, done = self._at[address], 0
        while done < size:
            arena, offset = divmod(at + done, ARENA)
            n = min(size - done, ARENA - offset)
            yield self._arenas[arena][offset : offset + n], done, done + n
            done += n

    def drop(self) -> None:
        """Give the memory back."""
        self._arenas.clear()
        self._at.clear()
        self._end = 0


class Weights:
    """The weights of one worker, as a member of its pool with a minimum of 0.

    Parameters
    ----------
    pool : KVPool
    context : Context
        Of the weights alone.
    name : str
        Of the pool's member.
    log : logging.Logger
        The engine's.

    Attributes
    ----------
    lease : Lease
        The pool's member, whose segments hold the weights.
    is_alone : Callable[[], bool]
        Returns whether no other process computes on the device. Then a kernel may copy.
    """

    def __init__(self, pool: KVPool, context: Context, name: str = "weights", log: logging.Logger = LOG) -> None:
        self._log = log
        self._gpu = "gpu" in context.capabilities
        torch_pools = TorchPools(context.device) if self._gpu else HostPools()
        torch_pools.check()
        self._device = torch.device("cuda", context.device) if self._gpu else torch.device("cpu")
        # Others take segments one by one, and an allocation goes back whole: so allocations are small.
        self.lease = Lease(pool, context, torch_pools, name=name, page_size=PAGE, wait=LOAD_WAIT, alloc_wait=LOAD_WAIT,
                           small=True)  # fmt: skip
        self._unreserved = 0  # bytes that are to be reserved
        self._lock = threading.RLock()
        self._copy = HostCopy(self._gpu)
        self._sum = Sums(self._device)
        self._to_device = ToDevice(self._device)
        self.is_alone: Callable[[], bool] = bool
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}  # by address and bytes
        self._sums: dict[int, int | None] = {}  # of the segments whose copies are right, if they are known
        self._asleep = False
        self._parked: list[int] = []  # segments
        self._lost: set[int] = set()  # segments whose contents are not there, but their copies are
        self._end = 0  # of what is used in the host's last segment
        self._last = 0
        self._thread: threading.Thread | None = None
        self._busy: Callable[[], bool] = bool
        self._stop = False
        self._portion = PORTION  # bytes that were pinned since the last pause
        self._again, self._missing = math.inf, 0  # when to copy what is missing, and its bytes as the log has them

    # ---- loading ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The context in which the model is loaded. Raises torch's or Python's error if the pool has too little."""
        with self.lease:
            yield

    def reserve(self, size: int) -> None:
        """Have the other members give `size` bytes, which stay here until the model is loaded; 0: it is.

        `lacking` says how much has not come yet.
        """
        self._unreserved = -(-size // PAGE) * PAGE
        if not size:
            self.lease._reserve(0)

    def lacking(self) -> int:
        """Bytes that have not come of what is reserved, or for which the loading of the model waits."""
        if self._unreserved:
            try:
                self.lease._reserve(self._unreserved)
            except (OutOfMemory, VmemError):  # the minimums of other members are in the way, until these sleep
                return self._unreserved
            self._unreserved = 0
        return self.lease.stats().lacking_bytes

    def make_room(self, size: int, seconds: float, lacks: Callable[[int], None]) -> None:
        """Have the other members give `size` bytes, and the driver have them, as far as they do in time.

        The device may have less memory than the pool's budget. An allocation tells the pool, if it fails.

        lacks : called with the bytes that are missing before each attempt but the first.
        """
        pair, size = self.lease._pair, -(-size // PAGE) * PAGE
        device, end = self._device.index or 0, time.monotonic() + seconds
        while (address := getattr(lib, f"vmem_torch_alloc_{pair}")(size, device, ffi.NULL)) == ffi.NULL:
            if time.monotonic() >= end:
                break
            lacks(max(self.lease.stats().short_bytes, 1))
            time.sleep(0.02)
        else:
            getattr(lib, f"vmem_torch_free_{pair}")(address, size, device, ffi.NULL)
        self.lease.trim()
        self.lease.context.trim()

    def adopt(self, modules: Iterable[torch.nn.Module]) -> None:
        """Move the parameters and buffers of modules to the pool, where torch has no memory pools."""
        moved: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for module in modules:
                for tensor in itertools.chain(module.parameters(), module.buffers()):
                    old = tensor.untyped_storage()
                    if not old.nbytes() or not old.data_ptr():
                        continue
                    if old.data_ptr() not in moved:
                        new = self._bytes(old.nbytes())
                        new.untyped_storage().copy_(old)
                        moved[old.data_ptr()] = moved[new.data_ptr()] = new.untyped_storage()
                    view = torch.empty(0, dtype=tensor.dtype)
                    tensor.data = view.set_(
                        moved[old.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride()
                    )
                    tensor._vmem_pool = self.lease.mem_pool  # type: ignore[attr-defined] # it ends with the last one

    def _bytes(self, size: int) -> torch.Tensor:
        """Memory of the pool, uint8[size], on the host."""
        padded = -(-size // ALIGN) * ALIGN
        pool = self.lease.mem_pool
        if not self._last or self._end + padded > pool.segments[self._last]:
            self._last, self._end = pool.alloc(-(-padded // PAGE) * PAGE), 0
        address, self._end = self._last + self._end, self._end + padded
        return tensor_at(self.lease._owned(), address, (size,), torch.uint8, "cpu")

    # ---- the copy --------------------------------------------------------------------------------------------

    def copy_behind(self, busy: Callable[[], bool] = bool) -> None:
        """Begin to copy the weights to the host, in a thread. No CUDA graph may be captured meanwhile.

        busy : whether requests run. Then the copy pauses between portions: CUDA pins a GiB of host memory in about one
            second, in which it launches few kernels.
        """
        with self._lock:
            self._busy = busy
            if self._thread is None:
                self._thread = threading.Thread(target=self._copy_all, name="vmem-weights", daemon=True)
                self._thread.start()

    def _copy_all(self) -> None:
        begin, logged = time.monotonic(), time.monotonic()
        size, done, retry = 0, 0, math.inf
        try:
            segments = self.lease._segments()
            size = sum(segments.values())
            for address, n in segments.items():
                self._pause(n)
                self._copy.reserve(address, n)  # not under the lock: a model that is to sleep does not wait for it
                with self._lock:
                    if self._stop:
                        return
                    self._copy_one(address, n)
                done += n
                if time.monotonic() > logged + 5:
                    logged = time.monotonic()
                    self._log.info("vMem: copied %.1f of %.1f GiB of weights to the host", done / 2**30, size / 2**30)
            if size:
                self._log.info("vMem: %.2f GiB of weights are in the pool, and in pinned host memory after %.1f s",
                               size / 2**30, time.monotonic() - begin)  # fmt: skip
            self._missing = 0
            self._to_device.prepare()
        except Exception as error:
            retry = time.monotonic() + AGAIN
            if self._missing != size - done:
                self._missing = size - done
                self._log.warning("vMem: %.2f of %.2f GiB of weights have no copy in host memory. They stay on the "
                                  "device while the model sleeps: %s", self._missing / 2**30, size / 2**30,
                                  str(error))  # fmt: skip
        finally:
            with self._lock:
                self._thread, self._again = None, retry

    def copy_again(self) -> None:
        """Try to copy what the host had no memory for, now and then while the model sleeps."""
        if self._asleep and time.monotonic() >= self._again:
            self._again = math.inf
            self.copy_behind(self._busy)

    def _pause(self, size: int) -> None:
        """Before `size` bytes are pinned: wait after each portion, while requests run."""
        again = time.monotonic() + BUSY
        while self._portion >= PORTION and self._hurts() and time.monotonic() < again:
            time.sleep(BUSY / 50)
        self._portion = size + (self._portion if self._portion < PORTION else 0)

    def _hurts(self) -> bool:
        """Return whether requests run now, so that pinning memory would delay them."""
        return not self._asleep and not self._stop and self._busy()

    def _copy_one(self, address: int, size: int) -> None:
        """Copy a segment, if it has no copy, and park it if the model sleeps."""
        if address in self._parked:
            return
        if address not in self._sums:
            self._refresh({address: size})
        if self._asleep:
            self.lease._park_segments([address])
            self._parked.append(address)

    def _memory(self, address: int, size: int) -> torch.Tensor:
        """A segment, uint8[size]. Kept: to make one takes 40 us, and a sleep compares hundreds."""
        if (address, size) not in self._tensors:
            made = tensor_at(self.lease._owned(), address, (size,), torch.uint8, self._device)
            self._tensors[address, size] = made
        return self._tensors[address, size]

    def _refresh(self, segments: dict[int, int]) -> None:
        """Copy the segments that differ from their copies. Memory is reserved for all of them."""
        now = self._sums_of(segments)
        stale = [a for a in segments if a not in now or self._sums.get(a) != now[a]]
        for address in stale:
            self._sums.pop(address, None)
            memory = self._memory(address, segments[address])
            for part, begin, end in self._copy.parts(address, segments[address]):
                part.copy_(memory[begin:end], non_blocking=True)
        if stale:
            self._synchronize()
        self._sums.update((a, now.get(a)) for a in stale)

    def _sums_of(self, segments: dict[int, int]) -> dict[int, int]:
        """The sums of these segments, or none of them if the device is full: then all are copied, which takes none."""
        try:
            sums = [self._sum(self._memory(a, n)) for a, n in segments.items()]
            return dict(zip(segments, torch.stack(sums).tolist())) if sums else {}
        except torch.OutOfMemoryError:
            return {}

    def _synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize(self._device)

    # ---- sleep and wake --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that has the weights."""
        return self._device

    @property
    def bytes(self) -> int:
        """Bytes of the weights' segments. It is asked many times a second: torch's own snapshot would take too long."""
        return self.lease.stats().bytes

    @property
    def held(self) -> int:
        """Bytes of them that are on the device now."""
        return self.lease.stats().held_bytes

    @property
    def gives(self) -> int:
        """Bytes on the device that others can have while the model sleeps: those of which there is a copy, or which
        nobody wants back.
        """
        stats = self.lease.stats()
        given = stats.parked_bytes if self._asleep else self._copy.bytes
        return max(stats.held_bytes - max(stats.bytes - given, 0), 0)

    @property
    def parked(self) -> bool:
        return self._asleep

    def park(self, keep: bool = True, busy: Callable[[], bool] | None = None) -> None:
        """Let the other members of the pool have the weights' memory; no kernel may use them until `wake`.

        keep: whether they come back as they are now. Then segments without a copy stay on the device until a thread has
        copied them. busy: as for `copy_behind`.
        """
        with self._lock:
            if self._asleep:
                return
            self._synchronize()
            self._busy = busy or self._busy
            segments = self.lease._segments()
            if keep:
                copied = {address: n for address, n in segments.items() if address in self._copy}
                self._refresh(copied)
            else:
                copied = segments
                self._sums.clear()
            self.lease._park_segments(list(copied))
            self._asleep, self._parked = True, list(copied)
            if len(copied) < len(segments):
                self.copy_behind(self._busy)

    def wake(
        self, wait: float, came: Callable[[], None] = lambda: None, queued: bool = False, ahead: bool = False
    ) -> int:
        """Take the memory back, all or nothing, and copy what went; returns the bytes copied.

        wait: the most seconds that the other members have to give it. Raises `OutOfMemory`; then the weights are parked
        as before, and its `missing` says how many bytes they wait for. came: called when all of the memory is claimed.
        queued: whether to return while the current stream copies. Only kernels that wait for this stream may use the
        weights then. ahead: whether copies may begin before all is claimed, because others will hardly fail to give it.
        """
        with self._lock:
            if not self._asleep:
                return 0
            try:
                copied = self._take_and_copy(wait, came, ahead)
            except BaseException:
                self.lease._park_segments(self._parked)  # also what has come
                raise
            if not queued:
                self._synchronize()
            self._lost.clear()
            self._asleep, self._parked = False, []
            return copied

    def _take_and_copy(self, wait: float, came: Callable[[], None], ahead: bool) -> int:
        """Take the memory back in portions, and copy into each while the next one comes; returns the bytes copied.

        A copy engine delays what still comes, so that it begins when all has.
        """
        by_kernel = self._to_device.has_kernel and self.is_alone()
        meanwhile, copied = by_kernel or not self._gpu, 0
        ahead = ahead and meanwhile and self.bytes - self.held > AHEAD
        segments = self.lease._segments() if ahead else {}  # else once all is claimed: it takes long
        at_once = AT_ONCE if meanwhile else self.lease.stats().bytes
        for address in self._take(self._within(segments, AHEAD), time.monotonic() + wait, came, at_once):
            segments = segments or self.lease._segments()
            memory = self._memory(address, segments[address])
            for part, begin, end in self._copy.parts(address, segments[address]):
                self._to_device(memory[begin:end], part, by_kernel)
                copied += end - begin
        return copied

    def _within(self, segments: dict[int, int], most: int) -> int:
        """How many of the parked segments, from the first on, take at most so many bytes; 0 if all do."""
        sizes = itertools.accumulate(segments.get(address, 0) for address in self._parked)
        n = sum(size <= most for size in sizes)
        return n if n < len(self._parked) else 0

    def _take(self, first: int, end: float, came: Callable[[], None], at_once: int) -> Iterator[int]:
        """Take the memory back, that of the `first` segments before others are claimed; yield those to copy into."""
        claims = [self._parked[:first], self._parked[first:]] if first else [self._parked]
        for claim in claims:
            lost, left = self.lease._unpark_segments(claim, max(end - time.monotonic(), 0.0), at_once)
            self._lost.update(lost)  # whatever fails from here on
            if claim is claims[-1]:
                came()
            yield from self._lost.intersection(claim, self._sums).difference(left)
            while left:
                lost, left = self.lease._unpark_segments(left, 0.0, at_once)
                self._lost.update(lost)
                yield from self._sums.keys() & lost

    def close(self) -> None:
        """Leave the pool. The memory goes when the last tensor does."""
        self._stop = True
        with self._lock:
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                self._synchronize()  # a kernel may read the copy
            self._copy.drop()
            self._tensors.clear()
            self.lease.close()
