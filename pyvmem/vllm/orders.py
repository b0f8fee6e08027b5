"""What a scheduler tells its workers with each step.

SPDX-License-Identifier: MIT
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepOrders:
    """Travels as attribute `vmem` of vLLM's SchedulerOutput.

    Attributes
    ----------
    step : int
        The step's number.
    position : int
        What the ring held when the step was scheduled: to be carried out before it.
    gone : list of int
        Blocks that no longer circulate.
    ahead : list of list of int
        Blocks to be backed in the background, one order after the other.
    order : int
        The number of the first of these orders.
    evicted : list of int
        Blocks that circulate and whose contents vLLM has forgotten.
    """

    step: int
    position: int
    gone: list[int] = field(default_factory=list)
    ahead: list[list[int]] = field(default_factory=list)
    order: int = 0
    evicted: list[int] = field(default_factory=list)
