"""The scheduler's side: reports forgotten blocks to the worker, and keeps the block pool within its limits.

vLLM's scheduler stays unchanged. A `PoolKeeper` watches its block pool:

- Blocks that the pool has forgotten (freed without a hash, or evicted) lose their pages with the next step.
- Cached blocks beyond the cap are evicted, the least recently used first.
- If the worker may use less memory than the pool has blocks, blocks are taken out of circulation, from the front of the
  pool's free queue. Free blocks go first, then cached prefixes. After that the scheduler admits less.

This module does not import vLLM: the pool is vLLM's BlockPool.

SPDX-License-Identifier: MIT
"""

import time
from collections.abc import Callable, Sequence
from typing import Any


class PoolKeeper:
    """Keeps one block pool within its limits.

    Parameters
    ----------
    pool : vllm.v1.core.block_pool.BlockPool
    cap : int or None
        The most cached blocks that no request uses; None for no cap.
    least : int
        Blocks that always stay in circulation: as many as one request of the greatest length needs.
    allowed : callable or None
        Returns how many blocks may be in use now, or None.
    """

    PERIOD = 0.1

    def __init__(
        self, pool: Any, cap: int | None = None, least: int = 1, allowed: Callable[[], int | None] | None = None
    ) -> None:
        self.pool = pool
        self.cap = cap
        self.least = least
        self._allowed = allowed
        self._held_back: list[Any] = []
        self._forgotten: list[int] = []
        self._freed = False
        self._asked = 0.0

    # ---- called by the pool's methods --------------------------------------------------------------------------

    def freed(self, blocks: Sequence[Any]) -> None:
        """The pool has freed these blocks."""
        self._freed = True
        self._forgotten += [b.block_id for b in blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null]

    def resetting(self) -> list[int]:
        """The pool is about to forget everything if no block is in use. Returns the argument for `reset`."""
        self._give_back(len(self._held_back))
        return [b.block_id for b in self.pool.blocks if b.block_hash is not None]

    def reset(self, blocks: list[int]) -> None:
        """The pool has forgotten these blocks."""
        self._forgotten += blocks

    # ---- called by the scheduler's ---------------------------------------------------------------------------

    def before_schedule(self, idle: bool = False) -> None:
        """Apply the cap and the memory limit to the pool. Acts only from time to time, and when idle."""
        now = time.monotonic()
        if not idle and now - self._asked < self.PERIOD:
            return
        self._asked = now
        if self._freed and self.cap is not None:
            self._evict(self.cap)
        self._freed = False
        if self._allowed is not None:
            allowed = self._allowed()
            if allowed is not None:
                self._hold_back(self.pool.num_gpu_blocks - max(allowed, self.least + 1))

    def take_forgotten(self) -> list[int]:
        """Blocks whose contents the scheduler has forgotten since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    @property
    def held_back(self) -> int:
        """Blocks out of circulation."""
        return len(self._held_back)

    def _evict(self, cap: int) -> None:
        # In the free queue, cached blocks follow the others, in the order of their last use.
        queue = self.pool.free_block_queue
        block, kept, beyond = queue.fake_free_list_tail.prev_free_block, 0, set()
        while block is not queue.fake_free_list_head and block.block_hash is not None:
            if kept < cap:
                kept += 1
            else:
                beyond.add(block.block_id)
            block = block.prev_free_block
        if beyond:
            self.pool.evict_blocks(beyond)
            self._forgotten += beyond

    def _hold_back(self, wanted: int) -> None:
        wanted = max(wanted, 0)
        if wanted < len(self._held_back):
            self._give_back(len(self._held_back) - wanted)
        elif wanted > len(self._held_back):
            n = min(wanted - len(self._held_back), self.pool.get_num_free_blocks())
            taken = self.pool.get_new_blocks(n) if n > 0 else []
            self._held_back += taken
            self._forgotten += [b.block_id for b in taken]

    def _give_back(self, n: int) -> None:
        if n:
            back = self._held_back[-n:]
            del self._held_back[-n:]
            self.pool.free_blocks(back)
