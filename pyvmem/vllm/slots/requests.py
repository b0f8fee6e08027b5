"""Requests in slots: where the blocks of each of vLLM's requests lie in a KV cache.

This module does not import vLLM. While a request runs, it has a slot of the cache, in which its rows follow each other.
vLLM's scheduler numbers the blocks of each request. The rows of a new block are shared under its number (`BlockRuns`).
Blocks of the prefix cache are mapped at the slot as well.

Steps and fences: vLLM prepares step k on the CPU while the GPU computes step k - 1. `begin` makes fence k behind all
kernels enqueued so far, and waits for fence k - 1, which has long been passed if vLLM runs one step ahead. A slot whose
request ends in step k may be freed when fence k is passed.

Slots linger: to free a slot whose blocks the prefix cache still has, the driver must unmap them, and it must map the
pages of the next request. So an ended request's slot is freed when most of its blocks are forgotten. Its pages then
stay where they are for the next request, and no call to the driver is made.

SPDX-License-Identifier: MIT
"""

import collections
import errno
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pyvmem._ffi import ffi, lib
from pyvmem.errors import OutOfMemory, _check
from pyvmem.kv.cache import KVCache

_RUNS, _NUMBERS, _FOUND = ffi.typeof("struct vmem_kv_run[]"), ffi.typeof("uint64_t[]"), ffi.typeof("uint32_t *")
_KEEP, _MOST = 1, 2**32 - 1
WAIT = 30.0  # seconds that a step waits for memory that another process uses before it fails

# (slot, first block, numbers of the blocks, how many of them exist already)
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


class Fence(Protocol):
    """A place in the order of the kernels, such as a recorded ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Wait until the kernels before it have ended."""

    def query(self) -> bool:
        """Return whether the kernels before it have ended."""


