"""Leases without a GPU: the Python side over a stand-in for PyTorch's allocator, with the host's memory behind it.

SPDX-License-Identifier: MIT
"""

import ctypes
import gc
import random
import threading

import pytest
import torch
from caching_allocator import MIB, FakeCuda, FakeGraph, OutOfMemoryError, words
from kv_pools import free, load, make

import pyvmem
import pyvmem.lease
from pyvmem import KVPool, OutOfMemory, VmemError, torch_pool
from pyvmem._ffi import lib
from pyvmem.lease import TorchPools, Lease


def lease_of(pool, most=64 * MIB, *, cuda=None, context=None, fine=True, threads="all"):
    """As torch_pool makes it, on the host, where PyTorch has no pools."""
    cuda = cuda or FakeCuda()
    context = context or pool._context(0) or pyvmem.Context("host")
    page_size = 64 << 10 if fine else 2 * MIB
    options = dict(name="torch", page_size=page_size, most=most, threads=threads, wait=60.0, alloc_wait=60.0)
    return Lease(pool, context, cuda, **options), cuda


@pytest.fixture
def pool():
    with KVPool(budget=64 * MIB) as pool:
        yield pool
        gc.collect()
        assert pool.members() == []


def resident(lease):
    return lease.stats().held_bytes


def test_addresses_stay_and_pages_go(pool):
    lease, cuda = lease_of(pool)
    assert "parked" in repr(lease)
    with lease:
        assert "in use" in repr(lease)
        a, b = cuda.alloc(100), cuda.alloc(30 * MIB)
        words(a)[:2] = 1, 2
        words(b)[-1] = 5
        assert resident(lease) == lease.stats().bytes == 32 * MIB
        cuda.free(b)
    assert resident(lease) == 32 * MIB  # nobody has asked
    with lease:
        pass
    lease.trim()
    assert resident(lease) == 2 * MIB  # the segment with the living block
    assert lease.stats().bytes == 32 * MIB and lease.allocated_bytes == 512
    assert list(words(a)[:2]) == [1, 2]
    with lease:
        assert resident(lease) == 32 * MIB
        again = cuda.alloc(30 * MIB)
        assert again[1].addr == b[1].addr and lease.stats().allocs == 2  # PyTorch's free list is still right
        words(again)[-1] = 6
        cuda.free(again)
        cuda.free(a)
    assert lease.stats().parked_segments == 2
    lease.trim()
    assert resident(lease) == 0
    lease.close()
    assert lease.closed and "closed" in repr(lease)


def test_only_spare_pages_of_the_cache_are_taken(pool):
    cache = make(pool)
    slots = load(cache, 8)
    free(cache, slots[4:])  # 16 MiB are kept
    lease, cuda = lease_of(pool)
    assert lease.context is cache.context
    with lease:
        a = cuda.alloc(40 * MIB)  # 32 are free
        words(a)[-1] = 1
        with pytest.raises(OutOfMemoryError):
            cuda.alloc(20 * MIB)
        assert lease.shortage.reason == "budget" and lease.stats().refused == 1
        for slot in slots[:4]:
            assert (cache.keys[0][slot] == slot + 1).all()
        cuda.free(a)
    more = load(cache, 4, pool)  # what is parked goes back to the cache
    with pytest.raises(OutOfMemory, match="lacks .* MiB") as raised:
        lease.__enter__()
    assert raised.value.shortage.reason == "budget" and raised.value.shortage.missing_pages
    assert lease.stats().parked_segments == 1 and cuda.routes == []
    free(cache, more)
    with lease:
        again = cuda.alloc(40 * MIB)
        assert again[1].addr == a[1].addr
        cuda.free(again)
    for slot in slots[:4]:
        assert (cache.keys[0][slot] == slot + 1).all()
    lease.close()
    cache.close()


def test_a_lease_that_is_reset_begins_anew_where_memory_is_short(pool):
    cache = make(pool)
    lease, cuda = lease_of(pool)
    with lease:
        a, kept = cuda.alloc(40 * MIB), cuda.alloc(3 * MIB)
        words(kept)[0] = 9
        cuda.free(a)
    load(cache, 8, pool)
    try:
        lease.__enter__()
    except pyvmem.OutOfMemory as error:  # whose frames live on while it is handled
        assert "end a request, or call reset" in str(error)
        lease.reset()
    with lease:
        assert lease.stats().bytes == 20 * MIB  # the segment that lives
        b = cuda.alloc(100)
        assert words(kept)[0] == 9
        cuda.free(b)
    cuda.free(kept)
    assert lease.stats().bytes == 2 * MIB  # that of b
    lease.close()
    cache.close()


