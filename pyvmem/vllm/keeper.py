"""The scheduler's side: which of vLLM's blocks circulate.

A block *circulates* if vLLM's block pool may hand it out: it is in use or in the pool's free queue, and its pages are
backed. All others are *out*: the keeper holds them, taken with the pool's own `get_new_blocks`, and they have no pages.
To grow, the keeper orders blocks that are out to be backed; they enter the free queue when every worker has done so. To
shrink, it takes blocks off the free queue, in vLLM's own order: unused ones first, then the least recently used of the
prefix cache. So vLLM's admission, eviction and preemption act on the memory that there is, and no step waits for pages.

This module does not import vLLM: the pool is vLLM's BlockPool, the manager its KVCacheManager.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import heapq
import time
from collections.abc import Iterator
from typing import Any

from pyvmem.engine import control
from pyvmem.engine.budget import BlockBudget
from pyvmem.engine.control import Page
from pyvmem.vllm.orders import Copies

MOST_LEAVING = 4096  # blocks that leave in one step: 0.7 ms
MOST_ORDERS = control.ANSWERS // 2  # at a time
RETRY = 0.03  # seconds until memory that was refused is asked for again
PART = 64 << 20  # bytes of blocks in one order: what is backed serves before the rest is
KEEP = 128 << 20  # bytes at most, the null block's included, that an idle engine keeps for a request that may come
TAKEN = 0.5  # seconds after which what steps took says less about the next ones


# vLLM's queue and pool do their own work: these two wrap functions of one object each. A class that is given to an
# object which is there would do as well, but CPython then reads every attribute of the object from a dict, in vLLM's
# own code, too: three times as slowly.


def _count_front(queue: Any) -> set[int]:
    """Numbers of the free blocks in vLLM's queue that hold no cached prefix. The queue keeps the set up to date.

    vLLM puts these at the front and cached ones at the end.
    """
    front = {b.block_id for b in queue.get_all_free_blocks()}
    popleft, popleft_n, remove, prepend_n = queue.popleft, queue.popleft_n, queue.remove, queue.prepend_n

    def counted_popleft() -> Any:
        block = popleft()
        front.discard(block.block_id)
        return block

    def counted_popleft_n(n: int) -> Any:
        blocks = popleft_n(n)
        if front:
            for block in blocks:
                front.discard(block.block_id)
        return blocks

    def counted_remove(block: Any) -> None:
        remove(block)
        front.discard(block.block_id)

    def counted_prepend_n(blocks: Any) -> None:
        prepend_n(blocks)
        front.update([b.block_id for b in blocks])

    queue.popleft, queue.popleft_n = counted_popleft, counted_popleft_n
    queue.remove, queue.prepend_n = counted_remove, counted_prepend_n
    return front


def _leave_out(pool: Any, keeper: Keeper) -> None:
    """Have vLLM's block pool count its blocks without those that are out."""
    evict_blocks, reset_prefix_cache = pool.evict_blocks, pool.reset_prefix_cache

    def evict(block_ids: set[int]) -> None:
        evict_blocks(block_ids)
        keeper.forgot()

    def reset() -> bool:
        held = keeper.held
        pool.num_gpu_blocks -= held
        try:
            done: bool = reset_prefix_cache()
        finally:
            pool.num_gpu_blocks += held
        if done:
            keeper.forgot()
        return done

    pool.get_usage, pool.evict_blocks, pool.reset_prefix_cache = keeper.usage, evict, reset


