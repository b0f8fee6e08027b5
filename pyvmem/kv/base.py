"""The base of a KV cache: its fences, its answers when memory is short, and its statistics.

SPDX-License-Identifier: MIT
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, SupportsIndex

from pyvmem._checks import uint
from pyvmem._ffi import ffi, lib
from pyvmem.errors import _check, structure
from pyvmem.kv.types import KVStats, Shortage, TensorSpec
from pyvmem.kv.view import REASONS, STATS
from pyvmem.owned import _Owned

if TYPE_CHECKING:
    from pyvmem.kv.hashes import BlockHashes

_log = logging.getLogger("pyvmem")
_REASONS = (None, "budget", "device", "mappings", "slots")


def shortage_of(raw: Any) -> Shortage:
    """The `Shortage` of a struct vmem_kv_shortage."""
    numbers = (
        raw.missing_pages, raw.prefix_pages, raw.requests, raw.ending_pages, raw.watermark_pages, raw.coming_pages,
        raw.step,
    )  # fmt: skip
    return Shortage(_REASONS[raw.reason], *numbers, refusal=REASONS[raw.refusal])


class KVBase(_Owned):
    """The native manager with its fences."""

    missing_pages: int
    page_size: int
    specs: list[TensorSpec]
    tile_rows: int

    def __init__(self) -> None:
        self.missing_pages = 0
        self._raw_stats: Any = None
        self._reported: KVStats | None = None  # the statistics that were read last
        self._events: list[tuple[Any, int]] = []  # (event, step), the oldest first
        self._polling = threading.RLock()
        self._hashes: BlockHashes | None = None
        self._closing: tuple[int, Any, Any] | None = None  # (step, owner, pointer) of a cache closed after a step

    # ---- fences ----------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The number of the last successful step, counted from 1: the fence of its kernels. 0 before the first step."""
        number = ffi.new("uint64_t *")
        _check(lib.vmem_kv_last_step(self._use(), number))
        return int(number[0])

    def retire(self, step: SupportsIndex | None = None) -> None:
        """Declare that the kernels of all steps up to this one (None: of every step) have ended.

        Without this call, a step's kernels count as ended once the steps that may be in flight have been called after
        it. This is the only call that may follow ``close(after=step)``: it frees the memory.
        """
        closing = self._closing
        if closing is not None:
            if step is None or uint("step", step) >= closing[0]:
                self._end()
            return
        _check(lib.pv_kv_retire(self._use(), self.last_step if step is None else uint("step", step)))

    def _fence(self, after: Any) -> int:
        return self.last_step if callable(getattr(after, "query", None)) else uint("after", after)

    def _watch(self, after: Any, number: int) -> None:
        """If `after` is an event, retire the step once the event has completed."""
        if callable(getattr(after, "query", None)):
            self._events.append((after, number))

    def _ready(self) -> Any:
        """As `_use`, for a call that takes or returns a slot or memory: completed events may have made some free."""
        if self._events:
            self._poll()
        return self._use()

    def _poll(self) -> None:
        """Retire the steps whose events have completed."""
        with self._polling:
            while self._events:
                first = self._events[0]
                if not first[0].query():
                    break
                self.retire(first[1])
                if self._events and self._events[0] is first:  # a signal handler may have polled, too
                    del self._events[0]

    def _close_after(self, after: Any) -> None:
        number = 0 if after is None else self._fence(after)
        ended = lib.pv_kv_close(self._use(), number)
        if ended < 0 and ended != -errno.EPERM:  # EPERM: a forked child of the cache's process has nothing to end
            _check(ended)
        self._closing = number, self._owner, self._thing
        self._events.clear()
        self._drop()
        if ended:
            self._end()
        elif callable(getattr(after, "query", None)):
            threading.Thread(target=self._end_after, args=(after,), name="pyvmem close").start()

    def _end_after(self, event: Any) -> None:
        lib.pv_beside_captures()
        with suppress(Exception):  # if the CUDA context is lost, no kernel runs any more
            while not event.query():
                time.sleep(0.001)
        self._end()

    def _end(self) -> None:
        self._closing = None

    # ---- when memory is short --------------------------------------------------------------------------------

    def _answer(self, answer: int) -> int:
        """Return what a call that may lack memory returns: 0, or -1 if `answer` is a number of missing pages."""
        if not answer:
            return 0
        if answer < 0:
            _check(answer)
        self.missing_pages = answer
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%r: %s", self, self.shortage)
        return -1

    @property
    def shortage(self) -> Shortage:
        """The `Shortage` of this thread's last call that found too little memory or no slot, on whichever cache.

        Read it right after that call: later calls may reset it.
        """
        raw = structure("vmem_kv_shortage")
        _check(lib.vmem_kv_last_shortage(raw))
        return shortage_of(raw)

    # ---- metrics ---------------------------------------------------------------------------------------------

    @property
    def step_maps(self) -> int:
        """The number of steps so far that had to map pages themselves. `stats` includes it, but this is faster."""
        if self._raw_stats is None:
            self._raw_stats = structure("vmem_kv_stats")
        _check(lib.vmem_kv_get_stats(self._use(), self._raw_stats))
        return int(self._raw_stats.step_maps)

    def stats(self) -> KVStats:
        """Return the current `KVStats`."""
        raw = structure("vmem_kv_stats")
        _check(lib.vmem_kv_get_stats(self._use(), raw))
        stats = KVStats(**{name: int(getattr(raw, name)) for name in STATS})
        self._report(stats)
        return stats

    def _report(self, now: KVStats) -> None:
        """Log what has happened in the background since the statistics were read before."""
        before, self._reported = self._reported, now
        if before is None:
            return
        if now.worker_errors != before.worker_errors:
            errors = now.worker_errors - before.worker_errors
            _log.warning("%r: %d operations of the background thread failed; a step does them again", self, errors)
        if now.budget_pages != before.budget_pages:
            mib = [n * now.page_size >> 20 for n in (before.budget_pages, now.budget_pages)]
            _log.info("%r: the budget changed from %d to %d MiB", self, *mib)

    def picture(self, path: str | os.PathLike[str] | None = None, *, slots: int = 32, title: str = "") -> str:
        """Draw who owns the cache's pages: requests, prefixes, memory mapped ahead or kept, and what is unused.

        path: a file to write: .svg, .png or .pdf (the last two need matplotlib, and draw the budget alone).
        slots: draw the pages of at most so many slots, those with the most pages. title: what stands above.
        Returns the picture as SVG, which a notebook shows for the cache itself.
        """
        from pyvmem.kv import picture

        stats = asdict(self.stats())
        text = picture.svg(stats, picture.slots_of(self, uint("slots", slots)), title)
        if path is not None:
            picture.save(text, path, stats, title)
        return text

    def _repr_html_(self) -> str | None:
        """The picture, for notebooks; None for a closed cache, which leaves its repr."""
        return None if self._thing is None else self.picture()

    def metrics_json(self) -> str:
        """Return the statistics as a JSON object."""
        return json.dumps(asdict(self.stats()))

    def metrics_prometheus(self, prefix: str = "pyvmem_kv_", labels: Mapping[str, Any] | None = None) -> str:
        """Return the statistics in Prometheus's text exposition format. labels: a dict added to every sample."""
        from pyvmem.kv.view import prometheus

        return prometheus(asdict(self.stats()), prefix, labels)
