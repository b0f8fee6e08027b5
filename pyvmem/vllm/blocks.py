"""The pages behind vLLM's blocks, in a worker.

`Blocks` backs and unbacks blocks by number. Pages that several blocks share are counted. Orders to back run in the
background, in order; a step backs what it needs itself if it must.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pyvmem.core import Context
from pyvmem.errors import OutOfMemory
from pyvmem.vllm import geometry

Ids = npt.NDArray[np.int64]


@dataclass
class Stats:
    """What has happened so far, in blocks, and what is backed now."""

    backed: int = 0
    pages: int = 0
    most_pages: int = 0
    now: int = 0
    ahead: int = 0
    unbacked: int = 0
    refused: int = 0


class Blocks:
    """Pages behind numbered blocks.

    Parameters
    ----------
    context : Context
    addr : int
        Where the allocation begins.
    page_size : int
    ranges : sequence of geometry.Range
    blocks : int
    answer : callable
        Called with (order, refused) when an order has been carried out, from any thread.
    """

    def __init__(self, context: Context, addr: int, page_size: int, ranges: Sequence[geometry.Range], blocks: int,
                 answer: Callable[[int, bool], None]) -> None:  # fmt: skip
        self._context, self._addr, self._page_size, self._ranges = context, addr, page_size, ranges
        self._answer = answer
        size = max(r.offset + (r.parts - 1) * r.part_stride + (blocks - 1) * r.stride + r.length for r in ranges)
        self._uses = np.zeros(-(-size // page_size), np.int32)
        self._backed = np.zeros(blocks, bool)
        self._leaving: collections.deque[tuple[int, Any, Ids]] = collections.deque()  # until their event has passed
        self._left = np.zeros(blocks, np.int64)  # by which call of `unback` a block leaves; 0: it stays
        self._calls = 0
        self._orders: collections.deque[tuple[int, Ids]] = collections.deque()
        self._lock = threading.RLock()
        self._due = threading.Event()
        self._stop = False
        self._stats = Stats()
        self._thread = threading.Thread(target=self._run, name="vmem-blocks", daemon=True)
        self._thread.start()

    # ---- orders ------------------------------------------------------------------------------------------------

    def back(self, ids: Sequence[int]) -> int:
        """Back blocks now, all or none; returns how many were not. Raises `OutOfMemory`, and `ValueError`."""
        with self._lock:
            return self._back(self._checked(ids), "now")

    def order(self, order: int, ids: Sequence[int]) -> None:
        """Back blocks in the background; `answer` is called when it is done."""
        self._orders.append((order, self._checked(ids)))
        self._due.set()

    def unback(self, ids: Sequence[int], event: Any = None) -> None:
        """Unback blocks when `event` has passed (it has a method `query`), unless they are backed again before."""
        checked = self._checked(ids)
        checked = checked[checked != 0]  # vLLM's null block is read at any time
        with self._lock:
            self._calls += 1
            self._left[checked] = self._calls  # with this call's event, not with one before
            self._leaving.append((self._calls, event, checked))
        self._due.set()

    def flush(self) -> None:
        """Carry out all that was ordered, and what can be unbacked now, in this thread."""
        with self._lock:
            while self._orders:
                self._one(*self._orders.popleft())
            while self._leaving and (self._leaving[0][1] is None or self._leaving[0][1].query()):
                call, _, ids = self._leaving.popleft()
                self._unback(ids[self._left[ids] == call])

    def backed(self) -> list[int]:
        """The blocks that are backed, without those that are about to be unbacked."""
        with self._lock:
            return np.flatnonzero(self._backed & (self._left == 0)).tolist()

    def stats(self) -> Stats:
        """`Stats` at this moment."""
        with self._lock:
            return Stats(**{f.name: getattr(self._stats, f.name) for f in fields(Stats)})

    def close(self) -> None:
        """Stop the thread. The pages belong to the virtual tensor."""
        self._stop = True
        self._due.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- how -------------------------------------------------------------------------------------------------

    def _checked(self, ids: Sequence[int]) -> Ids:
        checked = np.unique(np.asarray(ids, np.int64))
        if len(checked) and not 0 <= checked[0] <= checked[-1] < len(self._backed):
            raise ValueError(f"ids must lie within 0:{len(self._backed)}")
        return checked

    def _run(self) -> None:
        while not self._stop:
            waits = bool(self._leaving)
            self._due.wait(0.002 if waits else None)
            self._due.clear()
            while self._orders and not self._stop:
                with self._lock:
                    if self._orders:
                        self._one(*self._orders.popleft())
            self.flush()

    def _one(self, order: int, ids: Ids) -> None:
        try:
            self._back(ids, "ahead")
        except OutOfMemory:
            self._stats.refused += 1
            self._answer(order, True)
        else:
            self._answer(order, False)

    def _back(self, ids: Ids, what: str) -> int:
        new = ids[~self._backed[ids]]
        if not len(new):
            self._left[ids] = 0
            return 0
        found = np.concatenate(list(geometry.pages(self._ranges, new, self._page_size)))
        page, uses = np.unique(found, return_counts=True)
        fresh = page[self._uses[page] == 0]
        if len(fresh):
            self._context.commit(*self._runs(fresh), self._page_size, zero=True, fine=True)
        self._uses[page] += uses.astype(np.int32)
        self._left[ids] = 0
        self._backed[new] = True
        self._stats.backed += len(new)
        self._stats.pages += len(fresh)
        self._stats.most_pages = max(self._stats.most_pages, self._stats.pages)
        setattr(self._stats, what, getattr(self._stats, what) + len(new))
        return len(new)

    def _unback(self, ids: Ids) -> None:
        old = ids[self._backed[ids]]
        if not len(old):
            return
        found = np.concatenate(list(geometry.pages(self._ranges, old, self._page_size)))
        page, uses = np.unique(found, return_counts=True)
        self._uses[page] -= uses.astype(np.int32)
        self._backed[old] = False
        self._left[old] = 0
        free = page[self._uses[page] == 0]
        if len(free):
            self._context.decommit(*self._runs(free))
        self._stats.backed -= len(old)
        self._stats.pages -= len(free)
        self._stats.unbacked += len(old)

    def _runs(self, page: Ids) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        cut = np.flatnonzero(np.diff(page) != 1) + 1
        first, end = np.concatenate([[0], cut]), np.concatenate([cut, [len(page)]])
        return ((self._addr + page[first] * self._page_size).astype(np.uint64),
                ((end - first) * self._page_size).astype(np.uint64))  # fmt: skip
