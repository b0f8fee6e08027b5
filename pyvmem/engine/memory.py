"""The KV memory of one worker: a virtual tensor in numbered blocks, the pages behind them, and its part in a pool.

A block has parts at several places, such as one in each layer (`BlockRange`). Blocks whose parts are not whole pages
share pages.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from pyvmem import Context
from pyvmem._clock import now_us
from pyvmem.blocks import BlockRange, Blocks
from pyvmem.engine import control, pools
from pyvmem.engine.control import Page
from pyvmem.engine.settings import Refused, Settings, cannot
from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.kv.pool import KVPool
from pyvmem.tensor import VirtualTensor

PAGE = 2 << 20  # bytes of a page, if nothing else is set
POLL = 0.02  # seconds between two attempts to get memory from a pool
START = 60.0  # seconds in which an engine that starts gets the memory of block 0 from the other members of a pool
ASK = 0.06  # seconds in which an engine that runs requests asks others for memory, before it gives for once


def in_one_piece(ranges: Sequence[BlockRange]) -> bool:
    """Return whether a block of all layers is one piece of memory, and the next block the next piece."""
    first = min(r.offset for r in ranges)
    end = max(r.offset + (r.layers - 1) * r.layer_stride + r.bytes for r in ranges)
    return len({r.stride for r in ranges}) == 1 and end - first <= ranges[0].stride


def page_size(ranges: Sequence[BlockRange], sizes: Collection[int]) -> int:
    """The page size for blocks, of those that the backend has.

    For blocks in one piece it is at most 2 MiB. The device finds the memory of few, large pages faster, and a request's
    blocks are mostly neighbours, which share pages. Where the layers are apart, many blocks would share a page of one
    layer. So the page is the largest of which every part of a block is a whole number; else the smallest.
    """
    if in_one_piece(ranges):
        return max((size for size in sizes if size <= PAGE), default=min(sizes))
    parts = math.gcd(*(n for r in ranges for n in (r.offset, r.bytes, r.stride, r.layer_stride)))
    return max((size for size in sizes if parts % size == 0), default=min(sizes))


def bytes_under(blocks: Collection[int], ranges: Sequence[BlockRange], page: int) -> int:
    """Bytes of the pages under some blocks."""
    parts = (
        (r.offset + layer * r.layer_stride + block * r.stride, r.bytes)
        for r in ranges for layer in range(r.layers) for block in blocks
    )  # fmt: skip
    return page * len({i for at, size in parts for i in range(at // page, -(-(at + size) // page))})


def _check_backend(name: str, device: str) -> None:
    """Raise `Refused` if the backend's memory is not that of the engine's device. name: "" for the best that works."""
    if name == "host" and device != "cpu":
        raise Refused("VMEM_BACKEND=host has memory of the CPU only; unset it, or choose uvm, stock or cuda")
    if name not in ("", "host") and device == "cpu":
        raise Refused(f"VMEM_BACKEND={name}: the engine runs on the CPU here, whose memory is that of host; unset it")


def context_on(device: torch.device, chosen: Settings) -> Context:
    """A context for the KV memory of a worker. Raises `Refused` for a backend or page size that cannot be."""
    _check_backend(os.environ.get("VMEM_BACKEND", ""), device.type)
    context = Context(device=device.index or 0) if device.type == "cuda" else Context("host")
    _check_backend(context.backend, device.type)
    name, size, sizes = f"{chosen.switch}_PAGE_SIZE", chosen.page_size, sorted(context.page_sizes)
    if size and size not in sizes:
        has = ", ".join(map(str, sizes))
        raise Refused(f"{name}={size}: pages of backend {context.backend} have {has} bytes (or unset {name})")
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
            raise cannot(chosen.switch, f"worker {rank} is out of range: an engine may have {control.RANKS} workers")
        self._page, self._rank, self._chosen = page, rank, chosen
        self._tensor: VirtualTensor | None = None
        self._ranges: list[BlockRange] = []
        self._block = 0  # bytes of a block
        self._blocks: Blocks | None = None
        self._shared: Context | None = None
        self._pool: KVPool | None = None
        self._pool_size, self._share = 0, (0, 0)
        self._unfit: tuple[int, int] | None = None  # a share that the pool has refused
        self._asking = 0.0  # since when the pool has been asked for memory that it has not given; 0: it is not asked

    def context(self, device: torch.device) -> Context:
        """The context of all that this worker has on vMem. Raises as `context_on`."""
        self._shared = self._shared or context_on(device, self._chosen)
        return self._shared

    def pool(self, device: torch.device) -> KVPool:
        """The pool that the settings name. Raises `Refused`."""
        if self._pool is None:
            try:
                self._pool = pools.open_pool(self._chosen, self.context(device))
            except (OSError, ValueError, MemoryError) as error:
                raise self._without_pool(error) from error
        return self._pool

    def _without_pool(self, error: Exception) -> Refused:
        asked, switch = self._chosen, self._chosen.switch
        size = f"{switch}_POOL_SIZE {f'is {asked.pool_size}' if asked.pool_size else 'is not set'}"
        return Refused(f"{switch}_POOL={asked.pool}: {error}; {size} (or unset {switch}_POOL)")

    @property
    def blocks(self) -> Blocks:
        """The blocks, once `_make_blocks` has made them."""
        assert self._blocks is not None
        return self._blocks

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
        self._blocks = blocks = Blocks(self._tensor, self._ranges, number, board=self._board)
        self._join(self._tensor.tensor.device)
        self._back_null()
        page[control.NULL + rank] = alone = blocks.stats().held
        # Bytes of the blocks that share a page, or a page of each layer.
        page[control.PAGE_BYTES + rank] = self._tensor.page_size * block // min(r.stride for r in self._ranges)
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
                raise Refused(f"{switch}_MIN={asked.minimum} is over the {self._pool_size} bytes of "
                              f"{switch}_POOL={asked.pool}")  # fmt: skip
            self._page[control.POOL_OF + self._rank] = pools.number_of(Path(str(self._pool.path)).stem)
            name = f"{pools.ENGINE}{os.getpid()}"
            self._blocks.join(self._pool, name=name, min=asked.minimum, max=asked.maximum)
        except Refused:
            raise
        except OutOfMemory as error:  # of the pool
            raise Refused(f"{switch}_MIN={asked.minimum} does not fit {switch}_POOL={asked.pool}: {error}; "
                          "lower it, or the minimum of another member") from error  # fmt: skip
        except (OSError, ValueError, MemoryError, VmemError) as error:
            raise self._without_pool(error) from error

    def _back_null(self) -> None:
        """Back block 0. Models go to sleep for it, as for one that wakes."""
        begin = now_us()

        def lacks(size: int) -> None:
            control.lacks_to_start(self._page, self._rank, size, begin)

        try:
            self._back([0], START, lacks)
        except OutOfMemory as error:
            if self._pool is None:
                raise
            size, chosen = self._bytes_under([0]), self._chosen
            raise Refused(f"{chosen.switch}_POOL={chosen.pool}: the other members did not give {size} bytes "
                          f"within {START:.0f} s: {error}") from error  # fmt: skip

    def _bytes_under(self, ids: Sequence[int]) -> int:
        assert self._tensor is not None
        return bytes_under(ids, self._ranges, self._tensor.page_size)

    def _back(self, ids: Sequence[int], seconds: float, lacks: Callable[[int], None] = lambda size: None) -> None:
        """Back blocks. In a pool, the other members may have to give their bytes first, and have them in use now.

        lacks: called with these bytes while they have not come, and with 0 at the end.
        """
        end = time.monotonic() + seconds
        size = self._bytes_under(ids) if self._pool is not None else 0
        while True:
            try:
                if self._pool is not None:
                    self.blocks.ask(size)
                self.blocks.back(ids)
                break
            except OutOfMemory:
                if self._pool is None or time.monotonic() >= end:
                    lacks(0)
                    raise
            lacks(size)
            time.sleep(POLL)
        lacks(0)

    def _leave_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()

    # ---- between steps ---------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Tell the pool what the scheduler offers and wants, and publish."""
        if self._pool is not None and self._blocks is not None and self._page[control.LEAST]:
            self._tell_pool(self._pool)
        self.publish()

    def _tell_pool(self, pool: KVPool) -> None:
        page = self._page
        least = page[control.LEAST] * self._block + page[control.NULL + self._rank]
        nothing = page[control.LENT] or page[control.ASLEEP + self._rank]
        share = (0 if nothing else page[control.MIN], page[control.MAX] and max(page[control.MAX], least))
        self._set_share(share)
        keeps = page[control.ASLEEP + self._rank] == control.Sleeps.KEEPS
        self.blocks.offer(0 if keeps else page[control.OFFERED] * self._block)
        page[control.POOL_BYTES + self._rank] = self._pool_size
        page[control.POOL_MAY + self._rank] = int(self._board[control.BUDGET]) + pool.free
        most = min(share[1] or self._pool_size, self._pool_size)
        held = int(self._board[control.HELD])
        # Pages of an order that is being carried out are held already: to ask for them again would take them twice.
        due = sum(page[word] for word in (control.USED, control.CACHED, control.SPARE, control.COMING))
        unmade = max(due - (held - page[control.NULL + self._rank]) // self._block, 0)
        wanted = max(page[control.WANTED], page[control.AHEAD]) + min(self._pending(), unmade)
        wanted = min(wanted * self._block, most - held)
        self._ask(wanted, page[control.USED] > 0)

    def _set_share(self, share: tuple[int, int]) -> None:
        """Set minimum and maximum. If the minimums of all members would exceed the pool, nothing changes."""
        assert self._blocks is not None
        if share == self._share:
            return
        try:
            self.blocks.set_share(*share)
        except OutOfMemory as error:
            if share != self._unfit:
                self._chosen.logger.warning("vMem: the pool has no room for this engine's minimum yet: %s", error)
            self._unfit = share
            return
        self._share, self._unfit = share, None

    def _pending(self) -> int:
        """Blocks of orders without an answer. Each question to the pool asks for them, too, as it replaces the last."""
        return 0

    def _ask(self, wanted: int, runs: bool) -> None:
        """Ask the pool. An engine that runs requests pauses now and then: a member that asks gives others nothing."""
        assert self._blocks is not None
        now = time.monotonic()
        if self._asking and (wanted <= 0 or (runs and now >= self._asking + ASK)):
            self.blocks.ask(0)
            self._asking = 0.0
        elif wanted > 0:
            try:
                missing = self.blocks.ask(wanted)
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
