"""What the scheduler knows of other engines in its pool, and what its own requests lack.

Engines that name the same pool (VMEM_VLLM_POOL) lend each other memory by libvmem's pool (`pyvmem.KVPool`), whose
members are the workers' blocks. A worker asks for what the scheduler publishes as wanted, and offers what it publishes
as offered. Which blocks leave is the keeper's decision.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import time
from typing import Any

from pyvmem.vllm import control

LOOK = 0.005  # seconds between looks at the other engines' pages
FIND = 1.0  # and between searches for engines
SPARE = 8  # of the allowed blocks, this part at most is kept ready
PATIENCE, AGAIN = 1.0, 3.0  # seconds that others wait for an engine which gets nothing, and until they do again
RUNS = 1  # in place of the time when a request came: one that runs lacks blocks


def ready(low: int, allowed: int) -> int:
    """Blocks that an engine keeps ready: for two steps of `low` blocks, or a part of those that it may have."""
    return min(2 * low, allowed // SPARE)


def lacking(scheduler: Any, wait: list[Any], coming: int, most: int, beyond: int = 0) -> int:
    """Blocks that the requests of a scheduler of vLLM's lack, at most `most`.

    wait: those that wait. coming: what workers are backing. beyond: what vLLM wants for requests that begin, in all,
    beyond their rows.

    Running requests want a block each in each group, waiting ones their rows as far as they are known.
    """
    manager = scheduler.kv_cache_manager
    sizes = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_config.kv_cache_groups]
    need = len(scheduler.running) * len(sizes)
    for request in wait:
        done = request.num_computed_tokens
        need += sum(request.num_tokens // size + 1 - -(-done // size) for size in sizes)
    if wait:
        need += beyond
    return int(min(max(need - manager.block_pool.get_num_free_blocks() - coming, 0), max(most, 0)))


class Neighbours:
    """The other engines in the pool of one engine.

    Of the engines whose requests lack memory, one comes first: that of the highest priority; then one whose requests
    use less than its share, which is the pool divided by the engines that have requests now, but at least its minimum;
    then the one whose request came first. Requests that run come before those that begin. An engine that gets nothing
    (it hangs, or something else holds the memory) is passed over most of the time.

    Attributes
    ----------
    alone : bool
        Whether no other engine has a request that lacks memory.
    behind : bool
        Whether another engine comes first, and this one has its minimum. Then it takes no more memory than it has.
    full : bool
        Whether no request begins meanwhile: this engine has its share and the first has not, or the first runs at most
        one request and so may need what all others have.
    yields : bool
        Whether the first has a higher priority.
    surplus : int
        Bytes of a worker's blocks that the others offer beyond what they keep ready; 0 while one of them lacks memory.
    """

    def __init__(self, page: control.Page) -> None:
        self._page = page
        self._pages: list[control.Page] = []
        self._found = self._looked = 0.0
        self._had: dict[str, tuple[int, float]] = {}  # bytes of each engine, and since when
        self._share = 0  # bytes of a worker's pool
        self.alone, self.behind, self.full, self.yields = True, False, False, False
        self.surplus = 0

    def look(self) -> None:
        """Read what the others publish, at most every `LOOK` seconds."""
        now, page = time.monotonic(), self._page
        if not page[control.POOL]:
            return
        if now >= self._found + FIND:
            self._found = now
            own = page.pools()  # those of other GPUs have nothing to lend
            self._pages = [
                other for _, other in control.engines()
                if other[control.POOL] == page[control.POOL] and other.path != page.path
                and not set(other.pools()).isdisjoint(own)
            ]  # fmt: skip
        if now >= self._looked + LOOK:
            self._looked = now
            others = self._pages
            active = [o for o in others if o[control.USED] or o[control.HEAD]]
            self._share = page[control.POOL_BYTES] // (1 + len(active))
            self.alone = not any(o[control.HEAD] for o in others)
            self.surplus = 0 if any(o[control.HEAD] or o[control.WANTED] for o in others) else sum(
                max(o[control.OFFERED] - ready(o[control.LOW], o[control.ALLOWED]), 0) * o[control.BLOCK_BYTES]
                for o in others
            )  # fmt: skip
            first = min((o for o in (page, *others) if self._lacks(o, now)), key=self._turn, default=page)
            self.behind = first is not page and _bytes(page) >= page[control.MIN]
            has_less = self._has_share(page) and not self._has_share(first)
            self.full = self.behind and (has_less or first[control.STARVED] > 0)
            self.yields = self.behind and first[control.PRIORITY] > page[control.PRIORITY]

    def _has_share(self, page: control.Page) -> bool:
        return page[control.USED] * page[control.BLOCK_BYTES] >= max(self._share, page[control.MIN])

    def _turn(self, page: control.Page) -> tuple[int, bool, int, str]:
        """What sorts engines that lack memory."""
        head = page[control.HEAD]
        return -page[control.PRIORITY], head != RUNS and self._has_share(page), head, str(page.path)

    def _lacks(self, page: control.Page, now: float) -> bool:
        """Whether an engine lacks memory, and is not passed over."""
        name, has = str(page.path), _bytes(page)
        if not page[control.HEAD]:
            self._had.pop(name, None)
            return False
        if self._had.get(name, (-1, 0.0))[0] != has:
            self._had[name] = has, now
        return (now - self._had[name][1]) % AGAIN < PATIENCE


def _bytes(page: control.Page) -> int:
    """Bytes of the blocks that circulate in an engine."""
    return (page[control.USED] + page[control.CACHED] + page[control.SPARE]) * page[control.BLOCK_BYTES]
