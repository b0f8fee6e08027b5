"""The memory of one worker that sleeps and wakes as a whole, beside its KV cache: weights and activations.

An engine's plugin calls it, from the loading of the model on; begin with `Sleeper.claim`. It calls `weights` and
`activations`, and says in the control page what is lacking.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from pyvmem._clock import now_us
from pyvmem.engine import control, pools
from pyvmem.engine.control import Page, Sleeps
from pyvmem.engine.memory import context_on
from pyvmem.engine.settings import Refused, Settings
from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.kv.pool import KVPool
from pyvmem.sleep.activations import Activations
from pyvmem.sleep.bell import ring
from pyvmem.sleep.common import CommonWeights
from pyvmem.sleep.weights import LOAD_WAIT, Weights

LOOK = 0.02  # seconds between looks at what a model that is loaded lacks
STARTS = 600.0  # seconds for which others wait for an engine that starts
BESIDE = 8  # an engine that starts beside another one leaves one part in so many of the pool free
ANSWER = 0.02  # seconds in which the members of the pool say what they could give
TRY = 0.06  # seconds in which spare memory and prefixes of others wake the weights, before it is published what lacks
FEW = 2 << 30  # bytes that caches give, page by page, in about the time in which an idle model falls asleep
TELL = 0.01  # seconds after which it is published again: no further model sleeps for what has come meanwhile


class Missing(NamedTuple):
    """What the weights lack, and who could give it, in bytes.

    Attributes
    ----------
    bytes : int
        Beyond the budget that they have and what the pool has free.
    parked, cached : int
        What others could give of weights that are parked, and of the caches of their engines.
    own : int
        What the cache of this engine could.
    """

    bytes: int
    parked: int
    cached: int
    own: int

    @property
    def suffices(self) -> bool:
        """True if others give all of it, and few prefixes."""
        return self.bytes <= self.parked + min(self.cached, FEW)


class Sleeper:
    """A worker's weights, and what torch caches for its activations.

    Parameters
    ----------
    page : Page
        The engine's control page.
    rank : int
        The worker's column in the page.
    chosen : Settings
    pool : KVPool
    device : torch.device
        The worker's.

    Attributes
    ----------
    weights : Weights
    """

    def __init__(self, page: Page, rank: int, chosen: Settings, pool: KVPool, device: torch.device) -> None:
        self._page, self._rank, self._chosen, self._pool = page, rank, chosen, pool
        page[control.POOL_OF + rank] = pools.number_of(Path(str(pool.path)).stem)
        own = context_on(device, chosen)  # whose allocations are larger than those for blocks
        self._name, seconds = f"weights {os.getpid()}", chosen.common
        self.weights: Weights = (CommonWeights(pool, own, self._name, chosen.logger, seconds) if seconds
                                 else Weights(pool, own, self._name, chosen.logger))  # fmt: skip
        self.weights.is_alone = lambda: not control.any_computes(control.others(page, page[control.POOL_OF + rank]))
        self._activations = Activations(self.weights)
        self._busy: Callable[[], bool] | None = None
        self._copies = False  # whether a copy has begun because a server lets the model sleep

    @contextlib.contextmanager
    def claim(self, size: int) -> Iterator[None]:
        """The context in which the engine loads its weights, about `size` bytes. Raises `Refused`.

        Models go to sleep for one that is loaded, as for one that wakes. What they have given stays here until the
        weights are in, and the rest of the pool is for others meanwhile.
        """
        weights, loaded = self.weights, threading.Event()
        asks = threading.Thread(target=self._ask, args=(loaded,), name="vmem-claim", daemon=True)
        self._wait_for_starts(min(size, self._pool.budget))
        end = time.monotonic() + LOAD_WAIT
        weights.reserve(max(min(size, self._pool.budget), 1))
        asks.start()
        try:
            while weights.lacking():
                if time.monotonic() >= end:
                    raise Refused(f"{self._chosen.switch}_POOL={self._chosen.pool}: the other members did not give the "
                                  f"{size} bytes of the weights within {LOAD_WAIT:.0f} s")  # fmt: skip
                time.sleep(LOOK)
            yield
        except BaseException:
            self._page[control.STARTING] = 0
            raise
        finally:
            loaded.set()
            asks.join()
            weights.reserve(0)

    def _wait_for_starts(self, size: int) -> None:
        """Return when there is memory for this engine beside those that began to start before it, or none starts.

        An engine cannot sleep before its server runs. Two that start and hold what the other one lacks would wait for
        each other. size: 0 if it is not known.
        """
        page, logged, size = self._page, False, size or self._pool.budget
        self._lacks(size)  # those that begin later count it
        if not page[control.PID]:
            control.claim(page)  # until the scheduler does
        if not page[control.STARTING]:
            page[control.STARTING] = now_us()
            page[control.STARTING] = now_us()  # who has not seen the first one began before
        while earlier := control.starting_before(page, page[control.POOL_OF + self._rank], STARTS):
            if size + sum(earlier) <= self._pool.free - self._pool.budget // BESIDE:
                break
            if not logged:
                logged = True
                self._chosen.logger.info("vMem: this model waits until %d that began before it in pool %s have started",
                                         len(earlier), self._chosen.pool)  # fmt: skip
            time.sleep(LOOK)

    def _ask(self, loaded: threading.Event) -> None:
        """Publish what is lacking until the weights are in. Nothing of torch's: it may wait in an allocation."""
        begin = now_us()
        while not loaded.wait(LOOK):
            control.lacks_to_start(self._page, self._rank, self.weights.lacking(), begin)
        control.lacks_to_start(self._page, self._rank, 0, begin)

    def warmed_up(self, busy: Callable[[], bool]) -> None:
        """Graphs have been captured, so that weights may be copied to the host.

        They are if a server lets the model sleep, so that it sleeps at once. Else the first sleep that keeps them has
        them copied: a trainer may discard them each time, and pinned host memory takes a second for each GiB.

        busy : as for `Weights.copy_behind`.
        """
        self._busy = busy
        self._page[control.STARTING] = 0

    def falls_asleep(self) -> None:
        """Note how much memory torch caches, before the engine gives it to the driver."""
        self._activations.note()

    def wake(self, seconds: float, waits: Callable[[], None] = lambda: None, queued: bool = False) -> None:
        """Take everything back, or raise OutOfMemory after so many seconds. Then `park` must follow.

        Meanwhile, the page says how much is missing, and when all is claimed. waits : called while it waits for others,
        and has the pool know what the engine's own blocks give (`Sleeps`). queued : as `Weights.wake` has it.
        """
        end, asks = time.monotonic() + seconds, False
        others = control.others(self._page, self._page[control.POOL_OF + self._rank])
        with contextlib.suppress(VmemError):  # if the pool's file cannot be read, the attempt says why
            asks = self._must_others_sleep(others, min(seconds, TRY), waits)
        ahead = not control.any_wakes(others)  # two that hold what the other one lacks would wait for each other
        while True:
            try:
                self.weights.wake(min(seconds, TELL if asks else TRY), self._claimed, queued, ahead and not asks)
                break
            except BaseException as error:
                self._sleeps(Sleeps.LACKS)
                if not isinstance(error, OutOfMemory):
                    raise
                self._lacks(error.missing)  # type: ignore[attr-defined]
                asks = True
                if time.monotonic() >= end:
                    raise
            waits()
            time.sleep(1e-3)
        self._activations.take(seconds, self._lacks)

    def _must_others_sleep(self, models: list[Page], seconds: float, waits: Callable[[], None]) -> bool:
        """Return whether other models have to sleep, and say so in the page: they lack it, or it is in their caches.

        An idle model's weights are in host memory, too, but a prefix may have to be computed again. If a model is idle,
        this waits at most so many seconds until it has parked them. Then nobody has to sleep any more.
        """
        if self._missing().bytes > 0:
            self._pool.look(ANSWER)  # a model that is idle now may have been busy a moment ago
        lacks = self._missing()
        idle = control.any_rests(models)
        others = lacks.parked + lacks.cached
        sleep = not lacks.suffices if idle else lacks.bytes > others + lacks.own
        if sleep or lacks.bytes <= others:
            self._sleeps(Sleeps.KEEPS)
            waits()
        if sleep:
            self._lacks(lacks.bytes)
        return sleep and not (idle and self._is_parked(seconds, waits))

    def _is_parked(self, seconds: float, waits: Callable[[], None]) -> bool:
        """Wait until models that go to sleep have parked what is missing. False: they have not in so many seconds.

        What they have parked comes first and at once, in large pieces. If the pool was asked before, prefixes of others
        would go, 2 MiB a call of the driver.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._missing().suffices:
                self._lacks(0)
                return True
            waits()
            time.sleep(1e-3)
            self._pool.look(ANSWER)  # nobody has asked, so they need not have told
        return False

    def _missing(self) -> Missing:
        members, engine = self._pool.members(), f"{pools.ENGINE}{os.getpid()}"
        others = [m for m in members if m.name not in (self._name, engine)]
        unused = sum(m.has - m.held for m in members if m.name == self._name)  # others took less than a whole segment
        return Missing(
            bytes=self.weights.bytes - self.weights.held - unused - self._pool.free,
            parked=sum(m.could_give for m in others if m.gives_first),
            cached=sum(m.could_give for m in others if not m.gives_first),
            own=sum(m.could_give for m in members if m.name == engine),
        )

    def park(self, keep: bool = True) -> None:
        """Put everything to sleep, also after an attempt to wake that failed. keep: as `Weights.park` has it."""
        self._sleeps(Sleeps.LACKS)
        self.weights.park(keep, self._busy)
        self._activations.drop()

    def _claimed(self) -> None:
        """While the weights are mapped and copied, nobody need give more, and requests may come to the engine."""
        self._lacks(0)
        self._sleeps(Sleeps.CLAIMED)

    def _lacks(self, missing: int) -> None:
        cells, word = self._page.cells, control.SHORT + self._rank
        before, cells[word] = cells[word], missing
        if missing and not before:
            ring(self._page.path)

    def _sleeps(self, how: Sleeps) -> None:
        self._page.cells[control.ASLEEP + self._rank] = how

    def publish(self) -> None:
        """Write this worker's column of the control page. It is called now and then: see `warmed_up`."""
        cells, rank, weights = self._page.cells, self._rank, self.weights
        if self._busy is not None and cells[control.STATE] and not self._copies:
            self._copies = True
            weights.copy_behind(self._busy)
        cells[control.WEIGHTS + rank], cells[control.WEIGHTS_HELD + rank] = weights.bytes, weights.held
        cells[control.GIVES + rank] = weights.gives
