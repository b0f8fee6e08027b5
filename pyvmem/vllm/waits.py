"""How long the steps of a worker take on vMem, and for which of them the GPU waited.

vLLM prepares a step while the GPU computes the one before, so that most of what a step does on the CPU delays nobody. A
step that vMem held up for `LEAST` seconds or more, and at whose end the GPU had nothing left to do, is a wait. Its
cause is what took longest:

- ``lock``: the thread that clears up
- ``fence``: kernels of an earlier step
- ``slot``: finding a slot for a new request
- ``forget``: blocks that the scheduler assigned again had pages that were not released yet
- ``attach``: mapping blocks of the prefix cache
- ``map``: mapping new pages
- ``thread``: the KV cache's background thread was mapping or unmapping
- ``bind``: naming the pages of new blocks

`first` in front of a cause: no request was running before the step, so the engine may have given its memory back.

SPDX-License-Identifier: MIT
"""

import collections
import time
from collections.abc import Callable
from typing import Any

LEAST = 2e-4


class Waits:
    """The steps of one worker.

    Attributes
    ----------
    steps : int
    seconds : dict
        By part of a step, for all steps.
    waits : dict
        {cause: (steps, seconds, seconds of the longest)}
    each : deque
        Seconds that each of the last steps took.
    """

    def __init__(self) -> None:
        self.least = LEAST
        self.steps = 0
        self.seconds: collections.Counter[str] = collections.Counter()
        self.waits: dict[str, tuple[int, float, float]] = {}
        self.each: collections.deque[float] = collections.deque(maxlen=100_000)
        self._step: dict[str, float] = {}
        self._first = False
        self._since = self._last = 0.0

    @property
    def count(self) -> int:
        """Waits so far."""
        return sum(n for n, *_ in self.waits.values())

    def take(self) -> dict[str, Any]:
        """All of this since the last call."""
        taken = dict(steps=self.steps, seconds=dict(self.seconds), waits=dict(self.waits), each=list(self.each))
        self.steps = 0
        for kept in (self.seconds, self.waits, self.each):
            kept.clear()
        return taken

    def begin(self, first: bool) -> None:
        """A step begins. first: no request was running."""
        self._step.clear()
        self._first = first
        self.go()

    def go(self) -> None:
        """From now on, time counts again."""
        self._since = time.perf_counter()

    def add(self, part: str) -> float:
        """The time since `go` or the last `add` went to this part of the step. Returns the seconds."""
        now = time.perf_counter()
        self._last, self._since = now - self._since, now
        self._step[part] = self._step.get(part, 0.0) + self._last
        return self._last

    def move(self, part: str, to: str) -> None:
        """What the last `add` gave to one part belongs to another."""
        self._step[part] -= self._last
        self._step[to] = self._step.get(to, 0.0) + self._last

    def end(self, idle: Callable[[], bool]) -> None:
        """The step ends. idle: whether the GPU has nothing to do."""
        seconds = sum(self._step.values())
        self.steps += 1
        self.seconds.update(self._step)
        self.each.append(seconds)
        if seconds >= self.least and idle():
            cause = max(self._step, key=self._step.__getitem__)
            cause = f"first: {cause}" if self._first else cause
            n, total, most = self.waits.get(cause, (0, 0.0, 0.0))
            self.waits[cause] = n + 1, total + seconds, max(most, seconds)
        self._step.clear()
