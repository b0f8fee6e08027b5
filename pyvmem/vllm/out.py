"""The blocks that do not circulate, by the pages that they would share.

A page is there while one of its blocks circulates. The others take no memory when they come back, so they come first;
then whole pages do. The lowest number comes first in either case, so that blocks in use stay close together.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


class Out:
    """The blocks 1 to `total` that are out: all at first.

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
        Pages of which some block circulates. That of block 0, which is always there, does not count.
    """

    def __init__(self, total: int, block_bytes: int, span: int) -> None:
        self.span, self._bytes, self._total = max(span, block_bytes), block_bytes, total
        self._n, self.pages = total, 0
        self._is_out = bytearray(b"\0" + b"\1" * total)
        self._size = [len(self._blocks(page)) for page in range(self.page_of(total) + 1)]
        self._of = [self._size[0] - 1, *self._size[1:]]  # the blocks of each page that are out
        self._part = [0]  # a heap of pages that are there and have blocks that are out; some no longer do
        self._whole = list(range(1, len(self._size)))  # a heap of pages whose blocks are all out

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[int]:
        return (i for i, out in enumerate(self._is_out) if out)

    @property
    def shared(self) -> bool:
        """Whether blocks share pages."""
        return self.span > self._bytes

    def page_of(self, block: int) -> int:
        """The page in which a block begins."""
        return block * self._bytes // self.span

    def inside(self, page: int) -> int:
        """How many blocks of a page are not out."""
        return self._size[page] - self._of[page]

    def put(self, ids: Iterable[int]) -> None:
        """These blocks are out now."""
        for i in ids:
            page = i * self._bytes // self.span
            self._is_out[i] = 1
            self._n += 1
            self._of[page] += 1
            if self._of[page] == self._size[page]:
                self.pages -= 1
                heapq.heappush(self._whole, page)
            elif self._of[page] == 1:
                heapq.heappush(self._part, page)

    def take(self, n: int, pages: int) -> list[int]:
        """Take up to `n` blocks that need at most `pages` pages more."""
        taken: list[int] = []
        while len(taken) < n:
            if self._part:
                page = heapq.heappop(self._part)
                if self._of[page] == self._size[page]:
                    continue  # it has left, and is among the whole ones
            elif self._whole and pages > 0:
                page = heapq.heappop(self._whole)
                self.pages, pages = self.pages + 1, pages - 1
            else:
                break
            for i in self._blocks(page):
                if self._is_out[i] and len(taken) < n:
                    self._is_out[i] = 0
                    self._of[page] -= 1
                    taken.append(i)
            if self._of[page]:
                heapq.heappush(self._part, page)
        self._n -= len(taken)
        return taken

    def _blocks(self, page: int) -> range:
        first, end = (-(-p * self.span // self._bytes) for p in (page, page + 1))
        return range(first, min(end, self._total + 1))
