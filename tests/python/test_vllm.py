"""pyvmem.vllm without vLLM: requests in slots, under the stand-ins of vllm_standins."""

import collections
import importlib
import inspect
import os
import random
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from vllm_standins import BlockPool, Gpu, Request, Runner, Scheduler

from pyvmem.errors import OutOfMemory
from pyvmem.kv import KVCache, TensorSpec
from pyvmem.kv_blocks import BlockNames
from pyvmem.vllm import layout, metrics, patches, plugin, refuse, settings
from pyvmem.vllm.memory import MARGIN, Memory
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
                             generous=False, name=None)  # fmt: skip
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


def test_pages_in_use_are_the_blocks_that_the_scheduler_knows():
    engine = Engine(requests=4)
    engine.run(engine.requests(25, shared=0.5))
    cached = len(engine.scheduler.pool.cached)
    engine.cache.wait()
    assert cached
    assert engine.cache.stats().prefix_pages == cached
    engine.slots.IDLE_SECONDS = -1
    engine.slots.tend()
    assert engine.cache.stats().held_pages == cached


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
    slots.WAIT_SECONDS = 0
    slots.begin_step()
    slots.start(0, [1], 0)
    slots.back()  # kernels of the step before are running
    assert slots.map_waits == 0
    slots.begin_step()
    engine.gpu.wait(engine.gpu.marked)
    slots.start(1, [2], 0)
    slots.back()
    assert slots.map_waits == 1
    slots.begin_step()
    engine.gpu.wait(engine.gpu.marked)
    slots.back()  # nothing to map
    assert slots.map_waits == 1


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


class DeviceMemory:
    """A context whose device memory changes by hand."""

    def __init__(self, free):
        self.free, self.created, self.overhead, self.calls = free, 0, 100, []

    def stats(self):
        return types.SimpleNamespace(created=self.created, overhead=self.overhead)

    def info(self):
        return types.SimpleNamespace(memory_free=self.free)

    def prealloc(self, n):
        self.calls.append(n)
        if n > self.free:
            raise OutOfMemory(12, "no")

    def trim(self):
        self.calls.append("trim")


GB = 1 << 30


def test_a_busy_engine_makes_memory_ahead_within_its_limit():
    device = DeviceMemory(50 * GB)
    memory = Memory(device, ahead=GB)
    assert memory.look(40 * GB, busy=False) == 50 * GB + 100 - MARGIN
    assert device.calls == []
    memory.look(40 * GB, busy=True)
    device.created = 40 * GB - 5
    memory.look(40 * GB, busy=True)
    device.created = 41 * GB
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, 5]


def test_a_busy_engine_gives_back_what_others_need_or_it_has_not_needed_for_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pyvmem.vllm.memory.time.monotonic", lambda: now[0])
    device = DeviceMemory(50 * GB)
    memory = Memory(device, ahead=GB)
    device.overhead += 3 * GB
    memory.look(40 * GB, busy=True)
    now[0] = 6.0
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, "trim"]
    device.free = MARGIN
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, "trim", "trim"]
    device.overhead = 100  # nothing is left to give
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, "trim", "trim"]


def test_memory_that_another_process_was_faster_to_take_is_no_error():
    device = DeviceMemory(3 * GB)
    memory = Memory(device, ahead=GB)
    device.prealloc = lambda n: (_ for _ in ()).throw(OutOfMemory(12, "no"))
    assert memory.look(40 * GB, busy=True) == 3 * GB + 100 - MARGIN


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


def test_a_request_with_computed_tokens_needs_a_prefix_cache():
    engine = Engine(caching=False)
    engine.slots.begin_step()
    with pytest.raises(RuntimeError, match="no prefix cache"):
        engine.slots.start(0, [1, 2], 8)


# ---- layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["token", "block", "layer"])
def test_every_layer_has_bytes_of_its_own_and_slots_are_whole_blocks(kind):
    shape = layout.Layout(kind, layers=3, row=64, tokens=16)
    flat = torch.zeros(shape.tensors, 4 * 16 * shape.tensor_row, dtype=torch.int8)
    for layer in range(3):
        raw = flat[layer if shape.tensors > 1 else 0]
        view = layout.view(raw, shape, layer, torch.bfloat16, (4, 2, 16, 16), (0, 2, 1, 3))
        assert view.shape == (4, 2, 16, 16)
        assert (view == 0).all()
        view += layer + 1
        if kind != "block":  # tokens of successive blocks are a constant stride apart
            assert view.stride(0) == 16 * view.stride(2)
    assert shape.slot_tokens(100) % 16 == 0


