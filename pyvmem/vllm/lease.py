"""What the scheduler knows of other engines in its pool, and what its own requests lack.

Engines that name the same pool (VMEM_VLLM_POOL) lend each other memory by libvmem's pool (`pyvmem.KVPool`), whose
members are the workers' blocks. A worker asks for what the scheduler publishes as wanted, and offers what it publishes
as offered. Which blocks leave is the keeper's decision.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import itertools
import time
import zlib
from typing import Any

from pyvmem.vllm import control

LOOK = 0.05  # seconds between looks at the other engines' pages
FIND = 1.0  # and between searches for engines
MOST_WAITING = 64  # requests that are looked at


def number_of(pool: str) -> int:
    """What stands for a pool in a control page; 0 for none."""
    return zlib.crc32(pool.encode()) | 1 << 32 if pool else 0


def lacking(scheduler: Any, coming: int, most: int) -> int:
    """Blocks that the requests of a scheduler of vLLM's lack, at most `most`.

    Running requests want a block each in each group, waiting ones their rows as far as they are known.
    """
    manager = scheduler.kv_cache_manager
    sizes = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_config.kv_cache_groups]
    need = len(scheduler.running) * len(sizes)
    for request in itertools.islice(scheduler.waiting, MOST_WAITING):
        need += sum(request.num_tokens // size + 1 for size in sizes)
    if scheduler.waiting:
        need += manager.watermark_blocks
    return int(min(max(need - manager.block_pool.get_num_free_blocks() - coming, 0), max(most, 0)))


class Neighbours:
    """The other engines in the pool of one engine."""

    def __init__(self, page: control.Page) -> None:
        self._page = page
        self._pages: list[control.Page] = []
        self._found = self._looked = 0.0
        self._yields = False

    def yields(self) -> bool:
        """Whether an engine of a higher priority lacks memory."""
        now, page = time.monotonic(), self._page
        if not page[control.POOL]:
            return False
        if now >= self._found + FIND:
            self._found = now
            self._pages = [
                other for _, other in control.engines()
                if other[control.POOL] == page[control.POOL] and other.path != page.path
            ]  # fmt: skip
        if now >= self._looked + LOOK:
            self._looked = now
            self._yields = any(
                o[control.WANTED] and o[control.PRIORITY] > page[control.PRIORITY] for o in self._pages
            )  # fmt: skip
        return self._yields
