"""How numbered blocks share pages: which blocks to back so that they take few pages, and what pages hold beyond them.

A page is there while one of its blocks is backed. The others take no memory when they come back, so they come first;
then whole pages do. The lowest number comes first in either case, so that blocks in use stay close together.

Blocks may reach into pages in which none of them begins. What these take cannot be counted from numbers: it is measured
now and then (`measure`), and a limit is lowered by it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Iterator


class PagePacking:
    """The blocks 1 to `total`, of which those that have no memory are *out*: all at first.

    Parameters
    ----------
    total : int
    block_bytes : int
        Bytes of a block, all layers.
    span : int
        Bytes of blocks that share a page: of the page, or of as many as there are layers, if these are apart. 0 if no
        two blocks share one.

    Attributes
    ----------
    pages : int
        Pages of which some block is backed. That of block 0, which is always there, does not count.
    count : int
        Blocks that are out.
    at_hand : int
        Blocks that are out and whose page is there.
    shared : bool
        Blocks share pages.
    together : int
        Blocks that share a page at least.
    page_overhead : int
        Bytes that pages held beyond the blocks which begin in them, when they were last measured.
    limit_correction : int
        Bytes by which blocks stay below a limit, so that their pages keep it.
    """

    def __init__(self, total: int, block_bytes: int, span: int) -> None:
        self.span, self._bytes = max(span, block_bytes), block_bytes
        self.count, self.pages, self.shared = total, 0, self.span > block_bytes
        self.page_overhead = self.limit_correction = self._measured_limit = 0
        self.together = self.span // block_bytes
        self._is_out = bytearray(b"\0" + b"\1" * total)
        pages = range(self.page_of(total) + 1)
        self._first = [-(-page * self.span // block_bytes) for page in pages]  # the first block of each page
        self._first.append(total + 1)
        self._size = [self._first[page + 1] - self._first[page] for page in pages]
        self._of = [self._size[0] - 1, *self._size[1:]]  # the blocks of each page that are out
        self.at_hand = self._of[0]
        self._part = [0]  # a heap of pages that are there and have blocks that are out; some no longer do
        self._whole = list(range(1, len(self._size)))  # a heap of pages whose blocks are all out

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return (i for i, out in enumerate(self._is_out) if out)

    def page_of(self, block: int) -> int:
        """The page in which a block begins."""
        return block * self._bytes // self.span

    def inside(self, page: int) -> int:
        """How many blocks of a page are not out."""
        return self._size[page] - self._of[page]

    def put(self, ids: Iterable[int]) -> None:
        """These blocks are out now."""
        size, span, out, of, whole = self._bytes, self.span, self._is_out, self._of, self._size
        for i in ids:
            page = i * size // span
            out[i] = 1
            of[page] += 1
            self.count += 1
            self.at_hand += 1
            if of[page] == whole[page]:
                self.pages -= 1
                self.at_hand -= whole[page]
                heapq.heappush(self._whole, page)
            elif of[page] == 1:
                heapq.heappush(self._part, page)

    def take(self, n: int, pages: int) -> list[int]:
        """Take up to `n` blocks that need at most `pages` pages more."""
        taken: list[int] = []
        out, of, first, part, whole = self._is_out, self._of, self._first, self._part, self._whole
        if not self.shared:  # a block is a page
            taken = [heapq.heappop(whole) for _ in range(min(n, pages, len(whole)))]
            for i in taken:
                out[i] = of[i] = 0
            self.pages += len(taken)
        while self.shared and (left := n - len(taken)) > 0:
            if part:
                page = heapq.heappop(part)
                if of[page] == self._size[page]:
                    continue  # it has left, and is among the whole ones
            elif whole and pages > 0:
                page = heapq.heappop(whole)
                self.pages, pages = self.pages + 1, pages - 1
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
        self.count -= len(taken)
        return taken

    # ---- limits ----------------------------------------------------------------------------------------------

    def whole(self, size: int) -> int:
        """The bytes of the whole pages in so many bytes."""
        return size - size % self.span

    def measure(self, held: int, limit: int) -> None:
        """See what pages hold beyond the blocks that begin in them.

        held : bytes of all pages but those of block 0, while no block is on its way. limit: bytes that they may hold.
        """
        own = self.pages * self.span
        self.page_overhead = max(held - own, 0)
        # Above the limit, what leaves takes its part of this with it; below it, what comes is taken to add nothing.
        self.limit_correction = limit - own * limit // held if held > max(limit, own) else self.page_overhead

    def forget(self, limit: int) -> None:
        """Forget what was measured, if it was under another limit: it says little about this one."""
        if limit != self._measured_limit:
            self._measured_limit, self.limit_correction, self.page_overhead = limit, 0, 0

    def fewest_pages(self, blocks: int, free: Iterable[int]) -> int:
        """Pages of so many blocks if only those in use are scattered. Page 0 makes up for the last, maybe a part.

        free : the blocks that are backed and not in use.
        """
        unused = collections.Counter(map(self.page_of, free))
        used = self.pages - sum(n == self.inside(page) for page, n in unused.items() if page)
        return max(used, -(-blocks // self.together))

    def freeing(self, free: Iterable[int]) -> list[int]:
        """Those of the blocks, backed and not in use, whose pages have no other ones: if they leave, pages go."""
        free = list(free)
        if not self.shared:
            return free
        count = collections.Counter(map(self.page_of, free))
        return [i for i in free if count[page := self.page_of(i)] == self.inside(page)]

    def blocks_in(self, room: int) -> int:
        """Blocks that need no more than so many bytes: those of pages that are there need none."""
        return self.at_hand + room // self.span * self.together if self.shared else room // self._bytes
