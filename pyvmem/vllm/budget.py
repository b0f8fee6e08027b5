"""The scheduler's side: which of vLLM's blocks have memory.

A block is *backed* if vLLM's block pool may hand it out: it is in use or in the pool's free queue, and has pages. All
others are *unbacked* and have no pages. The budget keeps them from vLLM by taking them with the pool's own
`get_new_blocks`. vLLM's admission, eviction and preemption therefore act on the memory that there is, and no step waits
for pages.

The life of a block::

                   order, take_orders                  every worker answered: add_backed
    UNBACKED ------------------------> workers back it -----------------------------> in the free queue
       ^  ^                               |  some worker refused                        |           ^
       |  +-------------------------------+                              vLLM allocates |           | its request ends
       |                                                                                v           |
       |        unback: spare blocks first, then the least recently used            in use by a request
       +---------------------------------------- from the free queue; it may be cached there

A block that leaves is `unbacked` at once. Workers learn of it with the next step, or by the control page's ring if no
step runs. They unmap its pages behind a fence, as kernels of steps in flight may still read it.

This module does not import vLLM: the pool is vLLM's BlockPool, the manager its KVCacheManager.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyvmem.engine import control
from pyvmem.engine.budget import BlockBudget
from pyvmem.engine.control import Page
from pyvmem.vllm.plan import Supply
from pyvmem.vllm.transfers import Transfers

MOST_LEAVING = 4096  # most blocks that are unbacked in one step, which takes 0.7 ms
MOST_ORDERS = control.ANSWERS // 2  # most orders without an answer
PART = 64 << 20  # bytes of blocks in one order: its blocks can be used before the next order's are backed
KEEP = 128 << 20  # most bytes, the null block's included, that an idle engine keeps for the next request
TAKEN = 0.5  # seconds after which blocks that steps took count for half as many


class FreeQueue:
    """The free blocks of vLLM's block pool. Those that hold no cached prefix come first in its queue.

    vLLM's queue and pool keep working as they do; this class wraps functions of the two objects. It does not change the
    objects' classes instead: CPython would then read all of their attributes from a dict, three times as slowly, in
    vLLM's own code, too.

    Parameters
    ----------
    pool : vllm.v1.core.block_pool.BlockPool
    num_withheld : callable
        Returns how many blocks the pool must not count: the unbacked ones.

    Attributes
    ----------
    empty : set of int
        Numbers of the free blocks that hold no cached prefix.
    """

    def __init__(self, pool: Any, num_withheld: Callable[[], int]) -> None:
        self._pool, self._queue = pool, pool.free_block_queue
        self.empty: set[int] = set(self)
        self._follow_queue()
        self._hide_unbacked(num_withheld)

    def __len__(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def __iter__(self) -> Iterator[int]:
        return (b.block_id for b in self._queue.get_all_free_blocks())

    def evicted_next(self, n: int) -> Iterator[int]:
        """The numbers of the first `n` blocks with contents, which vLLM evicts before others."""

        def blocks() -> Iterator[Any]:
            block, end = self._queue.fake_free_list_head.next_free_block, self._queue.fake_free_list_tail
            while block is not end:
                yield block
                block = block.next_free_block

        return itertools.islice((b.block_id for b in blocks() if b.block_hash is not None), n)

    def _follow_queue(self) -> None:
        """Have the queue keep `empty` up to date."""
        queue, empty = self._queue, self.empty
        popleft, popleft_n, remove, prepend_n = queue.popleft, queue.popleft_n, queue.remove, queue.prepend_n

        def counted_popleft() -> Any:
            block = popleft()
            empty.discard(block.block_id)
            return block

        def counted_popleft_n(n: int) -> Any:
            blocks = popleft_n(n)
            if empty:
                for block in blocks:
                    empty.discard(block.block_id)
            return blocks

        def counted_remove(block: Any) -> None:
            remove(block)
            empty.discard(block.block_id)

        def counted_prepend_n(blocks: Any) -> None:
            prepend_n(blocks)
            empty.update([b.block_id for b in blocks])

        queue.popleft, queue.popleft_n = counted_popleft, counted_popleft_n
        queue.remove, queue.prepend_n = counted_remove, counted_prepend_n

    def _hide_unbacked(self, num_withheld: Callable[[], int]) -> None:
        """Have the pool count its blocks without unbacked ones."""
        pool, evict_blocks, reset_prefix_cache = self._pool, self._pool.evict_blocks, self._pool.reset_prefix_cache

        def evict(block_ids: set[int]) -> None:
            evict_blocks(block_ids)
            self.sort()

        def reset() -> bool:
            hidden = num_withheld()
            pool.num_gpu_blocks -= hidden
            try:
                done: bool = reset_prefix_cache()
            finally:
                pool.num_gpu_blocks += hidden
            if done:
                self.sort()
            return done

        pool.evict_blocks, pool.reset_prefix_cache = evict, reset

    def sort(self) -> None:
        """Move blocks whose contents vLLM has forgotten to the front; vLLM leaves them where they are in the queue."""
        self.put_first(b for b in self._queue.get_all_free_blocks() if b.block_hash is None)

    def put_first(self, blocks: Iterable[Any]) -> None:
        """Move free blocks to the front of the queue."""
        blocks = list(blocks)
        for block in blocks:
            self._queue.remove(block)
        self._queue.prepend_n(blocks)

    def take(self, n: int) -> list[int]:
        """Take blocks off the front. vLLM's block metrics (--kv-cache-metrics) must not count them as a request's."""
        blocks = self._pool.get_new_blocks(n)
        if metrics := getattr(self._pool, "metrics_collector", None):
            for block in blocks:
                metrics.block_metrics.pop(block.block_id, None)
        return [b.block_id for b in blocks]

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back that `take` has returned. The first in `ids` comes first in the queue."""
        self._pool.free_blocks(self._pool.blocks[i] for i in ids)


