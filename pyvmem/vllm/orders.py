"""What a scheduler tells its workers with each step.

SPDX-License-Identifier: MIT
"""

from collections.abc import Sequence
from typing import NamedTuple


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
    """

    step: int
    position: int
    gone: Sequence[int] = ()
    ahead: Sequence[list[int]] = ()
    order: int = 0
    evicted: Sequence[int] = ()
