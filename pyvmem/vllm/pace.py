"""How long a device still computes the prompts of the steps in flight.

Until then, a step that waits for blocks delays nothing, so it may wait for more of them and take a larger part of a
prompt: small parts use a device badly.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections


class Pace:
    """The steps in flight, and the least time that steps of their size took. Times are in seconds, on one clock.

    Parameters
    ----------
    least : int
        Tokens of a step that counts. Smaller ones end too soon.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._flight: collections.deque[tuple[int, int, float]] = collections.deque()  # (step, tokens, when it began)
        self._ended = 0.0  # the last step
        self._best: dict[int, float] = {}  # seconds for a token, by the number of bits of a step's tokens

    def begin(self, step: int, tokens: int, now: float) -> None:
        """A step was scheduled."""
        self._flight.append((step, tokens, now))

    def end(self, step: int, now: float) -> None:
        """The answer of a step has come, and those of the steps before it."""
        while self._flight and self._flight[0][0] <= step:
            number, tokens, began = self._flight.popleft()
            if number == step and tokens >= self._least:
                # Who reads answers late learns too long times, so the least counts.
                size, taken = tokens.bit_length(), (now - max(began, self._ended)) / tokens
                self._best[size] = min(self._best.get(size, taken), taken)
        self._ended = now

    def left(self, now: float) -> float:
        """Seconds for which the device computes at least; 0 if that is not known."""
        end = self._ended
        for _, tokens, began in self._flight:
            size = tokens.bit_length()
            pace = self._best.get(size, min(self._best.values(), default=0.0)) if tokens >= self._least else 0.0
            end = max(end, began) + tokens * pace
        return max(end - now, 0.0) if self._flight else 0.0
