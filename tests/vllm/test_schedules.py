"""vLLM's own scheduler beside the same one on vMem: where all blocks have memory, each step schedules the same."""

import collections
import contextlib
import random

import pytest
from steps import TOKENS, Clock, Engine, make_scheduler

from pyvmem.engine import control
from pyvmem.engine.control import State
from pyvmem.vllm import budget, scheduler, waiting

BLOCKS, PAGE = 400, 64 << 10


class Served:
    """A scheduler whose requests come at given steps, and what each of its steps schedules.

    Two steps are in flight. Every answer is the same token, and no device computes anything.
    """

    def __init__(self, engine, scheduler, memory=None, worker=None):
        self.engine, self.scheduler, self.memory, self.worker = engine, scheduler, memory, worker

    def step(self):
        """Schedule, and have the worker carry its orders out: (vLLM's output, the requests that get a token)."""
        output = self.scheduler.schedule()
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        if self.memory is not None:
            self.worker.memory.begin(output)
            self.worker.memory.end(output)
            self.engine.flush()
            self.worker.finish()
        return output, {r.request_id: 7 for r in requests if r.num_computed_tokens >= r.num_prompt_tokens}

    def serve(self, requests, at=lambda i: 0):
        """What the steps schedule for requests that come at steps `at`: tokens, cached tokens, preempted requests."""
        # On a slow machine, the scheduler's thread would look between two steps, and take an idle engine's blocks.
        with contextlib.nullcontext() if self.memory is None else self.memory.lock:
            return self._serve(requests, at)

    def _serve(self, requests, at):
        made, flight, coming, number = [], collections.deque(), collections.deque(enumerate(requests)), 0
        while coming or self.scheduler.has_unfinished_requests() or flight:
            while coming and at(coming[0][0]) <= number:
                self.scheduler.add_request(self.engine.request(*coming.popleft()[1]))
            output, sampled = self.step()
            number += 1
            new = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
            made.append((dict(output.num_scheduled_tokens), new, sorted(output.preempted_req_ids or ())))
            if output.total_num_scheduled_tokens:
                flight.append((output, sampled))
            if len(flight) == 2 or (flight and not output.total_num_scheduled_tokens):
                answered, sampled = flight.popleft()
                self.scheduler.update_from_output(answered, self.engine.answer_of(answered, sampled))
            assert number < 4000, "requests wait for ever"
        self.step()
        return made


