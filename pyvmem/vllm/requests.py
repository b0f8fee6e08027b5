"""Requests in slots: translates what vLLM's worker does with its requests into calls to the KV cache.

This module does not import vLLM. While a request runs, it has an index in vLLM's tables and a slot of the cache. The
two differ, because a slot stays in use after its request until the kernels that read it have ended. vLLM's scheduler
names the blocks of each request. A new block is bound to the pages at its place in the slot. Blocks of the prefix cache
are mapped at the slot as well.

Steps and fences: vLLM prepares step k on the CPU while the GPU computes step k - 1. `begin_step` marks fence k behind
all kernels enqueued so far, and waits for fence k - 1, which has long been passed if vLLM runs one step ahead. A slot
whose request ends in step k may be freed when fence k is passed.

Slots linger: to free a slot whose blocks the prefix cache still has, the driver must unmap them, and it must map the
pages of the next request. So an ended request's slot is freed when most of its blocks are forgotten. Its pages then
stay where they are for the next request, and no call to the driver is made.

SPDX-License-Identifier: MIT
"""

import collections
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pyvmem.errors import OutOfMemory
from pyvmem.kv import KVCache
from pyvmem.kv_blocks import BlockNames
from pyvmem.vllm.waits import Waits

# (slot, first block, names of the blocks, how many of them exist already)
Operation = tuple[int, int, Sequence[int], int]


def in_order(ops: list[Operation]) -> Iterator[list[Operation]]:
    """A step's operations in groups, each of which shares only blocks that exist or that groups before it write.

    vLLM's scheduler lists resumed requests after new ones, although a new one may share what a resumed one writes.
    """
    while ops:
        unwritten = {i for _, _, ids, hits in ops for i in ids[hits:]}
        waits = [not unwritten.isdisjoint(ids[:hits]) for _, _, ids, hits in ops]
        ready = [op for op, later in zip(ops, waits) if not later]
        yield ready or ops
        ops = [op for op, later in zip(ops, waits) if later] if ready else []


class Fences(Protocol):
    """Marks in the order of the kernels, numbered from 1."""

    def mark(self) -> int:
        """Place a mark behind all kernels enqueued so far, and return its number."""

    def wait(self, n: int) -> None:
        """Wait until the kernels before mark n have ended."""

    def done(self, n: int) -> bool:
        """Whether the kernels before mark n have ended."""


@dataclass
class Writer:
    """A request as the one that wrote blocks: how many, and how many of these still have a name."""

    slot: int
    wrote: int = 0
    named: int = 0

    @property
    def forgotten(self) -> bool:
        """Whether most of its blocks have no name any more."""
        return 2 * self.named <= self.wrote