def test_reset_drops_what_is_not_alive(pool):
    lease, cuda = lease_of(pool)
    with lease:
        a, b = cuda.alloc(12 * MIB), cuda.alloc(14 * MIB)
        cuda.free(a)
        with pytest.raises(RuntimeError, match="within a with block"):
            lease.reset()
        with pytest.raises(RuntimeError, match="within a with block"):
            lease.close()
    lease.reset()
    assert lease.stats().bytes == 14 * MIB and lease.allocated_bytes == 0  # b is of the old pool
    cuda.free(b)
    assert lease.stats().bytes == 0
    with lease:
        cuda.free(cuda.alloc(12 * MIB))
    lease.close()


def test_a_block_that_waits_for_a_stream_is_idle(pool):
    """record_stream defers the end of a block beyond the lease's: all kernels have ended before pages go."""
    lease, cuda = lease_of(pool)
    with lease:
        a = cuda.alloc(12 * MIB)
        cuda.free(a, waits=True)
        b = cuda.alloc(12 * MIB, stream=7)
        assert b[1].addr != a[1].addr
        cuda.free(b)
    assert lease.stats().parked_segments == 2
    lease.trim()
    assert resident(lease) == 0
    with lease:
        again = cuda.alloc(12 * MIB, stream=7)
        assert again[1].addr == b[1].addr
        cuda.free(again)
    lease.close()


def test_graphs_keep_their_segments(pool):
    lease, cuda = lease_of(pool)
    graph = FakeGraph()
    with pytest.raises(RuntimeError, match="within a with block"), lease.graph(graph):
        pass
    with lease:
        x = cuda.alloc(2 * MIB)
        with lease.graph(graph):
            inside = cuda.alloc(12 * MIB)
            cuda.free(inside)
        eager = cuda.alloc(3 * MIB)
        assert inside[0] is not x[0] and inside[0] is not eager[0]
        words(inside)[0] = 77
        cuda.free(eager)
    assert words(inside)[0] == 77  # a replay outside finds what the capture left
    assert lease.stats().parked_segments == 0
    with lease:
        pass
    assert words(inside)[0] == 77
    graph.reset()
    with lease:
        cuda.free(x)
    assert lease.stats().parked_segments == lease.stats().segments
    with lease, lease.graph(graph):
        again = cuda.alloc(12 * MIB)
        assert again[1].addr == inside[1].addr
        cuda.free(again)
    graph.reset()
    lease.close()


def test_a_capture_that_fails_leaves_the_block_usable(pool):
    lease, cuda = lease_of(pool)
    with lease:
        with pytest.raises(ZeroDivisionError), lease.graph(FakeGraph()):
            1 / 0
        a = cuda.alloc(100)
        assert a is not None
        cuda.free(a)
    assert cuda.routes == []
    lease.close()


def test_threads(pool):
    """All threads allocate in the lease, as backward needs, or only the one that entered."""
    for threads, found in (("all", True), ("this", False)):
        lease, cuda = lease_of(pool, threads=threads)
        seen = []

        def backward(cuda=cuda, seen=seen):
            seen.append(cuda.alloc(100))

        with lease:
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            if seen[0]:
                cuda.free(seen[0])
        assert (seen[0] is not None) is found
        lease.close()


def test_dropping_a_lease_that_is_open_waits_for_its_blocks(pool):
    lease, cuda = lease_of(pool)
    with lease:
        a = cuda.alloc(12 * MIB)
        words(a)[3] = 4
    del lease
    gc.collect()
    assert len(pool.members()) == 1 and words(a)[3] == 4
    cuda.free(a)
    assert pool.members() == []


def test_a_pool_that_ends_beside_another_ones_block_waits(pool):
    """PyTorch ends the process if a MemPool ends while allocations are routed."""
    lease, cuda = lease_of(pool)
    other, _ = lease_of(pool, cuda=cuda)
    with other:
        cuda.free(cuda.alloc(12 * MIB))
    with lease:
        del other
        gc.collect()
        assert len(pool.members()) == 2
    assert len(pool.members()) == 1
    lease.close()