class Keeper(BlockBudget):
    """Decides which blocks of one pool circulate.

    Parameters
    ----------
    manager : vllm.v1.core.kv_cache_manager.KVCacheManager
    page, block_bytes, least, low, ranks
        As for `BlockBudget`.
    copies : Copies, optional
        Blocks that these name keep their memory.
    """

    def __init__(
        self, manager: Any, page: Page, block_bytes: int, least: int, low: int, ranks: int, copies: Copies | None = None
    ) -> None:
        self.manager, self.pool, self._copies = manager, manager.block_pool, copies
        self._gone: list[int] = []  # for the workers
        self._evicted: list[int] = []
        self._order: list[int] = []
        super().__init__(page, self.pool.num_gpu_blocks - 1, block_bytes, least, low, ranks)  # without the null block
        self.watermark: int = manager.watermark_blocks
        self._watermark = self.watermark / max(self.total, 1)
        self._full = False
        self._queue = self.pool.free_block_queue
        self._front = _count_front(self._queue)
        self._get(self.pool.get_num_free_blocks())
        self._coming: collections.deque[tuple[int, int, list[int]]] = collections.deque()  # order, step, ids
        self._orders = 0
        self._part = max(PART // block_bytes, 1)
        self._soon = 0  # blocks of the first order, for which a step waits
        self._before, self._taken, self._since = 0, [0, 0], 0.0  # spare blocks before a step; see `_count_taken`
        self._retry = 0.0
        self._most_order = self.total  # less after a refusal
        self._left = 0  # the step that last sent blocks that leave
        self.step = 0
        self.full = False  # no request begins meanwhile
        self.follows = False  # whether what is kept ready follows what steps took: else they wait for what they lack
        _leave_out(self.pool, self)
        self.publish()

    # ---- what there is ---------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Blocks that vLLM cannot hand out."""
        return self._out.count + self._n_coming + len(self._order)

    @property
    def spare(self) -> int:
        """Free blocks without contents."""
        return len(self._front)

    def num_free(self) -> int:
        """Blocks in the pool's queue."""
        return int(self.pool.get_num_free_blocks())

    def free_ids(self) -> Iterator[int]:
        """Their numbers."""
        return (b.block_id for b in self._queue.get_all_free_blocks())

    def _moving(self) -> bool:
        """Whether orders are out, or workers have not read yet what left."""
        words, ranks = self.page.words, self.ranks
        ran = words[control.FINISHED : control.FINISHED + ranks].min() >= self._left
        read = words[control.RING_DONE : control.RING_DONE + ranks].min() >= self.page[control.POSITION]
        return bool(self._gone or self._coming or self._order or not ran or not read)

    # ---- before and after vLLM's schedule() ---------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Blocks without contents that are kept for the first step of a request that may come."""
        return max(min(KEEP // self.block_bytes - 1, self.low), 0)

    def ready(self, need: int = 0) -> int:
        """Blocks that are kept ready: free, and without contents. need: what the next step takes."""
        most = super().ready()
        return max(min(most, max(sum(self._taken), self.floor)) if self.follows else most, need)

    def _count_taken(self) -> None:
        """Count the blocks that steps took of late: while they take few, few are kept ready."""
        now = time.monotonic()
        if now >= self._since + TAKEN:
            self._taken = [0, self._taken[0] if now < self._since + 2 * TAKEN else 0]
            self._since = now
        self._taken[0] += max(self._before - self.spare, 0)

    def before(self, need: int = 0, soon: int = 0, first: bool = False) -> None:
        """A step is about to be scheduled: blocks that are backed by now enter, and blocks above the limit leave.

        need : blocks that it takes at most, as far as known, and that requests which begin take later. soon: how many
        of them it waits for. first: whether to order no more than `need` now.
        """
        self._learn_pages()
        self._enter()
        self.fit()
        allowed = self.allowed()
        if (allowed, self.full) != (self._allowed, self._full):
            self._allowed, self._full = allowed, self.full
            self.watermark = int(self._watermark * allowed)
            self.manager.watermark_blocks = self.total if self.full else self.watermark
        beyond = self.circulating + self._n_coming - allowed
        if beyond > 0 or self._pages_beyond():
            self._shrink(beyond, MOST_LEAVING)
        elif len(self._coming) < MOST_ORDERS:
            ready = self.ready(need)
            wanted = ready - self.spare - self._n_coming
            if self.page.cells[control.POOL]:  # others give memory to who asks, not to orders
                wanted = min(wanted, self._room() - self._n_coming)
            if first:
                self._want(min(wanted, need, -beyond))
            elif 4 * wanted > ready or self.spare < need:  # not a few in each step: a driver's calls disturb the device
                self._want(min(wanted, -beyond))
        self._before, self._soon = self.spare, soon - self.spare - self._n_coming

    def comes(self, need: int) -> bool:
        """Whether blocks that are not spare come soon: there is memory for them that nobody has to give up."""
        more = self.allowed() - self.circulating
        if self.page.cells[control.POOL]:
            more = min(more, self._room())
        return need - self.spare <= more and time.monotonic() >= self._retry

    @property
    def ordered(self) -> int:
        """Blocks that workers back or will be told to."""
        return self._n_coming + len(self._order)

    def grows(self) -> bool:
        """Whether blocks are on their way or may be ordered."""
        return bool(self._coming) or self.circulating < self.allowed()

    def lacks(self, need: int) -> bool:
        """Whether the step must wait: it would evict cached blocks although ordered ones are about to come."""
        return self.spare < need and bool(self._order)

    def await_blocks(self, need: int, seconds: float) -> float:
        """Wait until `need` blocks are spare, until workers have backed what was ordered, or for so many seconds.

        Returns the seconds that it took.
        """
        if not self.page.attached(self.ranks):
            return 0.0  # their answers are not seen
        begin = now = time.monotonic()
        while self.spare < need and self._coming and now < begin + seconds:
            time.sleep(1e-4)
            self._enter()
            now = time.monotonic()
        return now - begin

    def evict_ahead(self, n: int) -> None:
        """Make vLLM forget what is least recently used, if fewer than `n` / 2 blocks are spare and no more may come.

        The blocks stay in the queue. In slots, a new block needs a page at a place of its own. Workers can map it ahead
        of the step only if they know earlier whose page it will be.
        """
        if 2 * self.spare >= n or self.grows():
            return
        known = set(self._front)
        blocks = self._get(min(n, self.pool.get_num_free_blocks()))
        self._evicted += [b.block_id for b in blocks if b.block_id not in known]
        self.pool.free_blocks(blocks)

    def take_evicted(self) -> list[int]:
        """What was evicted ahead since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take(self) -> tuple[list[int], list[list[int]], int]:
        """What the workers must know with this step: (blocks that leave, orders to back others, the first's number)."""
        self.step += 1
        self.page.cells[control.STEP] = self.step
        self._count_taken()
        gone, ahead = self._part_gone(), self._order
        if not gone and not ahead:
            return [], [], 0
        self._order = []
        self._left = self.step if gone else self._left
        part = max(self._part, -(-len(ahead) // (MOST_ORDERS - 1)))  # the page keeps the last answers alone
        soon = min(self._soon, part) if self._soon > 0 else part
        parts = [ahead[:soon], *(ahead[i : i + part] for i in range(soon, len(ahead), part))] if ahead else []
        first = self._orders + 1
        for self._orders, ids in enumerate(parts, first):
            self._coming.append((self._orders, self.step, ids))
        self._n_coming += len(ahead)
        return gone, parts, first

    def _part_gone(self) -> list[int]:
        """Those of the blocks that left of which the workers may know now."""
        gone, self._gone = (self._gone, []) if self._copies is None else self._copies.part(self._gone)
        return gone

    def leave(self, n: int) -> int:
        """Take up to `n` free blocks out of circulation; returns how many."""
        n = min(n, MOST_LEAVING, int(self.pool.get_num_free_blocks()))
        if n > 0:
            ids = [b.block_id for b in self._get(n)]
            self._gone += ids
            self._out.put(ids)
        return max(n, 0)

    def _get(self, n: int) -> Any:
        """Take free blocks. In vLLM's metrics of blocks (--kv-cache-metrics), they are evicted, but no request's."""
        blocks = self.pool.get_new_blocks(n)
        if metrics := getattr(self.pool, "metrics_collector", None):
            for block in blocks:
                metrics.block_metrics.pop(block.block_id, None)
        return blocks

    def _shrink(self, beyond: int, most: int) -> None:
        """So many blocks leave, and then others while pages are too many, but at most `most` in all.

        The first are spare ones that free a page, with the highest numbers. The others leave in vLLM's own order.
        """
        beyond = min(beyond, most)
        if beyond > 0 and self._out.shared:
            blocks = [self.pool.blocks[i] for i in heapq.nlargest(beyond, self._out.freeing(self._front))]
            for block in blocks:
                self._queue.remove(block)
            self._queue.prepend_n(blocks)
        # A block frees one page at most.
        while most > 0 and (n := self.leave(min(beyond if beyond > 0 else self._pages_beyond(), most))):
            beyond, most = beyond - n, most - n

    def _want(self, n: int) -> None:
        if n > 0 and self._out and time.monotonic() >= self._retry:
            ids = self._take_out(min(n, self._most_order))
            self._order += ids
            if self._copies is not None and self._gone:  # of which the workers do not know yet
                self._gone = list(set(self._gone).difference(ids))

    def _enter(self) -> None:
        while self._coming:
            order, step, ids = self._coming[0]
            seen = [rank for rank in range(self.ranks) if self.page[control.ATTACHED + rank]]
            told = [self.page.answer(order, rank) for rank in seen]
            # A worker that does not see the page backs in time.
            if -1 in told or (len(seen) < self.ranks and self.step < step + 2):
                return
            self._coming.popleft()
            self._n_coming -= len(ids)
            if 1 in told:
                self.page[control.REFUSED] += 1
                self._retry = time.monotonic() + RETRY
                if not self.page.cells[control.POOL] or self._room() >= len(ids):
                    self._most_order = max(len(ids) // 2, 1)  # the device lacks memory, not the pool
                self._gone += ids  # other workers may have backed them
                self._out.put(ids)
            else:
                # The lowest number first in the queue, so that blocks in use stay close together.
                self.pool.free_blocks(self.pool.blocks[i] for i in ids)
                self._most_order = max(self._most_order, min(2 * len(ids), self.total))

    # ---- between steps ---------------------------------------------------------------------------------------

    def between(self, idle: bool, keep: int = 0) -> None:
        """Blocks above the limit leave, and if `idle`, spare ones but `keep`. Workers learn it by the ring."""
        self._learn_pages()
        self._enter()
        self.fit()
        beyond = self.circulating + self._n_coming - self.allowed()
        if idle and self.spare > keep:
            beyond = max(
                beyond, min(self.spare - keep, len(self._out.freeing(self._front)))
            )  # others would give back nothing
        self._shrink(beyond, self.total)
        self.tell()

    def tell(self) -> None:
        """Send what has left to the workers by the ring. Without the page, workers learn it with the next step."""
        if not self._gone or not self.page.attached(self.ranks):
            return
        gone = self._part_gone()
        if len(gone) > MOST_LEAVING:
            gone.sort()  # neighbours leave together, by few calls of the driver
        while gone and self.page.push(self.step, gone[:MOST_LEAVING], self.ranks):
            del gone[:MOST_LEAVING]
        self._gone += gone  # with the next step, or the next time

    def forgot(self) -> None:
        """vLLM has forgotten what free blocks hold, and left them where they are in the queue."""
        blocks = [b for b in self._queue.get_all_free_blocks() if b.block_hash is None]
        for block in blocks:
            self._queue.remove(block)
        self._queue.prepend_n(blocks)
