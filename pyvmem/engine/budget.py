"""How many blocks of an engine may have memory: by its limits, by what its requests use, and by what others ask for.

An engine has a table of numbered blocks and a list of the free ones. A block is *backed* if the engine may use it: it
is in use or in the free list, and has pages. All others are *unbacked*, and have no memory. `BlockBudget` counts. Its
subclass moves blocks into the engine's free list and out of it, before each step and between steps.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from pyvmem.engine import control, pool_policy, pools
from pyvmem.engine.control import Page
from pyvmem.engine.packing import PagePacking
from pyvmem.engine.settings import Refused, Settings

FIT = 0.1  # seconds between two looks at what pages that blocks share take
RETRY = 0.03  # seconds until memory that was refused is asked for again


def take_settings(page: Page, chosen: Settings) -> None:
    """Write an engine's limits, its share and its pool into its control page, as its settings say."""
    if chosen.limit is not None:
        page[control.LIMIT] = chosen.limit
    page[control.MIN], page[control.MAX] = chosen.minimum, chosen.maximum
    page[control.PRIORITY], page[control.POOL] = chosen.priority, pools.number_of(chosen.pool)


def check_sizes(chosen: Settings, least: int, alone: int, pool: int, option: str) -> None:
    """Warn of limits below `least`, which are not kept. Raises `Refused` if a request cannot have it in its pool.

    least : bytes of the blocks of one request of the greatest length. alone: bytes of the pages under block 0. pool:
        bytes of the pool, 0 if they are not known. option: of the engine, which limits a request's length.
    """
    for name, size in (("LIMIT", chosen.limit), ("MAX", chosen.maximum or None)):
        if size is not None and size < least:
            chosen.logger.warning("%s_%s=%d counts as %d bytes, which a request of the greatest length needs",
                                  chosen.switch, name, size, least)  # fmt: skip
    if chosen.pool and 0 < pool < least + alone:
        raise Refused(f"{chosen.switch}_POOL={chosen.pool}: a request of the greatest length needs {least + alone} "
                      f"bytes of a worker, and the pool has {pool}; lower {option}, or raise "
                      f"{chosen.switch}_POOL_SIZE")  # fmt: skip