def test_misuse(pool):
    lease, cuda = lease_of(pool)
    with lease, pytest.raises(RuntimeError, match="do not nest"), lease:
        pass
    assert cuda.routes == []
    lease.close()
    lease.close()
    for call in (lease.__enter__, lease.reset, lease.stats, lease.trim, lambda: lease.shortage):
        with pytest.raises(ValueError, match="the lease is closed"):
            call()
    with pytest.raises(TypeError, match="pool must be a KVPool"):
        torch_pool(1)
    for arguments, error in (
        ({"most": 0}, "most 0"),
        ({"most": -1}, "most -1"),
        ({"wait": -1}, "wait"),
        ({"wait": float("nan")}, "wait"),
        ({"threads": 3}, "threads"),
    ):
        with pytest.raises(ValueError, match=error):
            torch_pool(pool, **arguments)
    for arguments, error in (
        ({"fine": 1}, "fine"),
        ({"context": 3}, "context"),
        ({"name": None}, "name"),
        ({"most": 1.5}, "most"),
    ):
        with pytest.raises(TypeError, match=error):
            torch_pool(pool, **arguments)
    with pytest.raises(pyvmem.InvalidArgument, match="most 5 is less than a page"):
        lease_of(pool, 5)


def test_cpu_memory_is_refused_and_says_why(pool):
    with pyvmem.Context("host") as context, pytest.raises(VmemError, match="only for CUDA") as raised:
        torch_pool(pool, context=context)
    assert raised.value.errno == pyvmem.lease.errno.EOPNOTSUPP


def test_sixteen_leases(pool):
    leases = [lease_of(pool)[0] for _ in range(16)]
    with pytest.raises(VmemError, match="all 16 places"):
        lease_of(pool)
    for lease in leases:
        lease.close()


def test_beside_a_parked_segment_others_go_on(pool):
    """A thread that frees, while another one enters and leaves, loses nothing."""
    lease, cuda = lease_of(pool)
    stop = threading.Event()
    errors = []

    def enter_and_leave():
        try:
            while not stop.is_set():
                with lease:
                    pass
        except BaseException as e:
            errors.append(e)

    with lease:
        blocks = [cuda.alloc(11 * MIB) for _ in range(3)]
        for i, b in enumerate(blocks):
            words(b)[0] = i + 1
    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    for i, b in enumerate(blocks):
        assert words(b)[0] == i + 1
    stop.set()
    thread.join()
    assert errors == []
    for b in blocks:
        cuda.free(b)
    lease.close()


# ---- a training step, recorded --------------------------------------------------------------------------------------


def recorded_step():
    """Allocations and frees of a small model's training step: [(address, bytes)], negative bytes for a free."""
    model = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 32, 64)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    found = []

    def walk(events):
        for event in events:
            if event.name == "[memory]":
                fields = event.extra_fields
                found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
            walk(event.children)

    walk(profile.profiler.kineto_results.experimental_event_tree())
    return [(ptr, size) for _, ptr, size in sorted(found)]


def test_a_recorded_training_step_is_replayed():
    """Every block keeps its contents while it lives, whatever is parked in between, beside a cache that serves."""
    trace = recorded_step()
    assert len(trace) > 300 and sum(size > 0 for _, size in trace) > 100
    pool = KVPool(budget=256 * MIB)
    cache = make(pool)
    slots = load(cache, 4, pool)
    lease, cuda = lease_of(pool, 256 * MIB)
    draw = random.Random(3)
    peak = 0
    for turn in range(20):
        live = {}
        with lease:
            for ptr, size in trace:
                if size > 0 and ptr not in live:
                    at = cuda.alloc(size * 16, stream=draw.randrange(2))
                    word = draw.getrandbits(60)
                    words(at, 1)[0] = word
                    ctypes.c_uint64.from_address(at[1].addr + at[1].size - 8).value = word
                    live[ptr] = at, word
                elif size < 0 and ptr in live:
                    at, word = live.pop(ptr)
                    assert words(at, 1)[0] == word
                    assert ctypes.c_uint64.from_address(at[1].addr + at[1].size - 8).value == word
                    cuda.free(at, waits=draw.random() < 0.02)
            peak = max(peak, sum(m.has for m in pool.members()))
            for at, _ in live.values():
                cuda.free(at)
        if turn % 2:
            lease.trim()
            assert resident(lease) == 0
        if turn % 10 == 0:
            more = load(cache, 2, pool)
            free(cache, more)
        for slot in slots:
            assert (cache.keys[0][slot] == slot + 1).all()
    stats = lease.stats()
    assert stats.parks == stats.unparks + stats.parked_segments > 60 and stats.refused == 0
    assert peak <= pool.budget
    lease.close()
    cache.close()
    assert pool.members() == []
    pool.close()


