"""Weights of a model in a pool, on the host: what went while they were parked comes back, and only that.

SPDX-License-Identifier: MIT
"""

import errno
import gc
import itertools
import random
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import until
from kv_pools import free, load, make

import pyvmem
from pyvmem import KVPool, OutOfMemory
from pyvmem.errors import VmemError
from pyvmem.sleep.sums import Sums
from pyvmem.sleep.weights import ARENA, MIB, HostCopy, Weights


class Net(torch.nn.Module):
    """A module with a tied weight, small tensors, a buffer and a view that is no contiguous one."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.embed = torch.nn.Parameter(torch.randn(1500, 1024, generator=draw))  # 5.9 MiB
        self.large = torch.nn.Parameter(torch.randn(2048, 1024, generator=draw).t())  # 8 MiB
        self.norm = torch.nn.Parameter(torch.randn(1024, generator=draw, dtype=torch.float64))
        self.head = self.embed
        self.register_buffer("scale", torch.arange(7, dtype=torch.int8))
        self.register_buffer("experts", torch.tensor([1, 3, 2]))
        self.register_buffer("empty", torch.empty(0))


@pytest.fixture
def pool():
    with KVPool(budget=40 * MIB) as pool:
        yield pool
        gc.collect()
        assert pool.members() == []


@pytest.fixture
def weights(pool):
    made = Weights(pool, pyvmem.Context("host"))
    yield made
    made.close()


def copied(weights, *busy):
    """Copy the weights to the host, to the end."""
    weights.copy_behind(*busy)
    wait()


def copying():
    """The thread that copies weights to the host, if there is one."""
    return next((thread for thread in threading.enumerate() if thread.name == "vmem-weights"), None)


def wait():
    if thread := copying():
        thread.join()


def tensors(net):
    return {n: t.detach().clone() for n, t in [*net.named_parameters(), *net.named_buffers()]}


def same(net, told):
    assert all(torch.equal(t, told[n]) for n, t in [*net.named_parameters(), *net.named_buffers()])
    assert net.head is net.embed


def test_adopted_tensors_are_as_they_were_and_in_the_pool(pool, weights):
    net = Net()
    told, strides = tensors(net), net.large.stride()
    with weights.loading():
        weights.adopt([net])
    same(net, told)
    assert net.large.stride() == strides
    assert weights.bytes == weights.held == 16 * MIB  # 6 + 8, and 2 for what is small
    (member,) = pool.members()
    assert member.name == "weights" and member.has >= 16 * MIB


def test_what_is_published_asks_torch_for_nothing_and_each_sleep_once(pool, weights, monkeypatch):
    """Its snapshot takes a millisecond, and the rest of the process waits for it. Tensors of segments are kept."""
    net, asked = Net(), []
    weights.adopt([net])
    copied(weights)
    snapshot = weights.lease._torch.snapshot
    monkeypatch.setattr(weights.lease._torch, "snapshot", lambda pool: asked.append(1) or snapshot(pool))
    assert weights.bytes == weights.held == 16 * MIB and not asked
    monkeypatch.setattr("pyvmem.sleep.weights.tensor_at", None)
    weights.park()
    assert weights.bytes == 16 * MIB and len(asked) == 1
    assert weights.wake(0) == 0 and len(asked) == 1
    weights.park()
    weights.lease.trim()
    assert weights.wake(0) == 16 * MIB and len(asked) == 3


def test_no_sleep_looks_for_garbage_in_what_a_worker_has_loaded():
    """Half a million objects, where a worker is a process of its own."""
    from pyvmem.vllm.mixins import WorkerMixin

    class Loads:
        def compile_or_warm_up_model(self):
            return "warm"

    class Worker(WorkerMixin, Loads):
        pass

    worker, loaded = Worker(), [[]]
    worker._vmem = types.SimpleNamespace(weights=True, warmed_up=lambda: None)
    try:
        assert worker.compile_or_warm_up_model() == "warm"
        assert not any(seen is loaded for seen in gc.get_objects())
    finally:
        gc.unfreeze()


def test_parked_weights_stay_until_somebody_asks_and_only_what_went_is_copied(pool, weights):
    net = Net()
    told = tensors(net)
    weights.adopt([net])
    before = net.large.data_ptr()
    copied(weights)
    weights.park()
    weights.park()
    assert weights.parked and weights.held == 16 * MIB
    assert weights.wake(0) == 0
    same(net, told)
    weights.park()
    cache = make(pool, context=weights.lease.context)
    slots = load(cache, 8, pool)  # 32 MiB
    assert weights.held < 16 * MIB
    came = []
    with pytest.raises(OutOfMemory, match="lacks") as short:
        weights.wake(0, lambda: came.append(weights.held))
    assert weights.parked and short.value.missing > 0 and not came
    free(cache, slots)
    assert 0 < weights.wake(10, lambda: came.append(weights.held)) < 16 * MIB  # some stayed
    assert came == [16 * MIB]  # once
    same(net, told)
    assert net.large.data_ptr() == before
    cache.close()


@pytest.mark.parametrize("change", ["word", "rows", "experts", "signs", "level 2"])
def test_weights_that_changed_in_place_come_back_as_they_are(pool, weights, change):
    net = Net()
    weights.adopt([net])
    copied(weights)
    weights.park()
    weights.wake(0)
    with torch.no_grad():
        if change == "word":
            net.embed[7, 9] += 1
        elif change == "rows":  # as experts that change places: the sum of all words is as before
            net.embed[:750] = torch.cat([net.embed[375:750], net.embed[:375]])
        elif change == "experts":  # linear sums of these are equal
            net.experts[:3] = torch.tensor([2, 1, 3])
        elif change == "signs":
            net.norm[[3, 700]] *= -1
        else:
            net.norm += 1
    told = tensors(net)
    weights.park(keep=change != "level 2")
    weights.lease.trim()
    assert weights.held == 0
    came_back = weights.wake(0)
    if change == "level 2":
        assert came_back == 0  # whoever discards them loads them again
        with torch.no_grad():
            for name, t in [*net.named_parameters(), *net.named_buffers()]:
                t.copy_(told[name])
        weights.park()
        weights.lease.trim()
        assert weights.wake(0) == 16 * MIB
    else:
        assert came_back == 16 * MIB
    same(net, told)


def test_weights_are_copied_while_requests_run_but_not_at_once(pool, weights, monkeypatch):
    seen, copies, reserve = [], [], HostCopy.reserve
    monkeypatch.setattr("pyvmem.sleep.weights.BUSY", 0.1)
    monkeypatch.setattr("pyvmem.sleep.weights.PORTION", 1)
    monkeypatch.setattr(HostCopy, "reserve", lambda copy, at, size: copies.append(at) or reserve(copy, at, size))
    net = Net()
    weights.adopt([net])
    copied(weights, lambda: seen.append(len(copies)) or True)
    assert len(copies) == weights.lease.stats().segments == len(set(seen))  # it asked before each


class Host:
    """Host memory that the thread of `weights` gets when a test says so, or is refused."""

    def __init__(self, monkeypatch):
        self._given, self._asked, self.full = threading.Semaphore(0), threading.Semaphore(0), False
        reserve = HostCopy.reserve

        def wait_and_reserve(copy, address, size):
            self._asked.release()
            assert self._given.acquire(timeout=60)
            if self.full:
                raise RuntimeError("out of host memory")
            reserve(copy, address, size)

        monkeypatch.setattr(HostCopy, "reserve", wait_and_reserve)

    def asked(self):
        """The thread asks for the memory of its next segment: it is done with those before."""
        assert self._asked.acquire(timeout=60)

    def give(self, n=1):
        self._given.release(n)

    def take_back(self):
        while self._given.acquire(blocking=False):
            pass

    def give_one_and_wait(self, thread):
        """Until `thread` asks for the next, or has nothing left to ask for."""
        if self._asks(thread):
            self.give()
            if self._asks(thread):
                self._asked.release()  # for whoever waits for it next

    def _asks(self, thread):
        while thread.is_alive():
            if self._asked.acquire(timeout=0.01):
                return True
        return self._asked.acquire(blocking=False)


@pytest.fixture
def host(monkeypatch):
    return Host(monkeypatch)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_sleep_begins_before_the_copy_and_each_segment_goes_once_it_has_one(pool, weights, host, done):
    net = Net()
    weights.adopt([net])
    weights.copy_behind()
    host.asked()
    for _ in range(done):
        host.give()
        host.asked()
    with torch.no_grad():
        net.large += 1
    told, sizes = tensors(net), list(weights.lease._segments().values())
    weights.park()
    weights.lease.trim()
    assert weights.parked and weights.held == sum(sizes[done:])
    assert weights.wake(0) == sum(sizes[:done])
    same(net, told)
    weights.park()
    host.give(3)
    wait()
    weights.lease.trim()
    assert weights.held == 0
    assert weights.wake(0) == 16 * MIB
    same(net, told)


def test_without_host_memory_the_weights_stay_and_the_next_sleep_tries_again(pool, weights, host):
    net = Net()
    told = tensors(net)
    weights.adopt([net])
    for host.full in (True, False):
        weights.park()
        host.give(3)
        wait()
        weights.lease.trim()
        assert weights.parked and weights.held == (16 * MIB if host.full else 0)
        host.take_back()
        assert weights.wake(0) == (0 if host.full else 16 * MIB)
        same(net, told)


def test_a_model_that_sleeps_is_copied_when_the_host_has_memory_again(pool, weights, host, monkeypatch, caplog):
    monkeypatch.setattr("pyvmem.sleep.weights.AGAIN", 0)
    net = Net()
    told = tensors(net)
    weights.adopt([net])
    host.full = True
    host.give(9)
    weights.park()
    for _ in range(3):
        wait()
        weights.lease.trim()
        assert weights.parked and weights.held == 16 * MIB
        weights.copy_again()
    wait()
    assert len([r for r in caplog.records if "have no copy in host memory" in r.message]) == 1
    host.full = False
    weights.copy_again()
    wait()
    weights.lease.trim()
    weights.copy_again()
    assert not copying() and weights.held == 0 and weights.wake(0) == 16 * MIB
    same(net, told)


def test_weights_that_are_discarded_are_not_read_for_the_copy(pool, weights, host):
    net = Net()
    weights.adopt([net])
    weights.copy_behind()
    host.asked()
    weights.park(keep=False)
    weights.lease.trim()
    host.give(3)
    wait()
    assert weights.held == 0
    assert weights.wake(0) == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_history_of_sleeps_while_the_copy_is_made_keeps_the_weights(pool, weights, host, seed):
    draw, net = random.Random(seed), Net()
    weights.adopt([net])
    told, cache = tensors(net), make(pool, context=weights.lease.context)
    discarded = False

    def wake():
        weights.wake(1)
        if discarded:  # whoever discards them loads them again
            with torch.no_grad():
                for name, t in [*net.named_parameters(), *net.named_buffers()]:
                    t.copy_(told[name])
        same(net, told)

    for _ in range(60):
        what = draw.choice(["copy", "refuse", "sleep", "discard", "wake", "change", "take", "trim"])
        if what in ("copy", "refuse"):
            host.full = what == "refuse"
            if thread := copying():
                host.give_one_and_wait(thread)
            else:
                weights.copy_behind()
        elif what in ("sleep", "discard") and not weights.parked:
            discarded = what == "discard"
            weights.park(keep=not discarded)
        elif what == "wake":
            wake()
            discarded = False
        elif what == "change" and not weights.parked:
            with torch.no_grad():
                net.large[draw.randrange(1024), draw.randrange(2048)] += 1
            told = tensors(net)
        elif what == "take" and weights.parked:
            free(cache, load(cache, draw.randrange(1, 9), pool))
        elif what == "trim":
            weights.lease.trim()
    host.full = False
    host.give(100)
    wake()
    cache.close()
    wait()


def test_a_copy_has_its_segments_across_arenas():
    copy = HostCopy(False)
    sizes = {1: ARENA - 2 * MIB, 2: 6 * MIB, 3: 2 * MIB}
    for address, size in sizes.items():
        copy.reserve(address, size)
        for part, begin, end in copy.parts(address, size):
            part[::MIB] = address
            assert len(part) == end - begin
    assert [(b, e) for _, b, e in copy.parts(2, sizes[2])] == [(0, 2 * MIB), (2 * MIB, 6 * MIB)]
    for address, size in sizes.items():
        found = list(copy.parts(address, size))
        assert sum(end - begin for _, begin, end in found) == size
        assert all(int(part[0]) == address for part, _, _ in found)


def test_a_full_device_has_no_memory_for_sums_and_loses_nothing(pool, weights, monkeypatch):
    """All is copied then, as nobody knows what has changed."""
    net = Net()
    weights.adopt([net])

    def full(self, memory):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Sums, "__call__", full)
    for _ in range(2):
        with torch.no_grad():
            net.norm += 1
        told = tensors(net)
        weights.park()
        wait()
        weights.lease.trim()
        assert weights.held == 0
        assert weights.wake(0) == 16 * MIB
        same(net, told)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_what_a_stream_still_copies_is_there_for_its_kernels_and_for_the_next_sleep(
    pool, context, device, alone, queued
):
    """The stream is late: the copies have not begun when a wake that queues them returns."""
    weights, net = Weights(pool, context), Net()
    weights.is_alone = lambda: alone
    told = tensors(net)
    with weights.loading():
        if device == "cpu":
            weights.adopt([net])
        else:
            net.to(device)
    copied(weights)
    for _ in range(4):
        weights.park()
        weights.lease.trim()
        assert weights.held == 0
        if device != "cpu":
            torch.cuda._sleep(50_000_000)
        assert weights.wake(1, queued=queued) == weights.bytes > 0
    same(net.to("cpu"), told)
    del net
    weights.close()


def portions(weights, monkeypatch, at=lambda number: None):
    """Have memory come in pieces of 2 MiB; at(n) is called before the n-th. Returns what was there at each copy."""
    unpark, numbers, held = weights.lease._unpark_segments, itertools.count(), []
    memory = weights._memory

    def unpark_some(*args):
        at(next(numbers))
        return unpark(*args)

    monkeypatch.setattr("pyvmem.sleep.weights.AT_ONCE", 2 * MIB)
    monkeypatch.setattr(weights.lease, "_unpark_segments", unpark_some)
    monkeypatch.setattr(weights, "_memory", lambda *segment: held.append(weights.held) or memory(*segment))
    return held


def sleeping(weights):
    """Weights whose memory has gone: (the model, its tensors)."""
    net = Net()
    told = tensors(net)
    weights.adopt([net])
    copied(weights)
    weights.park()
    weights.lease.trim()
    return net, told


def test_copies_begin_while_memory_still_comes(weights, monkeypatch):
    slept, held, came = sleeping(weights), portions(weights, monkeypatch), []
    assert weights.wake(0, lambda: came.append(weights.held)) == 16 * MIB
    assert came == held[:1] and 0 < held[0] < held[-1] == 16 * MIB
    same(*slept)


@pytest.mark.parametrize("ahead", [True, False])
def test_an_interrupt_when_all_is_claimed_loses_no_contents(weights, monkeypatch, ahead):
    slept = sleeping(weights)
    monkeypatch.setattr("pyvmem.sleep.weights.AHEAD", 6 * MIB)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.wake(0, interrupted, False, ahead)
    assert weights.parked and weights.wake(0) == 16 * MIB
    same(*slept)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("comes", [True, False])
def test_copies_begin_before_a_neighbour_has_given_the_rest_if_it_will(pool, weights, monkeypatch, comes, ahead):
    slept, cache, came = sleeping(weights), make(pool, context=weights.lease.context), []
    slots = load(cache, 8, pool)  # 32 of 40 MiB
    with monkeypatch.context() as patch:
        held = portions(weights, patch)
        patch.setattr("pyvmem.sleep.weights.AHEAD", 6 * MIB)
        with ThreadPoolExecutor() as thread:
            wait = 3600 if comes else 0.1
            wakes = thread.submit(weights.wake, wait, lambda: came.append(len(held)), False, ahead)
            until(lambda: held or not ahead)
            assert not came
            if comes:
                free(cache, slots)
            error = wakes.exception()
    assert (held != []) == (comes or ahead)
    if comes:
        assert error is None and len(came) == 1 and (came[0] > 0) == ahead
    else:
        assert isinstance(error, OutOfMemory) and not came and weights.parked
        assert 8 * MIB <= error.missing <= 16 * MIB
        other = make(pool, context=weights.lease.context)
        load(other, 2, pool)  # what it had taken is there for others
        other.close()
        cache.close()
        assert weights.wake(10) == 16 * MIB
    same(*slept)
    cache.close()


@pytest.mark.parametrize("kernel, alone", [(True, True), (True, False), (False, True)])
def test_on_a_gpu_copies_begin_meanwhile_by_a_kernel_and_else_when_all_memory_has_come(
    weights, monkeypatch, kernel, alone
):
    slept, held, by = sleeping(weights), portions(weights, monkeypatch), []

    class Copies:
        has_kernel = kernel

        def __call__(self, to, source, by_kernel):
            by.append(by_kernel)
            to.copy_(source)

    monkeypatch.setattr(weights, "_to_device", Copies())
    weights.is_alone = lambda: alone
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_gpu", True)
        patch.setattr(weights, "_synchronize", lambda: None)
        assert weights.wake(0) == 16 * MIB
    assert set(by) == {kernel and alone}
    assert (held[0] < 16 * MIB) == (kernel and alone)
    same(*slept)


def test_a_neighbour_that_grows_meanwhile_gets_nothing_that_a_wake_has_claimed(pool, weights, monkeypatch):
    slept, cache, slots = sleeping(weights), make(pool, context=weights.lease.context), []
    portions(weights, monkeypatch, lambda number: slots.extend(load(cache, 8, pool)) if number == 1 else None)
    assert weights.wake(0) == 16 * MIB
    assert 4 <= len(slots) <= 6  # of the 24 MiB beside it
    same(*slept)
    cache.close()


@pytest.mark.parametrize("fault", [OutOfMemory, VmemError])
@pytest.mark.parametrize("at, taken", [(1, False), (1, True), (2, True)])
def test_a_wake_that_fails_in_the_middle_undoes_what_came(pool, weights, monkeypatch, fault, at, taken):
    """Twice in a row; a neighbour may take the memory in between. What was copied into is not taken for whole."""
    slept, cache = sleeping(weights), make(pool, context=weights.lease.context)

    def fail(number):
        if number == at:
            raise fault(errno.ENOMEM, "in the middle")

    def nowhere(address, size):
        """No copy lands."""
        return torch.empty(size, dtype=torch.uint8)

    for _ in range(2):
        with monkeypatch.context() as patch:
            portions(weights, patch, fail)
            patch.setattr(weights, "_memory", nowhere)
            with pytest.raises(fault, match="in the middle"):
                weights.wake(10)
        assert weights.parked and 0 < weights.held < 16 * MIB
        if taken:
            slots = load(cache, 8, pool)
            assert len(slots) == 8  # 32 of 40 MiB: the claim has gone, too
            free(cache, slots)
    assert weights.wake(10) == 16 * MIB
    same(*slept)
    cache.close()