@pytest.fixture
def both(tmp_path):
    """Make vLLM's scheduler, and one on vMem whose blocks all have memory but a few: each has the same prefix cache."""
    made = []

    def make(limit=BLOCKS - 1, few=0, **options):
        plain, _ = make_scheduler(tmp_path, limit + 1, plain=True, page=PAGE, **options)
        e = Engine(tmp_path, blocks=BLOCKS, page=PAGE, **options)
        made.append(e)
        if limit < BLOCKS - 1:
            e.page[control.LIMIT] = limit * e.budget.block_bytes
        served = Served(e, plain), Served(e, e.scheduler, e.memory, e.workers[0])
        with e.memory.lock:
            for one in served:
                for i in range(limit // 4):  # one after the other, so that both caches have the same order
                    one.serve([(f"fill{i}", [i + 3] * 129, 1)])
            assert e.budget.num_backed == limit
            e.budget.unback(few)  # as an idle engine gives up what holds no prefix
        return served

    yield make
    for e in made:
        e.close()


def prompts(n, seed, longest=100):
    """(name, prompt, output tokens) of requests, half of which share a prefix."""
    draw = random.Random(seed).randrange
    prefixes = [[900 + i] * 48 for i in range(3)]
    return [(f"r{seed}-{i}", prefixes[draw(3)] * (i % 2) + [draw(3, 900) for _ in range(draw(1, longest))], draw(1, 40))
            for i in range(n)]  # fmt: skip


WORLDS = {
    "all at once": dict(),
    "two groups": dict(kinds=("full", "window")),
    "states": dict(kinds=("full", "mamba")),
    "not asynchronous": dict(asynchronous=False),
    "few blocks, so that some are preempted": dict(limit=24),
    "large steps": dict(batch=2048),
}


@pytest.mark.parametrize("every", [0, 3], ids=["at once", "one after the other"])
@pytest.mark.parametrize("world", WORLDS)
def test_where_all_blocks_have_memory_each_step_is_vllms(both, world, every):
    plain, vmem = both(**{"kinds": ("full",), **WORLDS[world]})
    for turn in range(3):
        requests = prompts(40, turn)
        want, got = (one.serve(requests, lambda i: every * i) for one in (plain, vmem))
        assert got == want
        if "limit" in WORLDS[world] and not every:
            assert any(preempted for *_, preempted in want)


def test_while_requests_run_a_step_whose_memory_is_all_there_only_counts(both, monkeypatch):
    _, vmem = both(kinds=("full",))
    budget, page, looks, counts = vmem.memory.budget, vmem.memory.page, [], []
    words = [getattr(control, name) for name in "ALLOWED USED CACHED SPARE COMING WANTED LENT".split()]
    look, step = budget.refresh, vmem.step
    monkeypatch.setattr(budget, "refresh", lambda: look() or looks.append(len(vmem.scheduler.running)))

    def counted():
        made = step()
        counts.append([page[word] for word in words])
        budget.publish()
        assert [page[word] for word in words] == counts[-1]
        return made

    vmem.step = counted
    vmem.serve(prompts(40, 1), lambda i: 3 * i)
    assert not any(looks) and len(set(map(tuple, counts))) > 20


@pytest.mark.parametrize("word", ["LIMIT", "MAX", "LEND"])
def test_the_owners_order_reaches_the_next_step_after_those_that_only_counted(both, word):
    _, vmem = both(kinds=("full",))
    budget, page = vmem.memory.budget, vmem.memory.page
    vmem.scheduler.add_request(vmem.engine.request("long", [3] * 100, 100))
    for _ in range(3):
        vmem.step()
    assert vmem.scheduler.running and budget.num_backed == BLOCKS - 1
    page[getattr(control, word)] = 1 if word == "LEND" else 40 * budget.block_bytes
    vmem.step()
    assert budget.num_backed == (0 if word == "LEND" else 40)


def test_a_limit_that_ends_before_a_block_could_leave_is_forgotten(both):
    """All blocks are in use meanwhile, so that nothing but the limit has changed."""
    _, vmem = both(kinds=("full",))
    page, manager, told = vmem.memory.page, vmem.scheduler.kv_cache_manager, []
    vmem.scheduler.add_request(vmem.engine.request("long", [3] * 100, 100))
    with vmem.memory.lock:
        for _ in range(3):
            vmem.step()
        held = manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks())
        for limit in (40 * vmem.memory.budget.block_bytes, control.NO_LIMIT):
            page[control.LIMIT] = limit
            vmem.step()
            told.append(page[control.ALLOWED])
    assert vmem.scheduler.running and vmem.memory.budget.num_backed == BLOCKS - 1
    assert told == [40, BLOCKS - 1]
    manager.block_pool.free_blocks(held)


@pytest.mark.parametrize("before", [False, True], ids=["", "paused by the user"])
def test_a_sleep_that_two_servers_order_leaves_the_engine_as_it_was(both, before):
    """One that starts meanwhile becomes the leader, and orders the sleep again that another one has begun."""
    from vllm.v1.core.sched.interface import PauseState

    _, vmem = both(kinds=("full",))
    was = PauseState.PAUSED_NEW if before else PauseState.UNPAUSED
    vmem.scheduler.set_pause_state(was)
    with vmem.memory.lock:
        vmem.memory.page[control.STATE] = State.CLOSING
        for _ in range(2):
            vmem.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        vmem.memory.page[control.STATE] = State.WAKING
        vmem.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert vmem.scheduler.pause_state == was


@pytest.mark.parametrize("few", [1, 5, 60])
def test_a_burst_waits_for_no_memory_where_it_must_evict_anyway(both, few):
    """A few blocks have no memory, and a step, or the requests that wait, need more. vLLM would take cached blocks."""
    plain, vmem = both(kinds=("full",), few=few, batch=256)
    requests = prompts(40, 1)
    assert vmem.memory.budget.growable() == few > vmem.memory.budget.spare
    want, got = (one.serve(requests) for one in (plain, vmem))
    assert got == want


def memory_comes_late(vmem, monkeypatch, seconds):
    """Workers answer orders so late. A step takes 6 ms."""
    clock, since, told, step = Clock(), {}, vmem.memory.page.answer, vmem.step
    for module in (budget, scheduler, waiting):
        monkeypatch.setattr(module, "time", clock)

    def answer(order, rank):
        since.setdefault(order, clock.now)
        return told(order, rank) if clock.now >= since[order] + seconds else -1

    vmem.memory.page.answer = answer
    vmem.step = lambda: clock.sleep(0.006) or step()