# ---- the calls of PyTorch -------------------------------------------------------------------------------------------


def test_doors_call_pytorch_by_the_names_it_has(monkeypatch):
    """The calls that a lease makes of PyTorch, with torch.cuda recorded."""
    calls = []

    class MemPool:
        id = (0, 5)

        def __init__(self, allocator):
            calls.append(("MemPool", allocator))

        def use_count(self):
            return 2

        def snapshot(self, include_traces=True):
            calls.append(("snapshot", include_traces))
            mine = {"device": 1, "segment_pool_id": (0, 5), "address": 4096, "blocks": []}
            return [mine, {**mine, "device": 0}, {**mine, "segment_pool_id": (0, 4)}]

    class Pluggable:
        def __init__(self, path, alloc, free):
            library = ctypes.CDLL(path)
            assert library[alloc] and library[free]
            calls.append((alloc, free))

        def allocator(self):
            return "allocator"

    def named(name):
        return lambda *arguments: calls.append((name, *arguments))

    monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable)
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    for name in ("_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, named(name), raising=False)
    torch_pools = TorchPools(1)
    with pytest.raises(VmemError, match="no CUDA device"):
        torch_pools.check()
    pair = lib.VMEM_TORCH_PLACES - 1  # which no other lease of this process gets to
    pool = torch_pools.new_pool(pair)
    torch_pools.new_pool(pair)
    made = f"vmem_torch_alloc_{pair}", f"vmem_torch_free_{pair}"
    assert calls == [made, ("MemPool", "allocator"), ("MemPool", "allocator")]
    calls.clear()
    assert [s["address"] for s in torch_pools.snapshot(pool)] == [4096] and calls == [("snapshot", False)]
    monkeypatch.setattr(MemPool, "snapshot", lambda self: [{"device": 1, "address": 8192, "blocks": []}])
    assert [s["address"] for s in torch_pools.snapshot(pool)] == [8192]  # as torch 2.11 has it
    assert torch_pools.is_shared(pool)
    calls.clear()
    assert torch_pools.routes_all_threads
    torch_pools.route(pool, True)()
    assert calls == [
        ("_cuda_beginAllocateToPool", 1, (0, 5)),
        ("_cuda_endAllocateToPool", 1, (0, 5)),
        ("_cuda_releasePool", 1, (0, 5)),
    ]


def test_without_the_private_names_one_thread_is_routed(monkeypatch):
    calls = []

    class Use:
        def __init__(self, pool, device):
            calls.append((pool, device))

        def __enter__(self):
            calls.append("entered")

        def __exit__(self, *error):
            calls.append("left")

    monkeypatch.delattr(torch._C, "_cuda_beginAllocateToPool", raising=False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", Use)
    torch_pools = TorchPools(0)
    assert not torch_pools.routes_all_threads
    before = torch.autograd.is_multithreading_enabled()
    end = torch_pools.route("pool", False)
    assert not torch.autograd.is_multithreading_enabled()
    end()
    assert torch.autograd.is_multithreading_enabled() == before
    assert calls == [("pool", 0), "entered", "left"]


def test_the_private_names_of_this_torch():
    """torch.cuda's Python sources still use what a lease calls; a CPU build has no binding to call."""
    source = open(torch.cuda.memory.__file__).read()
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool", "class MemPool", "def use_count", "def use_mem_pool"):
        assert name in source
    stubs = open(
        torch._C.__path__[0] + "/__init__.pyi"
        if hasattr(torch._C, "__path__")
        else torch.__path__[0] + "/_C/__init__.pyi"
    ).read()
    assert "_cuda_beginAllocateToPool" in stubs