class RequestSlots:
    """The requests of one worker.

    Parameters
    ----------
    cache : KVCache
        Has more slots than `max_requests`, because slots of ended requests wait for their fence.
    block_tokens : int
        Tokens of one of the scheduler's blocks.
    max_requests : int
    fences : Fences
    names : BlockNames or None
        None without a prefix cache: blocks then need no names.
    wait_seconds : int
        How long a step waits for memory that another process uses before it fails.
    table_blocks : int
        The most blocks in a request's table.
    wake : callable or None
        Called at the end of a step that leaves much to clear up, so that another thread, which calls `tend` from time
        to time, does so at once. None: the step clears up itself.
    """

    IDLE_SECONDS = 0.2
    MAP_SECONDS = 2e-5  # the KV cache's part of a step that maps nothing takes less
    PORTION = 128  # blocks that are dropped at a time, so that a step does not wait long for the lock
    TABLE_AHEAD = 64  # blocks for which a request's table is written beyond those that it has
    TRIM_BYTES = 1 << 30  # that an idle cache releases at a time
    LINGER = 2  # of the slots beyond max_requests, one in so many may linger

    def __init__(
        self,
        cache: KVCache,
        block_tokens: int,
        max_requests: int,
        fences: Fences,
        names: BlockNames | None = None,
        wait_seconds: float = 60,
        table_blocks: int = 0,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.cache = cache
        self.names = names
        self.block_tokens = block_tokens
        self.blocks_per_slot = cache.layout(0)[3] // block_tokens
        self._table_blocks = table_blocks
        self._wake = wake
        self.lock = threading.RLock()
        self._fences = fences
        self._slots = [-1] * max_requests
        self._blocks = [0] * max_requests  # of each request
        self._tabled = [0] * max_requests  # for which its table has been written
        self._lengths = np.zeros(cache.slots, np.int32)
        self._ops: list[Operation] = []  # of this step
        self._retiring: collections.deque[tuple[int, int]] = collections.deque()  # (fence, slot)
        self._lingering: dict[int, Writer] = {}  # slots of ended requests, the first to end first
        self._most_lingering = (cache.slots - max_requests) // self.LINGER
        self._writers = [Writer(slot) for slot in range(cache.slots)]  # the slots' last requests
        self._named: dict[int, Writer] = {}  # blocks whose names have pages
        self._dropped: set[int] = set()  # blocks that the scheduler has forgotten and that may have pages still
        self._now = 0
        self._in_step = False  # between begin_step and back
        self._last_ended = (-1, -1)  # (index, slot)
        self._waiting: Sequence[tuple[int, int]] = ()
        self._wait_seconds = wait_seconds
        self._full_budget = self._budget = cache.stats().budget_pages
        self.limit_pages = self._budget
        self._short_budget = 0  # steps so far that the budget was too small for
        self._last_step = time.monotonic()
        self._trimmed = True
        self._first = True  # no step since requests last ran
        self._step_maps = 0
        self.waits = Waits()
        self.fence_waits = 0  # steps that waited for a fence because slots or pages were short
        self.trim_seconds: collections.deque[float] = collections.deque(maxlen=1000)  # of giving everything back
        self.hit_blocks = 0

    # ---- a step, in this order ---------------------------------------------------------------------------------

    def begin_step(self, dropped: Sequence[int] = (), waiting: Sequence[tuple[int, int]] = ()) -> None:
        """Begin a step. Must be the first call of a step.

        Parameters
        ----------
        dropped
            Blocks whose contents the scheduler has forgotten.
        waiting
            Of each of the next requests: its tokens after its first step, and how many of these the prefix cache has.
            The background thread backs the others.
        """
        self.waits.begin(self._first)
        with self.lock:
            self.waits.add("lock")
            self._now = self._fences.mark()
            self._fences.wait(self._now - 1)
            self.waits.add("fence")
            self._in_step = True
            self._dropped.update(dropped)
        self._expect(waiting)
        self.waits.add("thread")

    def announce(self, waiting: Sequence[tuple[int, int]]) -> None:
        """Announce the next requests outside a step, while no request runs."""
        with self.lock:
            self._last_step = time.monotonic()
            self._trimmed = False
            self._expect(waiting)

    def _expect(self, waiting: Sequence[tuple[int, int]]) -> None:
        if waiting != self._waiting:
            self._waiting = waiting
            most = self.cache.max_tokens
            self.cache.expect([min(n, most) for n, _ in waiting], [min(cached, most) for _, cached in waiting])

    def finish(self, index: int) -> None:
        """The request at `index` has ended or is preempted. Kernels of the previous step may still use its slot."""
        slot = self._slots[index]
        if slot < 0:
            return
        with self.lock:
            self._slots[index] = -1
            self._ops = [op for op in self._ops if op[0] != slot]
            self._retiring.append((self._now, slot))
            self._last_ended = index, slot

    def settle(self, indices: Iterable[int], dropped: Sequence[int] = ()) -> None:
        """The requests at these indices have ended, outside a step. Kernels of the last step may still run."""
        with self.lock:
            self._now = self._fences.mark()
            self._trimmed = False
            self._first = True
            for index in indices:
                self.finish(index)
            self._dropped.update(dropped)
        self._later()

    def start(self, index: int, ids: Sequence[int], computed: int) -> Sequence[int]:
        """Start a request with these blocks; `computed` tokens have rows already.

        Returns the numbers for its table. They include the first of the blocks that will follow, whose numbers are
        constant too, so most steps write no table.
        """
        hits = min(-(-computed // self.block_tokens), len(ids))
        self.waits.go()
        with self.lock:
            self.waits.add("lock")
            if self._slots[index] >= 0:
                self.finish(index)
            if hits and self.names is None:
                slot, hits = self._take_back(index, computed), 0
            else:
                slot = self._alloc(len(ids) * self.block_tokens, hits * self.block_tokens)
            self._slots[index] = slot
            self._writers[slot] = Writer(slot)
            self._ops.append((slot, 0, ids, hits))
            self.hit_blocks += hits
            self.waits.add("slot")
        self._blocks[index] = len(ids)
        self._tabled[index] = 0
        return self._table(index)

    def extend(self, index: int, ids: Sequence[int]) -> Sequence[int]:
        """Add the request's next blocks. Returns the numbers to add to its table, often none."""
        first = self._blocks[index]
        self._ops.append((self._slots[index], first, ids, 0))
        self._blocks[index] = n = first + len(ids)
        return self._table(index) if n > self._tabled[index] else ()

    def back(self) -> None:
        """Back everything that the step's kernels access."""
        self._last_step = time.monotonic()
        self._in_step = False
        if not (self._ops or self._retiring or self._dropped) and self._now % 64:
            return
        self.waits.go()
        with self.lock:
            self.waits.add("lock")
            ops, self._ops = self._ops, []
            self._trimmed = False
            if self.names is None:
                for slot, first, ids, _ in ops:
                    self._lengths[slot] = (first + len(ids)) * self.block_tokens
                self._step()
            else:
                self._back_named(ops, self.names)
            self.waits.end(lambda: self._fences.done(self._now))
            self._first = False
        self._later()

    @property
    def busy(self) -> bool:
        """Whether there was a step since `tend` last found the cache idle."""
        return not self._trimmed

    # ---- after a step ------------------------------------------------------------------------------------------

    def _later(self) -> None:
        if self._wake is None:
            self.clear_up()
        elif len(self._dropped) > 4 * self.PORTION:  # fewer can wait for the next regular call
            self._wake()

    def clear_up(self) -> None:
        """Free slots whose kernels have ended, and drop forgotten blocks.

        Both may give memory back and unmap what slots shared, which takes milliseconds.
        """
        while True:
            with self.lock:
                self._drop_forgotten(self.PORTION)
                if not self._dropped:  # or a slot would be freed while its blocks still have names
                    self._reap(self._now if self._in_step else None)  # a step may take back what ended in it
                    return
            time.sleep(1e-4)  # a step that waits for the lock comes first

    def _drop_forgotten(self, most: int) -> None:
        self._drop([self._dropped.pop() for _ in range(min(most, len(self._dropped)))])

    # ---- the rest ----------------------------------------------------------------------------------------------

    def _table(self, index: int) -> range:
        """The numbers that follow those in the request's table."""
        first, start = self._tabled[index], self._slots[index] * self.blocks_per_slot
        blocks = self._blocks[index]
        self._tabled[index] = end = max(blocks, min(blocks + self.TABLE_AHEAD, self._table_blocks))
        return range(start + first, start + end)

    def _back_named(self, ops: list[Operation], names: BlockNames) -> None:
        # Reassigned names are dropped before anything is backed, because the scheduler counts on their pages.
        changed = [i for _, _, ids, hits in ops for i in ids[hits:]]
        self._dropped.difference_update(changed)
        self._drop(changed)
        self.waits.add("forget")
        for group in in_order(ops):
            slots: list[int] = []
            index: list[int] = []
            ids: list[int] = []
            for slot, first, blocks, hits in group:
                if hits:
                    self.waits.go()
                    names.attach(slot, blocks[:hits])
                    self.waits.add("attach")
                n = len(blocks)
                self._lengths[slot] = (first + n) * self.block_tokens
                slots += [slot] * (n - hits)
                index += range(first + hits, first + n)
                ids += blocks[hits:]
            self._step()
            if ids:
                names.bind(*np.array((slots, index, ids), np.uint32))
                for slot, _, blocks, hits in group:
                    writer, new = self._writers[slot], blocks[hits:]
                    self._named.update(dict.fromkeys(new, writer))
                    writer.wrote += len(new)
                    writer.named += len(new)
            self.waits.add("bind")

    def _drop(self, ids: Iterable[int]) -> None:
        """Drop these blocks' names, where they have pages, and release pages that no slot has mapped."""
        gone = [i for i in ids if i in self._named]
        if not gone or self.names is None:
            return
        self.names.drop(np.array(gone, np.uint32))
        for i in gone:
            writer = self._named.pop(i)
            writer.named -= 1
            if writer.forgotten and self._lingering.get(writer.slot) is writer:
                self._free(writer.slot)

    def _free(self, slot: int) -> None:
        """Free a slot that no kernel accesses."""
        self._lingering.pop(slot, None)
        self.cache.free_reqid(slot)

    def _free_lingering(self, left: int = 0) -> None:
        while len(self._lingering) > left:
            self._free(next(iter(self._lingering)))

    def _alloc(self, tokens: int, prefix_tokens: int) -> int:
        slot = self.cache.alloc_reqid(tokens, prefix_tokens=prefix_tokens)
        while slot < 0 and (self._lingering or self._retiring):
            if not self._lingering:
                self.fence_waits += 1
                self._fences.wait(self._retiring[0][0])
                self._reap()
            self._free_lingering(max(len(self._lingering) - 1, 0))
            slot = self.cache.alloc_reqid(tokens, prefix_tokens=prefix_tokens)
        if slot < 0:
            raise RuntimeError(f"all {self.cache.slots} slots of the KV cache are taken")
        return slot

    def _take_back(self, index: int, computed: int) -> int:
        """The slot of a session that goes on with more input: vLLM has just removed the request, and adds it again."""
        last, slot = self._last_ended
        if last != index or (self._now, slot) not in self._retiring:
            raise RuntimeError(f"a request starts with {computed} computed tokens, but there is no prefix cache")
        self._retiring.remove((self._now, slot))
        return slot

    def _reap(self, before: int | None = None) -> None:
        """Free the slots whose kernels have ended, or let them linger. before: only those of earlier fences."""
        while self._retiring and self._fences.done(self._retiring[0][0]):
            if self._retiring[0][0] == before:
                break
            _, slot = self._retiring.popleft()
            self._lengths[slot] = 0
            writer = self._writers[slot]
            if writer.forgotten:
                self._free(slot)
            else:
                self._lingering[slot] = writer
        self._free_lingering(self._most_lingering)

    def _step(self) -> None:
        self.waits.go()
        self._step_or_wait()
        maps = self.waits.add("thread") > self.MAP_SECONDS and self.cache.step_maps
        if maps and maps != self._step_maps:
            self._step_maps = maps
            self.waits.move("thread", "map")

    def _step_or_wait(self) -> None:
        deadline = None
        while self.cache.step(self._lengths) == -1:
            if self._dropped:
                self._drop_forgotten(len(self._dropped))
                continue
            if self._lingering:
                self._free_lingering()
                continue
            if self._retiring:
                if not self._fences.done(self._retiring[0][0]):
                    self.fence_waits += 1
                    self._fences.wait(self._retiring[0][0])
                self._reap()
                continue
            stats = self.cache.stats()
            self._see_limit(stats.budget_pages)  # the user may have set it since the last look
            by_budget, self._short_budget = stats.short_budget - self._short_budget, stats.short_budget
            if by_budget and self._budget < self._full_budget:
                # The limit is now smaller than what the scheduler has assigned. From the next step on, the scheduler
                # gives up prefixes and admits less. This step is already scheduled.
                want = max(stats.held_pages, self._budget) + self.cache.missing_pages
                self._set_budget(min(want, self._full_budget))
                continue
            # Another process uses the memory.
            now = time.monotonic()
            deadline = now + self._wait_seconds if deadline is None else deadline
            if now >= deadline:
                raise OutOfMemory(errno.ENOMEM, f"no memory for a step within {self._wait_seconds} s "
                                  f"(VMEM_VLLM_WAIT): {self.cache.shortage}")  # fmt: skip
            time.sleep(0.001)

    def _set_budget(self, pages: int) -> None:
        self.cache.set_budget(pages * self.cache.page_size)
        self._budget = pages

    def _see_limit(self, budget: int) -> None:
        if budget != self._budget:
            self.limit_pages = self._budget = budget
            self._full_budget = max(self._full_budget, budget)

    def poll_limit(self) -> int:
        """Pages that the KV cache may have: the budget that the user set last."""
        with self.lock:
            stats = self.cache.stats()
            self._see_limit(stats.budget_pages)
            if self._budget > self.limit_pages >= stats.held_pages:
                self._set_budget(self.limit_pages)
            return self.limit_pages

    def tend(self) -> bool:
        """Free slots whose kernels have ended, and release the kept pages of an idle cache. Called in the background.

        Returns whether another call is needed soon.
        """
        if not (self._retiring or self._dropped) and self._trimmed:
            return False
        self.clear_up()
        began = time.perf_counter()
        while not self._trimmed:
            with self.lock:
                busy = self._retiring or any(s >= 0 for s in self._slots)
                if busy or time.monotonic() - self._last_step <= self.IDLE_SECONDS:
                    return True
                done = self._release_kept(self.TRIM_BYTES)
            time.sleep(1e-4)  # a request that arrives comes first
            if done and self.names is not None:
                self.names.compact()
            with self.lock:
                self._trimmed = done and time.monotonic() - self._last_step > self.IDLE_SECONDS
        self.trim_seconds.append(time.perf_counter() - began)
        return False

    def reset(self) -> None:
        """Discard all requests. No request and no kernel may be running."""
        with self.lock:
            for index in range(len(self._slots)):
                self.finish(index)
            self._ops = []
            self._fences.wait(self._fences.mark())
            self._reap()
            self._dropped.clear()
            self._drop(list(self._named))
            self._release_kept()
            self._trimmed = True

    def _release_kept(self, most: int | None = None) -> bool:
        """Release kept pages, about `most` bytes of them. Returns whether none are left."""
        self._expect(())
        self._free_lingering()
        self.cache.wait()  # otherwise the background thread could still back the next slot
        return self.cache.reclaim(most) == 0 or most is None
