"""What vLLM's next step takes and what it waits for: a function of numbers, without effects.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Supply(NamedTuple):
    """The blocks that a step may have."""

    spare: int  # free, without contents
    more: int  # that are coming, and that may be backed besides. Negative: so many must leave
    ready: int  # that one step may take, as many as are kept ready if there are enough
    free_memory: bool = True  # there is memory for `more`: none was refused a moment ago
    waits_for_others: bool = False  # other engines of the pool have to give memory up before `more` can come
    cached: int = 0  # free, with contents

    def suffices(self, need: int) -> bool:
        """Return whether so many blocks are spare or may be backed."""
        return need <= self.spare + self.more


class StepNeed(NamedTuple):
    """What the next step may use, in blocks."""

    takes: int  # at most
    begins: int  # free for all requests that begin in it: vLLM begins a request only if its prompt fits
    worthwhile: int  # of the fewest tokens that are worth a step
    running: bool  # requests run
    parts: bool  # a request may begin with a part of its prompt
    missing: Callable[[], int]  # what running requests take, if fewer are free, cached ones included; else 0
    # Whether the known requests take so many of the cached blocks that vLLM evicts next, even if so many others come.
    anyway: Callable[[int, int], bool]


class StepPlan(NamedTuple):
    """What a step takes and what it waits for, in blocks."""

    takes: int = 0  # at most
    begins: int = 0  # free for all requests that begin in it
    awaits: int = 0  # without which it does not run, unless waiting for them takes too long
    parts: bool = False  # requests begin with what has come, and the rest comes while the step runs

    @property
    def orders(self) -> int:
        """Blocks to have backed, or on their way, before it runs."""
        return max(self.takes, self.begins)


def plan_step(need: StepNeed, supply: Supply) -> StepPlan:
    """Plan a step of an engine whose blocks may become more.

    If all that the step and its requests take can be backed, it waits for what is worth a step, and the rest comes
    while it runs. If not, it waits for all, unless running requests can go on meanwhile.

    Where no waiting makes enough blocks spare, or others have to give some up first, cached blocks serve: vLLM evicts
    them. Only running requests wait then, as vLLM would preempt them. The same goes for cached blocks that the known
    requests will take even if all memory comes: to wait for it, or to compute less meanwhile, keeps none of them. If a
    request needs more than is free to begin, it begins with a part and what comes.
    """
    takes = awaits = need.takes
    most = max(need.takes, need.begins)
    parts = need.parts and supply.free_memory and supply.suffices(most)
    if parts:
        awaits = min(need.worthwhile, takes)
    elif not need.running or need.begins <= supply.ready:
        takes = awaits = most
    late = supply.waits_for_others or not supply.suffices(awaits)
    evicts, comes = need.takes - supply.spare, supply.spare + max(supply.more, 0)
    lost = evicts > 0 and most - supply.spare <= supply.cached and need.anyway(evicts, comes)
    if (awaits > supply.spare and late) or lost:
        awaits, parts = need.missing(), False
    return StepPlan(takes, need.begins, awaits, parts)