class BlockBudget:
    """The blocks 1 to `total` of one engine. Block 0 is always backed, and does not count.

    Parameters
    ----------
    page : Page
        The engine's control page.
    total : int
    block_bytes : int
        Bytes of a block in one worker, all layers, until workers tell their own. Of these, the largest counts: a
        stage of a pipeline may have more layers than another.
    least : int
        Blocks that one request of the greatest length needs. As many are always backed.
    low : int
        Blocks that one step may take. Twice as many are kept ready, or a part of those that are allowed
        (`pool_policy.SPARE`) if that is less.
    ranks : int
        Workers.
    """

    def __init__(self, page: Page, total: int, block_bytes: int, least: int, low: int, ranks: int) -> None:
        self.page, self.total, self.block_bytes, self.ranks = page, total, block_bytes, ranks
        self.least, self.low = min(least, total), low
        self._allowed = total  # as of the last step
        self.packing = PagePacking(total, block_bytes, 0)
        self._page_bytes = 0  # as the worker says that has the largest blocks
        self._measured = 0.0
        self.lent = False
        self.is_behind = False  # another engine of the pool gets memory first
        self._keeps = 0  # blocks that are not offered
        self.offers = 0  # bytes that other engines of the pool offer
        self._retry = 0.0
        page[control.BLOCKS], page[control.BLOCK_BYTES] = total, block_bytes
        page[control.LEAST], page[control.LOW], page[control.RANKS_USED] = self.least, low, ranks

    # ---- the engine's free list ------------------------------------------------------------------------------

    def num_free(self) -> int:
        """Blocks in the engine's free list, cached ones included that no request uses."""
        raise NotImplementedError

    def free_ids(self) -> Iterable[int]:
        """Their numbers."""
        raise NotImplementedError

    @property
    def spare(self) -> int:
        """Free blocks without contents."""
        raise NotImplementedError

    def moving(self) -> bool:
        """Return whether blocks are being backed or unbacked in a way that the boards do not show."""
        return self.coming > 0

    # ---- what there is ---------------------------------------------------------------------------------------

    @property
    def num_withheld(self) -> int:
        """Blocks that the engine cannot hand out."""
        return self.packing.num_out + self.coming

    @property
    def num_backed(self) -> int:
        """Blocks in use or in the free list."""
        return self.total - self.num_withheld

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self.num_backed - self.num_free()

    @property
    def coming(self) -> int:
        """Blocks that workers are backing."""
        raise NotImplementedError

    @property
    def most(self) -> int:
        """Blocks that may be backed, whatever other engines have."""
        most: int = min(max(self._most_bytes() // self.block_bytes, self.least), self.total)
        return most

    def is_whole(self) -> bool:
        """Return whether all blocks are backed, and no limit or pool can take any. Steps need not look after memory.

        The last step that looked after it has seen no limit either: others still have what it wrote.
        """
        taken = self.lent or self.page.cells[control.POOL] or self.num_withheld or self._allowed < self.total
        return not taken and self._limit() >= self.total * self.block_bytes

    def allowed(self) -> int:
        """Blocks that may be backed now."""
        if self.lent:
            return 0
        most = self.most
        if self.page.cells[control.POOL]:
            most = min(most, self._left_bytes() // self.block_bytes)
        if self.is_behind:
            most = min(most, self.num_backed + self.coming)
        return most

    def growable(self) -> int:
        """Blocks that may be backed beyond those that are, or are coming. Negative: so many are too many."""
        more = self.allowed() - self.num_backed - self.coming
        if self.page.cells[control.POOL]:  # others give memory to who asks, not to orders
            more = min(more, self._room() - self.coming)
        return more

    def refused(self, ids: Iterable[int]) -> None:
        """There was no memory for these blocks, which were to be backed."""
        self.packing.put(ids)
        self.page[control.REFUSED] += 1
        self._retry = time.monotonic() + RETRY

    def waits(self) -> bool:
        """Return whether memory was refused a moment ago."""
        return time.monotonic() < self._retry

    def _limit(self) -> int:
        """The smaller of limit and maximum, in whole pages."""
        cells = self.page.cells
        limit, most = cells[control.LIMIT], cells[control.MAX]
        return self.packing.in_pages(min(limit, most) if most else limit)

    def _most_bytes(self) -> int:
        """The most that blocks may take, in whole pages in which they begin."""
        return self.packing.in_pages(self._limit() - self.packing.limit_correction)

    def _left_bytes(self) -> int:
        """Bytes that other members of the pool leave to blocks, in whole pages; they have asked for offered blocks."""
        most, page = control.NO_LIMIT, self.page
        if page.cells[control.POOL] and page.cells[control.OFFERED]:
            for rank in range(self.ranks):
                if shrink_to := page.board_word(rank, control.SHRINK_TO):
                    most = min(most, self._in_largest(rank, shrink_to - page.cells[control.NULL + rank]))
        return max(self.packing.in_pages(most - self.packing.page_overhead), self._keeps * self.block_bytes)

    def _in_largest(self, rank: int, size: int) -> int:
        """Convert bytes of a worker's blocks to bytes of the same blocks in the worker that has the largest ones."""
        return size * self.block_bytes // (self.page.cells[control.OWN_BLOCK + rank] or self.block_bytes)

    def _pages_beyond(self) -> int:
        """Pages beyond a limit that must go. Blocks within the limit may be scattered over too many pages."""
        packing = self.packing
        if not packing.shared:
            return 0
        most, left = self._most_bytes() // packing.page_bytes, self._left_bytes() // packing.page_bytes
        if self.num_backed <= self.least and packing.pages_in_use > min(most, left):
            # Free blocks may leave, and blocks that share pages come in their place.
            most = max(most, packing.fewest_pages(self.least, self.free_ids()))
        asked = min(packing.pages_in_use - left, self.num_backed - self._keeps)  # a block frees one page at most
        return max(packing.pages_in_use - most, asked, 0)

    def fit(self) -> None:
        """Measure what pages hold beyond the blocks that begin in them: blocks may reach into the next page."""
        most = self._limit()
        self.packing.forget(most)
        limited = most < self.total * self.block_bytes or self.page.cells[control.POOL]
        if not limited or time.monotonic() < self._measured + FIT:
            return
        words, ranks = self.page.words, self.ranks
        boards = self.page.boards(ranks)
        if self.moving() or self.num_backed > self.allowed() or boards[:, control.LEAVING].any():
            return  # blocks are on their way
        self._measured = time.monotonic()
        held = int((boards[:, control.HELD] - words[control.NULL : control.NULL + ranks]).max())
        self.packing.measure(held, most)

    def reachable(self) -> int:
        """Blocks that may be backed now; in a pool, as far as nobody's requests use its memory.

        Leases and caches that are members of the pool may offer more.
        """
        allowed = self.allowed()
        if self.page.cells[control.POOL]:
            allowed = min(allowed, self.num_backed + self._room() + self.offers // self.block_bytes)
        return allowed

    def usage(self) -> float:
        """The part of the blocks within reach that requests use."""
        allowed = self.reachable()
        return min(self.used / allowed, 1.0) if allowed else 0.0

    def ready(self, need: int = 0) -> int:
        """Blocks to keep ready: free, and without contents. need: blocks that the next step takes."""
        return max(pool_policy.ready(self.low, self._allowed), need)

    def _room(self) -> int:
        """Blocks for which the pool has unused memory. Blocks of pages that exist need none."""
        return self.packing.blocks_in(self._room_bytes())

    def _room_bytes(self) -> int:
        """Bytes of the pool that nobody uses, as far as workers see the page."""
        page, room = self.page, self.total * self.block_bytes
        for rank in range(self.ranks):
            if page.cells[control.ATTACHED + rank]:
                most = max(page.board_word(rank, control.BUDGET), page.cells[control.POOL_MAY + rank])
                room = min(room, self._in_largest(rank, most - page.board_word(rank, control.HELD)))
        return max(room, 0)

    def asked(self) -> bool:
        """Return whether other engines of the pool ask for blocks that are backed here, or for their pages."""
        packing = self.packing
        return self._left_bytes() < max(self.num_backed * self.block_bytes, packing.pages_in_use * packing.page_bytes)

    def _learn_pages(self) -> None:
        """Take over which blocks share pages, once workers have their memory and know it."""
        cells = self.page.cells
        largest = max(range(self.ranks), key=lambda rank: cells[control.OWN_BLOCK + rank])
        block, page_bytes = cells[control.OWN_BLOCK + largest], cells[control.PAGE_BYTES + largest]
        if block and (page_bytes, block) != (self._page_bytes, self.block_bytes):
            self._page_bytes, self.block_bytes = page_bytes, block
            self.page[control.BLOCK_BYTES] = block
            before = set(self.packing)
            self.packing = PagePacking(self.total, block, page_bytes)
            self.packing.take(self.total, self.total)
            self.packing.put(before)

    def _take_unbacked(self, n: int) -> list[int]:
        """Take up to `n` unbacked blocks, whose pages fit the limits. The caller has them backed."""
        packing, pages = self.packing, self.total
        if packing.shared:
            pages = min(self._most_bytes(), self._left_bytes()) // packing.page_bytes - packing.pages_in_use
            short = self.least - self.num_backed - self.coming
            n, pages = min(n, short) if pages < 0 else n, max(pages, short)
            if self.page.cells[control.POOL]:
                coming = -(-self.coming // packing.together)
                pages = min(pages, max(self._room_bytes() // packing.page_bytes - coming, 0))
        return packing.take(n, pages)

    def publish_free(self) -> tuple[int, int]:
        """Write how many blocks are in use, and how many free ones have contents or none: (free, backed)."""
        page, free, spare, backed = self.page.cells, self.num_free(), self.spare, self.num_backed
        page[control.USED], page[control.SPARE], page[control.CACHED] = backed - free, spare, free - spare
        return free, backed

    def publish(self, wanted: int = 0, yields: bool = False, keeps: int = 0) -> None:
        """Write the numbers of the control page.

        wanted : blocks that requests lack. yields: whether requests give way to another engine's. keeps: free blocks
        that requests take next, and that are not offered to others.
        """
        (free, backed), page = self.publish_free(), self.page.cells
        page[control.ALLOWED], page[control.COMING], page[control.WANTED] = self.reachable(), self.coming, wanted
        page[control.LENT] = self.lent and not backed
        minimum = 0 if self.page.asleep else -(-page[control.MIN] // self.block_bytes)
        # Without `yields`, others get what no request uses; with it, the engine preempts requests for them.
        offered = backed if yields else free - keeps
        page[control.OFFERED] = offered = max(min(offered, backed - minimum), 0)
        self._keeps = backed - offered
