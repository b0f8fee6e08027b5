"""vLLM's offloading to host memory beside blocks that come and go: every row that attention can read is read back."""

import collections

import offload
import pytest
from offload import OffloadingEngine
from steps import Clock, next_token
from test_steps import fails_in_a_child, maps_in_steps, set_limit

from pyvmem.vllm import budget, demand, orders, scheduler


@pytest.fixture
def engine(tmp_path):
    made = []

    def make(**options):
        made.append(OffloadingEngine(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


CASES = {
    "full": dict(kinds=("full",)),
    "window": dict(),
    "answers, too": dict(prompts_alone=False),
    "few chunks": dict(chunks=12),
    "not asynchronous": dict(asynchronous=False, queue=1),
    "two workers": dict(ranks=2),
    "blocks of 40 KiB": dict(page=40 << 10),
    "batches in a queue": dict(queue=3, depth=3),
}


@pytest.mark.parametrize("limit", [None, 70, "moves"])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_right_beside_copies(engine, monkeypatch, case, limit):
    monkeypatch.setattr(demand, "CHUNK", 32)
    e = engine(**CASES[case])
    set_limit(e, limit)
    if limit == "moves":
        e.every = lambda: e.random.random() < 0.2 and e.limit(e.random.choice([40, 60, 110, 400]))
    e.run(60)
    assert e.read > 20_000
    assert e.counts["stored"] > 50 and (limit is None or e.counts["loaded"] > 5 or "chunks" in CASES[case])
    assert maps_in_steps(e) == 0
    assert not e.budget._leaving


@pytest.fixture
def late(monkeypatch):
    """Copies are carried out many steps later, or when vLLM waits for them."""
    monkeypatch.setattr(offload.HostCopies, "late", 0.95)


def test_rows_are_right_if_copies_are_late(engine, late):
    e = engine(kinds=("full",))
    e.every = lambda: e.limit(e.random.choice([40, 400]))
    e.run(60)
    assert e.counts["loaded"] > 50 and maps_in_steps(e) == 0


def test_what_a_request_leaves_is_stored_also_if_the_limit_falls_first(engine):
    """vLLM names the last store with the step after the end. The thread between steps may give up blocks before."""
    e = engine(kinds=("full",), prompts_alone=False)
    tokens = [7] * 100
    request = e.request("first", list(tokens), 29)
    for _ in range(29):
        tokens.append(next_token(tokens))
    flight = collections.deque()
    e.scheduler.add_request(request)
    while not request.is_finished():
        e.turn(flight)
    with e.memory.lock:
        e.budget.lent = True
        e.idle()
        e.budget.lent = False
    e.settle()
    e.idle()
    assert e.scheduler.reset_prefix_cache()
    read = e.read
    e.answer([e.request("again", tokens, 2)])
    e.settle()
    assert e.counts["loaded"] == 8 and e.read > read


def test_what_is_to_be_stored_is_stored_before_the_memory_sleeps(engine, late, monkeypatch):
    """vLLM begins a store with the step after the one that names it, which comes when the model is awake again."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    e = engine(kinds=("full",), asynchronous=False, queue=1)
    worker = e.workers[0]
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker.copies.connector)

    def synchronize():
        worker.copies.copies.synchronize()
        worker.finish()

    worker.memory._synchronize = synchronize
    tokens = [7] * 100
    e.answer([e.request("first", list(tokens), 1)])
    worker.memory.sleep(2)
    assert e.resident()[0] <= 1
    assert worker.memory.wake()
    e.settle()
    assert e.scheduler.reset_prefix_cache()
    read = e.read
    e.answer([e.request("again", tokens, 2)])
    e.settle()
    assert e.counts["loaded"] == 6 and e.read > read


def test_a_prefix_that_others_took_while_its_model_slept_comes_from_the_host(engine, monkeypatch):
    """vLLM resets the prefix cache and the connector's copies when it goes to sleep; the model keeps both."""
    from vllm.v1.core.sched.interface import PauseState

    monkeypatch.setenv("VMEM_VLLM", "1")
    monkeypatch.setenv("VMEM_VLLM_SLEEP", "keep")
    e = engine(kinds=("full",), asynchronous=False, queue=1)
    memory, tokens = e.workers[0].memory, [7] * 100
    e.answer([e.request("first", list(tokens), 2)])
    e.settle()
    e.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    memory.sleep(1)
    assert e.scheduler.kv_cache_manager.reset_prefix_cache()  # the blocks on the device alone
    assert memory.wake()
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    read = e.read
    e.answer([e.request("again", tokens, 2)])
    e.settle()
    assert e.counts["loaded"] == 6 and e.read > read


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_are_right_if_the_host_has_no_room_and_windows_move_on(engine, late, seed):
    """vLLM tries to store a block later again, when the window may have left it behind."""
    e = engine(chunks=8, seed=seed)
    e.every = lambda: e.limit(e.random.choice([40, 400]))
    named = e.workers[0].memory.begin

    def begin(output):
        known = set(e.workers[0].memory._backed_ids())
        assert known.issuperset(set(orders.named_blocks(output)) - {0})  # a copy finds its blocks backed
        return named(output)

    e.workers[0].memory.begin = begin
    e.run(60)
    assert maps_in_steps(e) == 0


def test_the_check_sees_it_if_blocks_leave_before_they_are_copied(engine, late, monkeypatch):
    monkeypatch.setattr(orders.Copies, "part", lambda self, leaving: (list(leaving), []))
    assert fails_in_a_child(lambda: engine(kinds=("full",)))


@pytest.mark.parametrize("others_give", [False, True])
@pytest.mark.parametrize("chunk", [512, 32])
def test_a_prefix_from_the_host_is_loaded_when_all_its_blocks_are_there(engine, monkeypatch, chunk, others_give):
    """Its request cannot begin in parts, and each attempt would look up the whole prompt: two attempts are enough."""
    monkeypatch.setattr(demand, "CHUNK", chunk)
    e = engine(kinds=("full",))
    tokens, clock, ready = [7] * 240, Clock(), {}
    e.answer([e.request("first", list(tokens), 2)])
    e.settle()
    assert e.scheduler.kv_cache_manager.reset_prefix_cache()  # the blocks on the device alone
    for module in (budget, scheduler):
        monkeypatch.setattr(module, "time", clock)
    with e.memory.lock:
        clock.now += 10
        e.flush()
        e.budget.between_steps(True, 0)
        e.flush()
        told, asks = e.page.answer, []
        e.page.answer = lambda order, rank: told(order, rank) if ready.get(order, 0) <= clock.now else -1
        connector = e.scheduler.connector.connector_scheduler
        real = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = lambda *a, **more: [asks.append(a), real(*a, **more)][1]
        if others_give:  # as in a pool without room
            supply = e.budget.supply
            monkeypatch.setattr(e.budget, "supply", lambda: supply()._replace(more=0, waits_for_others=True))
        e.scheduler.add_request(e.request("again", tokens, 2))
        steps, loads = 0, {}
        while not loads:
            output, sampled = e.step()
            steps, loads = steps + 1, output.kv_connector_metadata.load_jobs
            arrives = clock.now
            for order, ids in enumerate(output.vmem.ahead, output.vmem.order):
                ready[order] = arrives = arrives + len(ids) * 5e-3
            clock.now += 1e-3
            e.flush()
        assert len(asks) <= 2 and (steps <= 3 or others_give)