def test_a_kernel_may_have_smaller_blocks_where_tokens_are_evenly_spaced():
    shape = layout.Layout("token", layers=2, row=64, tokens=32)
    flat = torch.zeros(4 * 32 * shape.tensor_row, dtype=torch.int8)
    whole = layout.view(flat, shape, 1, torch.bfloat16, (4, 2, 32, 16), (0, 2, 1, 3))
    halves = layout.view(flat, shape, 1, torch.bfloat16, (8, 2, 16, 16), (0, 2, 1, 3))
    whole.copy_(torch.arange(whole.numel()).view(whole.shape))
    assert (halves.transpose(1, 2).reshape(-1) == whole.transpose(1, 2).reshape(-1)).all()
    with pytest.raises(ValueError, match="16 tokens, vLLM's 32"):
        layout.view(flat, layout.Layout("block", 2, 64, 32), 1, torch.bfloat16, (8, 2, 16, 16), (0, 2, 1, 3))


@pytest.mark.parametrize("layers, row, base, tokens", [(32, 4096, 16, 16), (4, 2048, 16, 16), (2, 512, 16, 64),
                                                       (28, 2048, 16, 16), (1, 64, 16, 1024)])  # fmt: skip
def test_blocks_grow_to_whole_pages(layers, row, base, tokens):
    assert layout.block_tokens("token", layers, row, base) == tokens
    assert tokens * layers * row % PAGE == 0


# ---- settings, versions, refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name, text", [("VMEM_VLLM", "yes"), ("VMEM_VLLM_CACHE_TOKENS", "-1"),
                                        ("VMEM_VLLM_CACHE_TOKENS", "16k"), ("VMEM_VLLM_LAYOUT", "rows")])  # fmt: skip
def test_a_wrong_setting_is_named(name, text):
    with pytest.raises(ValueError, match=f"{name}={text}"):
        settings.read({"VMEM_VLLM": "1", name: text})


def test_unset_means_off():
    assert not settings.read({}).on
    assert settings.read({"VMEM_VLLM": "0", "VMEM_VLLM_CACHE_TOKENS": "16k"}) == settings.Settings()
    assert settings.read({"VMEM_VLLM": "1", "VMEM_VLLM_CACHE_TOKENS": "0"}).cache_tokens == 0


def test_an_unknown_version_is_refused_with_a_way_to_insist():
    with pytest.raises(patches.UnknownVersion, match="vLLM 9.9 must be 0.26.0; VMEM_VLLM_FORCE=1 tries it"):
        patches.install("9.9")


def test_the_plugin_does_nothing_unless_it_is_switched_on(monkeypatch):
    monkeypatch.delenv("VMEM_VLLM", raising=False)
    monkeypatch.setenv("VMEM_VLLM_LAYOUT", "wrong")  # of no interest then
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it would fail
    plugin.register()


@pytest.mark.parametrize("environment, text", [
    ({}, "pyvmem: VMEM_VLLM=1: vLLM 9.9 must be 0.26.0"),
    ({"VMEM_VLLM_FORCE": "1"}, "pyvmem: VMEM_VLLM=1: vLLM 9.9 lacks a function that vMem replaces"),
    ({"VMEM_VLLM_CACHE_TOKENS": "many"}, "pyvmem: VMEM_VLLM_CACHE_TOKENS=many"),
])  # fmt: skip
def test_what_is_asked_for_and_cannot_be_ends_vllm_with_one_line(monkeypatch, environment, text):
    for name, value in {"VMEM_VLLM": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    fake = types.ModuleType("vllm")
    fake.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "vllm", fake)
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda p: p.name)
def test_a_replacement_takes_what_vllm_gives_it_by_position_or_by_name(patch, monkeypatch):
    worker = importlib.import_module("pyvmem.vllm.worker")
    given = {name: object() for name in patch.parameters}
    takes = inspect.signature(getattr(worker, patch.by))
    takes.bind("original", *given.values())
    of = [given.pop("self")] if "self" in given else []
    takes.bind("original", *of, **given)  # by vLLM's names
    lines = [f"def original({', '.join(patch.parameters)}):", f"    return ({', '.join(patch.parameters)},)"]
    scope = {}
    exec("\n".join(lines), scope)
    replaced = patches._replacement(scope["original"], lambda original, *args, **named: original(*args, **named))
    assert replaced(*of, **given) == replaced(*of, *given.values()) == (*of, *given.values())


class Backend:
    """FlashAttention's description of its KV cache."""

    @staticmethod
    def get_kv_cache_shape(blocks, tokens, heads, size, cache_dtype_str="auto"):
        return (blocks, heads, tokens, 2 * size)

    @staticmethod
    def get_kv_cache_stride_order():
        return (0, 2, 1, 3)


