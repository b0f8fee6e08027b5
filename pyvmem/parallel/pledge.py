"""How far the requests of tensor-parallel ranks can grow without a question to the other ranks.

SPDX-License-Identifier: MIT
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from pyvmem._ffi import lib
from pyvmem.kv.arguments import lengths_of
from pyvmem.kv.cache import KVCache

AHEAD = 32  # tokens past a step's lengths that the ranks agree on with it; and the most steps between two agreements


class Pledge:
    """How far requests can grow without asking the other ranks: from `least` to `most` tokens."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows = {(spec.row_bytes, spec.max_tokens or cache.max_tokens) for spec in cache.specs}
        self.least, self.most = np.zeros((2, cache.slots), np.int64)
        self.ahead = self.most.copy()  # what the next agreement is about
        self.steps = 0  # since the last agreement

    def covers(self, lengths: npt.NDArray[Any] | None) -> bool:
        """Whether a step to these lengths finds its memory on every rank."""
        if lengths is None or self.steps == AHEAD:
            return False
        grown = lengths > 0
        return bool(grown.any() and (~grown | (lengths >= self.least) & (lengths <= self.most)).all())

    def took(self, lengths: npt.NDArray[Any]) -> None:
        """Record a step that `covers` allowed."""
        self.least = np.where(lengths > 0, lengths, self.least)
        self.steps += 1

    def assured(self, lengths: npt.NDArray[Any]) -> bool:
        """Whether this rank has the memory for all requests to grow by `AHEAD` tokens."""
        further = np.minimum(lengths + AHEAD, self.cache.max_tokens)
        self.ahead = np.where(lengths > 0, further, self.most)
        raw = lengths_of(self.ahead, self.cache.slots)
        return not lib.vmem_kv_step(self.cache._use(), raw, self.cache.slots, lib.VMEM_KV_ASSURED)

    def agree(self, lengths: npt.NDArray[Any], ahead: bool) -> None:
        """Record a step. ahead: every rank has the memory for the next ones."""
        self.least = np.where(lengths > 0, lengths, self.least)
        self.most = self.ahead if ahead else np.where(self.most > 0, self.within_pages(self.least), 0)
        if not ahead:
            self.most = np.where(lengths > 0, self.within_pages(lengths), self.most)
        self.steps = 0

    def within_pages(self, lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Lengths up to which requests need no further pages: these are backed and stay backed."""
        page, tile, most = self.cache.page_size, self.cache.tile_rows, self.cache.max_tokens
        within: npt.NDArray[Any] = np.full_like(lengths, most)
        for row, rows in self.rows:
            pages = -(-np.minimum(-(-lengths // tile) * tile, rows) * row // page)
            within = np.minimum(within, np.where(lengths >= rows, most, pages * page // row // tile * tile))
        within = np.minimum(np.maximum(within, lengths), most)
        return np.asarray(within)

    def end(self, slot: int) -> None:
        self.most[slot] = 0

    def clear(self) -> None:
        self.most[:] = 0
