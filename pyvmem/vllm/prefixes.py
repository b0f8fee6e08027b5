"""Prefixes of vLLM's that outlive their engine: full blocks of its prefix cache are saved to host memory.

The scheduler says with each step which blocks vLLM has hashed in it, and which it hands out anew (`PrefixOrders`). Once
the device has computed the step, a thread of the worker (`prefix_worker`) saves the blocks that nobody was given
meanwhile. The next engine of an equal key (`prefix_key`) restores what was saved, if the sum is right, before its first
request: into blocks that are free, of memory that nobody uses. To vLLM, they are blocks of its prefix cache that no
request uses.

The scheduler and its one worker are in one process. Begin with `SchedulerPrefixes.look`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterable
from typing import Any

from pyvmem.errors import OutOfMemory
from pyvmem.sleep.prefixes import LONGEST, Saved
from pyvmem.vllm import prefix_worker
from pyvmem.vllm.orders import PrefixOrders
from pyvmem.vllm.prefix_worker import WorkerPrefixes

logger = logging.getLogger("vllm.vmem")

ENDS = 5.0  # seconds after a start or a wake in which another engine's end may become known
TRIES = 16  # saved blocks at which one looks for a place, before a block is not saved


class SchedulerPrefixes:
    """Tells the worker which blocks to save, and enters those that are restored.

    Parameters
    ----------
    budget : VllmBudget
    """

    def __init__(self, budget: Any) -> None:
        self._budget, self._pool = budget, budget.pool
        self._worker: WorkerPrefixes | None = None
        self._places: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # the least recently used first
        self._free: list[int] = []
        self._taken: list[int] = []
        self._saves: dict[int, tuple[Any, tuple[int, int, bytes, bytes]]] = {}  # by block: request, and `PrefixOrders`
        self._resets = 0
        self._until = time.monotonic() + ENDS  # when it no longer looks for what another engine has saved
        self._due = True
        self._follow_pool()

    def _follow_pool(self) -> None:
        """Have vLLM's pool say what is hashed, handed out and used again."""
        pool = self._pool
        new, full, free, reset = pool.get_new_blocks, pool.cache_full_blocks, pool.free_blocks, pool.reset_prefix_cache

        def get_new_blocks(num_blocks: int) -> Any:
            blocks = new(num_blocks)
            if self._worker is not None:
                for b in blocks:
                    self._taken.append(b.block_id)
                    self._saves.pop(b.block_id, None)  # of a request that was preempted in the same step
            return blocks

        def cache_full_blocks(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int, *args: Any,
            **more: Any,
        ) -> None:  # fmt: skip
            full(request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **more)
            if self._worker is not None:
                for i in range(num_cached_blocks, num_full_blocks):
                    self._note(request, blocks[i], (i + 1) * block_size, blocks[i - 1].block_hash if i else b"")

        def free_blocks(ordered_blocks: Iterable[Any]) -> None:
            blocks = list(ordered_blocks)
            free(blocks)
            if self._worker is not None:
                for b in blocks:  # vLLM has them in the order in which they are to go
                    if b.block_hash in self._places:
                        self._places.move_to_end(b.block_hash)

        def reset_prefix_cache() -> bool:
            done: bool = reset()
            if done:
                self._reset()
            return done

        pool.get_new_blocks, pool.cache_full_blocks, pool.free_blocks = get_new_blocks, cache_full_blocks, free_blocks
        pool.reset_prefix_cache = reset_prefix_cache

    def _take_place(self) -> int | None:
        """A place for one block more: one without a block, or of that which no request has used for longest."""
        if self._free:
            return self._free.pop()
        for _ in range(TRIES):
            name, place = self._places.popitem(last=False)
            block = self._pool.cached_block_hash_to_block.get_one_block(name)
            if block is None or block.ref_cnt == 0:
                return place
            self._places[name] = place
        return None

    def _note(self, request: Any, block: Any, tokens: int, parent: bytes | None) -> None:
        """vLLM has hashed a block of a request, with so many tokens up to its end."""
        name, saver = block.block_hash, self._worker
        if block.is_null or name is None or parent is None or saver is None or saver.ended:
            return
        if max(len(name), len(parent)) > LONGEST or (parent and parent not in self._places):
            return  # without its beginning, it would serve nobody
        place = self._places.get(name)
        if place is None:
            place = self._take_place()
            if place is None:
                return
            self._places[name] = place
        elif (there := saver.file.at(place)) is not None and there.hash == name:
            return
        self._saves[block.block_id] = request, (place, tokens, name, parent)

    def orders(self) -> PrefixOrders | None:
        """What the step that has been scheduled says. vLLM has counted its tokens as computed."""
        if self._worker is None:
            return None
        taken, self._taken, saves, self._saves = self._taken, [], self._saves, {}
        return PrefixOrders(self._resets, taken, [
            (block, *save) for block, (request, save) in saves.items()
            if request.num_computed_tokens >= save[1]  # it was not preempted in the same step
        ])  # fmt: skip

    def _reset(self) -> None:
        """vLLM's prefix cache has been reset: what was saved is not to be found either."""
        self._resets += 1
        self._saves = {}
        if self._worker is not None:
            self._worker.reset(self._resets)
            self._learn()

    def _learn(self) -> list[Saved]:
        """Take over what the file has; returns it, the beginnings of prompts first."""
        assert self._worker is not None
        file = self._worker.file
        saved = file.saved()
        self._places = collections.OrderedDict((each.hash, each.place) for each in reversed(saved))
        used = set(self._places.values())
        self._free = [place for place in reversed(range(file.places)) if place not in used]
        return saved

    def look(self) -> None:
        """Before a step, and between steps: restore what was saved, after a start and whenever the engine has woken."""
        budget = self._budget
        if budget.page.asleep:
            self._due, self._until = True, time.monotonic() + ENDS
        elif self._due and not budget.lent:
            if self._worker is None:
                self._worker = prefix_worker.of_engine(budget.page.path)
                if self._worker is not None:
                    self._worker.resets = self._resets
                    self._learn()
            self._due = time.monotonic() < self._until
            if self._worker is not None and not budget.moving():
                if self._worker.find(self._resets + 1):
                    self._resets += 1
                    self._worker.found = self._due = False
                    self._worker.resets, self._saves = self._resets, {}
                    self._restore(self._learn())

    def _restore(self, saved: list[Saved]) -> None:
        """Enter blocks into vLLM's prefix cache, of memory that nobody uses."""
        saver, pool, budget, begin = self._worker, self._pool, self._budget, time.monotonic()
        assert saver is not None
        by_hash, hashes = pool.cached_block_hash_to_block, {b""}
        saved = [each for each in saved if by_hash.get_one_block(each.hash) is None]
        budget.refresh()
        done: list[Any] = []
        try:
            for at in range(0, len(saved), saver.together):
                some = saved[at : at + saver.together]
                ids = budget.take_unused(len(some))
                if not ids:
                    break
                try:
                    right = saver.restore(ids, some[: len(ids)])
                except OutOfMemory:
                    budget.refused(ids)
                    break
                for i, each, is_right in zip(ids, some, right):
                    done.append(pool.blocks[i])
                    # A prefix without its beginning serves nobody, and whoever looks one up relies on there being none.
                    if is_right and each.parent in hashes and each.hash not in hashes:
                        hashes.add(each.hash)
                        done[-1].set_block_hash(each.hash, num_tokens=each.tokens)
                        by_hash.insert(each.hash, done[-1])
        finally:
            pool.free_blocks(reversed(done))  # the beginnings of prompts are to be evicted last
        logger.info("vMem: %d of %d blocks of prefixes that another engine had saved are in the cache after %.2f s",
                    len(hashes) - 1, len(saved), time.monotonic() - begin)  # fmt: skip
