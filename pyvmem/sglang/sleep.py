"""A model of SGLang's that sleeps: its weights are offered to its pool, and so are the rows that no request uses.

While it sleeps, SGLang's event loop takes orders and runs no step. Requests that run keep their rows, and go on when it
wakes. SGLang's own orders ``release_memory_occupation`` and ``resume_memory_occupation`` have their meaning; with the
tag of this module, they are those of `pyvmem.sleep.serve`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import time
from typing import Any

from pyvmem.engine import control
from pyvmem.errors import OutOfMemory
from pyvmem.sglang.ranks import Ranks
from pyvmem.sleep.sleeper import Sleeper

TAG = "vmem"
WEIGHTS = "weights"  # SGLang's tag
TURN = 0.002  # seconds between looks at orders, of which SGLang's own loop does not rest
WAKE = 10.0  # seconds in which the pool's other members must give the memory of a model that wakes


class Sleep:
    """The sleep of one scheduler, with the weights of its model worker, which is in the same process.

    memory: its SchedulerMemory; page: the engine's control page.
    """

    def __init__(self, memory: Any, scheduler: Any, sleeper: Sleeper, page: control.Page, ranks: Ranks) -> None:
        self._memory, self._scheduler, self._sleeper = memory, scheduler, sleeper
        self._page, self._ranks = page, ranks
        self.asleep = self._paused = False  # _paused: whether SGLang's own orders have paused the engine
        sleeper.warmed_up(lambda: bool(scheduler.running_batch.reqs))

    def begin(self) -> None:
        """Go to sleep."""
        if self.asleep:
            return
        self._sleeper.falls_asleep()
        self._sleeper.park()
        self.asleep, self._paused = True, self._scheduler._engine_paused
        self._scheduler._engine_paused = True
        self._scheduler.cur_batch_for_debug = None  # else SGLang's watchdog takes the sleep for a step that hangs
        self._page.cells[control.ASLEEP + self._ranks.rank] = 1
        self._memory.publish()  # neighbours may have its minimum, too

    def end(self) -> None:
        """Wake, on all ranks or on none. Then the page says what is lacking, and the model goes on sleeping."""
        if not self.asleep:
            return
        cells, rank, missing = self._page.cells, self._ranks.rank, 0
        try:
            self._sleeper.wake(cells[control.PATIENCE] / 1000 or WAKE, self._give)
        except OutOfMemory as error:
            missing = max(getattr(error, "missing", 0), 1)
        cells[control.SHORT + rank] = missing
        failed = self._ranks.most([missing])[0] > 0
        cells[control.WOKE + rank] = 2 * (cells[control.WOKE + rank] // 2 + 1) + failed
        if failed:
            self._sleeper.park()
            return
        cells[control.ASLEEP + rank] = 0
        self.asleep, self._scheduler._engine_paused = False, self._paused
        self._memory.publish()

    def _give(self) -> None:
        """While it waits for memory: the model's own cached rows may be what the pool has to give."""
        self._page[control.BEAT] += 1
        if self._ranks.size == 1:  # ranks give in turns of the event loop alone, as all must decide alike
            self._memory.rest()

    def paused(self) -> None:
        """SGLang's own order has paused the engine, or has it go on, which it does when it wakes."""
        if self.asleep:
            self._paused, self._scheduler._engine_paused = self._scheduler._engine_paused, True

    def turn(self, idle: bool) -> None:
        """A turn of SGLang's event loop while the model sleeps. idle: no order has come."""
        self._memory.rest()
        if self._memory.drops:
            self._retract()
        self._sleeper.weights.copy_again()
        if idle:
            time.sleep(TURN)

    def _retract(self) -> None:
        """Have SGLang give up the rows of its requests. Those whose clients have gone would end in a step only."""
        from sglang.srt.managers import io_struct

        paused, scheduler = self._paused, self._scheduler
        scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
        scheduler.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False))
        self._paused = paused
