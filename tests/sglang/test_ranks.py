"""SGLang's schedulers of two ranks on vMem, step by step: each runs for itself, and all must decide alike.

Both ranks are forks of one process that has imported SGLang. Each gets the same requests at the same step, as from
SGLang's broadcast, and reads back its own rows after each step. Only rank 0 sees that limits move.
"""

import os
import random
import signal

import pytest
import steps
import torch
from models import model
from steps import MIB, Engine, forked, moving, workload

JOBS = [(f"r{i}", prompt, n) for i, (prompt, n) in enumerate(workload(30))]
BIND = dict(SGLANG_CPU_OMP_THREADS_BIND="0|0")  # without it, SGLang wants a NUMA node for each rank


@pytest.fixture(scope="module", autouse=True)
def imported():
    steps.imports()


def both(do, *args, vmem=True, **environment):
    """The result of both ranks, which must be equal."""
    first, second = forked(do, *args, vmem=vmem, ranks=2, **BIND, **environment)
    assert first == second
    return first


def plain(kind, jobs=JOBS, **options):
    """SGLang's own tokens with two ranks."""
    return steps.plain(kind, jobs, both, **options)


CASES = {
    "gqa": ("gqa", {}),
    "mha in pages of 1": ("mha", dict(page_size=1)),
    "windows in a pool of their own": ("windows", dict(two_pools=True, page_size=16)),
    "gqa without overlap": ("gqa", dict(overlap=False, disable_overlap_schedule=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_limits_that_move_leave_the_tokens_as_they_are(name):
    kind, options = CASES[name]

    def run():
        engine = Engine(model(kind), **options)
        held, move = [], moving((2 * MIB, 3 * MIB, 6 * MIB, 12 * MIB))

        def each(engine):
            move(engine)
            held.append(engine.held())

        engine.run(JOBS, each=each)
        assert max(held) < sum(k.memory.nbytes for k in engine.memory.budgets)
        return engine.tokens(), [k.num_backed for k in engine.memory.budgets]

    tokens, _ = both(run)
    assert tokens == plain(kind, **options)


@pytest.mark.parametrize("short", [0, 1])
def test_memory_that_one_rank_lacks_counts_for_both(short):
    """The device of one rank has less than the other's: both get as many pages as that one has, and go on."""

    def run():
        engine = Engine(model("gqa"), page_size=16)
        budget = engine.memory.budgets[0]
        device = budget.memory.context(torch.device("cpu"))
        most = budget.least + 20

        def each(engine):
            if engine.steps == 20 and engine.rank == short:
                device.set_budget((most + 1) * budget.block_bytes)
            if engine.steps == 400 and engine.rank == short:
                device.set_budget(0)

        engine.run(JOBS, each=each)
        return engine.tokens(), budget.num_backed

    tokens, _ = both(run)
    assert tokens == plain("gqa", page_size=16)


def test_a_rank_that_does_not_hear_the_other_is_seen():
    """A seeded fault: rank 1 goes by a limit of its own. The ranks no longer decide alike.

    Then one of them ends, or each waits for the other, until an alarm ends both.
    """

    def run():
        signal.alarm(200)
        engine = Engine(model("gqa"))
        if engine.rank:
            engine.memory.see = lambda told: None
        engine.run(JOBS, each=moving((2 * MIB, 3 * MIB, 6 * MIB)))
        return engine.tokens(), engine.memory.budgets[0].num_backed

    with pytest.raises((ChildProcessError, AssertionError)):
        assert both(run)[0] == plain("gqa")


def test_random_load_with_limits_flushes_aborts_and_retractions():
    """As many steps as VMEM_STEPS says (default 600), each with all rows of both ranks read back and the leak check."""
    many = int(os.environ.get("VMEM_STEPS", 600))

    def run():
        engine = Engine(model("gqa"), page_size=16, tokens=6144)
        move = moving((MIB // 2, MIB, 2 * MIB, 5 * MIB), every=13)
        flushed = steps.random_load(engine, many, move)
        wanted = {r.rid: (list(r.origin_input_ids), r.sampling_params.max_new_tokens) for r in engine.requests}
        return engine.tokens(), wanted, engine.aborted, flushed, engine.retractions(), engine.steps

    tokens, wanted, aborted, flushed, retracted, count = both(run)
    jobs = [(name, *wanted[name]) for name in wanted if name not in aborted]
    own = plain("gqa", jobs, page_size=16)
    ties = {n: steps.tie(model("gqa"), wanted[n][0], own[n], tokens[n]) for n in own if tokens[n] != own[n]}
    print(f"{count} steps, {len(wanted)} requests, {len(aborted)} aborted, {flushed} flushes, {retracted} retractions, "
          f"ties {ties}")  # fmt: skip
    assert max(ties.values(), default=0) < 1e-4 and len(ties) <= max(len(own) / 200, 1)
    assert aborted and flushed and retracted


def test_a_step_without_news_tells_nothing():
    """While a batch decodes and nothing changes, rank 0 adds nothing to SGLang's own broadcast."""

    def run():
        engine = Engine(model("gqa"), page_size=16)
        told, news = [], engine.memory.news
        engine.memory.news = lambda: told.append(news()) or told[-1]
        engine.run([("r0", list(range(3, 40)), 200)])
        return sum(one is not None for one in told), len(told)

    (some, all_), _ = forked(run, ranks=2, **BIND)
    assert all_ > 200 and some < all_ // 4


def own_limits(engine):
    """A function that sets limits of this group of ranks alone: with DP attention each has a page of its own."""
    from pyvmem.engine import control

    group, leads = engine.parallel.attn_dp_rank, not engine.parallel.attn_tp_rank
    rng = random.Random(group)

    def each(engine):
        if engine.steps % 25 == 0:
            limit = rng.choice((control.NO_LIMIT, 2 * MIB, 3 * MIB, 6 * MIB, 12 * MIB))
            engine.memory.page[control.LIMIT] = limit if leads else 1

    return each


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_dp_attention_have_limits_of_their_own(ranks):
    """Each group has requests and memory of its own, and all run each step together; with 4 ranks, two to a group."""

    def run(vmem):
        engine = Engine(model("qwen3"), attn_dp_size=2)
        group = engine.parallel.attn_dp_rank
        engine.run(JOBS[group::2], each=own_limits(engine) if vmem else None)
        return group, engine.tokens()

    def told(vmem):
        return forked(run, vmem, vmem=vmem, ranks=ranks, SGLANG_CPU_OMP_THREADS_BIND="|".join("0" * ranks))

    own, on = told(False), told(True)
    assert [group for group, _ in on] == sorted(list(range(2)) * (ranks // 2))
    assert [tokens for _, tokens in on] == [tokens for _, tokens in own]
    assert len({name for _, tokens in on for name in tokens}) == len(JOBS)


def test_a_group_without_requests_gives_its_memory_back_while_another_runs():
    def run():
        engine = Engine(model("qwen3"), attn_dp_size=2)
        group, held = engine.parallel.attn_dp_rank, []
        engine.run(JOBS[group::2])
        engine.scheduler.flush_cache()
        engine.run([] if group else [("long", list(range(3, 40)), 400)], each=lambda e: held.append(e.held()))
        return held, engine.memory.budgets[0].block_bytes

    (busy, _), (idle, block) = forked(run, ranks=2, **BIND)
    assert len(idle) == len(busy) > 400
    assert min(busy[100:-10]) > block and idle[-1] <= 10 * block
