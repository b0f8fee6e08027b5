"""pyvmem.vllm without vLLM: requests in slots, under the stand-ins of vllm_standins. The rest: test_vllm_engine."""

import collections
import importlib
import math
import random
import threading
import types

import numpy as np
import pytest
import torch
from vllm_standins import Gpu, Request, Runner, Scheduler

from pyvmem.errors import OutOfMemory
from pyvmem.kv import KVCache, TensorSpec
from pyvmem.kv_blocks import BlockNames
from pyvmem.vllm.requests import RequestSlots
from pyvmem.vllm.scheduler import PoolKeeper

TOKENS, PAGE, MOST = 8, 64 << 10, 96  # tokens of a block, and of a request at most
ROW = PAGE // TOKENS


class Engine:
    """Scheduler, worker and GPU, with the GPU a step behind the worker."""

    def __init__(self, *, requests=6, blocks=64, spare=3, caching=True, cap=None, budget=40, tensors=1, allowed=None,
                 slack=8, check=True):  # fmt: skip
        specs = [TensorSpec(f"kv{i}", (ROW // 8,), torch.int64) for i in range(tensors)]
        self.cache = KVCache(specs, requests + spare, MOST, (blocks + slack) * tensors * PAGE, backend="host",
                             page_size=PAGE, check=check, lazy=True, ahead_tokens=TOKENS, eager=False,
                             generous=False, idle_seconds=math.inf, name=None)  # fmt: skip
        self.gpu = Gpu()
        names = BlockNames(self.cache, blocks, TOKENS) if caching else None
        self.slots = RequestSlots(self.cache, TOKENS, requests, self.gpu, names, wait_seconds=0,
                                  table_blocks=MOST // TOKENS)  # fmt: skip
        rows = [self.cache.flat(i).numpy().view(np.uint64) for i in range(tensors)]
        self.runner = Runner(self.slots, rows[-1], TOKENS, requests, MOST // TOKENS, self.gpu)
        self.scheduler = Scheduler(blocks, TOKENS, requests, budget, caching)
        self.keeper = PoolKeeper(self.scheduler.pool, cap, MOST // TOKENS, allowed)
        self.keeper.PERIOD = 0
        self.scheduler.free_blocks = self._free
        self.random = random.Random(7)
        self.flight = []

    def _free(self, blocks):
        blocks = list(blocks)
        self.scheduler.pool.free_blocks(blocks)
        self.keeper.freed(blocks)

    def step(self):
        """One step is prepared while the one before computes; what came of that is known afterwards."""
        self.keeper.before_schedule()
        output = self.scheduler.schedule()
        waiting = [(len(r.tokens), len(self.scheduler.hits_of(r)) * TOKENS) for r in self.scheduler.waiting]
        self.runner.execute(output, self.keeper.take_forgotten(), waiting)
        if output.scheduled:
            self.flight.append(output)
        if len(self.flight) == 2 or (self.flight and not output.scheduled):
            self.scheduler.output(self.flight.pop(0))

    def run(self, requests, abort=0.0):
        waiting = list(requests)
        steps = 0
        while waiting or self.scheduler.waiting or self.scheduler.running or self.flight:
            while waiting and self.random.random() < 0.6:
                self.scheduler.waiting.append(waiting.pop(0))
            live = self.scheduler.running
            if live and self.random.random() < abort:
                self.scheduler.abort(self.random.choice(live))
            self.step()
            steps += 1
            assert steps < 5000
        self.step()
        self.step()
        self.gpu.wait(self.gpu.marked)
        self.cache.wait()

    def requests(self, n, shared=0.0):
        prefixes = [[self.random.randrange(9) for _ in range(5 * TOKENS)] for _ in range(3)]
        made = []
        for i in range(n):
            prompt = [self.random.randrange(9) for _ in range(self.random.randrange(1, 40))]
            if self.random.random() < shared:
                prompt = self.random.choice(prefixes) + prompt[:20]
            made.append(Request(f"r{i}", prompt, self.random.randrange(1, 30)))
        return made


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("tensors", [1, 3])
def test_every_row_is_read_back_as_written(caching, tensors):
    engine = Engine(caching=caching, tensors=tensors)
    engine.run(engine.requests(40, shared=0.6))
    assert engine.runner.read > 5000
    assert bool(engine.scheduler.hits) == caching


def test_a_table_is_written_ahead_so_that_most_steps_write_none():
    engine = Engine(requests=2, blocks=12)
    slots = engine.slots
    slots.TABLE_AHEAD = 2
    slots.begin_step()
    first = slots.start(0, [1, 2], 0)
    written = list(first)
    assert len(written) == 4
    for block in range(3, 13):
        written += slots.extend(0, [block])
    start = first[0]
    assert written == list(range(start, start + MOST // TOKENS))  # and not beyond the table
    assert start % slots.blocks_per_slot == 0


def test_preempted_and_aborted_requests_leave_the_others_alone():
    engine = Engine(blocks=30)
    engine.run(engine.requests(40, shared=0.4), abort=0.05)
    assert engine.scheduler.preemptions
    assert engine.runner.read > 5000


def test_a_request_may_share_what_another_writes_in_the_same_step():
    engine = Engine(budget=200)
    prompt = [1, 2, 3] * 12
    engine.scheduler.waiting.extend([Request("a", prompt, 3), Request("b", prompt, 3)])
    engine.run([])
    assert engine.scheduler.hits == 4
    assert engine.cache.stats().attached_pages == 4


def test_a_request_may_share_what_one_that_is_listed_after_it_writes_in_the_same_step():
    engine = Engine(requests=3)
    slots = engine.slots
    slots.begin_step()
    slots.start(0, [1, 2, 3, 4], 3 * TOKENS)  # 1 from the request below, and 2 and 3 from the last
    slots.start(1, [1, 5], 0)
    slots.start(2, [1, 2, 3], TOKENS)
    slots.back()
    assert engine.cache.stats().attached_pages == 4
    rows = engine.cache.flat(0)[:, 0].view(-1, MOST)
    rows[slots._slots[2], TOKENS] = 7  # in block 2
    assert rows[slots._slots[0], TOKENS] == 7


def test_pages_in_use_are_the_blocks_that_the_scheduler_knows():
    engine = Engine(requests=4)
    engine.run(engine.requests(25, shared=0.5))
    cached = len(engine.scheduler.pool.cached)
    assert cached
    engine.slots.IDLE_SECONDS = -1
    engine.slots.tend()
    stats = engine.cache.stats()
    assert stats.prefix_pages == stats.held_pages == cached


def start_and_end(engine, index, ids):
    """One step of a request, and the next one, by which its kernels have ended."""
    slots = engine.slots
    slots.begin_step()
    slots.start(index, ids, 0)
    slots.back()
    slots.begin_step()
    slots.finish(index)
    slots.back()
    engine.gpu.wait(engine.gpu.marked)


def test_pages_of_forgotten_blocks_stay_in_place_for_the_next_request():
    engine = Engine(requests=2, spare=4)
    slots = engine.slots
    start_and_end(engine, 0, [1, 2, 3, 4])
    slots.begin_step([1, 2, 3, 4])
    slots.back()
    engine.cache.wait()
    slots.begin_step()
    slots.start(1, [5, 6, 7, 8], 0)
    slots.back()
    stats = engine.cache.stats()
    assert (stats.adopted_pages, stats.step_maps) == (4, 1)
    assert engine.cache.context.stats().unmap_ops == 0


def test_lingering_slots_leave_room_for_others():
    engine = Engine(requests=2, spare=4)
    slots = engine.slots
    for i in range(4):
        start_and_end(engine, 0, [2 * i + 1, 2 * i + 2])
    slots.clear_up()
    assert engine.cache.stats().active_slots == 2  # half of the slots beyond those of running requests
    slots.begin_step()
    taken = {slots.start(i, [20 + i], 0)[0] for i in range(2)}
    slots.back()
    for i in range(8):
        start_and_end(engine, i % 2, [30 + i])  # each finds a slot
    assert len(taken) == 2


def test_a_name_that_outlives_its_slot_is_not_counted_for_the_next_request():
    engine = Engine(requests=2, spare=2)
    slots = engine.slots
    start_and_end(engine, 0, [1, 2])
    start_and_end(engine, 0, [3, 4])  # only one may linger: the first is freed
    start_and_end(engine, 0, [5, 6])
    slots.clear_up()
    assert engine.cache.stats().active_slots == 1
    slots.begin_step([1, 2, 3])
    slots.back()
    slots.clear_up()
    assert engine.cache.stats().active_slots == 1
    slots.begin_step([5, 6])
    slots.back()
    slots.clear_up()
    assert engine.cache.stats().active_slots == 0


@pytest.mark.parametrize("cap", [0, 5])
def test_cached_blocks_stay_up_to_the_cap_the_last_used(cap):
    engine = Engine(cap=cap)
    engine.run(engine.requests(20, shared=0.5))
    engine.scheduler.waiting.append(Request("last", [5] * 45, 1))
    engine.run([])
    engine.slots.IDLE_SECONDS = -1
    engine.slots.tend()
    assert len(engine.scheduler.pool.cached) == cap
    assert engine.cache.stats().held_pages == cap
    if cap:
        assert set(engine.scheduler.pool.cached) == {(5,) * k for k in range(TOKENS, 41, TOKENS)}


def test_without_a_prefix_cache_pages_stay_in_their_slots_and_are_adopted():
    engine = Engine(caching=False)
    engine.run(engine.requests(30))
    stats = engine.cache.stats()
    assert stats.adopted_pages > 10
    assert stats.kept_pages
    engine.slots.IDLE_SECONDS = -1
    assert engine.slots.tend() is False
    assert engine.cache.stats().held_pages == 0


def test_a_slot_is_free_only_when_the_kernels_of_its_last_step_are_through():
    engine = Engine(spare=1, requests=2, caching=False)
    slots = engine.slots
    slots.begin_step()
    first = slots.start(0, [1], 0)
    slots.back()
    slots.begin_step()
    slots.finish(0)  # kernels of the first step may be running
    second = slots.start(0, [2], 0)
    assert first != second
    third = slots.start(1, [3], 0)
    assert third not in (first, second)
    slots.finish(1)
    assert slots.fence_waits == 0
    assert slots.start(1, [4], 0) == first  # no other is left: this waited for them
    assert slots.fence_waits == 1


def test_prompts_that_wait_are_backed_before_they_start():
    engine = Engine(requests=4, slack=20)
    slots = engine.slots
    slots.begin_step((), ((50, 0), (20, 0), (10**6, 0)))
    slots.start(0, [1], 0)
    slots.back()
    engine.cache.wait()
    maps = engine.cache.stats().step_maps
    slots.begin_step()
    slots.start(1, [2, 3, 4, 5, 6, 7, 8], 0)
    slots.start(2, [9, 10, 11], 0)
    slots.back()
    assert engine.cache.stats().step_maps == maps


def test_prompts_that_arrive_at_an_idle_engine_are_backed_before_the_first_step():
    engine = Engine(requests=4, slack=20)
    slots = engine.slots
    slots.announce(((50, 0), (20, 0)))
    engine.cache.wait()
    slots.begin_step((), ((50, 0), (20, 0)))
    slots.start(0, [2, 3, 4, 5, 6, 7, 8], 0)
    slots.start(1, [9, 10, 11], 0)
    slots.back()
    assert engine.cache.stats().step_maps == 0


def test_what_was_backed_for_prompts_that_never_came_goes_back():
    engine = Engine(requests=4, slack=20)
    slots = engine.slots
    slots.IDLE_SECONDS = math.inf
    slots.announce(((50, 0), (20, 0)))
    engine.cache.wait()
    assert engine.cache.stats().held_pages
    assert slots.tend()  # not idle for long
    slots.IDLE_SECONDS = -1
    assert not slots.tend()
    engine.cache.wait()
    assert engine.cache.stats().held_pages == 0


def test_a_scheduler_without_running_requests_announces_new_ones(monkeypatch):
    worker = importlib.import_module("pyvmem.vllm.worker")
    heard = []
    monkeypatch.setattr(worker, "_current", types.SimpleNamespace(requests=types.SimpleNamespace(
        announce=heard.append)))  # fmt: skip
    scheduler = types.SimpleNamespace(waiting=collections.deque(), running=[], max_num_scheduled_tokens=400,
                                      kv_cache_manager=types.SimpleNamespace(enable_caching=False))  # fmt: skip
    for tokens in (50, 60):
        request = types.SimpleNamespace(num_tokens=tokens)
        worker.add_request(lambda scheduler, request: scheduler.waiting.append(request), scheduler, request)
    assert heard == [((50, 0),), ((50, 0), (60, 0))]
    scheduler.running.append("a request")  # the next step announces them
    worker.add_request(lambda scheduler, request: scheduler.waiting.append(request), scheduler, request)
    assert len(heard) == 2


def test_a_prompt_with_a_cached_beginning_is_backed_behind_it():
    engine = Engine(requests=4, slack=20)
    slots = engine.slots
    slots.begin_step()
    slots.start(0, [1, 2, 3], 0)
    slots.back()
    slots.begin_step((), ((7 * TOKENS, 3 * TOKENS),))
    slots.back()
    engine.cache.wait()
    before = engine.cache.stats()
    assert before.eager_pages == 4
    slots.begin_step()
    slots.start(1, [1, 2, 3, 4, 5, 6, 7], 3 * TOKENS)
    slots.back()
    after = engine.cache.stats()
    assert (after.attached_pages, after.step_maps) == (3, before.step_maps)


def test_tokens_from_the_cache_are_looked_up_once():
    worker = importlib.import_module("pyvmem.vllm.worker")
    asked = []

    def find_longest_cache_hit(hashes, most):
        asked.append((hashes, most))
        return ["blocks"], 32, 0

    manager = types.SimpleNamespace(enable_caching=True, coordinator=types.SimpleNamespace(
        find_longest_cache_hit=find_longest_cache_hit))  # fmt: skip
    made = [types.SimpleNamespace(num_tokens=n, block_hashes=["h"], skip_reading_prefix_cache=n == 50)
            for n in (50, 100, 900)]  # fmt: skip
    scheduler = types.SimpleNamespace(waiting=collections.deque(made), max_num_scheduled_tokens=400,
                                      kv_cache_manager=manager)  # fmt: skip
    for _ in range(2):
        assert worker.waiting(scheduler) == ((50, 0), (100, 32), (432, 32))
    assert asked == [(["h"], 99), (["h"], 899)]
    manager.enable_caching = False
    assert worker.waiting(scheduler) == ((50, 0), (100, 0), (400, 0))


def test_a_step_whose_backing_the_gpu_waited_for_is_counted():
    engine = Engine(caching=False)
    slots = engine.slots
    slots.waits.least = 0
    slots.begin_step()
    slots.start(0, [1], 0)
    slots.back()  # kernels of the step before are running
    assert slots.waits.count == 0
    slots.begin_step()
    engine.gpu.wait(engine.gpu.marked)
    slots.start(1, [2], 0)
    slots.back()
    assert slots.waits.count == 1
    slots.begin_step()
    engine.gpu.wait(engine.gpu.marked)
    slots.back()  # nothing to map
    assert slots.waits.count == 1


def test_another_thread_may_clear_up_after_steps():
    engine = Engine(blocks=30)
    engine.slots._wake = lambda: None
    engine.slots.PORTION = 2
    step = engine.step

    def step_and_sometimes_tend():
        step()
        if engine.random.random() < 0.3:
            engine.slots.tend()

    engine.step = step_and_sometimes_tend
    engine.run(engine.requests(40, shared=0.4), abort=0.05)
    assert engine.runner.read > 5000
    engine.slots.IDLE_SECONDS = -1
    engine.slots.tend()
    assert engine.cache.stats().held_pages == len(engine.scheduler.pool.cached)


@pytest.mark.parametrize("idle_seconds", [-1, 0.2])
def test_a_thread_clears_up_beside_the_steps(idle_seconds):
    engine = Engine(blocks=30)
    due, stop, failed = threading.Event(), threading.Event(), []
    engine.slots._wake = due.set
    engine.slots.PORTION = 3
    engine.slots.IDLE_SECONDS = idle_seconds

    def work():
        try:
            while not stop.is_set():
                due.wait(0.002)
                due.clear()
                engine.slots.tend()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    engine.run(engine.requests(30, shared=0.5), abort=0.05)
    stop.set()
    thread.join()
    assert not failed
    engine.slots.IDLE_SECONDS = -1
    engine.slots.tend()
    assert engine.cache.stats().held_pages == len(engine.scheduler.pool.cached)


def test_a_block_that_is_assigned_again_keeps_its_new_pages():
    engine = Engine()
    slots = engine.slots
    slots._wake = lambda: None
    slots.begin_step()
    slots.start(0, [1, 2], 0)
    slots.back()
    slots.begin_step([1])  # forgotten, and dropped later
    slots.back()
    assert engine.cache.stats().prefix_pages == 0  # the slot has them
    slots.begin_step()
    slots.start(1, [1, 3], 0)
    slots.back()
    slots.clear_up()
    slots.begin_step()
    slots.start(2, [1, 3, 4], 2 * TOKENS)  # these names still have pages
    slots.back()
    assert engine.cache.stats().attached_pages == 2


def test_a_step_that_is_short_takes_what_was_not_cleared_up():
    engine = Engine(blocks=30, slack=0)
    slots = engine.slots
    slots._wake = lambda: None
    slots.begin_step()
    slots.start(0, list(range(1, 13)), 0)
    slots.start(1, list(range(13, 25)), 0)
    slots.back()
    slots.begin_step()
    slots.finish(0)
    slots.back()
    engine.gpu.wait(engine.gpu.marked)
    slots.begin_step(range(1, 13))
    slots.start(2, [25, 26, 27, 28, 29, 12, 11, 10, 9], 0)
    slots.back()
    assert engine.cache.stats().held_pages <= 30


def test_requests_that_end_outside_a_step_wait_for_their_kernels():
    engine = Engine(requests=2, caching=True)
    slots = engine.slots
    slots.begin_step()
    slots.start(0, [1, 2], 0)
    slots.back()
    slots.settle([0], [2])
    slots.IDLE_SECONDS = -1
    assert slots.tend()  # kernels may be running
    assert engine.cache.stats().active_slots == 1
    engine.gpu.wait(engine.gpu.marked)
    assert not slots.tend()
    stats = engine.cache.stats()
    assert (stats.active_slots, stats.held_pages, stats.prefix_pages) == (0, 1, 1)


def test_a_smaller_limit_gives_up_cached_prefixes_then_admits_less():
    engine = Engine(blocks=64, allowed=lambda: engine.slots.poll_limit())
    engine.run(engine.requests(20, shared=0.3))
    assert len(engine.scheduler.pool.cached) > 25
    engine.cache.set_budget(24 * PAGE)
    engine.run(engine.requests(30, shared=0.3))
    assert engine.keeper.held_back >= 64 - 24
    assert engine.cache.stats().budget_pages == 24
    assert engine.cache.stats().held_pages <= 24
    engine.cache.set_budget(72 * PAGE)
    engine.run(engine.requests(10))
    assert engine.keeper.held_back == 0


def test_a_limit_in_the_middle_of_requests_fails_none_of_them():
    engine = Engine(blocks=64, allowed=lambda: engine.slots.poll_limit())
    made = engine.requests(20)
    for request in made:
        request.end = len(request.tokens) + 40
    engine.scheduler.waiting.extend(made)
    while engine.cache.stats().needed_pages <= 30:
        engine.step()
    engine.cache.set_budget(24 * PAGE)
    engine.run([])
    assert engine.cache.stats().budget_pages == 24


@pytest.mark.parametrize("seen", [True, False])
def test_a_prompt_that_was_scheduled_before_a_smaller_limit_is_backed(seen):
    engine = Engine(caching=False, requests=3)
    slots = engine.slots
    slots.begin_step()
    slots.start(0, [1, 2], 0)
    slots.back()
    engine.cache.set_budget(3 * PAGE)  # one page is left
    if seen:  # the background thread looks only from time to time
        assert slots.poll_limit() == 3
    slots.begin_step()
    slots.start(1, [3, 4, 5, 6], 0)
    slots.back()
    assert engine.cache.stats().needed_pages == 6
    slots.begin_step()
    slots.finish(1)
    slots.back()
    engine.gpu.wait(engine.gpu.marked)
    slots.IDLE_SECONDS = -1
    slots.tend()
    engine.cache.reclaim()
    assert slots.poll_limit() == 3
    assert engine.cache.stats().budget_pages == 3


def test_reset_of_the_prefix_cache_frees_its_pages():
    engine = Engine(allowed=lambda: 40)
    engine.run(engine.requests(20, shared=0.3))
    assert engine.keeper.held_back
    known = engine.keeper.resetting()
    assert engine.scheduler.pool.reset_prefix_cache()
    engine.keeper.reset(known)
    engine.step()
    assert engine.cache.stats().prefix_pages == 0


def test_sleep_gives_everything_back():
    engine = Engine()
    engine.scheduler.waiting.extend(engine.requests(4))
    for _ in range(4):
        engine.step()
    engine.slots.reset()
    stats = engine.cache.stats()
    assert (stats.held_pages, stats.active_slots) == (0, 0)


def test_memory_that_another_process_has_is_waited_for_then_an_error():
    engine = Engine(caching=False)
    engine.slots._full_budget = 1  # the budget cannot be raised: as if the device had no more
    engine.cache.set_budget(PAGE)
    engine.slots._budget = 1
    engine.slots.begin_step()
    engine.slots.start(0, [1, 2, 3], 0)
    with pytest.raises(OutOfMemory, match="within 0 s"):
        engine.slots.back()


@pytest.mark.parametrize("caching", [False, True])
def test_a_session_that_gets_more_input_keeps_its_rows(caching):
    engine = Engine(caching=caching, requests=2)
    slots = engine.slots
    rows = engine.cache.flat(0)[:, 0].view(-1, MOST)
    slots.begin_step()
    slots.start(0, [1, 2], 0)
    slots.back()
    rows[slots._slots[0], TOKENS + 2] = 7
    for blocks in ([1, 2, 3], [1, 2, 3, 4, 5]):
        engine.gpu.wait(engine.gpu.marked)
        slots.begin_step()
        slots.finish(0)  # vLLM removes the request and adds it again
        engine.gpu.wait(engine.gpu.marked)
        slots.clear_up()  # as another thread may
        first = slots.start(0, blocks, TOKENS + 3)[0]
        slots.back()
        assert first == slots._slots[0] * slots.blocks_per_slot
        assert rows[slots._slots[0], TOKENS + 2] == 7
        rows[slots._slots[0], (len(blocks) - 1) * TOKENS] = 8  # backed
    engine.gpu.wait(engine.gpu.marked)
    slots.settle([0, 1])
    slots.IDLE_SECONDS = -1
    engine.gpu.wait(engine.gpu.marked)
    slots.tend()
    assert engine.cache.stats().active_slots == 0


def test_a_request_with_computed_tokens_needs_a_prefix_cache():
    engine = Engine(caching=False)
    engine.slots.begin_step()
    with pytest.raises(RuntimeError, match="no prefix cache"):
        engine.slots.start(0, [1, 2], 8)
