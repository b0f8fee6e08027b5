"""The KV memory of one worker: a virtual tensor in numbered blocks, the pages behind them, and its part in a pool.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pyvmem import Context
from pyvmem.blocks import BlockRange, Blocks
from pyvmem.engine import control, geometry, pools, refuse
from pyvmem.engine.control import Page
from pyvmem.engine.settings import Settings
from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.kv.pool import KVPool
from pyvmem.tensor import VirtualTensor

logger = logging.getLogger("pyvmem.engine")

POLL = 0.02  # seconds between two attempts to get memory from a pool
START = 60.0  # seconds in which an engine that starts gets the memory of block 0 from the other members of a pool
ASK = 0.06  # seconds in which an engine that runs requests asks others for memory, before it gives for once


def context_on(device: torch.device, chosen: Settings) -> Context:
    """A context for the KV memory of a worker. Raises `refuse.Refused` for a backend or page size that cannot be."""
    refuse.backend(os.environ.get("VMEM_BACKEND", ""), device.type)
    context = Context(device=device.index or 0) if device.type == "cuda" else Context("host")
    refuse.backend(context.backend, device.type)
    refuse.page_size(chosen.switch, chosen.page_size, context.backend, context.page_sizes)
    return context


class BlockMemory:
    """The blocks of one worker. Block 0 is always backed: engines let padding read and write it.

    Parameters
    ----------
    page : Page
        The engine's control page.
    rank : int
        The worker's column in the page.
    chosen : Settings
    """

    def __init__(self, page: Page, rank: int, chosen: Settings) -> None:
        if rank >= control.RANKS:
            raise refuse.Refused(f"{chosen.switch}=1: worker {rank} is out of range: an engine may have "
                                 f"{control.RANKS} workers (or unset {chosen.switch})")  # fmt: skip
        self._page, self._rank, self._chosen = page, rank, chosen
        self._tensor: VirtualTensor | None = None
        self._ranges: list[BlockRange] = []
        self._block = 0  # bytes of a block
        self._blocks: Blocks | None = None
        self._shared: Context | None = None
        self._pool: KVPool | None = None
        self._pool_size, self._share = 0, (0, 0)
        self._unfit: tuple[int, int] | None = None  # a share that the pool has refused
        self._asking = 0.0  # since when the pool has been asked for what it does not give; 0: for nothing

    def context(self, device: torch.device) -> Context:
        """The context of all that this worker has on vMem. Raises as `context_on`."""
        self._shared = self._shared or context_on(device, self._chosen)
        return self._shared

    def pool(self, device: torch.device) -> KVPool:
        """The pool that the settings name. Raises `refuse.Refused`."""
        if self._pool is None:
            asked, switch = self._chosen, self._chosen.switch
            try:
                self._pool = pools.open_pool(asked, self.context(device))
            except (OSError, ValueError, MemoryError) as error:
                size = f"{switch}_POOL_SIZE {f'is {asked.pool_size}' if asked.pool_size else 'is not set'}"
                raise refuse.Refused(f"{switch}_POOL={asked.pool}: {error}; {size} (or unset {switch}_POOL)") from error
        return self._pool

    @property
    def _board(self) -> Any:
        """This worker's row of the boards."""
        return self._page.boards(control.RANKS)[self._rank]

    def publish(self) -> None:
        """Write this worker's column of the control page; libvmem writes the board."""
        if self._tensor is not None:
            self._page.words[control.RESIDENT + self._rank] = self._tensor.resident_bytes

    # ---- the start -------------------------------------------------------------------------------------------

    def _make_blocks(self, number: int, block: int) -> int:
        """Make the blocks 0 to `number` - 1 of the tensor, and back block 0. Returns the bytes of the pages under it.

        block : bytes of a block, all layers, with what is unused between two blocks.
        """
        assert self._tensor is not None
        page, rank = self._page, self._rank
        self._block = block
        self._blocks = Blocks(self._tensor, self._ranges, number, zero=True, board=self._board)
        self._join(self._tensor.tensor.device)
        self._back_null()
        page[control.NULL + rank] = alone = self._blocks.stats().held
        page[control.SPAN + rank] = geometry.span(self._ranges, self._tensor.page_size, block)
        page[control.OWN_BLOCK + rank] = block
        return alone

    def _join(self, device: torch.device) -> None:
        """Become a member of the pool that the environment names, if it names one."""
        asked, switch = self._chosen, self._chosen.switch
        if not asked.pool or self._blocks is None:
            return
        try:
            self._pool = self.pool(device)
            self._pool_size, self._share = self._pool.budget, (asked.minimum, asked.maximum)
            self._page[control.POOL_BYTES + self._rank] = self._pool_size
            if asked.minimum > self._pool_size:
                raise refuse.Refused(f"{switch}_MIN={asked.minimum} is over the {self._pool_size} bytes of "
                                     f"{switch}_POOL={asked.pool}")  # fmt: skip
            self._page[control.POOL_OF + self._rank] = pools.number_of(Path(str(self._pool.path)).stem)
            name = f"{pools.ENGINE}{os.getpid()}"
            self._blocks.join(self._pool, name=name, min=asked.minimum, max=asked.maximum)
        except refuse.Refused:
            raise
        except OutOfMemory as error:  # of the pool
            raise refuse.Refused(f"{switch}_MIN={asked.minimum} does not fit {switch}_POOL={asked.pool}: {error}; "
                                 "lower it, or the minimum of another member") from error  # fmt: skip
        except (OSError, ValueError, MemoryError, VmemError) as error:
            size = f"{switch}_POOL_SIZE {f'is {asked.pool_size}' if asked.pool_size else 'is not set'}"
            raise refuse.Refused(f"{switch}_POOL={asked.pool}: {error}; {size} (or unset {switch}_POOL)") from error

    def _back_null(self) -> None:
        """Back block 0."""
        try:
            self._back([0], START)
        except OutOfMemory as error:
            if self._pool is None:
                raise
            size, chosen = self._bytes_under([0]), self._chosen
            raise refuse.Refused(f"{chosen.switch}_POOL={chosen.pool}: the other members did not give {size} bytes "
                                 f"within {START:.0f} s: {error}") from error  # fmt: skip

    def _bytes_under(self, ids: Sequence[int]) -> int:
        assert self._tensor is not None
        return geometry.bytes_under(ids, self._ranges, self._tensor.page_size)

    def _back(self, ids: Sequence[int], seconds: float) -> None:
        """Back blocks. In a pool, the other members may have to give their bytes first, and have them in use now."""
        assert self._blocks is not None
        end = time.monotonic() + seconds
        size = self._bytes_under(ids) if self._pool is not None else 0
        while True:
            try:
                if self._pool is not None:
                    self._blocks.ask(size)
                self._blocks.back(ids)
                break
            except OutOfMemory:
                if self._pool is None or time.monotonic() >= end:
                    raise
            time.sleep(POLL)

    def _leave_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()

    # ---- between steps ---------------------------------------------------------------------------------------

    def _between(self) -> None:
        """Tell the pool what the scheduler offers and wants."""
        page, blocks = self._page, self._blocks
        if self._pool is None or blocks is None or not page[control.PID]:
            return
        least = page[control.LEAST] * self._block + page[control.NULL + self._rank]
        nothing = page[control.LENT] or page[control.ASLEEP + self._rank]
        share = (0 if nothing else page[control.MIN], page[control.MAX] and max(page[control.MAX], least))
        self._set_share(share)
        blocks.offer(page[control.OFFERED] * self._block)
        page[control.POOL_BYTES + self._rank] = self._pool_size
        page[control.POOL_MAY + self._rank] = int(self._board[control.BUDGET]) + self._pool.free
        most = min(share[1] or self._pool_size, self._pool_size)
        held = int(self._board[control.HELD])
        wanted = max(page[control.WANTED], page[control.AHEAD]) + self._pending()
        wanted = min(wanted * self._block, most - held)
        self._ask(wanted, page[control.USED] > 0)

    def _set_share(self, share: tuple[int, int]) -> None:
        """Set minimum and maximum. While the minimums of all members exceed the pool, this one's is as before."""
        assert self._blocks is not None
        if share == self._share:
            return
        try:
            self._blocks.set_share(*share)
        except OutOfMemory as error:
            if share != self._unfit:
                logger.warning("vMem: the pool has no room for this engine's minimum yet: %s", error)
            self._unfit = share
            return
        self._share, self._unfit = share, None

    def _pending(self) -> int:
        """Blocks of orders on their way. What they lack is asked for, too, as a question replaces the last one."""
        return 0

    def _ask(self, wanted: int, runs: bool) -> None:
        """Ask the pool. An engine that runs requests pauses now and then, as who asks gives others nothing."""
        assert self._blocks is not None
        now = time.monotonic()
        if self._asking and (wanted <= 0 or (runs and now >= self._asking + ASK)):
            self._blocks.ask(0)
            self._asking = 0.0
        elif wanted > 0:
            try:
                missing = self._blocks.ask(wanted)
            except OutOfMemory:
                missing = wanted
            self._asking = (self._asking or now) if missing else 0.0

    # ---- the device ------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        if self._tensor is not None and self._tensor.tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.tensor.device)

    def _trim(self) -> None:
        if self._tensor is not None:
            self._tensor.context.trim()
