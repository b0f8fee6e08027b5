"""HiCache on vMem: rows come from host memory and go there, while limits move, requests are aborted and models sleep.

Copies are late, and each sees that all of its rows have memory. Tokens are plain SGLang's without HiCache.
"""

import random
import uuid

import hicache
import pytest
import steps
from models import model
from neighbour import Neighbour
from steps import MIB, Engine, forked, moving, workload

ONCE = [(f"r{i}", prompt, n) for i, (prompt, n) in enumerate(workload(24))]
JOBS = ONCE + [(f"s{name}", prompt, n) for name, prompt, n in ONCE]  # prefixes that memory had, and has lost
POOL = 64 * MIB  # 14 MiB of them for weights
FILES = dict(hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete",
             hicache_storage_backend_extra_config='{"prefetch_threshold": 64}')  # fmt: skip
BIND = dict(SGLANG_CPU_OMP_THREADS_BIND="0|0")  # without it, SGLang wants a NUMA node for each rank


@pytest.fixture(scope="module", autouse=True)
def imported():
    steps.imports()


def engine_of(kind="gqa", tokens=8192, **options):
    hicache.on_cpu()
    return Engine(model(kind), tokens=tokens, **{**hicache.OPTIONS, **options})


def in_flight(engine):
    return engine.scheduler.tree_cache.cache_controller.has_inflight_device_transfers()


def used(engine):
    return sum(k.used * k.block_bytes for k in engine.memory.budgets)


def told(engine):
    return {name: made for name, made in engine.tokens().items() if name not in engine.aborted}, hicache.COUNTS


def on(ranks):
    """A function as `forked`, whose result is of so many ranks."""

    def run(do, *args, **more):
        told = forked(do, *args, ranks=ranks, **more, **(BIND if ranks > 1 else {}))
        return told if ranks > 1 else [told]

    return run


def plain(kind="gqa", ranks=1, **options):
    """SGLang's own tokens."""

    def first(do, *args, **more):
        return on(ranks)(do, *args, **more)[0]

    first.__name__ = f"on {ranks}"
    return steps.plain(kind, JOBS, first, tokens=8192, **options)


def aborting(engine, draw):
    """Abort one of the requests now and then: one that waits, or one that runs."""
    if draw.random() < 0.04:
        names = [r.rid for r in engine.requests if not r.finished() and r.rid not in engine.aborted]
        if names:
            engine.abort(draw.choice(names))


CASES = {
    "written at once": ("gqa", dict(hicache_write_policy="write_through"), 1),
    "written if used again": ("gqa", dict(hicache_write_policy="write_through_selective", page_size=16), 1),
    "written when they go": ("gqa", dict(hicache_write_policy="write_back"), 1),
    "windows in a pool of their own": ("windows", dict(two_pools=True), 1),
    "two ranks": ("gqa", {}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_limits_lends_and_aborts_leave_the_tokens_as_they_are(name):
    kind, options, ranks = CASES[name]

    def run():
        from pyvmem.engine import control

        engine, draw, lent = engine_of(kind, **options), random.Random(2), 0
        move = moving([size * MIB for size in (2, 3, 6, 12)])
        page = engine.memory.page

        def each(engine):
            nonlocal lent
            move(engine)
            aborting(engine, draw)
            wants = draw.random() < 0.03
            if engine.rank == 0 and wants:
                page[control.LEND] = 1
            if engine.rank == 0 and page[control.LEND] and page[control.LENT]:
                lent, page[control.LEND] = lent + 1, 0

        engine.run(JOBS, each=each)
        return *told(engine), lent

    answers = on(ranks)(run)
    assert answers[0][2]
    own = plain(kind, ranks, **{name: value for name, value in options.items() if name != "hicache_write_policy"})
    for tokens, counts, _ in answers:
        assert tokens == {name: own[name] for name in tokens} and len(JOBS) // 2 < len(tokens) < len(JOBS)
        assert counts["stored"] and counts["loaded"] and not counts["unbacked"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_sleeps_with_copies_in_flight(ranks):
    """A neighbour takes all that no request holds: rows whose copies end while the model sleeps, too."""

    def run():
        from pyvmem.engine import control

        engine, slept = engine_of(), []
        neighbour = None if engine.rank else Neighbour()
        engine.memory.page[control.RUNNING] = 1

        def each(engine):
            if engine.steps % 27 != 5 or len(slept) == 8:
                return
            slept.append(in_flight(engine))
            engine.order("ReleaseMemoryOccupation", tags=["vmem"])
            engine.rest(20)
            assert not in_flight(engine)
            size = POOL - ranks * (used(engine) + 4 * MIB)  # pages that are used in part stay whole
            for _ in range(3000):  # all ranks make as many steps
                if engine.memory.ranks.tell(neighbour is not None and neighbour.try_to_take(size)):
                    break
                engine.step()
            else:
                raise AssertionError(f"the pool did not give {size} bytes")
            if neighbour is not None:
                neighbour.give()
            engine.step()
            engine.order("ResumeMemoryOccupation", tags=["vmem"])
            assert not engine.memory.asleep

        engine.run(JOBS, each=each)
        return *told(engine), slept

    own = plain(ranks=ranks)
    for tokens, counts, slept in on(ranks)(run, VMEM_SGLANG_POOL=uuid.uuid4().hex[:12],
                                           VMEM_SGLANG_POOL_SIZE=str(POOL), VMEM_SGLANG_WEIGHTS="1"):  # fmt: skip
        assert any(slept) and tokens == own and counts["stored"] and not counts["unbacked"]


def test_another_engine_begins_with_rows_that_files_have(tmp_path):
    """A storage behind host memory, while limits move."""

    def run():
        engine = engine_of(**FILES)
        engine.run(JOBS, each=moving([size * MIB for size in (2, 3, 6, 12)]))
        engine.rest(20)  # what was stored on the host goes to files
        return *told(engine), sum(r.storage_hit_length for r in engine.requests)

    where = dict(SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(tmp_path))
    first, second = forked(run, **where), forked(run, **where)
    for tokens, counts, _ in (first, second):
        assert tokens == plain() and counts["stored"] and not counts["unbacked"]
    assert second[2] > first[2] and second[1]["loaded"] > first[1]["loaded"]
