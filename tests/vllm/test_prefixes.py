"""Prefixes that outlive their engine, on vLLM's own scheduler: engines are killed, and every row is read back.

Engines are forked, one after the other. The owner of what they save is a process of its own.
"""

import contextlib
import json
import os
import random
import signal
import time
import traceback

import pytest
import steps
import torch
from steps import Engine

from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from pyvmem import Context
from pyvmem.engine import control
from pyvmem.kv.pool import KVPool
from pyvmem.sleep.common import CommonWeights
from pyvmem.sleep.prefixes import FIRST
from pyvmem.vllm.prefixes import SchedulerPrefixes, WorkerPrefixes

PAGE = 64 << 10  # bytes of a block
KEY = "k" * 64


class Memory(steps.Memory):
    """Work of the fake device that a step's event or a synchronization waits for."""

    late = 0  # most fences for which a step's end is not known, so that its blocks are saved late
    held = False  # it is not known at all

    def _event(self):
        n = self.gpu.mark() + random.randint(0, self.late)
        return lambda: self.gpu.passed >= n and not self.held

    def _synchronize(self):
        self.gpu.wait(self.gpu.mark())


def engine(folder, pool, places=100, key=KEY, late=0, **options):
    """An engine of one kind of layer whose prefixes outlive it."""
    steps.Memory = Memory
    e = Engine(folder, **dict(dict(kinds=("full",), page=PAGE), **options))
    memory = e.workers[0].memory
    memory.late = late
    weights = CommonWeights(KVPool(PAGE << 10, path=str(pool)), Context("host"), "weights", seconds=600)
    weights.find(str(os.getpid()))  # nobody else loads these
    memory.prefixes = WorkerPrefixes(memory, weights, key, FIRST + 8192 + places * (PAGE + 256))
    e.memory._prefixes = SchedulerPrefixes(e.budget)
    e.owner, e.hits, execute = weights._link.owner, 0, e.workers[0].execute

    def counted(output):
        e.hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        return execute(output)

    e.workers[0].execute = counted
    return e


def saved(e):
    """Wait until everything is saved that is to be."""
    worker = e.workers[0].memory.prefixes
    e.workers[0].finish()
    end = time.monotonic() + 60
    while worker._pending:  # its thread saves them beside this one
        assert time.monotonic() < end
        time.sleep(1e-3)
    with worker.lock:
        return worker.file.saved()


def prompt_of(tokens, seed=1):
    draw = random.Random(seed).randrange
    return [draw(3, 900) for _ in range(tokens)]


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """What would take each child seconds."""
    os.environ["VMEM_VLLM"] = "0"
    made = Engine(tmp_path_factory.mktemp("first"), kinds=("full",), page=PAGE)
    made.answer([made.request("r", [5] * 40, 2)])
    made.close()


class Child:
    """A forked process with an engine, which calls a function with it and waits until it is killed."""

    def __init__(self, folder, do, **options):
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(read)
            try:
                signal.alarm(300)
                e = engine(folder, folder / "gpu.pool", **options)
                os.write(write, (json.dumps(dict(owner=e.owner)) + "\n").encode())
                told = dict(result=do(e))
            except BaseException:
                told = dict(error=traceback.format_exc())
            os.write(write, (json.dumps(told) + "\n").encode())
            signal.pause()
        os.close(write)
        self._lines = os.fdopen(read)
        self.owner = json.loads(self._lines.readline() or "{}").get("owner")

    def result(self):
        """What the function has returned; None if the process was killed before."""
        told = json.loads(self._lines.readline() or "{}")
        if "error" in told:
            pytest.fail(told["error"])
        return told.get("result")

    def kill(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@pytest.fixture
def start(tmp_path):
    """Starts a `Child`. What is left ends with the test."""
    made = []
    torch.set_num_threads(1)  # a child that is forked beside OpenMP's threads would wait for them

    def start(do, **options):
        made.append(Child(tmp_path, do, **options))
        return made[-1]

    with KVPool(PAGE << 10, path=str(tmp_path / "gpu.pool")):
        yield start
        for each in made:
            each.kill()
        for owner in {each.owner for each in made} - {None}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner, signal.SIGKILL)


@pytest.fixture
def child(start):
    """Returns what a function returns in a `Child`, which is then killed, or before, after so many seconds."""

    def run(do, after=None, **options):
        made = start(do, **options)
        if after is not None:
            time.sleep(after)  # it is killed wherever it is then
            made.kill()
        told = made.result()
        made.kill()
        return told

    return run


def serve(tokens, seed=1, then=lambda e: None):
    """Serve one prompt: how much of it was in the cache, and what is saved then."""

    def do(e):
        before = e.hits
        e.answer([e.request(f"r{next(steps._numbers)}", prompt_of(tokens, seed), 4)])
        e.settle()
        then(e)
        return dict(hits=e.hits - before, saved=len(saved(e)), read=e.read)

    return do