def start_engine(monkeypatch, layers=3, blocks=40, caching=True, **environment):
    """A worker's engine on the host backend, as `initialize_kv_cache` makes it; and its layers' views."""
    worker = importlib.import_module("pyvmem.vllm.worker")
    for name, text in {"VMEM_VLLM": "1", "VMEM_BACKEND": "host", **environment}.items():
        monkeypatch.setenv(name, text)
    spec = types.SimpleNamespace(block_size=16, page_size_bytes=16 * 4096, dtype=torch.float16, num_kv_heads=2,
                                 head_size=512)  # fmt: skip
    names = [f"layer{i}" for i in range(layers)]
    config = types.SimpleNamespace(
        num_blocks=blocks, kv_cache_tensors=[types.SimpleNamespace(shared_by=[n]) for n in names],
        kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec, layer_names=names)],
    )  # fmt: skip
    vllm_config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_seqs=4), num_speculative_tokens=0,
        model_config=types.SimpleNamespace(max_model_len=100),
        cache_config=types.SimpleNamespace(enable_prefix_caching=caching),
    )  # fmt: skip
    engine = worker.Engine(config, vllm_config, torch.device("cpu"), settings.read())
    monkeypatch.setattr(worker, "_current", engine)
    raw = worker.allocate_kv_cache(None, config, {}, "cpu")
    group = types.SimpleNamespace(kv_cache_spec=spec, kv_cache_group_id=0, backend=Backend,
                                  layer_names=[*names, "sharing"])  # fmt: skip
    views = worker.reshape_kv_cache(None, [group], raw, "auto", [16], {"sharing": names[0]}, config)
    assert views["sharing"] is views[names[0]]
    return engine, [views[n] for n in names]


@pytest.mark.parametrize("kind, tensors", [("block", 1), ("token", 1), ("layer", 3)])
def test_an_engine_backs_what_its_layers_write(monkeypatch, kind, tensors):
    engine, views = start_engine(monkeypatch, VMEM_VLLM_LAYOUT=kind)
    gpu = Gpu()
    engine.requests._fences = gpu
    assert (len(engine.cache.specs), engine.cache.page_size) == (tensors, PAGE)
    engine.requests.begin_step()
    table = engine.requests.start(0, [5, 6], 0)
    engine.requests.back()
    for layer, view in enumerate(views):
        for place in range(2):  # of the request's blocks; the table goes on
            view[table[place]] = 10 * layer + place
    engine.requests.begin_step()
    again = engine.requests.start(1, [5, 6, 7], 32)
    engine.requests.back()
    for layer, view in enumerate(views):
        for place in range(2):
            assert (view[again[place]] == 10 * layer + place).all()
    assert engine.cache.stats().attached_pages == 2 * 3 * (16 * 4096) // PAGE
    gpu.wait(gpu.marked)
    engine.close()


def test_an_engine_may_have_what_the_limit_and_the_device_leave(monkeypatch):
    engine, _ = start_engine(monkeypatch, caching=False)
    engine.look()
    assert engine.allowed_blocks() == 40
    engine.cache.set_budget(25 * 3 * 65536)
    engine.look()
    assert engine.allowed_blocks() == 25
    monkeypatch.setattr(importlib.import_module("pyvmem.vllm.memory"), "MARGIN", 2**60)
    engine.look()
    assert engine.allowed_blocks() == 0  # nothing is held, and the device has nothing to spare
    engine.requests._fences = Gpu()
    engine.close()
    engine.requests.tend()


def test_shutting_down_gives_everything_back_in_a_process_that_lives_on(monkeypatch):
    worker = importlib.import_module("pyvmem.vllm.worker")
    engine, _ = start_engine(monkeypatch)
    engine.requests._fences = Gpu()
    calls = []
    runner = types.SimpleNamespace(req_states=types.SimpleNamespace(vmem=engine))
    worker.shutdown(calls.append, runner)
    assert calls == [runner]
    assert worker.current() is None
    with pytest.raises(ValueError, match="closed"):
        engine.cache.stats()
    worker.shutdown(calls.append, runner)  # again
    worker.shutdown(calls.append, types.SimpleNamespace())  # of an engine that never had a KV cache


def test_a_failure_of_the_background_thread_is_logged_once_and_it_goes_on(monkeypatch, caplog):
    engine, _ = start_engine(monkeypatch)
    engine.requests._fences = Gpu()
    looks = []
    monkeypatch.setattr(engine, "look", lambda: looks.append(1) or 1 / 0)
    while len(looks) < 4:
        time.sleep(0.01)
    assert [r.message for r in caplog.records] == ["vMem: the background thread failed and goes on"]
    engine.close()


