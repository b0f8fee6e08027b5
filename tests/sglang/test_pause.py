"""An engine that SGLang's own order has paused: it gives what no request holds, and goes on with SGLang's own tokens.

RL frameworks pause an engine while they update its weights, and want its memory for that time.
"""

import uuid

import pytest
import steps
from models import model
from neighbour import Neighbour
from steps import MIB, Engine, forked, workload

JOBS = [(f"r{i}", prompt, n) for i, (prompt, n) in enumerate(workload(30))]
POOL = 32 * MIB


@pytest.fixture(scope="module", autouse=True)
def imported():
    steps.imports()


def own(page_size=64):
    engine = Engine(model("gqa"), page_size=page_size)
    engine.run(JOBS)
    return engine.tokens()


def plain():
    return steps.plain("gqa", JOBS)


def rows(engine):
    """Bytes of the blocks that requests hold."""
    return sum(k.used * k.block_bytes for k in engine.memory.budgets)


def paused(mode, ask, give, page_size=64):
    """Pause an engine with requests that run and wait, ask for its memory, and go on; returns what a test compares.

    page_size : so many tokens that no two of SGLang's pages share one of memory.
    """
    engine = Engine(model("gqa"), page_size=page_size)
    engine.run(JOBS[:10])  # they leave prefixes
    seen = []
    for job in JOBS[10:24]:
        engine.submit(*job)
    while len(engine.scheduler.running_batch.reqs) < 4:
        engine.step()
    for _ in range(3):
        engine.order("PauseGeneration", mode=mode)
        engine.rest(2)
        before, has = engine.held(), rows(engine)
        asked = ask(engine)
        engine.rest(30)
        seen.append((before, has, rows(engine), engine.held()))
        give(asked)
        engine.order("ContinueGeneration", torch_empty_cache=False)
        for _ in range(5):
            engine.step()
    engine.run(JOBS[24:])
    (budget,) = engine.memory.budgets
    return engine.tokens(), seen, budget.block_bytes, budget.least * budget.block_bytes


def compare(told, mode, name):
    """`LIMIT` counts as what a request of the greatest length needs; `LEND` leaves SGLang's page 0."""
    tokens, seen, block, least = told
    assert tokens == plain()
    for before, had, has, held in seen:
        most = (max(has, least) if name == "LIMIT" else has) + block
        assert had == has and (had > 0) == (mode == "in_place")
        assert held <= most < before, f"{held} of {before} bytes are held, and requests have {has}"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("name", ["LIMIT", "LEND"])
def test_a_paused_engine_obeys_its_owner(name, mode):
    def run():
        from pyvmem.engine import control

        word = getattr(control, name)

        def ask(engine):
            engine.memory.page[word] = 1
            return engine

        def give(engine):
            engine.memory.page[word] = control.NO_LIMIT if word == control.LIMIT else 0

        return paused(mode, ask, give)

    compare(forked(run), mode, name)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_engine_gives_its_pool_what_no_request_holds(mode):
    """Also what its waiting requests would take next, and it does not ask for more."""

    def run():
        from pyvmem.engine import control

        def ask(engine):
            if not neighbours:
                neighbours.append(Neighbour())
            neighbours[0].take(engine, POOL - rows(engine) - MIB)
            page = engine.memory.page
            assert not page[control.WANTED] and not page[control.HEAD]
            return neighbours[0]

        neighbours = []
        return paused(mode, ask, Neighbour.give)

    pool = dict(VMEM_SGLANG_POOL=uuid.uuid4().hex[:12], VMEM_SGLANG_POOL_SIZE=str(POOL))
    tokens, seen, *_ = forked(run, **pool)
    assert tokens == plain() and all(had == has for _, had, has, _ in seen)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_ranks_that_are_paused_obey_alike(mode):
    def run():
        from pyvmem.engine import control

        def ask(engine):
            engine.memory.page[control.LIMIT] = 1
            return engine

        def give(engine):
            engine.memory.page[control.LIMIT] = control.NO_LIMIT

        return paused(mode, ask, give, page_size=128)

    bind = dict(SGLANG_CPU_OMP_THREADS_BIND="0|0")  # without it, SGLang wants a NUMA node for each rank
    first, second = forked(run, ranks=2, **bind)
    assert first == second and first[0] == forked(own, 128, vmem=False, ranks=2, **bind)[0]
    assert all(held <= max(has, first[3]) + first[2] for _, _, has, held in first[1])