class BackingOrders:
    """Orders to the workers to back blocks: those that go out with the next step, and those that await answers.

    Attributes
    ----------
    unsent : list of int
        Blocks that the next step will order.
    num_sent : int
        Blocks that the workers are backing.
    number : int
        The last order's number.
    """

    def __init__(self, page: Page, ranks: int) -> None:
        self._page, self._ranks = page, ranks
        self.unsent: list[int] = []
        self._sent: collections.deque[tuple[int, int, list[int]]] = collections.deque()  # order, step, ids
        self.number = self.num_sent = 0

    def __len__(self) -> int:
        """The number of orders without an answer."""
        return len(self._sent)

    def send(self, step: int, first: int, part: int) -> tuple[list[list[int]], int]:
        """Divide the unsent blocks into orders that go with a step: (blocks of each, the number of the first).

        first, part : the most blocks of the first order and of the others.
        """
        if not self.unsent:
            return [], self.number + 1
        ids, self.unsent = self.unsent, []
        part = max(part, -(-len(ids) // (MOST_ORDERS - 1)))  # the page keeps only the last answers
        first = min(first, part) if first > 0 else part
        parts = [ids[:first], *(ids[i : i + part] for i in range(first, len(ids), part))]
        number = self.number + 1
        for self.number, some in enumerate(parts, number):
            self._sent.append((self.number, step, some))
        self.num_sent += len(ids)
        return parts, number

    def answered(self, step: int) -> Iterator[tuple[list[int], bool]]:
        """Remove orders that every worker has answered: (blocks, whether some worker refused). step: the last one."""
        while self._sent:
            order, sent_with, ids = self._sent[0]
            seen = [rank for rank in range(self._ranks) if self._page[control.ATTACHED + rank]]
            answers = [self._page.answer(order, rank) for rank in seen]
            # A worker without a shared page cannot answer. It has backed the blocks within two steps.
            if -1 in answers or (len(seen) < self._ranks and step < sent_with + 2):
                return
            self._sent.popleft()
            self.num_sent -= len(ids)
            yield ids, 1 in answers


class TakenBlocks:
    """Counts the spare blocks that recent steps took: if they take few, few need be kept ready."""

    def __init__(self) -> None:
        self._before, self._count, self._counted = 0, 0.0, 0.0

    def begin(self, spare: int) -> None:
        """Note how many blocks are spare before a step is scheduled."""
        self._before = spare

    def end(self, spare: int) -> None:
        """Count the blocks that the step took, by those that are still spare."""
        if spare < self._before:
            self._count, self._counted = self.recent() + self._before - spare, time.monotonic()

    def recent(self) -> float:
        """The blocks taken of late: after every `TAKEN` seconds they count for half as many."""
        return self._count * math.pow(0.5, (time.monotonic() - self._counted) / TAKEN)


class VllmBudget(BlockBudget):
    """Decides which blocks of one block pool of vLLM's are backed.

    Parameters
    ----------
    manager : vllm.v1.core.kv_cache_manager.KVCacheManager
    page, block_bytes, least, low, ranks
        As for `BlockBudget`.
    transfers : Transfers
        Blocks that these name keep their memory.
    """

    def __init__(
        self,
        manager: Any,
        page: Page,
        block_bytes: int,
        least: int,
        low: int,
        ranks: int,
        transfers: Transfers,
    ) -> None:
        self.manager, self.pool, self._transfers = manager, manager.block_pool, transfers
        self._leaving: list[int] = []  # unbacked blocks that the workers do not know of yet
        self.orders = BackingOrders(page, ranks)
        total = self.pool.num_gpu_blocks - 1  # without the null block
        super().__init__(page, total, block_bytes, least=least, low=low, ranks=ranks)
        self.watermark: int = manager.watermark_blocks
        self._watermark = self.watermark / max(self.total, 1)
        self._full = False
        self._free = FreeQueue(self.pool, lambda: self.num_withheld)
        self.pool.get_usage = self.usage
        self._free.take(len(self._free))
        self._taken = TakenBlocks()
        self._awaited = 0  # blocks of the first order: the next step will wait for them
        self._most_order = self.total  # most blocks to order at once; less after a refusal
        self._left = 0  # number of the step that last named blocks that leave
        self.step = 0
        self.is_full = False  # no request may begin
        self.adapts = False  # whether the number of blocks kept ready follows what recent steps took
        self.publish()

    # ---- what there is ---------------------------------------------------------------------------------------

    @property
    def coming(self) -> int:
        """Blocks that workers are backing."""
        return self.orders.num_sent

    @property
    def ordered(self) -> int:
        """Blocks that workers are backing or will be told to."""
        return self.coming + len(self.orders.unsent)

    @property
    def num_withheld(self) -> int:
        """Blocks that vLLM cannot hand out."""
        return self.packing.num_out + self.ordered

    @property
    def spare(self) -> int:
        """Free blocks without contents."""
        return len(self._free.empty)

    def num_free(self) -> int:
        """Blocks in the pool's queue."""
        return len(self._free)

    def free_ids(self) -> Iterator[int]:
        """The numbers of these blocks."""
        return iter(self._free)

    def evicted_next(self, n: int) -> Iterator[int]:
        """The numbers of the first `n` blocks with contents, which vLLM evicts before others."""
        return self._free.evicted_next(n)

    def moving(self) -> bool:
        """Return whether orders await answers, or workers have not yet read which blocks left."""
        words, ranks = self.page.words, self.ranks
        ran = words[control.FINISHED : control.FINISHED + ranks].min() >= self._left
        read = words[control.RING_DONE : control.RING_DONE + ranks].min() >= self.page[control.POSITION]
        return bool(self._leaving or self.ordered or not ran or not read)

    @property
    def floor(self) -> int:
        """Blocks without contents that are kept for the first step of a request that may come."""
        return max(min(KEEP // self.block_bytes - 1, self.low), 0)

    def ready(self, need: int = 0) -> int:
        """Blocks to keep ready: free, and without contents. need: blocks that the next step takes."""
        most = super().ready()
        return max(min(most, max(round(self._taken.recent()), self.floor)) if self.adapts else most, need)

    def supply(self) -> Supply:
        """The blocks that the next step may have."""
        lacks = bool(self.page.cells[control.POOL]) and self._room() < self.coming
        spare = self.spare
        return Supply(spare, self.growable() + self.coming, self.low, not self.waits(), lacks,
                      cached=self.num_free() - spare)  # fmt: skip

    def grows(self) -> bool:
        """Return whether blocks are being backed or may be ordered, as of the last `refresh`."""
        return bool(self.orders) or self.num_backed < self._allowed

    def can_grow(self) -> bool:
        """Return whether blocks are on their way, or there is memory for more now."""
        return self.ordered > 0 or (self.growable() > 0 and not self.waits())

    def must_wait(self, need: int) -> bool:
        """Return whether the step must wait: it would evict cached blocks although ordered ones are about to come."""
        return self.spare < need and bool(self.orders.unsent)

    # ---- before and after vLLM's schedule() ---------------------------------------------------------------------

    def refresh(self) -> None:
        """Let backed blocks enter the free queue, and read how many blocks are allowed now."""
        self._learn_pages()
        self.add_backed()
        self.fit()
        allowed = self.allowed()
        if (allowed, self.is_full) != (self._allowed, self._full):
            self._allowed, self._full = allowed, self.is_full
            self.watermark = int(self._watermark * allowed)
            self.manager.watermark_blocks = self.total if self.is_full else self.watermark

    def prepare_step(self, need: int = 0, awaited: int = 0, first: bool = False) -> None:
        """Before a step is scheduled and after `refresh`, order blocks, or unback those above the limit.

        need : most blocks that the step, and later the requests that begin in it, will take. awaited: how many of them
        the step will wait for. first: whether to order no more than `need` now.
        """
        above = self.num_backed + self.coming - self._allowed
        if above > 0 or self._pages_beyond():
            self._shrink(above, MOST_LEAVING)
        elif above < 0 and len(self.orders) < MOST_ORDERS:
            ready = self.ready(need)
            wanted = ready - self.spare - self.coming
            if self.page.cells[control.POOL]:  # others give memory to a member that asks, not to one that orders
                wanted = min(wanted, self._room() - self.coming)
            if first:
                self.order(min(wanted, need, -above))
            elif 4 * wanted > ready or self.spare < need:  # not a few in each step: map calls disturb the device
                self.order(min(wanted, -above))
        self.begin_step()
        self._awaited = awaited - self.spare - self.coming

    def begin_step(self) -> None:
        """Count what the step takes that is about to be scheduled."""
        self._taken.begin(self.spare)

    def await_blocks(self, need: int, seconds: float) -> float:
        """Wait until `need` blocks are spare, until workers have backed what was ordered, or for so many seconds.

        Returns the seconds that it took.
        """
        if not self.page.attached(self.ranks):
            return 0.0  # their answers are not seen
        begin = now = time.monotonic()
        while self.spare < need and self.orders and now < begin + seconds:
            time.sleep(1e-4)
            self.add_backed()
            now = time.monotonic()
        return now - begin

    def take_orders(self) -> tuple[list[int], list[list[int]], int]:
        """Begin a step, and return its orders: (blocks that leave, blocks of each order, number of the first order)."""
        self.step += 1
        self.page.cells[control.STEP] = self.step
        self._taken.end(self.spare)
        leaving = self._take_leaving()
        if leaving:
            self._left = self.step
        return leaving, *self.orders.send(self.step, self._awaited, max(PART // self.block_bytes, 1))

    def _take_leaving(self) -> list[int]:
        """The leaving blocks that the workers may learn of now. Copies in flight keep the others' memory."""
        ids, self._leaving = self._transfers.part(self._leaving)
        return ids

    def order(self, n: int) -> None:
        """Order up to `n` blocks more. The next step tells the workers."""
        if n > 0 and self.packing and not self.waits():
            ids = self._take_unbacked(min(n, self._most_order))
            self.orders.unsent += ids
            if self._transfers.copies is not None:  # a block that leaves and comes back does neither
                self._leaving = list(set(self._leaving).difference(ids))

    def take_unused(self, n: int) -> list[int]:
        """Take up to `n` unbacked blocks for which there is memory that nobody uses, while nothing is `moving`.

        The caller has them backed and gives them to vLLM, or calls `refused`.
        """
        n = min(n, self.growable())
        return self._take_unbacked(n) if n > 0 and not self.waits() else []

    def unback(self, n: int) -> int:
        """Take up to `n` free blocks from vLLM; returns how many. Workers release their memory when they learn it."""
        n = min(n, MOST_LEAVING, len(self._free))
        if n > 0:
            ids = self._free.take(n)
            self._leaving += ids
            self.packing.put(ids)
        return max(n, 0)

    def _shrink(self, beyond: int, most: int) -> None:
        """Unback `beyond` blocks, and then others while there are too many pages, but at most `most` in all.

        Spare blocks that free a page go first, the highest numbers before others. The rest go in vLLM's own order.
        """
        beyond = min(beyond, most)
        if beyond > 0 and self.packing.shared:
            freeing = heapq.nlargest(beyond, self.packing.freeing(self._free.empty))
            self._free.put_first(self.pool.blocks[i] for i in freeing)
        # A block frees one page at most.
        while most > 0 and (n := self.unback(min(beyond if beyond > 0 else self._pages_beyond(), most))):
            beyond, most = beyond - n, most - n

    def add_backed(self) -> None:
        """Give vLLM the blocks that every worker has backed."""
        for ids, refused in self.orders.answered(self.step):
            if refused:
                if not self.page.cells[control.POOL] or self._room() >= len(ids):
                    self._most_order = max(len(ids) // 2, 1)  # the device lacks memory, not the pool
                self._leaving += ids  # other workers may have backed them
                self.refused(ids)
            else:
                self._free.free(ids)  # the lowest number first, so that blocks in use stay close together
                self._most_order = max(self._most_order, min(2 * len(ids), self.total))

    # ---- between steps ---------------------------------------------------------------------------------------

    def between_steps(self, idle: bool, keep: int = 0) -> None:
        """Between steps, unback blocks above the limit, and if `idle` spare ones except `keep`, by the ring."""
        self.refresh()
        beyond = self.num_backed + self.coming - self._allowed
        if idle and self.spare > keep:  # only blocks that free a page: the others would give back no memory
            beyond = max(beyond, min(self.spare - keep, len(self.packing.freeing(self._free.empty))))
        self._shrink(beyond, self.total)
        self._tell()

    def _tell(self) -> None:
        """Tell the workers by the ring which blocks leave. Without a shared page, the next step tells them."""
        if not self._leaving or not self.page.attached(self.ranks):
            return
        leaving = self._take_leaving()
        if len(leaving) > MOST_LEAVING:
            leaving.sort()  # neighbours can then be unmapped by one call of the driver
        while leaving and self.page.push(self.step, leaving[:MOST_LEAVING], self.ranks):
            del leaving[:MOST_LEAVING]
        self._leaving += leaving  # with the next step, or the next time