def test_the_next_engine_serves_a_prompt_without_computing_it(child):
    first = child(serve(200))
    assert first["hits"] == 0 and first["saved"] == 200 // 16
    for _ in range(2):
        again = child(serve(200))
        assert again["hits"] == 200 // 16 * 16 and again["saved"] == first["saved"]
    other = child(serve(200, seed=2))
    assert other["hits"] == 0 and other["saved"] == 2 * first["saved"]


def test_another_key_has_none(child):
    child(serve(200))
    assert child(serve(200), key="other")["hits"] == 0


@pytest.mark.parametrize("what", ["reset", "changed weights"])
def test_what_is_not_valid_any_more_does_not_come_back(child, what):
    def forget(e):
        saved(e)
        if what == "reset":
            assert e.scheduler.reset_prefix_cache()
        else:
            e.workers[0].memory.prefixes._weights.leave()

    child(serve(200, then=forget)) if what == "reset" else child(lambda e: (serve(200)(e), forget(e)))
    assert child(serve(200))["hits"] == 0


def test_what_differs_from_its_sum_is_dropped_and_the_rest_comes_back(child):
    def damage(e):
        file, found = e.workers[0].memory.prefixes.file, saved(e)
        file.contents(found[5].place)[100] += 1

    child(serve(200, then=damage))
    assert child(serve(200))["hits"] == 5 * 16


def test_more_than_fits_drops_the_prefix_that_was_not_used_for_longest(child):
    def three(e):
        found = []
        for seed in (1, 2, 1, 3):
            found.append(serve(160, seed)(e)["saved"])
        return found

    assert child(three, places=25) == [10, 20, 20, 25]
    for seed, found in ((1, 144), (3, 144), (2, 80)):  # the end of a prefix goes first
        assert child(serve(160, seed), places=25)["hits"] == found


def test_of_a_prompt_that_does_not_fit_the_beginning_is_saved(child):
    assert child(serve(200), places=5)["saved"] == 5
    assert child(serve(200), places=5)["hits"] == 80


def takes_before_they_are_saved(e):
    """A second prompt has the blocks of the first before these are saved, and the last of them is not full."""
    memory = e.workers[0].memory
    e.limit(20)
    memory.held = True
    for seed, tokens in ((1, 200), (2, 240)):
        e.answer([e.request(f"r{seed}", prompt_of(tokens, seed), 4)])
    e.settle()
    memory.held = False
    return len(saved(e))


def test_a_block_that_was_handed_out_before_it_was_saved_is_not_saved(child):
    assert child(takes_before_they_are_saved) >= 15
    told = child(serve(200))  # reads every row
    assert 0 < told["hits"] < 192
    assert child(serve(240, seed=2))["hits"] == 240 - 16


def restore(e):
    """Have what is saved come back now, if it can: as after a start or a wake, while steps are in flight."""
    with e.memory.lock:
        e.memory._prefixes._due = e.workers[0].memory.prefixes.found = True
        e.memory._prefixes.look()


def leaves_while_it_is_computed(e):
    """A request is aborted whose steps are in flight, and its blocks leave. What was saved comes back into them."""
    worker, memory = e.workers[0], e.workers[0].memory
    e.memory._prefixes._due = False
    worker.depth = 1000  # the device computes nothing until somebody waits for it
    e.scheduler.add_request(e.request("r", prompt_of(250, 2), 4))
    for _ in range(4):
        e.update(*e.step())
    e.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    e.update(*e.step())
    with e.memory.lock:
        e.budget.unback(e.budget.total)
        e.budget._tell()
        with memory._lock:
            memory._ring(e.page[control.POSITION])
    restore(e)
    worker.depth = 1
    return serve(200)(e)["hits"]


def test_what_comes_back_waits_for_the_device(child):
    child(serve(200))
    assert child(leaves_while_it_is_computed, blocks=24) == 192


@pytest.mark.parametrize("tells", ["the ring", "a step"])
def test_nothing_comes_back_into_blocks_of_which_workers_do_not_know_that_they_leave(child, tells):
    def do(e):
        e.memory._prefixes._due = False
        serve(250, seed=2)(e)
        with e.memory.lock:
            e.budget.unback(e.budget.total)
            if tells == "the ring":
                e.budget._tell()
            else:
                e.scheduler.add_request(e.request("r", [5], 2))
                output = e.scheduler.schedule()
            restore(e)
        if tells == "a step":
            e.update(output, e.workers[0].execute(output))
        e.settle()
        return serve(200)(e)["hits"]

    child(serve(200))
    assert child(do, blocks=24) in (0, 192)


