"""The budget and the pages on vLLM's own scheduler: every row that attention can read is read back, in every step."""

import collections
import contextlib
import itertools
import os
import threading
import time
from unittest import mock

import pytest
import steps
import torch
from steps import Engine, make_scheduler, next_token, steps_of_a_prompt

from pyvmem import Context
from pyvmem.blocks import BlockRange, Blocks
from pyvmem.kv.pool import KVPool
from pyvmem.engine import control
from pyvmem.engine.control import State
from pyvmem.engine.settings import Refused
from pyvmem.vllm import demand, scheduler
from pyvmem.vllm.budget import KEEP, MOST_LEAVING, PART
from pyvmem.vllm.waiting import Lookup, Pace, waiting
from pyvmem.vllm.worker import BUSY, POLL, WorkerMemory

CPU = torch.device("cpu")


@pytest.fixture
def engine(tmp_path, request):
    made = []

    def make(**options):
        made.append(Engine(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def maps_in_steps(engine):
    return sum(int(engine.page.words[control.STEP_MAPS + rank]) for rank in range(len(engine.workers)))


def set_limit(e, limit):
    """limit: blocks, None, or "moves"."""
    if limit == "moves":
        e.every = lambda: e.random.random() < 0.05 and e.limit(e.random.choice([60, 80, 110, 200, 400]))
    elif limit:
        e.limit(limit)


def fails_in_a_child(make):
    """True if the engine that `make` makes reads a wrong row, or faults, under a limit that moves in every step."""
    child = os.fork()
    if not child:
        try:
            e = make()
            e.every = lambda: e.limit(e.random.choice([40, 400]))
            e.run(60)
        except AssertionError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


CASES = {
    "plenty": dict(),
    "one group": dict(kinds=("full",)),
    "no cache": dict(caching=False),
    "blocks of 40 KiB": dict(page=40 << 10),
    "blocks of 68.5 KiB": dict(page=16 * 4384),
    "pages of 2 MiB": dict(blocks=1200, pages=2 << 20),
    "pages of 2 MiB, blocks of 68.5 KiB": dict(blocks=1200, page=16 * 4384, pages=2 << 20),
    "states": dict(kinds=("full", "mamba")),
    "not asynchronous": dict(asynchronous=False, queue=1),
    "batches in a queue": dict(queue=3, depth=3),
    "four groups": dict(kinds=("full", "window", "window", "window")),
}


@pytest.mark.parametrize("limit", [None, 70, "moves"])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_right_and_no_step_maps(engine, monkeypatch, case, limit):
    monkeypatch.setattr(demand, "CHUNK", 32)  # requests begin in parts
    e = engine(**CASES[case])
    set_limit(e, limit)
    e.run(40)
    assert e.read > 20_000
    assert maps_in_steps(e) == 0
    if limit == 70:
        for worker in e.workers:  # the null block's page, and those that blocks share at the ends
            most = (max(70, e.budget.least) + 1) * e.budget.block_bytes + 3 * worker.page_size
            assert max(worker.resident) <= most
    if "mamba" in CASES[case].get("kinds", ()):
        assert e.workers[0].states > 100


def test_a_tight_limit_preempts_and_every_request_ends(engine):
    e = engine()
    e.limit(1)  # the least that is possible
    e.run(60)
    assert e.preempted > 0
    assert maps_in_steps(e) == 0


@pytest.mark.parametrize("asynchronous, ranks, batch", [(True, 1, 64), (False, 1, 64), (True, 2, 64), (True, 1, 256)])
def test_below_the_limit_nothing_is_evicted_or_preempted_for_memory_that_comes_late(
    engine, monkeypatch, asynchronous, ranks, batch
):
    monkeypatch.setattr(demand, "CHUNK", 32)
    e = engine(asynchronous=asynchronous, ranks=ranks, batch=batch, queue=2 if asynchronous else 1)
    pool, page, evicted, since = e.scheduler.kv_cache_manager.block_pool, e.page, [], {}
    evict, answer = pool._maybe_evict_cached_block, page.answer

    def late(order, rank):
        since.setdefault(order, time.monotonic())
        return answer(order, rank) if time.monotonic() > since[order] + 0.004 else -1

    page.answer = late
    pool._maybe_evict_cached_block = lambda block: evict(block) and (evicted.append(block.block_id) or True)
    for _ in range(3):
        e.run(7)
        e.idle()  # gives up spare blocks: the next requests find none
        assert e.budget.spare == 0
    assert e.cached() > 50 and e.budget.num_backed < e.budget.total
    assert not evicted and not e.preempted


@pytest.mark.parametrize(
    "blocks, limit, ready, most", [(1000, 100, 12, 12), (1000, None, 124, 124), (12_000, None, 524, 1048)]
)
def test_blocks_that_are_kept_ready_are_a_part_of_those_that_are_allowed(engine, blocks, limit, ready, most):
    e = engine(blocks=blocks, batch=4096)  # a step may take 524 blocks
    assert e.budget.low == 524
    set_limit(e, limit)
    for requests in (1, 1, 12):
        e.run(requests, abort=0)
        assert e.budget.spare <= most + 30  # what requests had, too
        assert e.budget.spare >= ready * 3 / 4 or e.budget.num_backed == limit
    assert maps_in_steps(e) == 0 and e.preempted == 0


def ordered_and_allocated(e):
    """Counts the blocks that are ordered, and those that vLLM allocates."""
    seen, budget, manager = collections.Counter(), e.budget, e.scheduler.kv_cache_manager
    allocate, take = manager.allocate_slots, budget.take_orders

    def counted(*args, **more):
        made = allocate(*args, **more)
        seen["allocated"] += sum(map(len, made.blocks)) if made is not None else 0
        return made

    def took():
        gone, ahead, order = take()
        seen["ordered"] += sum(map(len, ahead))
        return gone, ahead, order

    manager.allocate_slots, budget.take_orders = counted, took
    return seen


# Tokens. Of a prompt that ends with a block, vLLM up to 0.31 keeps the Mamba state of its end alone: no request can use
# it, because the last token has to be computed.
PROMPT = 248

FOUND = {
    "full": dict(kinds=("full",)),
    "window": dict(kinds=("full", "window")),
    "windows": dict(kinds=("full", "window", "window", "window")),
    "states": dict(kinds=("full", "mamba")),
    "lora": dict(kinds=("full",), lora=True),
}


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.parametrize("kept", [True, False])
def test_a_request_of_which_all_is_cached_orders_no_more_than_vllm_allocates(engine, monkeypatch, case, kept):
    from vllm.lora.request import LoRARequest

    monkeypatch.setattr(demand, "CHUNK", 64)
    monkeypatch.setattr("pyvmem.vllm.budget.TAKEN", 1e-9)  # earlier steps say nothing of what the next ones take
    options = dict(FOUND[case])
    more = dict(lora_request=LoRARequest("adapter", 1, "/none")) if options.pop("lora", False) else {}
    e = engine(**options, batch=256)
    draw = e.random.randrange
    prompt = [draw(3, 900) for _ in range(PROMPT)]
    e.answer([e.request("first", prompt, 2, **more)])
    e.settle()
    with e.memory.lock:  # its thread would change what there is
        e.budget.between_steps(True, e.budget.floor if kept else 0)
        e.flush()
        seen, stats = ordered_and_allocated(e), e.scheduler.kv_cache_manager.prefix_cache_stats
        e.scheduler.add_request(e.request("again", prompt, 2, **more))
        while not (step := e.step())[0].total_num_scheduled_tokens:
            e.flush()
        assert 0 < step[0].total_num_scheduled_tokens <= 48  # the rest was found
        behind = sum(map(len, step[0].vmem.ahead))
        assert seen["ordered"] - behind <= seen["allocated"] < 8
        assert not behind or not kept or case == "states"  # which has no steps of a part of a prompt
        e.update(*step)
        e.answer([])
    assert stats is None or stats.requests == 1
    assert maps_in_steps(e) == 0


@pytest.mark.parametrize("kinds", [("full",), ("full", "window"), ("full", "mamba")])
def test_neighbours_are_asked_for_no_more_than_vllm_allocates_for_a_request_of_which_all_is_cached(engine, kinds):
    e = engine(kinds=kinds, batch=256)
    prompt = [e.random.randrange(3, 900) for _ in range(PROMPT)]
    e.scheduler.add_request(first := e.request("first", prompt, 60))
    flight = collections.deque()
    while first.num_tokens == len(prompt):  # until its prompt is computed, and it holds these blocks
        e.turn(flight)
    with e.memory.lock:
        while e.budget.coming:
            e.flush()
            e.budget.between_steps(False)
        e.budget.unback(e.budget.num_free())
        e.page[control.POOL] = 1
        e.scheduler.add_request(e.request("again", prompt, 5))
        e.memory.publish()
        wanted, e.page[control.POOL] = e.page[control.WANTED], 0
        seen = ordered_and_allocated(e)
        while e.scheduler.waiting:
            e.flush()
            e.turn(flight)
    running, watermark = len(kinds), e.budget.watermark  # blocks for the other one's next tokens
    new = len(kinds) if "mamba" in kinds else 0  # vLLM gives no number for a state that the last step has cached
    assert seen["allocated"] <= 4
    assert 0 < wanted <= seen["allocated"] + watermark + running + new
    while flight:
        e.update(*flight.popleft())
    e.answer([])


def test_looking_a_request_up_changes_nothing_of_vllms(engine):
    e = engine(log_stats=True)
    prompt = [5] * 200
    e.answer([e.request("first", prompt, 2)])
    manager = e.scheduler.kv_cache_manager
    manager.enable_kv_cache_events = manager.block_pool.enable_kv_cache_events = True
    again = e.request("again", prompt, 2)
    again.kv_cache_report_mode = "full"

    def state():
        queue = [b.block_id for b in manager.block_pool.free_block_queue.get_all_free_blocks()]
        told = manager.prefix_cache_stats
        return queue, told and (told.requests, told.queries, told.hits), list(manager.block_pool.kv_event_queue)

    before = state()
    wants = e.memory.demand.wants(again)
    assert state() == before and wants.computed == 192
    blocks, computed = manager.get_computed_blocks(again)[:2]
    assert computed == wants.computed and tuple(map(len, blocks.blocks)) == wants.found


def test_a_prefix_is_found_by_halving_as_by_reading_each_block(engine):
    e = engine(kinds=("full",), blocks=120)
    manager, compared = e.scheduler.kv_cache_manager, []
    sizes = [group.kv_cache_spec.block_size for group in e.scheduler.kv_cache_config.kv_cache_groups]

    def compare():
        for request in waiting(e.scheduler):
            if not request.num_computed_tokens:
                each, halved = (Lookup(manager, sizes, plain)(request) for plain in (False, True))
                assert halved == each
                compared.append(halved)

    e.every = compare
    e.run(80)
    again = e.request("again", [5] * 200, 2)
    with mock.patch.object(manager.coordinator, "find_longest_cache_hit") as reads_each_block:
        e.memory.demand.wants(again)
    assert not reads_each_block.called
    assert any(wants.computed for wants in compared) and any(wants.cached < wants.found[0] for wants in compared)


def test_what_was_found_of_a_request_is_looked_up_again_when_it_is_evicted_or_old(engine, monkeypatch):
    from pyvmem.vllm import waiting as module

    e = engine(kinds=("full",))
    e.answer([e.request("first", [5] * 200, 2)])
    pool, wants, again = e.budget.pool, e.memory.demand.wants, e.request("again", [5] * 240, 2)
    monkeypatch.setattr(module, "SHARE", 0)
    assert wants(again).computed == 192
    looked = mock.Mock(side_effect=pool.get_cached_block)
    pool.get_cached_block = looked
    monkeypatch.setattr(module, "FRESH", 1e9)
    assert wants(again).computed == 192 and not looked.called
    pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash})
    assert wants(again).computed == 0 and looked.called
    e.answer([e.request("more", [5] * 240, 2)])
    assert wants(again).computed == 0
    monkeypatch.setattr(module, "FRESH", -1)
    assert wants(again).computed == 224


