"""Numbered blocks that share pages: chooses blocks to back so that they take few pages, and counts the pages.

A page exists while one of its blocks is backed. Backing another of its blocks takes no memory, so these are chosen
first, and then blocks of new pages. The lowest number comes first in either case, so that blocks in use stay close
together.

Blocks may reach into pages in which none of them begins. The memory of such pages cannot be counted from block numbers:
it is measured now and then (`measure`), and a limit is lowered by it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Iterator


class PagePacking:
    """The blocks 1 to `total`. Blocks without memory are *out*; at first, all are.

    Parameters
    ----------
    total : int
    block_bytes : int
        Bytes of a block, all layers.
    page_bytes : int
        Bytes of blocks that share a page; if layers are apart, that share one page of each layer. 0 if no two blocks
        share one.

    Attributes
    ----------
    pages_in_use : int
        Pages with a backed block. The page of block 0, which always exists, does not count.
    num_out : int
        Blocks that are out.
    at_hand : int
        Blocks that are out and whose page exists.
    shared : bool
        True if blocks share pages.
    together : int
        The fewest blocks that share a page.
    page_overhead : int
        Bytes that pages held beyond the blocks that begin in them, when last measured.
    limit_correction : int
        Bytes by which blocks stay below a limit, so that their pages keep it.
    """

    def __init__(self, total: int, block_bytes: int, page_bytes: int) -> None:
        self.page_bytes, self._bytes = max(page_bytes, block_bytes), block_bytes
        self.num_out, self.pages_in_use, self.shared = total, 0, self.page_bytes > block_bytes
        self.page_overhead = self.limit_correction = self._measured_limit = 0
        self.together = self.page_bytes // block_bytes
        self._is_out = bytearray(b"\0" + b"\1" * total)
        pages = range(self.page_of(total) + 1)
        self._first = [-(-page * self.page_bytes // block_bytes) for page in pages]  # the first block of each page
        self._first.append(total + 1)
        self._size = [self._first[page + 1] - self._first[page] for page in pages]
        self._of = [self._size[0] - 1, *self._size[1:]]  # the number of blocks of each page that are out
        self.at_hand = self._of[0]
        self._part = [0]  # a heap of pages that exist and have blocks that are out, or had some
        self._gone = list(range(1, len(self._size)))  # a heap of pages whose blocks are all out

    def __len__(self) -> int:
        return self.num_out

    def __iter__(self) -> Iterator[int]:
        return (i for i, out in enumerate(self._is_out) if out)

    def page_of(self, block: int) -> int:
        """The page in which a block begins."""
        return block * self._bytes // self.page_bytes

    def inside(self, page: int) -> int:
        """How many blocks of a page are not out."""
        return self._size[page] - self._of[page]

    def put(self, ids: Iterable[int]) -> None:
        """Mark these blocks as out."""
        size, page_bytes, out, of = self._bytes, self.page_bytes, self._is_out, self._of
        for i in ids:
            page = i * size // page_bytes
            out[i] = 1
            of[page] += 1
            self.num_out += 1
            self.at_hand += 1
            if of[page] == self._size[page]:
                self.pages_in_use -= 1
                self.at_hand -= self._size[page]
                heapq.heappush(self._gone, page)
            elif of[page] == 1:
                heapq.heappush(self._part, page)

    def take(self, n: int, pages: int) -> list[int]:
        """Take up to `n` blocks that need at most `pages` pages more."""
        taken: list[int] = []
        out, of, first, part, gone = self._is_out, self._of, self._first, self._part, self._gone
        if not self.shared:  # a block is a page
            taken = [heapq.heappop(gone) for _ in range(min(n, pages, len(gone)))]
            for i in taken:
                out[i] = of[i] = 0
            self.pages_in_use += len(taken)
        while self.shared and (left := n - len(taken)) > 0:
            if part:
                page = heapq.heappop(part)
                if of[page] == self._size[page]:
                    continue  # it has left, and is among those that are gone
            elif gone and pages > 0:
                page = heapq.heappop(gone)
                self.pages_in_use, pages = self.pages_in_use + 1, pages - 1
                self.at_hand += of[page]
            else:
                break
            i, end = first[page], first[page + 1]
            for _ in range(min(of[page], left)):
                i = out.index(1, i, end)
                out[i] = 0
                taken.append(i)
            self.at_hand -= min(of[page], left)
            of[page] -= min(of[page], left)
            if of[page]:
                heapq.heappush(part, page)
        self.num_out -= len(taken)
        return taken

    # ---- limits ----------------------------------------------------------------------------------------------

    def in_pages(self, size: int) -> int:
        """The bytes of the whole pages in so many bytes."""
        return size - size % self.page_bytes

    def measure(self, held: int, limit: int) -> None:
        """Compute what pages hold beyond the blocks that begin in them.

        held : bytes of all pages but those of block 0, while no block is being backed. limit: bytes that they may hold.
        """
        own = self.pages_in_use * self.page_bytes
        self.page_overhead = max(held - own, 0)
        # Above the limit, blocks that leave take their part of the overhead with them. Below it, blocks that come are
        # taken to add none.
        self.limit_correction = limit - own * limit // held if held > max(limit, own) else self.page_overhead

    def forget(self, limit: int) -> None:
        """Forget a measurement under another limit, which says little about this one."""
        if limit != self._measured_limit:
            self._measured_limit, self.limit_correction, self.page_overhead = limit, 0, 0

    def fewest_pages(self, blocks: int, free: Iterable[int]) -> int:
        """Pages of so many blocks if only those in use are scattered. Page 0 makes up for a last, partial page.

        free : the blocks that are backed and not in use.
        """
        unused = collections.Counter(map(self.page_of, free))
        used = self.pages_in_use - sum(n == self.inside(page) for page, n in unused.items() if page)
        return max(used, -(-blocks // self.together))

    def freeing(self, free: Iterable[int]) -> list[int]:
        """The blocks of `free` (backed, not in use) whose pages have no other blocks: giving them up frees pages."""
        free = list(free)
        if not self.shared:
            return free
        count = collections.Counter(map(self.page_of, free))
        return [i for i in free if count[page := self.page_of(i)] == self.inside(page)]

    def blocks_in(self, room: int) -> int:
        """Blocks that need no more than so many bytes. Blocks of pages that exist need none."""
        return self.at_hand + room // self.page_bytes * self.together if self.shared else room // self._bytes