def preempts_what_it_has_scheduled(e):
    """vLLM preempts a request that it has scheduled in the same step, and does not forget what it has hashed."""
    e.scheduler.policy = SchedulingPolicy.PRIORITY
    e.scheduler.waiting = create_request_queue(SchedulingPolicy.PRIORITY)
    e.scheduler.scheduler_config.long_prefill_token_threshold = 32
    e.limit(17)
    low = e.request("low", prompt_of(250), 4, priority=9)
    e.scheduler.add_request(low)
    while not low.num_computed_tokens:
        e.update(*e.step())
    e.scheduler.add_request(e.request("high", prompt_of(12, 2), 40, priority=1))
    while not e.preempted:
        computed = low.num_computed_tokens
        output, _ = e.step()
    assert "low" in output.preempted_req_ids and e.cached() > computed // 16
    return len(saved(e))


def test_what_was_hashed_and_not_computed_is_not_saved(child):
    assert child(preempts_what_it_has_scheduled) == 14
    assert child(serve(250))["hits"] == 14 * 16


def test_what_the_limit_does_not_allow_is_not_restored(child):
    child(serve(200))

    def do(e):
        told = serve(200)(e)
        return dict(told, held=e.workers[0].held())

    told = child(do, blocks=24)
    assert told["hits"] <= 192 and told["held"] <= 25 * PAGE


def test_an_engine_that_wakes_has_what_another_one_saved_that_died_meanwhile(start, tmp_path):
    def stands_by(e):
        e.settle()
        e.workers[0].memory.sleep()
        while not (tmp_path / "died").exists():
            with e.memory.lock:
                e.memory._prefixes.look()
            time.sleep(0.01)  # as the scheduler's thread between looks
        e.workers[0].memory.wake()
        return serve(200)(e)

    first = start(serve(200))
    assert first.result()["saved"] == 12
    other = start(stands_by)
    first.kill()
    (tmp_path / "died").touch()
    assert other.result()["hits"] == 192
    other.kill()


def test_engines_of_one_key_that_live_have_their_own(start):
    first = start(serve(200))
    assert first.result()["saved"] == 12
    second = start(serve(200))
    assert second.result()["hits"] == 0
    for each in (first, second):
        each.kill()
    for _ in range(2):
        third = start(serve(200))
        assert third.result()["hits"] == 192
    third.kill()


def busy(seed, turns, about):
    """Serve prompts of one of three kinds in each turn, about something.

    Limits move, requests are aborted and preempted, the cache is reset. What was saved comes back at any time, and not
    only after a start: while steps are in flight, between a step's schedule and its execution, and as blocks leave.
    """

    def do(e):
        draw = random.Random(seed)
        execute = e.workers[0].execute

        def leave():
            with e.memory.lock:
                e.budget.unback(draw.randrange(40))
                if draw.random() < 0.5:
                    e.budget._tell()

        def every():
            if draw.random() < 0.1:
                e.limit(draw.choice([20, 24, 40, 80, 200]))
            if draw.random() < 0.1:
                leave()
            if draw.random() < 0.05:
                e.workers[0].memory.held = draw.random() < 0.5
            if draw.random() < 0.05:
                restore(e)

        def executed(output):
            if draw.random() < 0.05:
                restore(e)
            return execute(output)

        e.every, e.workers[0].execute = every, executed
        for turn in range(turns):
            e.random = random.Random(f"{about} {turn % 3}")
            e.run(12, abort=0.1)
            if draw.random() < 0.1:
                e.scheduler.reset_prefix_cache()
            if draw.random() < 0.3:
                e.idle()
        return dict(read=e.read, hits=e.hits)

    return do


def test_engines_killed_at_any_time_leave_no_wrong_row(child):
    """In each round, prompts are new, so that one engine saves them, and the next one reads what it left."""
    seed, rounds = int(os.environ.get("VMEM_TEST_SEED", 7)), int(os.environ.get("VMEM_TEST_ITERATIONS", 4))
    draw = random.Random(seed)
    hits = 0
    for n in range(rounds):
        child(busy(draw.random(), 50, f"{seed} {n}"), after=draw.choice([0.05, 0.3, 0.6, 1.0]) * draw.random(),
              depth=draw.choice([1, 3, 9]), queue=draw.choice([2, 3]), places=draw.choice([10, 60, 300]),
              late=draw.choice([0, 10, 60]), blocks=draw.choice([30, 60, 400]))  # fmt: skip
        told = child(busy(draw.random(), 3, f"{seed} {n}"), places=60)
        assert told["read"] > 0
        hits += told["hits"]
    print(f"{2 * rounds} engines were killed, and {hits} tokens were in the cache")
