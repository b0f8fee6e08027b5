"""What a step of vLLM's takes and waits for, by table."""

import pytest

from pyvmem.vllm.plan import StepNeed, StepPlan, Supply, plan_step

# A step may take 40 blocks for 60 of the requests that begin in it; 6 are worth a step; running requests miss 3.
NEED = StepNeed(takes=40, begins=60, worthwhile=6, running=True, parts=True, missing=lambda: 3, anyway=lambda *n: False)
SUPPLY = Supply(spare=0, more=1000, ready=50)


def known(n):
    """Requests take `n` blocks."""
    return lambda evicts, comes: evicts + comes <= n


TABLE = {
    "the rest comes while a part of the prompts runs": ({}, {}, (40, 6, True)),
    "a part is no more than all": (dict(worthwhile=90), {}, (40, 40, True)),
    "requests that cannot begin in parts: running ones go on meanwhile": (dict(parts=False), {}, (40, 40, False)),
    "they begin soon with what is kept ready": (dict(parts=False, begins=50), {}, (50, 50, False)),
    "none runs, so the step waits for all": (dict(parts=False, running=False), {}, (60, 60, False)),
    "memory was refused a moment ago": ({}, dict(free_memory=False), (40, 40, False)),
    "exactly enough may be backed": ({}, dict(more=60), (40, 6, True)),
    "spare blocks count": ({}, dict(spare=10, more=50), (40, 6, True)),
    "all that the step takes may be backed, and not what its requests take later": ({}, dict(more=59), (40, 40, False)),
    "cached blocks serve where no waiting suffices": ({}, dict(more=5), (40, 3, False)),
    "and where nothing runs": (dict(running=False, missing=lambda: 0), dict(more=5), (60, 0, False)),
    "and where blocks must leave": ({}, dict(more=-7), (40, 3, False)),
    "and where others must give memory up first": ({}, dict(waits_for_others=True), (40, 3, False)),
    "nobody needs to give what is spare": ({}, dict(spare=40, waits_for_others=True), (40, 6, True)),
    "all are spare": ({}, dict(spare=60, more=0), (40, 6, True)),
    "and that requests take anyway": (dict(anyway=known(110)), dict(spare=10, more=70, cached=50), (40, 3, False)),
    "but none that may stay": (dict(anyway=known(109)), dict(spare=10, more=70, cached=50), (40, 6, True)),
    "nor fewer than begin": (dict(anyway=known(110)), dict(spare=10, more=70, cached=49), (40, 6, True)),
    "nor where enough are spare": (dict(anyway=known(999)), dict(spare=40, more=70, cached=50), (40, 6, True)),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_step_is_planned_by_what_it_needs_and_what_there_is(case):
    need, supply, (takes, awaits, parts) = TABLE[case]
    need, supply = NEED._replace(**need), SUPPLY._replace(**supply)
    plan = plan_step(need, supply)
    assert plan == StepPlan(takes, need.begins, awaits, parts)
    assert plan.orders == max(takes, need.begins)


def test_a_step_waits_for_no_more_than_can_come():
    """It waits only for spare blocks, for those that may be backed, and for what running requests miss."""
    values = 0, 1, 7, 40
    for takes in values:
        for begins in values:
            for spare in values:
                for more in (-3, *values):
                    for parts in (False, True):
                        need = NEED._replace(takes=takes, begins=begins, parts=parts)
                        plan = plan_step(need, SUPPLY._replace(spare=spare, more=more))
                        assert plan.awaits <= max(spare + max(more, 0), need.missing())
                        assert not plan.parts or plan.orders <= spare + more