@pytest.mark.parametrize("options", [dict(), dict(queue=1, asynchronous=False), dict(ranks=2)])
def test_a_first_request_begins_with_what_is_there_and_the_rest_comes_behind_it(engine, monkeypatch, options):
    """No step waits for blocks but those of its own tokens."""
    monkeypatch.setattr(demand, "CHUNK", 64)
    e = engine(kinds=("full",), batch=256, **options)
    e.run(3)
    e.scheduler.reset_prefix_cache()
    with e.memory.lock:
        e.budget.between_steps(True, 5)
        e.flush()
        assert e.budget.spare == 5
        e.scheduler.add_request(e.request("long", [5] * 240, 2))
        output, sampled = e.step()
        assert output.total_num_scheduled_tokens == 64  # of 240, in four of the blocks that are there
        assert sum(map(len, output.vmem.ahead)) >= 10  # the rest is ordered with it
        e.flush()
        e.update(output, sampled)
        e.answer([])
    assert maps_in_steps(e) == 0 and e.preempted == 0


@pytest.mark.parametrize("busy", [True, False])
def test_while_the_device_computes_a_step_waits_for_all_of_its_blocks(engine, monkeypatch, busy):
    """Otherwise, the rest of a prompt would be computed in small parts."""
    monkeypatch.setattr(demand, "CHUNK", 64)
    e = engine(kinds=("full",), batch=256)
    e.run(3)
    e.scheduler.reset_prefix_cache()
    told, looks = e.page.answer, itertools.count(0, 1 / 3)
    with e.memory.lock:
        e.budget.between_steps(True, 5)
        e.flush()
        monkeypatch.setattr("pyvmem.vllm.budget.PART", 2 * e.budget.block_bytes)
        e.memory.pace.left = lambda now: 60.0 * busy
        e.scheduler.add_request(e.request("long", [5] * 240, 2))
        first = e.step()
        order = first[0].vmem.order
        e.flush()
        e.page.answer = lambda n, rank: told(n, rank) if n < order + next(looks) else -1  # one after the other
        second = e.step()
        assert first[0].total_num_scheduled_tokens == 64
        assert (second[0].total_num_scheduled_tokens == 176) is busy
        e.update(*first)
        e.update(*second)
        e.answer([])
    assert maps_in_steps(e) == 0


# rate: GiB/s at which memory comes for a model with 128 KiB a token. A part waits for what comes soon, and no longer.
@pytest.mark.parametrize("tokens, rate, parts", [(8000, 40, [992, 7008]), (9000, 44, [992, 8008]),
                                                 (4000, 20, [992, 3008]), (8000, 20, [992, 3072, 3936])])  # fmt: skip
