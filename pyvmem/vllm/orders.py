"""What a scheduler tells its workers with each step.

SPDX-License-Identifier: MIT
"""

from collections.abc import Sequence
from typing import NamedTuple

AHEAD = 64  # tokens of a running request whose pages slots map ahead, or up to twice as many


class StepOrders(NamedTuple):
    """Travels as attribute `vmem` of vLLM's SchedulerOutput.

    Attributes
    ----------
    step : int
        The step's number.
    position : int
        What the ring held when the step was scheduled: to be carried out before it.
    gone : sequence of int
        Blocks that no longer circulate.
    ahead : sequence of lists of int
        Blocks to be backed in the background, one order after the other.
    order : int
        The number of the first of these orders.
    evicted : sequence of int
        Blocks that circulate and whose contents vLLM has forgotten.
    coming : sequence of (str, int, int)
        In slots, the requests that begin next: name, tokens, and how many of these are cached.
    """

    step: int
    position: int
    gone: Sequence[int] = ()
    ahead: Sequence[list[int]] = ()
    order: int = 0
    evicted: Sequence[int] = ()
    coming: Sequence[tuple[str, int, int]] = ()
