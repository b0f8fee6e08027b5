"""What the scheduler knows of other engines in its pool, and what its own requests lack.

Engines that name the same pool (VMEM_VLLM_POOL) lend each other memory by libvmem's pool (`pyvmem.KVPool`), whose
members are the workers' blocks. A worker asks for what the scheduler publishes as wanted, and offers what it publishes
as offered. Which blocks leave is the keeper's decision.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from pyvmem.vllm import control
from pyvmem.vllm.waiting import waiting

LOOK = 0.02  # seconds between looks at the other engines' pages
FIND = 1.0  # and between searches for engines
SPARE = 8  # of the allowed blocks, this part at most is kept ready
PATIENCE, AGAIN = 1.0, 3.0  # seconds that others wait for a starved engine which gets nothing, and until they do again


def ready(low: int, allowed: int) -> int:
    """Blocks that an engine keeps ready: for two steps of `low` blocks, or a part of those that it may have."""
    return min(2 * low, allowed // SPARE)


def lacking(scheduler: Any, wait: list[Any], coming: int, most: int, watermark: int = 0) -> int:
    """Blocks that the requests of a scheduler of vLLM's lack, at most `most`.

    wait: those that wait. coming: what workers are backing. watermark: what vLLM leaves free when a request begins.

    Running requests want a block each in each group, waiting ones their rows as far as they are known.
    """
    manager = scheduler.kv_cache_manager
    sizes = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_config.kv_cache_groups]
    need = len(scheduler.running) * len(sizes)
    for request in wait:
        done = request.num_computed_tokens
        need += sum(request.num_tokens // size + 1 - -(-done // size) for size in sizes)
    if wait:
        need += watermark
    return int(min(max(need - manager.block_pool.get_num_free_blocks() - coming, 0), max(most, 0)))


def oldest(scheduler: Any) -> int:
    """When the oldest request came that a scheduler looks at first, in microseconds; at least 1."""
    requests = itertools.chain(scheduler.running, waiting(scheduler)[:1])
    return max(int(min((r.arrival_time for r in requests), default=0) * 1e6), 1)


class Neighbours:
    """The other engines in the pool of one engine.

    Attributes
    ----------
    yields : bool
        Whether one of a higher priority lacks memory.
    share : int
        Bytes of a worker's pool for each engine that has requests, this one among them. At least its minimum.
    surplus : int
        Bytes of a worker's blocks that the others offer beyond what they keep ready; 0 while one of them lacks memory.
    pressed : bool
        Whether one lacks memory that has less than that, and no lower priority.
    first, behind : bool
        Among the engines that are starved, the one whose request is oldest comes first: whether that is this one, or
        another. So requests that need more than a share are served one after another. An engine that gets nothing
        although others wait (it hangs, or something else holds the memory) is passed over most of the time.
    """

    def __init__(self, page: control.Page) -> None:
        self._page = page
        self._pages: list[control.Page] = []
        self._found = self._looked = 0.0
        self._had: dict[int, tuple[int, float]] = {}  # bytes of each process, and since when
        self.yields = self.pressed = self.first = self.behind = False
        self.share = self.surplus = 0

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
            active = [o for o in self._pages if o[control.USED] or o[control.WANTED]]
            self.share = max(page[control.POOL_BYTES] // (1 + len(active)), page[control.MIN])
            lacking = [o for o in active if o[control.WANTED]]
            self.surplus = 0 if lacking else sum(
                max(o[control.OFFERED] - ready(o[control.LOW], o[control.ALLOWED]), 0) * o[control.BLOCK_BYTES]
                for o in self._pages
            )  # fmt: skip
            self.yields = any(o[control.PRIORITY] > page[control.PRIORITY] for o in lacking)
            first = min((key for o in (page, *self._pages) if (key := self._starved(o, now))), default=None)
            self.first = first is not None and first[1] == page[control.PID]
            self.behind = first is not None and not self.first
            self.pressed = any(
                _bytes(o) < self.share and o[control.PRIORITY] >= page[control.PRIORITY] for o in lacking
            )  # fmt: skip

    def _starved(self, page: control.Page, now: float) -> tuple[int, int] | None:
        """When the oldest request of a starved engine came, and the engine's process; None if it is passed over."""
        pid, has = page[control.PID], _bytes(page)
        if not page[control.STARVED]:
            self._had.pop(pid, None)
            return None
        if self._had.get(pid, (-1, 0.0))[0] != has:
            self._had[pid] = has, now
        return (page[control.STARVED], pid) if (now - self._had[pid][1]) % AGAIN < PATIENCE else None


def _bytes(page: control.Page) -> int:
    """Bytes of the blocks that circulate in an engine."""
    return (page[control.USED] + page[control.CACHED] + page[control.SPARE]) * page[control.BLOCK_BYTES]