def test_a_prompt_from_nothing_is_computed_in_few_parts(engine, monkeypatch, tokens, rate, parts):
    monkeypatch.setattr(steps, "MOST", 16384)
    monkeypatch.setattr("pyvmem.vllm.budget.KEEP", KEEP // 32)  # blocks of 64 KiB stand for those of 2 MiB
    monkeypatch.setattr("pyvmem.vllm.budget.PART", PART // 32)
    e = engine(kinds=("full",), blocks=1200, batch=8192)
    block, token, prepare = (2 << 20) / (rate << 30), 26e-6, 0.003  # seconds
    made, idle = steps_of_a_prompt(e, monkeypatch, tokens, block, token, prepare)
    assert (made, idle) == (parts, 0)


def test_the_scheduler_learns_how_long_a_device_computes(engine):
    e = engine(kinds=("full",))
    pace = e.memory.pace = Pace(8)
    e.run(3)
    assert pace.left(0.0) == 0  # no step is in flight
    pace.begin(10**9, 64, 1e9)
    assert pace.left(1e9) > 0


def test_a_request_begins_in_parts_only_if_the_rest_of_it_comes(engine, monkeypatch):
    monkeypatch.setattr(demand, "CHUNK", 64)
    e = engine(kinds=("full",), batch=256)
    e.run(3)
    e.scheduler.reset_prefix_cache()
    with e.memory.lock:
        e.budget.between_steps(True, 4)
        monkeypatch.setattr("pyvmem.engine.budget.RETRY", 1e9)
        e.budget.refused([])
        e.scheduler.add_request(e.request("long", [5] * 240, 2))
        for _ in range(3):
            assert not e.step()[0].total_num_scheduled_tokens
        assert not e.scheduler.running
        monkeypatch.setattr("pyvmem.engine.budget.RETRY", 0)
        e.budget.refused([])
        e.answer([])


@pytest.mark.parametrize("requests", [1, 12])
def test_prompts_begin_that_need_more_than_is_kept_ready(engine, requests):
    e = engine(blocks=60, kinds=("full",), batch=16)  # 7 blocks are kept ready
    e.prompts = 193, 195
    draws = itertools.cycle((0.3, 0.6))  # each second prompt begins with a prefix
    e.random.random = lambda: next(draws)
    e.run(requests, abort=0)
    assert maps_in_steps(e) == 0


def test_requests_begin_for_which_vllm_wants_more_blocks_than_their_rows(engine):
    e = engine(kinds=("full",), batch=256)
    e.scheduler.num_lookahead_tokens = 5  # of drafts, which lie in one block more
    e.limit(24)
    for n in (16 * 12 + 13, 16 * 3 + 13, 16 * 13 + 13):
        e.answer([e.request(f"of-{n}", [5] * n, 3)])
        e.scheduler.reset_prefix_cache()
    assert maps_in_steps(e) == 0


@pytest.mark.parametrize("case", [dict(), dict(kinds=("full",)), dict(queue=1, asynchronous=False)])
def test_a_session_goes_on_whose_next_input_needs_more_than_is_kept_ready(engine, case):
    e = engine(**case, blocks=60)
    e.converse([10, 20, 100, 60])
    assert e.read > 100
    assert maps_in_steps(e) == 0


@pytest.mark.parametrize("options", [dict(), dict(queue=1, asynchronous=False)])
def test_an_engine_says_with_its_last_answer_that_it_is_idle(engine, options):
    e = engine(**options)
    e.answer(e.requests(6))
    assert e.page[control.USED] == 0
    e.scheduler.add_request(e.requests(1)[0])
    e.step()
    assert e.page[control.USED] > 0
    from vllm.v1.request import RequestStatus

    e.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert e.page[control.USED] == 0


def test_idle_memory_is_what_is_cached(engine):
    e = engine()
    e.run(30)
    assert e.cached() > 50
    e.idle()
    assert e.resident() == [e.cached()]
    assert e.page[control.SPARE] == 0 or e.budget.spare == 0
    assert e.page[control.CACHED] > 0
    assert e.scheduler.reset_prefix_cache()
    assert e.cached() == e.page[control.CACHED] == 0
    e.idle()
    assert e.resident() == [0]
    e.run(20)  # and it grows again


def test_a_limit_that_falls_while_idle_takes_cached_blocks(engine):
    e = engine()
    e.run(30)
    e.idle()
    assert e.resident()[0] > e.budget.least + 10
    e.limit(e.budget.least + 5)
    e.idle()
    assert e.resident() == [e.budget.least + 5]
    e.run(20)


def bytes_held(e):
    """Of pages, without that of the null block."""
    return int(e.page.boards(1)[0, control.HELD]) - e.page[control.NULL]


def bytes_of_pages(e, ids):
    """Bytes of the pages of 2 MiB behind blocks, without the null block's."""
    return len({i * e.budget.block_bytes >> 21 for i in ids} - {0}) << 21


def test_idle_blocks_leave_whose_pages_go(engine):
    e = engine(blocks=1200, pages=2 << 20)
    e.run(30)
    pool = e.scheduler.kv_cache_manager.block_pool
    e.budget.order(64)
    e.settle()
    e.idle()  # they have come, two pages of them
    cached = [b.block_id for b in pool.blocks if b.block_hash]
    assert len(cached) > 50
    assert bytes_held(e) == bytes_of_pages(e, cached)
    assert e.budget.spare > 0  # beside cached blocks, where they take no memory
    orders = e.page.boards(1)[0, control.DONE]
    e.budget.refresh()
    e.budget.prepare_step()
    page_of = e.budget.packing.page_of
    assert set(map(page_of, e.budget.orders.unsent[:10])) <= set(map(page_of, cached)) | {0}
    assert e.scheduler.reset_prefix_cache()
    e.idle()
    assert bytes_held(e) == 0
    e.run(20)  # and it grows again
    assert e.page.boards(1)[0, control.DONE] > orders and maps_in_steps(e) == 0


def test_scattered_blocks_leave_until_their_pages_fit(engine):
    e = engine(blocks=1200, pages=2 << 20)
    e.run(60)
    e.idle()
    pool = e.scheduler.kv_cache_manager.block_pool
    cached = [b.block_id for b in pool.blocks if b.block_hash]
    pool.evict_blocks(set(e.random.sample(cached, len(cached) * 2 // 3)))  # scattered
    before = bytes_held(e)
    e.limit(before // e.budget.block_bytes // 2)
    assert e.budget.allowed() < e.budget.num_backed
    for _ in range(20):  # spare blocks go whose neighbours have gone, some of them by the scheduler's thread
        e.idle()
        kept = [b.block_id for b in pool.blocks if b.block_hash]
        if bytes_of_pages(e, kept) == bytes_held(e):
            break
    assert kept and bytes_of_pages(e, kept) == bytes_held(e) <= before // 2
    e.run(60)
    most = max(before // 2, e.budget.least * e.budget.block_bytes) + (4 << 20)  # and the null block's page, and a part
    assert max(e.workers[0].resident[-20:]) <= most
    assert maps_in_steps(e) == 0


def scatter(e):
    """Idle, with one cached block in each page, used after all others."""
    e.run(60)
    e.idle()
    pool = e.scheduler.kv_cache_manager.block_pool
    cached = [b.block_id for b in pool.blocks if b.block_hash]
    one = {e.budget.packing.page_of(i): i for i in cached}
    pool.evict_blocks(set(cached) - set(one.values()))
    last = [pool.blocks[i] for i in one.values()]
    pool.touch(last)
    pool.free_blocks(last)
    e.idle()
    assert e.cached() == len(one) > 10
    return last


def test_blocks_that_vllm_forgets_are_spare(engine):
    e = engine(blocks=1200, pages=2 << 20)
    scatter(e)
    pool = e.scheduler.kv_cache_manager.block_pool
    assert e.budget.spare == pool.get_num_free_blocks() - e.cached()
    pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash and b.block_id % 2})
    e.idle()  # below every limit
    kept = [b.block_id for b in pool.blocks if b.block_hash]
    assert kept and bytes_of_pages(e, kept) == bytes_held(e)


@pytest.mark.parametrize("idle", [True, False])
def test_scattered_blocks_do_not_stay_above_a_limit_because_they_are_few(engine, idle):
    e = engine(blocks=1200, pages=2 << 20)
    scatter(e)
    e.limit(4 * 32)  # blocks of four pages
    if idle:
        e.idle()
        assert bytes_held(e) <= 8 << 20
    e.run(60)
    assert e.budget.num_backed > e.budget.least and bytes_held(e) <= 8 << 20
    assert maps_in_steps(e) == 0


def test_an_engine_grows_soon_after_what_held_it_above_a_limit_has_ended(engine, monkeypatch):
    monkeypatch.setattr("pyvmem.engine.budget.FIT", 0)  # each look measures
    e = engine(blocks=1200, pages=2 << 20)
    last, pool, budget = scatter(e), e.scheduler.kv_cache_manager.block_pool, e.budget
    pool.touch(last)  # in use
    e.limit(4 * 32)  # blocks of four pages

    def looks(n):
        e.idle()
        for _ in range(n):
            with e.memory.lock:
                budget.fit()

    looks(100)
    assert len(last) <= budget.num_backed <= budget.least and bytes_held(e) > 8 << 20
    pool.free_blocks(last)
    looks(10)
    assert bytes_held(e) <= 8 << 20 and budget.allowed() == 4 * 32


def test_an_engine_that_another_comes_before_takes_no_more_memory(engine):
    e = engine()
    e.run(30)
    e.page[control.POOL], budget, most = 1, e.budget, e.budget.allowed()
    free = budget.pool.get_num_free_blocks()

    def offered(**more):
        budget.publish(**more)
        return e.page[control.OFFERED]

    assert offered() == free and offered(keeps=10) == free - 10 and offered(keeps=free + 1) == 0
    assert offered(keeps=free, yields=True) == budget.num_backed
    budget.is_behind = True
    assert budget.allowed() == budget.num_backed + budget.coming < most
    turns = [(False, False), (True, False), (True, True)]
    e.every = lambda: vars(budget).update(zip(("is_behind", "is_full"), e.random.choice(turns)))
    e.run(60)
    assert maps_in_steps(e) == 0


def test_while_another_comes_first_an_engine_offers_what_its_first_request_cannot_use(engine):
    from vllm.v1.request import RequestStatus

    e = engine(kinds=("full",))
    e.run(20)
    e.page[control.POOL] = 1
    memory, budget, near = e.memory, e.budget, e.memory._neighbours
    budget.unback(budget.pool.get_num_free_blocks() - 10)
    e.scheduler.add_request(e.request("long", [5] * 200, 5))  # 13 blocks
    memory.publish()
    assert e.page[control.HEAD] and not e.page[control.OFFERED]
    near.is_behind = budget.is_behind = True
    memory.publish()
    assert (e.page[control.OFFERED], e.page[control.WANTED]) == (10, 0)
    e.scheduler.finish_requests(["long"], RequestStatus.FINISHED_ABORTED)
    e.scheduler.add_request(e.request("short", [5] * 40, 5))
    memory.publish()
    assert not e.page[control.HEAD] and 0 < e.page[control.OFFERED] < 10  # it begins, and keeps what it takes
    near.is_full = True
    memory.publish()
    assert e.page[control.OFFERED] == 10


def test_in_a_pool_the_rest_of_a_prompt_that_runs_is_not_for_others(engine):
    e = engine(kinds=("full",), depth=0)
    e.limit(40)
    e.run(10)
    e.page[control.POOL], budget = 1, e.budget
    e.scheduler.add_request(e.request("long", [5] * 250, 5))  # 16 blocks, in steps of 4
    while not e.scheduler.running:
        output, _ = e.step()
    assert 0 < output.total_num_scheduled_tokens <= 64
    free = budget.pool.get_num_free_blocks()
    assert free - 16 <= e.page[control.OFFERED] <= free - 12 and not e.page[control.HEAD]
    budget.unback(free - 10)
    e.memory.publish()
    assert e.page[control.HEAD] and e.page[control.GROWS] and not e.page[control.OFFERED]


def test_requests_that_wait_for_something_else_lack_no_memory(engine):
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    e = engine(kinds=("full",))
    e.run(20)
    e.page[control.POOL], memory = 1, e.memory
    e.budget.unback(e.budget.pool.get_num_free_blocks() - 10)
    first, second = (e.request(name, [5] * 200, 5) for name in "ab")
    for request in (first, second):
        e.scheduler.add_request(request)

    def lacks():
        memory.publish()
        return bool(e.page[control.HEAD]), waiting(e.scheduler)

    first.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert lacks() == (True, [second])
    second.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert lacks() == (False, []) and e.page[control.OFFERED] == 10
    first.status = second.status = RequestStatus.WAITING
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        e.scheduler.set_pause_state(state)
        assert lacks() == (False, []) and e.page[control.OFFERED] == 10
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert lacks() == (True, [first, second])


def test_an_engine_begins_no_request_while_another_may_need_all(engine, monkeypatch):
    e = engine(kinds=("full",))
    e.run(20)
    monkeypatch.setattr(e.memory, "_read_peers", lambda: None)
    e.budget.is_full = True
    e.scheduler.add_request(e.request("a", [5] * 20, 5))
    for _ in range(5):
        e.step()
    assert not e.scheduler.running
    e.budget.is_full = False
    e.answer([])
    assert not e.scheduler.has_unfinished_requests()


def test_an_engine_gives_no_more_than_it_offers(engine):
    e = engine(kinds=("full",), pages=128 << 10)  # pages of two blocks
    e.run(20)
    e.page[control.POOL], budget = 1, e.budget
    budget.publish(keeps=budget.pool.get_num_free_blocks() - 20)
    backed = budget.num_backed
    e.page.boards(1)[0, control.SHRINK_TO] = e.page[control.NULL] + 8 * budget.block_bytes
    budget.refresh()
    budget.prepare_step()
    assert budget.num_backed == backed - 20


def pool_may(e, blocks, held=None):
    """The pool lets the engine's only worker hold so many blocks beside `held` bytes; default: those of block 0."""
    held = e.page[control.NULL] if held is None else held
    e.page[control.POOL], e.page[control.POOL_MAY] = 1, held + blocks * e.budget.block_bytes


def pool_has(e, blocks):
    """The pool has unused memory for so many blocks."""
    pool_may(e, blocks, e.page.board_word(0, control.HELD))


def test_in_a_pool_what_is_kept_ready_takes_no_memory_of_others(engine):
    e = engine(blocks=1000, batch=4096)
    pool_may(e, 150)
    e.run(12)
    assert 0 < e.budget.num_backed <= 150 and maps_in_steps(e) == 0
    pool_may(e, 350)
    e.run(4)
    assert e.budget.spare > 90


def in_pool(monkeypatch, name, **settings):
    """Engines made from now on are members of a pool of that name and this process: its whole name."""
    name = f"{name}-{os.getpid()}"
    for variable, text in dict(VMEM_VLLM="1", VMEM_VLLM_POOL=name, **settings).items():
        monkeypatch.setenv(variable, text)
    return name


def test_in_a_pool_no_step_waits_for_what_others_must_give_while_it_has_enough(engine):
    e = engine()
    e.run(20)
    pool_may(e, 0)
    if e.budget.spare:
        e.budget.unback(e.budget.spare)  # all that is left is cached
    assert e.budget.spare == 0 and e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 100
    waited, held = e.page[control.WAITED], []
    e.every = lambda: held.append(bool(e.memory._tokens))
    e.answer(e.requests(2))
    assert e.page[control.WAITED] == waited and not any(held) and maps_in_steps(e) == 0


def test_in_a_pool_nothing_is_ordered_that_it_does_not_have(engine):
    e = engine(kinds=("full",))
    e.run(20)
    budget = e.budget
    pool_may(e, 0)
    budget.unback(budget.pool.get_num_free_blocks())
    e.scheduler.add_request(e.requests(1)[0])
    for _ in range(3):
        e.step()
    assert e.page[control.WANTED] and not budget.coming and not e.page[control.REFUSED]
    pool_has(e, 3)
    budget.refresh()
    budget.prepare_step(9)
    assert len(budget.orders.unsent) == 3


def test_in_a_pool_an_order_takes_no_more_pages_than_it_has_room_for(engine):
    e = engine(kinds=("full",), pages=256 << 10)  # pages of 4 blocks
    e.page[control.POOL], budget = 1, e.budget
    budget.lent = True
    budget.between_steps(True)
    budget.lent = False
    e.flush()
    pool_has(e, 7)
    budget.refresh()
    budget.prepare_step(200)
    assert budget.orders.unsent == [1, 2, 3, 4, 5, 6, 7]
    assert budget.packing.pages_in_use == 1  # 3 of them are beside block 0
    budget.take_orders()
    budget.refresh()
    budget.prepare_step(200)
    assert not budget.orders.unsent  # those are on their way


def test_a_refusal_of_the_pool_makes_later_orders_no_smaller(engine, monkeypatch):
    e = engine(kinds=("full",))
    monkeypatch.setattr("pyvmem.engine.budget.RETRY", 0)
    monkeypatch.setattr(e.page, "answer", lambda order, rank: 1)
    budget = e.budget
    for room, most in ((0, 60), (40, 20)):  # the pool has the memory, but the device has not
        pool_has(e, room)
        budget.orders.unsent = budget.packing.take(40, budget.total)
        budget.take_orders()
        budget.add_backed()
        budget.order(60)
        assert len(budget.orders.unsent) == most
        budget.refused(budget.orders.unsent)
        budget.orders.unsent = []


def test_an_engine_whose_requests_lack_blocks_gives_none(engine):
    e = engine(kinds=("full",))
    e.run(20)
    e.page[control.POOL] = 1
    e.page.boards(1)[0, control.SHRINK_TO] = e.page[control.NULL] + 8 * e.budget.block_bytes
    e.page[control.OFFERED] = 100
    assert e.budget.asked() and e.budget.allowed() == 8
    e.page[control.OFFERED] = 0  # it was asked for what it offered before
    assert not e.budget.asked() and e.budget.allowed() > 100


def test_an_idle_engine_of_a_pool_gives_what_others_ask_for_without_delay(engine, monkeypatch):
    monkeypatch.setattr("pyvmem.vllm.scheduler.LOOK", 3600)  # seconds
    in_pool(monkeypatch, "asks", VMEM_VLLM_POOL_SIZE="8M")
    e = engine(kinds=("full",))
    e.run(20)
    assert e.budget.num_backed > 60
    asked, end = e.page[control.NULL] + 50 * e.budget.block_bytes, time.monotonic() + 60
    while e.budget.num_backed > 50 or e.page[control.RING_DONE] < e.page[control.POSITION]:
        assert time.monotonic() < end, (e.budget.num_backed, e.page[control.POSITION], e.page[control.RING_DONE])
        e.page.boards(1)[0, control.SHRINK_TO] = asked  # libvmem writes the board again when it becomes idle
        time.sleep(0.01)  # the engine's threads give blocks up meanwhile; the deadline is above


def test_an_idle_engine_of_a_pool_hears_what_others_ask_for_of_scattered_blocks(engine, monkeypatch):
    in_pool(monkeypatch, "scattered", VMEM_VLLM_POOL_SIZE="64M")
    e = engine(blocks=1200, pages=2 << 20)
    last = scatter(e)
    e.budget.unback(e.budget.spare)
    e.idle()
    with e.memory.lock:  # its thread would give them
        held = bytes_held(e)
        assert e.budget.num_backed * e.budget.block_bytes < held - (4 << 20) and len(last) <= e.budget.num_backed
        board = e.page.boards(1)[0]
        board[control.SHRINK_TO] = e.page[control.NULL] + held - (4 << 20)
        assert e.budget.asked()
        board[control.SHRINK_TO] = e.page[control.NULL] + held
        assert not e.budget.asked()


def test_in_a_pool_blocks_that_reach_into_more_pages_than_they_begin_in_leave_them(engine, monkeypatch):
    monkeypatch.setattr("pyvmem.engine.budget.FIT", 0)  # each look measures
    in_pool(monkeypatch, "reaches", VMEM_VLLM_POOL_SIZE="64M")
    e = engine(blocks=1200, page=16 * 4384, pages=2 << 20)
    last = scatter(e)
    e.scheduler.kv_cache_manager.block_pool.evict_blocks({b.block_id for i, b in enumerate(last) if i % 3})
    e.budget.unback(e.budget.spare)
    e.idle()
    board = e.page.boards(1)[0]
    asked = int(board[control.HELD]) - (2 << 20)
    assert bytes_held(e) > e.budget.packing.pages_in_use << 21
    for _ in range(3):
        board[control.SHRINK_TO] = asked
        e.idle()
    assert board[control.HELD] <= asked


def test_an_idle_worker_of_a_pool_sees_at_once_what_its_scheduler_wants(engine, monkeypatch):
    in_pool(monkeypatch, "wants", VMEM_VLLM_POOL_SIZE="8M")
    e = engine(kinds=("full",))
    monkeypatch.setattr("pyvmem.vllm.worker.POLL", 3600)  # seconds
    rests = threading.Thread(target=e.workers[0].memory._rest, args=(False,), daemon=True)
    rests.start()
    end = time.monotonic() + 60
    while rests.is_alive():
        assert time.monotonic() < end
        e.page[control.WANTED] += 1
        rests.join(0.01)


def test_a_worker_asks_the_pool_once_for_what_an_order_has_made(engine, monkeypatch):
    """An order that is being carried out has no answer yet, and its pages are held."""
    in_pool(monkeypatch, "making", VMEM_VLLM_POOL_SIZE="8M")
    e = engine(kinds=("full",))
    e.answer(e.requests(2))
    e.flush()
    memory, asked = e.workers[0].memory, []
    monkeypatch.setattr(memory.blocks, "ask", lambda size: asked.append(size // e.budget.block_bytes) or 0)
    monkeypatch.setattr(memory, "_pending", lambda: 5)
    with e.memory.lock:  # which its thread needs to publish
        e.memory.publish()
        e.page[control.WANTED] = 3
        memory.tend()
        e.page[control.COMING] += 4
        memory.tend()
    assert asked[0] == 3 and asked[-1] == 7


def test_engines_of_a_pool_serve_at_one_time_what_it_holds_once(engine, monkeypatch):
    in_pool(monkeypatch, "steps", VMEM_VLLM_POOL_SIZE="8M")
    one, two = engine(kinds=("full",)), engine(kinds=("full",))  # 128 blocks
    one.every = two.every = lambda: [w.finish() for w in one.workers + two.workers]  # fences pass
    for _ in range(2):
        one.run(30)  # its prefix cache fills the pool
        one.idle()
        two.run(10)
        assert one.resident()[0] + two.resident()[0] <= 126
    both = [threading.Thread(target=e.run, args=(60,)) for e in (one, two)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not one.scheduler.has_unfinished_requests() and not two.scheduler.has_unfinished_requests()
    assert maps_in_steps(one) == maps_in_steps(two) == 0 and min(one.read, two.read) > 1000


@contextlib.contextmanager
def fences_pass(*engines):
    """Meanwhile, what the workers have enqueued runs."""
    done = threading.Event()

    def run():
        while not done.wait(0.01):
            for each in engines:
                each.workers[0].finish()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_what_sleeps_reserves_nothing_and_wakes_with_what_its_requests_hold(engine, monkeypatch):
    in_pool(monkeypatch, "sleeps", VMEM_VLLM_POOL_SIZE="8M", VMEM_VLLM_MIN="4M")
    e = engine(kinds=("full",))
    e.every = lambda: [w.finish() for w in e.workers]
    e.run(10)
    assert e.scheduler.reset_prefix_cache()
    memory = e.workers[0].memory
    with e.memory.lock:
        e.budget.order(20)
        e.settle()
        e.budget.add_backed()
        assert e.budget.spare >= 20
    memory.tend()

    def minimum():
        return memory.pool(CPU).members()[0].min

    assert minimum() == 4 << 20
    with fences_pass(e):
        memory.sleep()
        assert minimum() == 0
        while e.budget.num_backed:  # the scheduler's thread gives up what is spare
            time.sleep(0.001)
        with e.memory.lock:  # and has told the worker
            memory.wake()
    assert memory._asleep is None and not memory._backed_ids() and minimum() == 4 << 20
    e.run(10)
    assert maps_in_steps(e) == 0


def test_an_engine_wakes_in_a_pool_that_another_has_filled(engine, monkeypatch):
    monkeypatch.setattr("pyvmem.vllm.worker.WAKE", 60)
    in_pool(monkeypatch, "wakes", VMEM_VLLM_POOL_SIZE="8M")
    one, two = engine(kinds=("full",)), engine(kinds=("full",))
    one.every = two.every = lambda: [w.finish() for w in one.workers + two.workers]
    one.run(10)
    one.scheduler.reset_prefix_cache()
    memory = one.workers[0].memory
    with one.memory.lock:  # it gives up none of its backed blocks
        memory.sleep()
        for _ in range(3):
            two.run(30)  # its prefix cache fills the pool
        blocks = two.workers[0].memory.blocks
        blocks.ask(blocks.stats().budget - blocks.stats().held + memory.pool(CPU).free)
        assert memory.pool(CPU).free == 0 and one.budget.num_backed
        with fences_pass(one, two):
            memory.wake()
    one.run(10)
    assert one.resident()[0] + two.resident()[0] <= 126 and maps_in_steps(one) == maps_in_steps(two) == 0


def test_an_engine_starts_in_a_pool_that_another_has_filled(engine, monkeypatch):
    in_pool(monkeypatch, "full", VMEM_VLLM_POOL_SIZE="8M")
    one = engine(kinds=("full",))
    one.run(60)
    blocks, pool = one.workers[0].memory.blocks, one.workers[0].memory.pool(CPU)
    blocks.ask(blocks.stats().budget - blocks.stats().held + pool.free)  # all that nobody has
    assert pool.free == 0
    with fences_pass(one):
        two = engine(kinds=("full",))
    one.every = two.every = lambda: [w.finish() for w in one.workers + two.workers]
    two.run(10)
    assert maps_in_steps(one) == maps_in_steps(two) == 0


def test_a_pool_must_hold_a_request_of_the_greatest_length(engine, monkeypatch):
    says = "VMEM_VLLM_POOL=small-.* needs [0-9]+ bytes .* has 1048576; .* raise VMEM_VLLM_POOL_SIZE"
    in_pool(monkeypatch, "small", VMEM_VLLM_POOL_SIZE="1M")
    with pytest.raises(Refused, match=says):
        engine(kinds=("full",))
    monkeypatch.delenv("VMEM_VLLM_POOL_SIZE")  # somebody else has made it
    page = control.open_page("small", 0)  # by a worker
    page[control.POOL_BYTES] = 1 << 20
    with pytest.raises(Refused, match=says):
        engine(kinds=("full",), engine="small")


@pytest.mark.parametrize(
    "name, settings, says",
    [
        ("none", dict(), "there is no pool .*; VMEM_VLLM_POOL_SIZE is not set"),
        ("other", dict(VMEM_VLLM_POOL_SIZE="16M"), "has 8388608.*; VMEM_VLLM_POOL_SIZE is 16777216"),
        ("less", dict(VMEM_VLLM_MIN="9M"), "VMEM_VLLM_MIN=9437184 is over the 8388608 bytes of VMEM_VLLM_POOL=less"),
    ],
)
def test_what_an_engine_says_of_a_pool_that_is_not_its_own(engine, monkeypatch, name, settings, says):
    named = in_pool(monkeypatch, name, **settings)
    with contextlib.nullcontext() if name == "none" else KVPool(8 << 20, name=named):
        with pytest.raises(Refused, match=says):
            engine(kinds=("full",))


def test_a_pool_that_another_user_may_write_to_is_refused_with_one_line(engine, monkeypatch):
    named = in_pool(monkeypatch, "foreign")
    with KVPool(8 << 20, name=named) as pool:
        os.chmod(pool.path, 0o666)
        with pytest.raises(Refused, match=f"^VMEM_VLLM_POOL={named}: .*must be this user's alone"):
            engine(kinds=("full",))


def test_an_engine_without_a_control_page_that_others_see_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(control, "view_folder", lambda: None)
    monkeypatch.setattr(scheduler.logger, "handlers", [caplog.handler])  # vLLM's own passes nothing on
    caplog.set_level("WARNING", scheduler.logger.name)
    made, _ = make_scheduler(tmp_path, 400, ("full",), 64 << 10)
    made._vmem.close()
    assert "set XDG_RUNTIME_DIR to one of mode 0700" in caplog.text


@pytest.fixture
def member():
    """Makes a member of a pool of 8 MiB that is no engine, with a minimum."""
    with Context("host") as context, contextlib.ExitStack() as stack:

        def make(name, least):
            pool = stack.enter_context(KVPool(8 << 20, name=name))
            blocks = Blocks(context.reserve(64 << 10), [BlockRange(0, 64 << 10, 64 << 10)], 1)
            stack.callback(blocks.close)
            blocks.join(pool, name="trainer", min=least)
            return blocks, pool

        yield make


def test_an_engine_whose_minimum_does_not_fit_beside_the_others_does_not_start(engine, monkeypatch, member):
    name = in_pool(monkeypatch, "minimums", VMEM_VLLM_MIN="6M")
    member(name, 4 << 20)
    says = "VMEM_VLLM_MIN=6291456 does not fit .* would be 10485760, over the pool's budget of 8388608.*; lower it"
    with pytest.raises(Refused, match=says):
        engine(kinds=("full",))


def test_a_minimum_that_does_not_fit_yet_is_taken_when_it_does(engine, monkeypatch, member):
    name = in_pool(monkeypatch, "minimums")
    blocks, pool = member(name, 6 << 20)
    e = engine(kinds=("full",))
    memory, offer = e.workers[0].memory, mock.Mock()
    monkeypatch.setattr(memory.blocks, "offer", offer)

    def minimum():
        offer.reset_mock()
        memory.tend()
        assert offer.called  # whatever becomes of the minimum
        (least,) = (m.min for m in pool.members() if m.name != "trainer")
        return least

    assert minimum() == 0
    e.page[control.MIN] = 4 << 20
    assert minimum() == minimum() == 0
    blocks.set_share(0, 0)
    assert minimum() == 4 << 20


def test_a_maximum_counts_as_what_a_request_of_the_greatest_length_needs(engine, monkeypatch):
    in_pool(monkeypatch, "most", VMEM_VLLM_POOL_SIZE="8M", VMEM_VLLM_MAX="256K")
    e = engine(kinds=("full",))
    e.every = lambda: [w.finish() for w in e.workers]
    e.prompts = 190, 195
    e.run(10)
    assert maps_in_steps(e) == 0


def test_a_limit_counts_the_bytes_of_pages_that_blocks_share(engine, monkeypatch):
    monkeypatch.setattr("pyvmem.engine.budget.FIT", 0)
    e = engine(page=16 * 4384)
    e.run(30)
    kept = e.budget.least + 40
    pool = e.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks(set(e.random.sample([b.block_id for b in pool.blocks if b.block_hash], 100)))  # scattered
    e.limit(kept)
    for _ in range(8):
        e.idle()
    board = e.page.boards(1)[0]
    held = board[control.HELD] - e.page[control.NULL]
    assert kept / 2 < held / e.budget.block_bytes <= kept
    assert e.budget.num_backed < kept
    e.page[control.LIMIT] = control.NO_LIMIT
    e.budget.refresh()
    e.budget.prepare_step()
    assert e.budget.allowed() == e.budget.total


def test_more_blocks_come_and_leave_at_once_than_an_order_or_the_ring_holds(engine):
    e = engine(blocks=40_000, kinds=("full",), page=1 << 10)
    total = e.budget.total

    def all_come():
        e.budget.order(total)
        assert len(e.budget.orders.unsent) > total - 2000 > control.RING - 2000 > MOST_LEAVING
        e.settle()
        e.budget.add_backed()
        assert e.budget.num_backed == total

    with e.memory.lock:  # its thread would give them up
        all_come()
    for _ in range(3):  # the ring is full meanwhile
        e.idle()
    assert bytes_held(e) == 0
    e.run(20)
    with e.memory.lock:
        all_come()
        e.limit(100)
        e.run(40)  # 4,096 leave in each step
    assert e.budget.num_backed <= 100 and bytes_held(e) <= 128 << 10
    assert maps_in_steps(e) == 0


def test_no_answer_is_lost_of_blocks_that_are_more_than_orders_in_flight_may_be(engine, monkeypatch):
    monkeypatch.setattr("pyvmem.vllm.budget.PART", 1)  # else a block of gigabytes, or a request of a hundred, does so
    e = engine(blocks=1000, kinds=("full",), page=1 << 10)
    with e.memory.lock:  # its thread would give them up
        e.budget.order(e.budget.total)
        e.step()
        e.flush()  # all are answered before the budget looks
        e.budget.add_backed()
        assert e.budget.num_backed == e.budget.total > control.ANSWERS


def test_resetting_forgets_all_and_holds_the_same_blocks(engine):
    e = engine()
    e.run(20)
    e.limit(60)
    e.run(20)
    held = sorted(e.budget.packing)
    assert e.scheduler.reset_prefix_cache()
    assert sorted(e.budget.packing) == held
    pool = e.scheduler.kv_cache_manager.block_pool
    assert pool.num_gpu_blocks == 400 and e.budget.spare == pool.get_num_free_blocks()
    e.run(20)


def test_vllms_metrics_of_blocks_are_those_of_requests(engine):
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    e = engine()
    pool = e.scheduler.kv_cache_manager.block_pool
    pool.metrics_collector = metrics = KVCacheMetricsCollector(1.0)
    set_limit(e, "moves")
    e.run(20)
    e.idle()
    assert metrics.block_metrics and not metrics.block_metrics.keys() & set(e.budget.packing)


def test_usage_counts_what_is_allowed(engine):
    e = engine()
    pool = e.scheduler.kv_cache_manager.block_pool
    assert pool.get_usage() == 0.0
    e.limit(60)
    most = []
    e.every = lambda: most.append(pool.get_usage())
    e.run(40)
    assert pool.get_usage() == 0.0
    assert 0.5 < max(most) <= 1.0


def test_usage_in_a_pool_counts_what_its_memory_and_the_others_requests_leave(engine, monkeypatch):
    in_pool(monkeypatch, "usage", VMEM_VLLM_POOL_SIZE="4M")
    one, two = engine(kinds=("full",)), engine(kinds=("full",))
    one.every = two.every = lambda: [w.finish() for w in one.workers + two.workers]
    pools, most = [e.scheduler.kv_cache_manager.block_pool for e in (one, two)], [0, 0]

    def look():
        for e in (one, two):
            e.workers[0].memory.tend()  # as its thread does
            e.memory._neighbours._looked = 0.0
            e.memory._read_peers()
            e.memory.publish()
        return [pool.get_usage() for pool in pools]

    assert look() == [0, 0] and one.page[control.ALLOWED] <= 63
    for request in one.requests(6):
        one.scheduler.add_request(request)
    flight = collections.deque()
    while one.scheduler.has_unfinished_requests() or flight:
        one.turn(flight)
        now = look()
        most = [max(pair) for pair in zip(most, now)]
        assert two.page[control.ALLOWED] <= 64 - one.budget.used
    assert most[0] > 0.25 and most[1] == 0
    assert look() == [0, 0]


def test_refused_orders_fail_no_step(engine):
    e = engine()
    context, others = e.workers[0].memory.context(CPU), [0]

    def every():  # another process takes the memory for a time
        others[0] += 1
        context.set_budget(context.stats().created or 1 if 20 <= others[0] < 60 else 0)

    e.every = every
    e.run(40)
    assert maps_in_steps(e) == 0
    assert e.page[control.REFUSED] > 0


def test_two_workers_and_the_slower_one_counts(engine):
    e = engine(ranks=2)
    e.run(30)
    assert maps_in_steps(e) == 0
    assert e.workers[0].read == e.workers[1].read > 10_000
    e.idle()
    assert e.resident() == [e.cached()] * 2


@pytest.mark.parametrize("stages", [(64 << 10, 128 << 10), (128 << 10, 64 << 10), (64 << 10, 64 << 10, 192 << 10)])
def test_a_limit_is_that_of_the_stage_with_the_largest_blocks(engine, stages):
    e = engine(kinds=("full",), stages=stages)
    e.page[control.LIMIT] = most = 40 * max(stages)
    e.run(40)
    e.idle()
    null = [e.page[control.NULL + rank] for rank in range(len(e.workers))]
    held = [max(w.resident) - n for w, n in zip(e.workers, null)]
    assert most / 2 < max(held) <= most
    assert e.page[control.BLOCK_BYTES] == e.budget.block_bytes == max(stages)
    assert maps_in_steps(e) == 0


def test_a_stage_offers_the_bytes_of_its_own_blocks(engine, monkeypatch):
    in_pool(monkeypatch, "stages", VMEM_VLLM_POOL_SIZE="24M")
    stages = 64 << 10, 192 << 10
    e = engine(kinds=("full",), stages=stages)
    e.every = lambda: [w.finish() for w in e.workers]  # fences pass
    e.run(10)
    assert maps_in_steps(e) == 0
    with e.memory.lock:  # or its thread publishes what it offers itself
        e.page[control.OFFERED] = 10
        for worker, size in zip(e.workers, stages):
            offer = mock.Mock()
            monkeypatch.setattr(worker.memory.blocks, "offer", offer)
            worker.memory.tend()
            offer.assert_called_with(10 * size)


def test_a_worker_that_does_not_see_the_page(engine):
    e = engine()
    e.page[control.ATTACHED] = 0
    e.workers[0].memory._page = control.Page(control._fresh(), None)
    e.run(40)
    assert e.read > 20_000  # it backs what it must, in time


def test_sleep_gives_up_everything_and_wakes(engine):
    e = engine()
    e.run(20)
    memory = e.workers[0].memory
    assert e.scheduler.reset_prefix_cache()
    memory.sleep()
    assert e.resident() == [0]
    memory.wake()
    e.run(20)
    assert maps_in_steps(e) == 0


def test_an_engine_that_its_user_has_paused_wakes_paused(engine):
    """A server lets its model sleep, and wakes it, whatever its user does meanwhile."""
    from vllm.v1.core.sched.interface import PauseState

    e = engine()
    page, pauses = e.page, e.scheduler

    def nap(user=None, before=None):
        """vLLM's calls around a sleep of the server's; user: what the user sets meanwhile, before: and before that."""
        if before is not None:
            pauses.set_pause_state(before)
        page[control.STATE] = State.CLOSING
        pauses.set_pause_state(PauseState.PAUSED_ALL)
        page[control.ASLEEP], page[control.STATE] = 1, State.ASLEEP
        if user is not None:
            pauses.set_pause_state(user)
            assert pauses.pause_state == PauseState.PAUSED_ALL  # nothing runs on memory that is not there
        page[control.STATE] = State.WAKING
        page[control.ASLEEP] = 0
        pauses.set_pause_state(PauseState.UNPAUSED)
        page[control.STATE] = State.AWAKE
        return pauses.pause_state

    assert nap() == PauseState.UNPAUSED
    assert nap(before=PauseState.PAUSED_ALL) == PauseState.PAUSED_ALL == nap()
    assert nap(user=PauseState.UNPAUSED) == PauseState.UNPAUSED == nap()
    pauses.set_pause_state(PauseState.PAUSED_ALL)  # the user's own sleep and wake are vLLM's
    pauses.set_pause_state(PauseState.PAUSED_NEW)
    pauses.set_pause_state(PauseState.UNPAUSED)
    assert pauses.pause_state == PauseState.UNPAUSED
    e.run(10)


def test_all_memory_is_lent_and_requests_go_on(engine):
    e = engine(asynchronous=False, queue=1)
    memory, lent = e.memory, []

    def lend():
        if len(lent) == 2 or e.steps < 60 * (len(lent) + 1) or not e.scheduler.running:
            return
        lent.append(len(e.scheduler.running))
        e.page[control.LEND] = 1
        memory.lend()
        assert e.page[control.LENT]
        e.idle()
        assert e.resident() == [0] and not e.scheduler.running
        for worker in e.workers:
            worker.table.clear()
        for _ in range(3):  # while it is lent, nothing runs
            output = e.scheduler.schedule()
            assert not output.total_num_scheduled_tokens
            for worker in e.workers:
                worker.execute(output)
        e.page[control.LEND] = 0
        e.budget.lent = False

    e.every = lend
    e.run(60)
    assert len(lent) == 2 and min(lent) > 0
    assert maps_in_steps(e) == 0


@pytest.mark.parametrize("options", [dict(), dict(queue=1, asynchronous=False)])
def test_blocks_leave_and_all_is_lent_while_steps_are_in_flight(engine, options):
    e = engine(**options)
    memory, update, lent = e.memory, e.update, []

    def late(output, sampled):
        known = e.scheduler.requests
        said = {name: known[name].num_output_tokens for name in sampled if name in known}
        with memory.lock:  # as its thread does
            e.budget.between_steps(True)
            if e.random.random() < 0.1:
                memory.lend()
                lent.append(e.budget.num_backed)
        for worker in e.workers:
            worker.memory._look()
        update(output, sampled)
        assert all(name not in known or known[name].num_output_tokens > n for name, n in said.items())

    e.update = late
    requests = e.requests(20)
    e.answer(requests)
    assert lent and not any(lent) and maps_in_steps(e) == 0
    for request in requests:
        tokens, n = list(request.all_token_ids), request.num_prompt_tokens
        assert len(tokens) == n + request.max_tokens
        assert tokens[n:] == [next_token(tokens[:i]) for i in range(n, len(tokens))]


def test_all_is_lent_but_what_a_session_holds_that_waits_for_input(engine):
    e = engine()
    draw, flight = e.random.randrange, collections.deque()
    first, last = (e.session("s", [draw(3, 900) for _ in range(40)], more) for more in (True, False))
    e.answer([first])
    used = e.budget.used
    for request in e.requests(4):
        e.scheduler.add_request(request)
    for _ in range(4):
        e.turn(flight)
    e.page[control.LEND] = 1
    for _ in range(10):
        e.turn(flight)
    assert not e.scheduler.running and e.budget.num_backed == e.budget.used == used > 0
    assert not e.page[control.LENT]
    e.scheduler.add_request(last)
    e.turn(flight)
    assert e.page[control.LENT] and not e.budget.num_backed
    e.page[control.LEND] = 0
    while e.scheduler.has_unfinished_requests() or flight:
        e.turn(flight)
    assert maps_in_steps(e) == 0


def test_the_check_sees_a_seeded_fault(engine):
    """Pages go before the steps that still read them have run: a row is wrong, or its address faults."""

    def broken():
        e = engine(depth=3, queue=3)
        e.workers[0].memory._fence = lambda: None
        return e

    assert fails_in_a_child(broken)


def test_the_workers_thread_leaves_the_looks_to_steps_while_they_run(monkeypatch):
    memory, pauses = WorkerMemory(control.private_page(), 0), []

    def rest(wake, pause, look, news):
        pauses.append(pause)
        memory._finished += len(pauses) in (2, 3)
        memory._stop = len(pauses) == 6

    monkeypatch.setattr(control, "rest", rest)
    monkeypatch.setattr(memory, "_look", lambda: None)
    memory._poll()
    assert pauses == [POLL] * 2 + [BUSY] * 2 + [POLL] * 2