def configuration(**changes):
    parallel = types.SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1,
                                     prefill_context_parallel_size=1)  # fmt: skip
    made = types.SimpleNamespace(
        parallel_config=parallel, cache_config=types.SimpleNamespace(cache_dtype="auto"), kv_transfer_config=None,
        use_v2_model_runner=True, model_config=types.SimpleNamespace(enable_return_routed_experts=False),
    )  # fmt: skip
    for path, value in changes.items():
        *owner, name = path.split("__")
        setattr(getattr(made, owner[0]) if owner else made, name, value)
    return made


class FullAttentionSpec:
    page_size_padded = None


class MambaSpec:
    pass


def kv_config(groups=1, spec=FullAttentionSpec, shared=1):
    return types.SimpleNamespace(
        kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec()) for _ in range(groups)],
        kv_cache_tensors=[types.SimpleNamespace(shared_by=["layer"] * shared, block_stride=0)],
    )


@pytest.mark.parametrize(
    "changes, config, text",
    [
        ({"kv_transfer_config": object()}, {}, "KV connectors"),
        ({"parallel_config__pipeline_parallel_size": 2}, {}, "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, {}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, {}, "context parallelism"),
        ({"use_v2_model_runner": False}, {}, "model runner V2"),
        ({"model_config__enable_return_routed_experts": True}, {}, "routed experts"),
        ({"cache_config__cache_dtype": "int4_per_token_head"}, {}, "int4_per_token_head"),
        ({}, {"groups": 2}, "2 groups"),
        ({}, {"spec": MambaSpec}, "MambaSpec"),
        ({}, {"shared": 2}, "share a KV tensor"),
    ],
)
def test_what_cannot_work_is_refused_with_one_line(changes, config, text):
    with pytest.raises(refuse.Refused, match=text) as caught:
        refuse.worker(configuration(**changes), kv_config(**config))
    assert "\n" not in str(caught.value)


def test_what_can_work_is_not_refused():
    refuse.worker(configuration(), kv_config())


def test_the_pool_keeper_holds_back_no_more_than_one_request_needs():
    keeper = PoolKeeper(BlockPool(50), least=10, allowed=lambda: 3)
    keeper.before_schedule()
    assert keeper.held_back == 50 - 11


def test_an_idle_scheduler_keeps_to_the_cap_though_its_workers_are_processes_of_their_own():
    worker = importlib.import_module("pyvmem.vllm.worker")
    pool = BlockPool(50)
    keeper = pool.vmem = PoolKeeper(pool, cap=3)
    blocks = pool.get_new_blocks(10)
    for block in blocks:
        pool.cache(block, block.block_id)
    keeper.before_schedule()  # the next look is due in a while
    worker.free_blocks(BlockPool.free_blocks, pool, blocks)
    scheduler = types.SimpleNamespace(kv_cache_manager=types.SimpleNamespace(block_pool=pool),
                                      has_unfinished_requests=lambda: False)  # fmt: skip
    assert worker.update_from_output(lambda *_: "outputs", scheduler, None, None) == "outputs"
    assert len(pool.cached) == 3
    assert len(keeper.take_forgotten()) == 7  # the step that says which requests have ended takes them along


# ---- metrics ----------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def small_cache(name):
    return KVCache([TensorSpec("kv", (ROW,), torch.uint8)], 2, 64, 8 * PAGE, backend="host", page_size=PAGE, name=name)


def test_metrics_are_of_this_servers_caches(runtime):
    with small_cache("vllm") as cache, small_cache("another"):
        (view,) = metrics.own_views()
        assert view.stats["budget_pages"] == cache.stats().budget_pages == 8
        assert metrics.own_views(2**30) == []
        assert len(metrics.own_views(os.getppid())) == 1


def test_workers_limits_reach_a_scheduler_in_another_process(runtime):
    worker = importlib.import_module("pyvmem.vllm.worker")
    spec = types.SimpleNamespace(page_size_bytes=PAGE)
    config = types.SimpleNamespace(num_blocks=100, kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec)],
                                   kv_cache_tensors=[None, None])  # fmt: skip
    assert worker.allowed_blocks(config) is None
    with small_cache("vllm"), small_cache("vllm") as second:  # of 8 pages each
        assert worker.allowed_blocks(config) == 4
        second.set_budget(6 * PAGE)
        assert worker.allowed_blocks(config) == 3
        config.num_blocks = 2
        assert worker.allowed_blocks(config) == 2


def test_metrics_come_with_vllms_own(runtime):
    core = pytest.importorskip("prometheus_client")
    registry = core.CollectorRegistry()
    registry.register(metrics.Collector())
    with small_cache("vllm"):
        labels = {"pid": str(os.getpid()), "device": "host:0"}
        assert registry.get_sample_value("vllm:vmem_kv_budget_pages", labels) == 8
        assert registry.get_sample_value("vllm:vmem_kv_steps_total", labels) == 0
    assert registry.get_sample_value("vllm:vmem_kv_budget_pages", labels) is None
