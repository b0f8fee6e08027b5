"""A model that is loaded beside busy ones gets its memory from them, and keeps it until the weights are in.

SPDX-License-Identifier: MIT
"""

import contextlib
import errno
import os
import threading
import time
import uuid

import pytest
import torch
from kv_pools import MIB, free, load, make

import pyvmem
from pyvmem import KVPool
from pyvmem.blocks import BlockRange
from pyvmem.engine import control
from pyvmem.engine.control import Sleeps, State
from pyvmem.engine.memory import BlockMemory
from pyvmem.engine.settings import Refused, Settings
from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.sleep.sleeper import Sleeper
from pyvmem.tensor import VirtualTensor

from conftest import until

PAGE = 64 << 10
CHOSEN = Settings("VMEM_ENGINE", on=True, pool="pool", weights=True)


@pytest.fixture
def pool():
    with KVPool(budget=36 * MIB) as pool:
        yield pool


@pytest.fixture
def busy(pool):
    """A model whose requests take whatever they get."""
    cache = make(pool, context=pyvmem.Context("host"))
    yield cache
    cache.close()


@pytest.fixture
def page():
    return control.private_page()


@pytest.fixture
def sleeper(pool, page):
    made = Sleeper(page, 0, CHOSEN, pool, torch.device("cpu"))
    yield made
    made.weights.close()