def served_alike(both, monkeypatch, requests, seconds=0.02, **options):
    """The blocks that vLLM evicts, and the tokens that its requests find cached, on its own and on vMem."""
    plain, vmem = both(kinds=("full",), **options)
    pool = plain.scheduler.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(options["few"]))  # what lost its memory on vMem has lost its contents, too
    memory_comes_late(vmem, monkeypatch, seconds)
    evicted, found = [], []
    for one in (plain, vmem):
        pool, number = one.scheduler.kv_cache_manager.block_pool, []
        evict = pool._maybe_evict_cached_block
        pool._maybe_evict_cached_block = lambda block, evict=evict, number=number: evict(block) and not number.append(1)
        found.append(sum(sum(new.values()) for _, new, _ in one.serve(requests)))
        evicted.append(len(number))
    return evicted, found


def test_blocks_that_requests_begin_with_alike_count_once(both, monkeypatch):
    """A burst of one prompt: memory for one of them suffices, so nothing is evicted until it has come."""
    requests = [(f"r{i}", [901] * 96 + [i + 3] * 4, 4) for i in range(40)]
    evicted, found = served_alike(both, monkeypatch, requests, few=60, batch=64)
    assert evicted == [0, 0] and found[0] == found[1] > 30 * 96


def test_a_burst_evicts_no_prefix_that_one_of_its_requests_finds(both, monkeypatch):
    """The burst takes cached blocks even if all memory comes, but not the oldest ones: the sixth request finds them."""
    prompts = [[900 + i] * 100 for i in range(40)]
    prompts[5] = [3 + 60] * 129  # of the oldest that are cached
    requests = [(f"r{i}", prompt, 4) for i, prompt in enumerate(prompts)]
    evicted, found = served_alike(both, monkeypatch, requests, seconds=0.1, few=60, batch=64)
    assert found == [128, 128] and evicted[1] <= evicted[0] + 8


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_evicted_where_memory_comes_for_all(both, monkeypatch, seed):
    draw = random.Random(seed)
    prefixes = [[900 + i] * draw.choice((48, 96, 160)) for i in range(4)]
    prompts = [draw.choice(prefixes) * draw.randrange(2) + [3 + i] * draw.randrange(1, 24) for i in range(40)]
    requests = [(f"r{i}", prompt, draw.randrange(1, 20)) for i, prompt in enumerate(prompts)]
    evicted, found = served_alike(both, monkeypatch, requests, few=180, batch=draw.choice((64, 256)))
    assert evicted == [0, 0] and found[1] >= found[0]


def stored_too_early(folder, batch):
    """The blocks of prompts that NIXL stores in a host buffer before they are whole, and not again, by plain vLLM.

    batch : vLLM's ``max_num_batched_tokens``.
    """
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer", kv_buffer_device="cpu")
    scheduler, _ = make_scheduler(folder, 400, ("full",), 64 << 10, asynchronous=False, transfer=transfer,
                                        plain=True, batch=batch)  # fmt: skip
    scheduler.connector.connector_scheduler.use_host_buffer = True  # as on a GPU
    e = Engine.__new__(Engine)
    requests = [e.request(f"r{i}", [7 + i] * n, 1) for i, n in enumerate((100, 150, 60))]
    for request in requests:
        request.kv_transfer_params = dict(do_remote_decode=True, do_remote_prefill=False)
        scheduler.add_request(request)
    stored, blocks = {}, {}
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        computed = {name: scheduler.requests[name].num_computed_tokens for name in output.num_scheduled_tokens}
        for name, meta in output.kv_connector_metadata.reqs_to_save.items():
            stored.update({(name, block): computed[name] for block in meta.local_block_ids[0]})
        for name in computed:
            blocks[name] = scheduler.kv_cache_manager.get_block_ids(name)[0]
        sampled = {r.request_id: 7 for r in requests if computed.get(r.request_id) == r.num_prompt_tokens}
        scheduler.update_from_output(output, e.answer_of(output, sampled))
    return sum(stored[r.request_id, block] < min((i + 1) * TOKENS, r.num_prompt_tokens)
               for r in requests for i, block in enumerate(blocks[r.request_id]))  # fmt: skip


def test_vllm_itself_stores_the_block_in_which_a_chunk_ends_as_it_is_then(tmp_path):
    """So vMem begins no such prompt in parts. If vLLM mends this, `connectors.WHOLE_PROMPTS` needs no NIXL."""
    assert stored_too_early(tmp_path, batch=64) > 0 == stored_too_early(tmp_path, batch=1024)
