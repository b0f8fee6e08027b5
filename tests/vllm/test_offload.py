"""vLLM's offloading to host memory beside blocks that come and go: every row that attention can read is read back."""

import collections
import os

import connect
import offload
import pytest
from offload import Fuzz, OffloadingEngine, SeveralEngine
from steps import Clock, next_token
from test_steps import fails_in_a_child, maps_in_steps, set_limit

from pyvmem.engine import control
from pyvmem.vllm import budget, connectors, demand, orders, scheduler


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


def can_sleep(e, monkeypatch):
    """Have the memory of an engine's worker find its connector, as in vLLM's process. Returns the worker."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    worker = e.workers[0]
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker.copies.connector)

    def synchronize():
        worker.copies.copies.synchronize()
        worker.finish()

    worker.memory._synchronize = synchronize
    return worker


def test_what_is_to_be_stored_is_stored_before_the_memory_sleeps(engine, late, monkeypatch):
    """vLLM begins a store with the step after the one that names it, which comes when the model is awake again."""
    e = engine(kinds=("full",), asynchronous=False, queue=1)
    worker = can_sleep(e, monkeypatch)
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


def load(e, monkeypatch, requests=4, tokens=224):
    """Requests that wait while their prefixes are loaded, which does not end: (the requests, steps in flight)."""
    from vllm.v1.request import RequestStatus

    prompts = [[7 + i] * tokens for i in range(requests)]
    e.answer([e.request(f"first{i}", list(prompt), 2) for i, prompt in enumerate(prompts)])
    e.settle()
    assert e.scheduler.kv_cache_manager.reset_prefix_cache()  # the blocks on the device alone
    monkeypatch.setattr(offload.HostCopies, "late", 1.0)
    waiting = [e.request(f"again{i}", [*prompt, 5, 6, 7], 20) for i, prompt in enumerate(prompts)]
    flight = collections.deque()
    for request in waiting:
        e.scheduler.add_request(request)
    while not all(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in waiting):
        e.turn(flight)
        e.flush()
    return waiting, flight


def end(e, waiting, flight, steps=400):
    """Serve requests to their ends, in a number of steps that is enough."""
    before = e.steps
    while e.scheduler.has_unfinished_requests() or flight:
        e.turn(flight)
        e.flush()
        assert e.steps < before + steps, [r.status.name for r in waiting]
    assert all(request.num_output_tokens == 20 for request in waiting)
    e.settle()


def test_loaded_requests_give_way_to_each_other_if_memory_leaves_meanwhile(engine, monkeypatch):
    """Each holds blocks, none has all, and vLLM can preempt none of them."""
    e = engine(kinds=("full",), chunks=200, asynchronous=False, queue=1)
    waiting, flight = load(e, monkeypatch)
    e.limit(e.budget.least)
    for _ in range(5):
        e.turn(flight)
    monkeypatch.setattr(offload.HostCopies, "late", 0.0)
    read = e.read
    end(e, waiting, flight)
    assert e.read > read and maps_in_steps(e) == 0


@pytest.mark.parametrize("late", [0.0, 0.9])
def test_everything_is_lent_also_while_prefixes_are_loaded(engine, monkeypatch, late):
    e = engine(kinds=("full",), chunks=200, asynchronous=False, queue=1)
    waiting, flight = load(e, monkeypatch)
    e.page[control.LEND] = 1
    monkeypatch.setattr(offload.HostCopies, "late", late)
    before = e.steps
    while not e.page[control.LENT]:
        e.turn(flight)
        assert e.steps < before + 100
    assert e.scheduler.has_unfinished_requests()
    e.page[control.LEND] = 0
    end(e, waiting, flight)
    assert maps_in_steps(e) == 0


def test_a_paused_engine_has_work_until_loads_have_ended_and_then_loses_its_blocks(engine, monkeypatch):
    """vLLM itself goes to sleep with loads in flight, or fails to reset its prefix cache."""
    from vllm.v1.core.sched.interface import PauseState

    e = engine(kinds=("full",), chunks=200, asynchronous=False, queue=1)
    waiting, flight = load(e, monkeypatch)
    e.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert e.scheduler.has_requests()
    monkeypatch.setattr(offload.HostCopies, "late", 0.5)
    while e.scheduler.has_requests():
        e.turn(flight)
    assert not any(worker.copies.copies.pending for worker in e.workers)
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert e.budget.used == 0
    e.workers[0].memory.sleep(2)
    assert e.resident()[0] <= 1
    assert e.workers[0].memory.wake()
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    end(e, waiting, flight)


def test_a_prefix_is_counted_up_to_its_first_evicted_block(engine):
    """A connector that copies a later block holds it, so that vLLM evicts an earlier one before."""
    e = engine(kinds=("full",))
    tokens, pool = [7] * 160, e.scheduler.kv_cache_manager.block_pool
    e.answer([e.request("first", list(tokens), 2)])
    e.settle()
    again = e.request("again", [*tokens, 5], 2)
    pool.evict_blocks({pool.get_cached_block(again.block_hashes[4], [0])[0].block_id})
    assert e.memory.demand.wants(again).found == (4,)


def whatever_happens(monkeypatch, make, prepare=lambda e: None):
    """Random events of engines with one step in flight, and with two. Yields what each has counted."""
    for seed in range(int(os.environ.get("VMEM_TEST_SEEDS", "2"))):
        e = make(asynchronous=seed % 2 == 1, queue=1 + seed % 2, seed=seed)
        for copies in (e.Copies, connect.Late):
            monkeypatch.setattr(copies, "late", copies.late)  # and back
        prepare(e)
        try:
            fuzz = Fuzz(e, seed)
            fuzz.run(400)
            assert fuzz.did["answered"] > 20 and fuzz.did["sleep"] and maps_in_steps(e) == 0
            yield e.counts
        finally:
            e.close()


def test_rows_are_right_whatever_happens(tmp_path, monkeypatch):
    def make(**options):
        return OffloadingEngine(tmp_path, kinds=("full",), **options)

    for counts in whatever_happens(monkeypatch, make, lambda e: can_sleep(e, monkeypatch)):
        assert counts["stored"] and counts["loaded"]


SIMPLE = "SimpleCPUOffloadConnector"


@pytest.mark.parametrize("names", [(SIMPLE,), (SIMPLE, connectors.OFFLOADING), (connectors.OFFLOADING, SIMPLE)])
def test_rows_are_right_whatever_happens_to_blocks_that_copies_hold(tmp_path, monkeypatch, names):
    def make(**options):
        return SeveralEngine(tmp_path, names, **options)

    for counts in whatever_happens(monkeypatch, make, lambda e: can_sleep(e, monkeypatch)):
        assert counts["stored"] and counts["loaded"] and not counts["unbacked"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_rows_are_right_whatever_happens_to_a_peer(tmp_path, monkeypatch, policy):
    """Prefixes come from a peer, late, in part or never, and it reads what requests have left."""
    from peer import PeerEngine

    for counts in whatever_happens(monkeypatch, lambda **options: PeerEngine(tmp_path, policy, **options)):
        assert counts["loaded"] and counts["failed"] and counts["read"]