def net(size):
    made = torch.nn.Module()
    made.register_buffer("words", torch.arange(size // 8))
    return made


def other_models(page, give, seen):
    """Those whose servers see what is lacking: they go to sleep one by one."""

    def watch():
        while give:
            if page[control.LACKS]:
                seen.append(
                    (State(page[control.STATE]), page[control.QUEUED], page[control.SINCE], page[control.LACKS])
                )
                give.pop()()
                told = page[control.LACKS]
                while give and page[control.LACKS] == told:
                    time.sleep(1e-3)
            time.sleep(1e-3)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_what_others_gave_stays_until_the_weights_are_in(pool, page, busy, sleeper):
    slots, seen = load(busy, 8, pool), []  # 32 of 36 MiB
    watch = other_models(page, [lambda: free(busy, slots[2:])], seen)
    with sleeper.claim(24 * MIB):
        watch.join()
        assert len(load(busy, 5, pool)) == 1  # what goes on takes nothing back: 12 MiB are for others
        while page[control.LACKS]:  # until the thread that asks has seen it
            time.sleep(1e-3)
        assert page[control.STATE] == page[control.QUEUED] == 0  # and others have their turns
        model = net(24 * MIB)
        sleeper.weights.adopt([model])
    assert torch.equal(model.words, torch.arange(3 * MIB))
    assert seen and seen[0][:2] == (State.WAKING, 1) and seen[0][2] > 0 and 20 * MIB <= seen[0][3] <= 24 * MIB
    (claim,) = [m for m in pool.members() if m.name.startswith("weights")]
    assert claim.min == 0


def test_memory_beyond_the_reservation_is_waited_for_and_asked_for(pool, page, busy, sleeper):
    """The weights are larger than their files, or nobody knows how large they are."""
    slots, seen = load(busy, 8, pool), []
    with sleeper.claim(0):
        watch = other_models(page, [lambda: free(busy, slots[2:])], seen)
        sleeper.weights.adopt([net(22 * MIB)])
        watch.join()
    assert seen and seen[0][0] == State.WAKING
    assert page[control.LACKS] == page[control.STATE] == 0


def test_weights_that_nobody_makes_room_for_are_refused_in_time(pool, page, busy, sleeper, monkeypatch):
    slots = load(busy, 8, pool)
    monkeypatch.setattr("pyvmem.sleep.sleeper.LOAD_WAIT", 0.2)
    with pytest.raises(Refused, match="VMEM_ENGINE_POOL=pool: the other members did not give"), sleeper.claim(24 * MIB):
        raise AssertionError("loaded")
    assert page[control.LACKS] == page[control.STATE] == 0
    free(busy, slots)
    assert len(load(busy, 8, pool)) == 8  # nothing of the claim is left


def test_a_load_that_fails_leaves_no_claim(pool, page, busy, sleeper):
    with pytest.raises(OSError, match="no file"), sleeper.claim(24 * MIB):
        raise OSError("no file")
    assert len(load(busy, 8, pool)) == 8


@pytest.mark.parametrize("taken", ["all", "a part", "spare"])
def test_what_spare_memory_cannot_be_is_said_at_once_and_nothing_else_is(pool, page, busy, sleeper, monkeypatch, taken):
    """A model sleeps for it, and need not if requests of others have ended."""
    models, said, asked = [net(8 * MIB) for _ in range(3)], [], []
    lacks, wake = sleeper._lacks, sleeper.weights.wake
    monkeypatch.setattr("pyvmem.sleep.sleeper.TRY", 3600)
    monkeypatch.setattr(sleeper, "_lacks", lambda missing: said.append(missing) or lacks(missing))
    monkeypatch.setattr(sleeper.weights, "wake", lambda *how: asked.append(sum(said)) or wake(*how))
    sleeper.weights.adopt(models)
    sleeper.park()
    copied(sleeper)
    slots = load(busy, 4 if taken == "a part" else 8, pool)  # 16 or 32 of 36 MiB
    assert (sleeper.weights.held > 8 * MIB) == (taken == "a part")  # which is no spare memory of others
    if taken == "spare":
        free(busy, slots)
        until(lambda: pool.free + sum(m.could_give for m in pool.members()) > 24 * MIB)
    wakes = threading.Thread(target=sleeper.wake, args=(3600,))
    wakes.start()
    if taken == "all":
        until(lambda: page.short)
        assert page.short > 12 * MIB
        free(busy, slots[3:])
        until(lambda: 0 < page.short < 12 * MIB)  # as it comes
        free(busy, slots[:3])
    elif taken == "a part":
        until(lambda: page.short)
        free(busy, slots)
    wakes.join()
    assert said[-1] == 0 and any(said) == (taken != "spare") == (asked[0] > 0)
    assert all(torch.equal(model.words, torch.arange(MIB)) for model in models)


def test_a_segment_of_which_others_took_a_part_is_not_missing_as_a_whole(pool, page, busy, sleeper, monkeypatch):
    """Its pages go together. Of its budget, others have what they needed, and the rest is still there."""
    model, said = net(24 * MIB), []
    monkeypatch.setattr("pyvmem.sleep.sleeper.ANSWER", 3600)
    monkeypatch.setattr("pyvmem.sleep.sleeper.TRY", 3600)
    monkeypatch.setattr(sleeper, "_lacks", said.append)
    sleeper.weights.adopt([model])
    for _ in range(3):
        sleeper.park()
        copied(sleeper)
        free(busy, load(busy, 4, pool))  # 16 MiB, of which 12 were free
        assert not sleeper.weights.held
        sleeper.wake(3600)
    assert said == [0] * 3
    assert torch.equal(model.words, torch.arange(3 * MIB))


def test_what_requests_of_another_process_have_just_left_puts_no_model_to_sleep(tmp_path, page, monkeypatch):
    """The pool's file says it up to 0.2 s later, unless somebody asks."""
    monkeypatch.setattr("pyvmem.sleep.sleeper.ANSWER", 3600)
    monkeypatch.setattr("pyvmem.sleep.sleeper.TRY", 3600)
    path, model, said = tmp_path / "pool", net(24 * MIB), []
    with KVPool(36 * MIB, path=path) as pool, KVPool(path=path) as elsewhere:
        sleeper = Sleeper(page, 0, CHOSEN, pool, torch.device("cpu"))
        monkeypatch.setattr(sleeper, "_lacks", said.append)
        sleeper.weights.adopt([model])
        with make(elsewhere, context=pyvmem.Context("host")) as cache:
            for _ in range(3):
                sleeper.park()
                copied(sleeper)
                slots = load(cache, 8, elsewhere)  # 32 of 36 MiB
                free(cache, slots)
                sleeper.wake(3600)
        sleeper.weights.close()
    assert said == [0] * 3
    assert torch.equal(model.words, torch.arange(3 * MIB))


def test_what_is_lacking_rings_once_for_other_servers(page, sleeper, monkeypatch):
    rung = []
    monkeypatch.setattr("pyvmem.sleep.sleeper.ring", lambda path: rung.append(page.short))
    for missing in (5, 4, 0, 0, 6):
        sleeper._lacks(missing)
        assert page.short == missing
    assert rung == [5, 6]


@pytest.mark.parametrize("fault", [None, OutOfMemory, VmemError])
def test_a_wake_says_that_all_is_claimed_and_no_longer_once_it_has_failed(page, sleeper, monkeypatch, fault):
    model, wake, seen = net(8 * MIB), sleeper.weights.wake, []

    def wakes(wait, came, *how):
        def told():
            came()
            seen.append(page[control.ASLEEP])
            if fault and len(seen) == 2:
                error = fault(errno.ENOMEM, "the driver has too little")
                error.missing = 5
                raise error

        seen.append(page[control.ASLEEP])
        return wake(wait, told, *how)

    monkeypatch.setattr(sleeper.weights, "wake", wakes)
    sleeper.weights.adopt([model])
    for again in range(2):
        sleeper.park()
        copied(sleeper)
        assert page[control.ASLEEP] == Sleeps.LACKS and not page.claimed
        with pytest.raises(fault) if fault and not again else contextlib.nullcontext():
            sleeper.wake(0)
        if fault and not again:
            assert page[control.ASLEEP] == Sleeps.LACKS
            sleeper.wake(0)
        assert page.claimed
    assert seen == [Sleeps.KEEPS, Sleeps.CLAIMED] * (3 if fault else 2)
    assert torch.equal(model.words, torch.arange(MIB))


def copied(sleeper):
    while sleeper.weights.gives < sleeper.weights.bytes:
        time.sleep(1e-3)


def test_weights_are_copied_for_a_server_that_lets_them_sleep_or_by_a_sleep_that_keeps_them(page, sleeper):
    """Reinforcement learning discards them, and its trainer needs the host's memory."""
    weights = sleeper.weights
    model = net(8 * MIB)
    weights.adopt([model])
    sleeper.warmed_up(bool)
    sleeper.publish()
    sleeper.park(keep=False)
    assert weights.gives == weights.bytes  # nobody wants them back
    sleeper.wake(1)
    sleeper.publish()
    assert weights._copy.bytes == weights.gives == 0  # and none was copied
    sleeper.park()
    copied(sleeper)
    weights.lease.trim()
    sleeper.wake(1)
    assert torch.equal(model.words, torch.arange(MIB))


def test_weights_are_copied_once_a_server_is_there(page, sleeper):
    sleeper.weights.adopt([net(8 * MIB)])
    page[control.STATE] = State.AWAKE
    sleeper.publish()
    assert sleeper.weights.gives == 0  # not while graphs are captured
    sleeper.warmed_up(bool)
    sleeper.publish()
    copied(sleeper)


def test_one_worker_that_has_all_does_not_end_the_claim_of_another(pool, page, busy, sleeper):
    page.cells[control.SHORT + 1] = 5 * MIB  # as it has published
    with sleeper.claim(2 * MIB):
        while not page[control.LACKS]:
            time.sleep(1e-3)
    assert page[control.STATE] == State.WAKING and page[control.LACKS] == 5 * MIB


def test_minimums_of_others_are_in_the_way_until_they_sleep(pool, page, busy, sleeper):
    other, seen = make(pool, "awake", context=pyvmem.Context("host"), pool_min=30 * MIB), []
    watch = other_models(page, [other.close], seen)
    with sleeper.claim(24 * MIB):
        watch.join()
        sleeper.weights.adopt([net(24 * MIB)])
    assert seen[0][3] == 24 * MIB


@pytest.fixture
def two(pool):
    """The workers of two engines, which see each other's pages."""
    name, made = uuid.uuid4().hex[:12], []
    for number in range(2):
        page = control.open_page(f"{name}{number}", 0)
        made.append((page, Sleeper(page, 0, CHOSEN, pool, torch.device("cpu"))))
    yield made
    for page, sleeper in made:
        sleeper.weights.close()
        page.unlink()


def test_a_model_that_starts_takes_nothing_that_an_earlier_one_needs_to_start(pool, busy, two):
    """Neither could sleep, and both would wait until one of them ends."""
    (_, first), (page, second) = two
    model, loaded = net(24 * MIB), threading.Event()

    def load_second():
        with second.claim(24 * MIB):
            loaded.set()

    with first.claim(24 * MIB):
        first.weights.adopt([model])
    thread = threading.Thread(target=load_second)
    thread.start()
    until(lambda: page.short)
    assert len(load(busy, 2, pool)) == 2 and not loaded.is_set()  # as the first one's null block
    first.warmed_up(bool)
    first.park()  # as its server has it
    thread.join()
    assert loaded.is_set()


def test_models_sleep_for_the_null_block_of_one_that_starts(pool, page, two, monkeypatch):
    """They hold all of the pool, and no KV cache has anything to give."""
    (awake, first), _ = two
    with first.claim(36 * MIB):
        first.weights.adopt([net(36 * MIB)])
    first.warmed_up(bool)
    memory, seen = BlockMemory(page, 0, CHOSEN), []
    monkeypatch.setattr(memory, "pool", lambda device: pool)
    memory._tensor = VirtualTensor((8 * MIB,), torch.int8, "cpu", page_size=PAGE, context=pyvmem.Context("host"))
    memory._ranges = [BlockRange(0, MIB, MIB)]
    watch = other_models(page, [first.park], seen)
    assert memory._make_blocks(8, MIB) == MIB
    watch.join()
    assert seen[0][:2] == (State.WAKING, 1) and seen[0][3] == MIB
    assert page[control.LACKS] == page[control.STATE] == 0 and page[control.PID]
    memory.blocks.close()


@pytest.mark.parametrize("sizes", [(4, 4), (24, 0), (24, 24)])
def test_models_start_side_by_side_if_both_fit(pool, two, sizes, monkeypatch):
    """The size of the first is not known while it is 0."""
    (begun, first), (_, second) = two
    with first.claim(sizes[0] * MIB):
        until(lambda: not begun.short)
        fits = sum(sizes) <= 8 and 0 not in sizes
        if not fits:
            monkeypatch.setattr("pyvmem.sleep.sleeper.STARTS", 0.1)  # nobody waits longer for one that hangs
        with contextlib.ExitStack() as stack:
            if sizes[1] == 24:
                monkeypatch.setattr("pyvmem.sleep.sleeper.LOAD_WAIT", 0.1)
                stack.enter_context(pytest.raises(Refused, match="did not give"))
            stack.enter_context(second.claim(sizes[1] * MIB))


def test_a_machine_that_has_just_booted_has_no_more_starts_than_others(pool, two, monkeypatch):
    """All times are less than those for which others wait, also the zero of an engine that has started."""
    (begun, first), (_, second) = two
    monkeypatch.setattr(control, "now_us", lambda: 5_000_000)
    with first.claim(24 * MIB):
        pass
    first.warmed_up(bool)
    assert begun[control.PID] and control.starting_before(second._page, begun[control.POOL_OF], 600.0) == []


def test_a_wake_copies_by_a_kernel_while_no_other_engine_of_the_pool_computes(pool, two):
    (own, sleeper), (other, _) = two
    own[control.PID] = other[control.PID] = os.getpid()
    alone = sleeper.weights.is_alone
    assert alone()
    own[control.USED] = 3
    assert alone()
    other[control.USED] = 3
    assert not alone()
    other.cells[control.ASLEEP] = 1  # with its requests
    assert alone()
    other.cells[control.ASLEEP], number = 0, other[control.POOL_OF]
    other[control.POOL_OF] = 0
    assert alone()
    other[control.POOL_OF] = number
    assert not alone()


def test_workers_of_one_engine_and_engines_of_other_pools_do_not_wait_for_each_other(pool, two):
    (page, first), (other, _) = two
    with first.claim(34 * MIB), KVPool(budget=36 * MIB) as elsewhere:
        for its, rank, where in ((page, 1, pool), (other, 1, elsewhere)):
            its[control.POOL_OF] = 0 if its is other else its[control.POOL_OF]
            made = Sleeper(its, rank, CHOSEN, where, torch.device("cpu"))
            with made.claim(1):
                pass
            made.weights.close()


@pytest.mark.parametrize(
    "state, how, ahead",
    [
        (State.AWAKE, 0, True),
        (State.ASLEEP, Sleeps.LACKS, True),
        (State.WAKING, Sleeps.LACKS, False),
        (State.WAKING, Sleeps.KEEPS, False),
        (State.WAKING, Sleeps.CLAIMED, True),
        (State.NONE, Sleeps.KEEPS, False),  # past its server
    ],
)
def test_no_part_is_claimed_ahead_while_another_model_wakes_that_lacks_memory(two, monkeypatch, state, how, ahead):
    (_, sleeper), (other, _) = two
    model, aheads, wake = net(8 * MIB), [], sleeper.weights.wake
    other[control.PID], other[control.STATE], other[control.ASLEEP] = os.getpid(), state, how
    monkeypatch.setattr(sleeper.weights, "wake", lambda *all: aheads.append(all[-1]) or wake(*all))
    sleeper.weights.adopt([model])
    sleeper.park()
    copied(sleeper)
    sleeper.wake(0)
    assert aheads == [ahead] and torch.equal(model.words, torch.arange(MIB))


@pytest.mark.parametrize("others", ["rest", "run"])
def test_the_pool_is_asked_for_a_wake_once_an_idle_model_has_parked_what_is_missing(
    pool, busy, two, monkeypatch, others
):
    """Else prefixes of others would go meanwhile. If nobody can sleep at once, it is asked at once."""
    (own, sleeper), (other, its) = two
    own[control.PID] = other[control.PID] = os.getpid()
    other[control.STATE], other[control.RUNNING] = State.AWAKE, others == "run"
    other[control.GIVES] = 24 * MIB
    model, parked, aheads, wake = net(20 * MIB), [], [], sleeper.weights.wake
    looks, look = [], KVPool.look
    monkeypatch.setattr("pyvmem.sleep.sleeper.TRY", 3600)
    monkeypatch.setattr(KVPool, "look", lambda self, seconds: looks.append(bool(own.short)) or look(self, seconds))
    sleeper._name = "of another process"
    sleeper.weights.adopt([model])
    sleeper.park()
    copied(sleeper)
    its.weights.adopt([net(24 * MIB)])
    free(busy, load(busy, 3, pool))
    until(lambda: sum(m.could_give for m in pool.members()) == 12 * MIB)

    def asks(*how):
        parked.append(sum(m.could_give for m in pool.members() if m.name == its._name))
        aheads.append(how[-1])
        return wake(*how)

    monkeypatch.setattr(sleeper.weights, "wake", asks)
    wakes = threading.Thread(target=sleeper.wake, args=(3600,))
    wakes.start()
    until(lambda: parked if others == "run" else own.short)
    assert others == "run" or (own.short >= 20 * MIB and not parked)
    its.park()
    wakes.join()
    assert (parked[0] >= 20 * MIB) == (others == "rest") == aheads[0] and own.short == 0
    assert any(looks) == (others == "rest")  # else it would learn of it up to 0.2 s later
    assert torch.equal(model.words, torch.arange(20 * MIB // 8))


@pytest.mark.parametrize("few, gives, sleeps", [(0, 12, True), (8, 12, False), (0, 0, False)])
def test_an_idle_model_sleeps_before_the_prefixes_of_others_go(pool, busy, two, monkeypatch, few, gives, sleeps):
    """These suffice, but to compute them again takes longer than to copy weights. For few of them, it does not, nor if
    there is no copy of the weights."""
    (own, sleeper), (other, its) = two
    other[control.PID], other[control.STATE], other[control.GIVES] = os.getpid(), State.AWAKE, gives * MIB
    model, said, lacks = net(12 * MIB), [], sleeper._lacks
    sleeper._name = "of another process"
    monkeypatch.setattr("pyvmem.sleep.sleeper.FEW", few * MIB)
    monkeypatch.setattr("pyvmem.sleep.sleeper.TRY", 3600)
    monkeypatch.setattr(sleeper, "_lacks", lambda missing: said.append(missing) or lacks(missing))
    sleeper.weights.adopt([model])
    sleeper.park()
    copied(sleeper)
    sleeper.weights.lease.trim()
    its.weights.adopt([net(12 * MIB)])
    free(busy, load(busy, 4, pool))  # 16 MiB; missing: 4 MiB
    until(lambda: sum(m.could_give for m in pool.members()) >= 16 * MIB)
    wakes = threading.Thread(target=sleeper.wake, args=(3600,))
    wakes.start()
    if sleeps:
        until(lambda: own.short)
        its.park()
    wakes.join()
    pool.look(60)
    assert any(said) == sleeps
    assert (sum(m.held for m in pool.members() if m.name == "kv") == 16 * MIB) == sleeps
    assert torch.equal(model.words, torch.arange(12 * MIB // 8))


@pytest.mark.parametrize("others", ["suffice", "sleep", "do not suffice"])
def test_a_model_that_wakes_gives_its_own_cache_only_if_others_do_not_give_enough(
    pool, page, busy, sleeper, monkeypatch, others
):
    """Its requests are about to use it."""
    seen, said = [], []
    monkeypatch.setattr(sleeper, "_lacks", said.append)
    sleeper.weights.adopt([net(20 * MIB)])
    sleeper.park()
    copied(sleeper)
    with make(pool, f"engine {os.getpid()}", context=pyvmem.Context("host")) as own:
        free(own, load(own, 3, pool))
        slots = load(busy, 5, pool)  # missing: 16 MiB
        free(busy, {"suffice": slots, "sleep": [], "do not suffice": slots[:2]}[others])

        def waits():
            seen.append(page[control.ASLEEP])
            if others == "sleep":
                free(busy, slots)
                slots.clear()

        given = 12 + {"suffice": 20, "sleep": 0, "do not suffice": 8}[others]
        until(lambda: sum(m.could_give for m in pool.members()) >= given * MIB)
        sleeper.wake(60, waits)
    assert seen[:1] == ([] if others == "do not suffice" else [Sleeps.KEEPS])
    assert any(said) == (others == "sleep")


def test_the_blocks_of_a_model_that_begins_to_wake_are_not_on_offer(pool, page, monkeypatch):
    memory = BlockMemory(page, 0, CHOSEN)
    monkeypatch.setattr(memory, "pool", lambda device: pool)
    memory._tensor = VirtualTensor((8 * MIB,), torch.int8, "cpu", page_size=PAGE, context=pyvmem.Context("host"))
    memory._ranges = [BlockRange(0, MIB, MIB)]
    memory._make_blocks(8, MIB)
    memory.blocks.back([1, 2, 3])
    page[control.LEAST], page[control.OFFERED] = 1, 2
    for state, given in [(0, 2), (Sleeps.KEEPS, 0), (Sleeps.LACKS, 2)]:
        page.cells[control.ASLEEP] = state
        memory.tend()
        pool.look(60)
        assert sum(m.could_give for m in pool.members()) == given * MIB
    memory.blocks.close()