class BlockRuns:
    """The rows of each block as a run of the cache (vmem_kv.h, "runs"): the scheduler alone decides which blocks stay.

    Blocks have numbers and `tokens` tokens each: whole pages in each tensor of `cache`.

    A block is found only at its place: behind as many blocks as there are before it in the slot that shared it. vLLM
    shares a block only among requests that begin alike.
    """

    def __init__(self, cache: KVCache, tokens: int) -> None:
        self._cache, self._tokens = cache, tokens
        self._runs: dict[int, int] = {}  # block -> run

    def share(self, parts: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Hold rows of slots, which the last step has backed, as blocks: all or none.

        parts: (slot, which of its blocks comes first, the numbers of the blocks). A number that is held must be dropped
        first.
        """
        size, held = self._tokens, self._runs
        blocks: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        for slot, first, numbers in parts:
            blocks += numbers
            rows += [(slot, row, size, _KEEP) for row in range(first * size, (first + len(numbers)) * size, size)]
        if not held.keys().isdisjoint(blocks):
            raise ValueError(f"block {next(block for block in blocks if block in held)} is held: drop it first")
        raw = ffi.new(_RUNS, rows)
        _check(lib.vmem_kv_share(self._cache._use(), raw, len(rows), 0))
        for block, run in zip(blocks, raw):
            held[block] = run.id

    def attach(self, slot: int, blocks: Sequence[int]) -> None:
        """Start a newly allocated slot, which no kernel accesses, with these blocks.

        Kernels that read their rows there must run after those that write them. Raises `ValueError` if a block is not
        held as the one at this place; the slot then has those before it.
        """
        runs, found = [self._runs.get(block, 0) for block in blocks], ffi.new(_FOUND)
        _check(lib.vmem_kv_attach(self._cache._use(), slot, ffi.new(_NUMBERS, runs), len(runs), _MOST, 0, found))
        n = found[0] // self._tokens
        if n != len(blocks):
            raise ValueError(f"block {blocks[n]} is not held as block {n} of a request")

    def drop(self, blocks: Iterable[int]) -> None:
        """Hold these blocks no longer. Those that are not held are skipped."""
        runs = [self._runs.pop(block, 0) for block in blocks]
        _check(lib.vmem_kv_drop(self._cache._use(), ffi.new(_NUMBERS, runs), len(runs), ffi.NULL))


@dataclass
class Writer:
    """A request as the one that wrote blocks: how many, and how many of these are still known."""

    slot: int
    wrote: int = 0
    known: int = 0

    @property
    def forgotten(self) -> bool:
        """Most of its blocks are not known any more."""
        return 2 * self.known <= self.wrote


class Requests:
    """The requests of one worker. Who calls holds a lock.

    Parameters
    ----------
    cache : KVCache
        Has more slots than requests run, because slots of ended requests wait for their fence.
    tokens : int
        Tokens of a block.
    most : int
        The most requests.
    fence : callable
        Returns a `Fence` behind all kernels enqueued so far; None where these have ended when their call returns.
    """

    def __init__(self, cache: KVCache, tokens: int, most: int, fence: Callable[[], Fence | None]) -> None:
        self.cache, self.tokens, self._make_fence = cache, tokens, fence
        self.blocks_per_slot = cache.layout(0)[3] // tokens
        self._runs = BlockRuns(cache, tokens)
        self._slots: dict[str, int] = {}
        self._blocks: dict[str, int] = {}  # of each request
        self._lengths = np.zeros(cache.slots, np.int32)
        self._ops: list[Operation] = []  # of this step
        self._retiring: collections.deque[tuple[Fence | None, int]] = collections.deque()  # with their slots
        self._lingering: dict[int, Writer] = {}  # slots of ended requests, the first to end first
        self._writers = [Writer(slot) for slot in range(cache.slots)]  # the slots' last requests
        self._known: dict[int, Writer] = {}  # blocks that have pages
        self._most_lingering = (cache.slots - most) // 2
        self._fence: Fence | None = None  # of this step
        self._steps = 0
        # Steps without requests, and entries that a graph does not use, read block 0: slot 0 is theirs.
        if cache.alloc(tokens, slot=0) is None:
            raise AssertionError("slot 0 is taken")
        self._lengths[0] = tokens
        self._step()

    # ---- a step, in this order ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""
        before, self._fence = self._fence, self._make_fence()
        if before is not None:
            before.synchronize()
        self._steps += 1
        self._reap()

    def forget(self, ids: Iterable[int]) -> None:
        """The scheduler has given up these blocks. Pages that no slot has are released."""
        gone = [i for i in ids if i in self._known]
        if not gone:
            return
        self._runs.drop(gone)
        for i in gone:
            writer = self._known.pop(i)
            writer.known -= 1
            if writer.forgotten and self._lingering.get(writer.slot) is writer:
                self._free(writer.slot)

    def finish(self, name: str) -> None:
        """A request has ended or is preempted. Kernels of the previous step may still use its slot."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._ops = [op for op in self._ops if op[0] != slot]
            self._retiring.append((self._fence, slot))

    def finish_all(self) -> None:
        """No request runs."""
        for name in list(self._slots):
            self.finish(name)

    def start(self, name: str, ids: Sequence[int], computed: int) -> list[int]:
        """Start a request with these blocks; `computed` tokens have rows already. Returns the numbers for its table."""
        self.finish(name)
        hits = min(-(-computed // self.tokens), len(ids))
        slot = self._alloc(len(ids) * self.tokens, hits * self.tokens)
        self._slots[name], self._blocks[name] = slot, 0
        self._writers[slot] = Writer(slot)
        return self._add(name, ids, hits)

    def extend(self, name: str, ids: Sequence[int]) -> list[int]:
        """Add the request's next blocks. Returns the numbers to add to its table."""
        return self._add(name, ids, 0)

    def back(self) -> int:
        """Back everything that the step's kernels access. Returns how many times the driver mapped pages for it."""
        if not self._ops and self._steps % 64:
            return 0
        # Reassigned numbers are dropped before anything is backed, because the scheduler counts on their pages.
        ops, self._ops = self._ops, []
        before = self.cache.stats().step_maps
        self.forget([i for _, _, ids, hits in ops for i in ids[hits:]])
        for group in in_order(ops) if ops else ([],):
            self._back(group)
        return self.cache.stats().step_maps - before

    # ---- between steps -----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request runs, and no kernel reads an ended one's slot."""
        self._reap()
        return not self._slots and not self._retiring

    def shrink(self) -> None:
        """Give back what only ended requests have, but for blocks that are known."""
        while self._lingering:
            self._free(next(iter(self._lingering)))
        self.cache.wait()  # otherwise the background thread could still back the next slot
        self.cache.reclaim(compact=True)

    def reset(self) -> None:
        """Discard all requests and blocks. No kernel may be running."""
        self.finish_all()
        self.forget(list(self._known))
        self._reap()
        self.shrink()

    # ---- the rest ----------------------------------------------------------------------------------------------

    def _add(self, name: str, ids: Sequence[int], hits: int) -> list[int]:
        slot, first = self._slots[name], self._blocks[name]
        self._ops.append((slot, first, ids, hits))
        self._blocks[name] = first + len(ids)
        start = slot * self.blocks_per_slot + first
        return list(range(start, start + len(ids)))

    def _back(self, group: list[Operation]) -> None:
        for slot, first, blocks, hits in group:
            if hits:
                self._runs.attach(slot, blocks[:hits])
            self._lengths[slot] = (first + len(blocks)) * self.tokens
        self._step()
        new_blocks = [(slot, first + hits, blocks[hits:]) for slot, first, blocks, hits in group if len(blocks) > hits]
        if new_blocks:
            self._runs.share(new_blocks)
            for slot, _, new in new_blocks:
                writer = self._writers[slot]
                self._known.update(dict.fromkeys(new, writer))
                writer.wrote += len(new)
                writer.known += len(new)

    def _free(self, slot: int) -> None:
        """Free a slot that no kernel accesses."""
        self._lingering.pop(slot, None)
        self.cache.free(slot)

    def _alloc(self, tokens: int, prefix_tokens: int) -> int:
        while (slot := self.cache.alloc(tokens, prefix_tokens=prefix_tokens)) is None:
            if not self._make_room():
                raise RuntimeError(f"all {self.cache.slots} slots of the KV cache are taken")
        return slot

    def _make_room(self) -> bool:
        """Free the slot of an ended request. Returns whether there was one."""
        if not self._lingering and self._retiring:
            if (fence := self._retiring[0][0]) is not None:
                fence.synchronize()
            self._reap(True)
            return True
        if self._lingering:
            self._free(next(iter(self._lingering)))
            return True
        return False

    def _reap(self, free: bool = False) -> None:
        """Free the slots whose kernels have ended, or let them linger."""
        while self._retiring and ((fence := self._retiring[0][0]) is None or fence.query()):
            _, slot = self._retiring.popleft()
            self._lengths[slot] = 0
            writer = self._writers[slot]
            if free or writer.forgotten:
                self._free(slot)
            else:
                self._lingering[slot] = writer
        while len(self._lingering) > self._most_lingering:
            self._free(next(iter(self._lingering)))

    def _step(self) -> None:
        deadline = None
        while not self.cache.step(self._lengths):
            if self._make_room():
                continue
            now = time.monotonic()
            deadline = now + WAIT if deadline is None else deadline
            if now >= deadline:
                raise OutOfMemory(errno.ENOMEM, f"no memory for a step within {WAIT:.0f} s: {self.cache.shortage}")
            time.sleep(0.001)  # another process uses the memory
