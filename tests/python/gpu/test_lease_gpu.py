"""Leases on a GPU, with PyTorch's own allocator: `pytest tests/python/gpu/test_lease_gpu.py`.

SPDX-License-Identifier: MIT
"""

import gc
import os
import threading
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS: bit-equal results

import pytest
from conftest import BACKENDS

import pyvmem
from pyvmem import KVPool, OutOfMemory, torch_pool

torch = pytest.importorskip("torch")

GPU = [name for name in BACKENDS if name != "host"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
MIB, GIB = 1 << 20, 1 << 30
TOKENS = 4096


@pytest.fixture(params=GPU)
def context(request):
    torch.zeros(1, device="cuda")
    with pyvmem.Context(request.param) as context:
        yield context
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def serving(pool, context, requests, slots=64):
    """A KV cache, and the slots of so many requests of 4,096 tokens (64 MiB each), whose rows say whose they are.

    The slots need not be the first ones: an allocation passes over one that the background thread is backing.
    """
    from pyvmem import KVCache

    cache = KVCache.for_model(8, 8, 64, slots, TOKENS, pool.budget, pool=pool, context=context, name=None)
    return cache, [start(cache, pool) for _ in range(requests)]


def start(cache, pool):
    slot = cache.alloc(TOKENS)
    lengths = [0] * cache.slots
    lengths[slot] = TOKENS
    while not cache.step(lengths):
        assert cache.shortage.coming_pages and pool.wait(cache, 60) != "refused", cache.shortage
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values)):
        k[slot] = slot + 1 + layer
        v[slot] = slot + 2 + layer
    return slot


def intact(cache, slots):
    return all(
        bool((k[slot] == slot + 1 + layer).all()) and bool((v[slot] == slot + 2 + layer).all())
        for slot in slots
        for layer, (k, v) in enumerate(zip(cache.keys, cache.values))
    )


class Peak:
    """The most device memory in use, as the driver counts it, sampled while a block runs."""

    def __enter__(self):
        self.most, self.stop = 0, threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        while not self.stop.is_set():
            free, total = torch.cuda.mem_get_info()
            self.most = max(self.most, total - free)
            time.sleep(0.001)

    def __exit__(self, *error):
        self.stop.set()
        self.thread.join()


def default_segments():
    """Bytes that PyTorch's default pool has."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0))


def test_the_names_of_this_torch(context):
    from pyvmem.lease import TorchPools

    torch_pools = TorchPools(0)
    torch_pools.check()
    assert torch_pools.routes_all_threads, torch.__version__


@pytest.mark.parametrize("threads", ["all", "this"])
def test_twenty_steps_are_bit_equal_beside_a_serving_cache(context, threads):
    """The losses of PyTorch's own allocator, every thread's allocations in the lease, and both within one budget."""
    from benchmarks.generate import llama
    from benchmarks.lease import SHAPE_1B, training_step

    torch.use_deterministic_algorithms(True)
    try:
        ids = [torch.randint(0, 32000, (2, 513), device="cuda", generator=generator(i)) for i in range(20)]

        def losses(block):
            model = llama(torch.device("cuda"), **dict(SHAPE_1B, num_hidden_layers=4)).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            training_step(model, optimizer, ids[0])  # the optimizer's state, and cuBLAS's workspaces, stay
            found = []
            for batch in ids:
                with block:
                    loss = training_step(model, optimizer, batch)
                    found.append(loss.item())
                    del loss
            return found

        class Nothing:
            def __enter__(self):
                pass

            def __exit__(self, *error):
                pass

        want = losses(Nothing())
        gc.collect()
        torch.cuda.empty_cache()
        with KVPool(6 * GIB) as pool:
            cache, slots = serving(pool, context, 60)
            running, ended = slots[:20], slots[20:]
            lease = torch_pool(pool, context=context, threads=threads)
            for slot in ended:
                cache.free(slot)
            with Peak() as peak:
                base = torch.cuda.mem_get_info()
                got = losses(lease)
            assert got == want
            assert lease.stats().refused == 0 and lease.stats().allocs > 10
            assert sum(member.has for member in pool.members()) <= pool.budget
            assert intact(cache, running)
            print(f"peak {peak.most / GIB:.2f} GiB in use, {(base[1] - base[0]) / GIB:.2f} before the steps")
            lease.close()
            cache.close()
    finally:
        torch.use_deterministic_algorithms(False)


def generator(seed):
    return torch.Generator("cuda").manual_seed(seed)


def test_both_stay_within_the_budget_by_the_drivers_count(context):
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests use the GPU at the same time, and the driver counts them, too")
    budget = 4 * GIB
    torch.cuda.synchronize()
    with KVPool(budget) as pool:
        cache, running = serving(pool, context, 1)
        lease = torch_pool(pool, context=context)
        with lease:
            torch.ones(1 << 20, device="cuda").sum().item()  # kernels are loaded
        free, total = torch.cuda.mem_get_info()
        base = total - free - sum(member.held for member in pool.members())
        with Peak() as peak:
            for turn in range(10):
                slots = [start(cache, pool) for _ in range(30 if turn % 2 else 50)]
                for slot in slots:
                    cache.free(slot)
                with lease:
                    tensors = [torch.ones(32 * MIB, device="cuda") for _ in range(20 if turn % 2 else 28)]
                    assert all(bool((x == 1).all()) for x in tensors)
                    del tensors
        # Page tables, and what a fill and a comparison need, come on top.
        print(f"peak {(peak.most - base) / GIB:.3f} of {budget / GIB} GiB")
        assert peak.most - base <= budget + 256 * MIB
        assert intact(cache, running)
        lease.close()
        cache.close()


def test_100_cycles_keep_every_row_of_the_cache(context):
    with KVPool(4 * GIB) as pool:
        cache, running = serving(pool, context, 16)
        lease = torch_pool(pool, context=context)
        addresses, segments = set(), set()
        for turn in range(100):
            with lease:
                x = torch.full((256 * MIB,), turn, dtype=torch.int32, device="cuda")  # 1 GiB
                small = torch.full((1000,), turn, device="cuda")
                assert bool((x == turn).all()) and bool((small == turn).all())
                addresses.add(x.data_ptr())
                del x, small
            if turn % 2:
                lease.trim()
                assert lease.stats().held_bytes == 0
            segments.add(lease.stats().allocs)
            if turn % 10 == 9:
                assert intact(cache, running)
        stats = lease.stats()
        assert len(addresses) == 1 and len(segments) == 1 and stats.parks == 100 * stats.allocs
        lease.close()
        assert intact(cache, running)
        cache.close()


@pytest.mark.parametrize("fine", [False, True])
def test_kept_pages_are_taken_and_come_back(context, fine):
    with KVPool(4 * GIB) as pool:
        cache, slots = serving(pool, context, 56)  # 3.5 GiB
        running, ended = slots[:16], slots[16:]
        lease = torch_pool(pool, context=context, fine=fine)
        for slot in ended:
            cache.free(slot)
        with lease:
            x = [torch.full((64 * MIB,), i, dtype=torch.int32, device="cuda") for i in range(8)]  # 2 GiB
            assert all(bool((x[i] == i).all()) for i in range(8))
            with pytest.raises(torch.cuda.OutOfMemoryError):
                torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
            assert lease.shortage.reason == "budget"
            del x
        assert intact(cache, running)
        more = [start(cache, pool) for _ in range(40)]
        with pytest.raises(OutOfMemory) as raised:
            lease.__enter__()
        assert raised.value.shortage.missing_pages > 0
        for slot in more:
            cache.free(slot)
        with lease:
            assert lease.stats().parked_segments == 0
        assert intact(cache, running)
        lease.close()
        cache.close()


def test_what_lives_stays(context):
    with KVPool(2 * GIB) as pool:
        lease = torch_pool(pool, context=context)
        with lease:
            keep = torch.arange(10_000_000, device="cuda")
            gone = torch.ones(100 * MIB, device="cuda")
            del gone
        lease.trim()
        assert 76 * MIB <= lease.stats().held_bytes < 100 * MIB  # 80 MB
        with lease:
            again = torch.zeros(100 * MIB, device="cuda")
            del again
        assert bool((keep == torch.arange(10_000_000, device="cuda")).all())
        lease.reset()
        assert bool((keep[-5:].cpu() == torch.arange(9_999_995, 10_000_000)).all())
        del lease
        gc.collect()
        assert len(pool.members()) == 1  # the tensor holds its segment
        assert int(keep[123]) == 123
        del keep
        torch.cuda.empty_cache()
        assert pool.members() == []


def test_a_captured_graph(context):
    with KVPool(2 * GIB) as pool:
        lease = torch_pool(pool, context=context)
        graph = torch.cuda.CUDAGraph()
        with lease:
            x = torch.ones(10 * MIB, device="cuda")
            torch.cuda.synchronize()
            segments = lease.stats().segments
            with lease.graph(graph):
                y = x * 2
                z = y.cumsum(0)  # y is the graph's own from here on
                del y
            assert lease.stats().segments > segments  # the capture allocated in the lease
            noise = torch.randn(20 * MIB, device="cuda")
            del noise
        for turn in range(10):
            x.fill_(turn)
            graph.replay()  # outside a block
            torch.cuda.synchronize()
            assert float(z[999]) == 2000 * turn
            with lease:
                noise = [torch.randn(30 * MIB, device="cuda") for _ in range(4)]
                graph.replay()
                assert float(z[99]) == 200 * turn
                del noise
        del z
        graph.reset()
        del graph
        with lease:
            pass
        lease.trim()
        assert lease.stats().held_bytes <= 64 * MIB  # x lives
        lease.close()


def test_record_stream(context):
    """A block that another stream still reads when its tensor dies is neither reused nor parked too early."""
    with KVPool(2 * GIB) as pool:
        lease = torch_pool(pool, context=context)
        side = torch.cuda.Stream()
        out = torch.empty(16 * MIB, device="cuda")
        for turn in range(5):
            with lease:
                x = torch.full((16 * MIB,), float(turn), device="cuda")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)
                    out.copy_(x)
                x.record_stream(side)
                del x
                again = torch.full((16 * MIB,), -1.0, device="cuda")
                del again
            lease.trim()
            assert lease.stats().held_bytes == 0
            torch.cuda.synchronize()
            assert bool((out == turn).all())
        lease.close()


def test_several_streams(context):
    with KVPool(2 * GIB) as pool:
        lease = torch_pool(pool, context=context)
        streams = [torch.cuda.Stream() for _ in range(4)]
        for turn in range(5):
            with lease:
                found = []
                for i, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        x = torch.full((12 * MIB,), turn + i, dtype=torch.int32, device="cuda")
                        found.append((x == turn + i).all())
                torch.cuda.synchronize()
                assert all(bool(f) for f in found)
                del found, x
            lease.trim()
            assert lease.stats().held_bytes == 0
        assert lease.stats().allocs >= 4
        lease.close()


def test_allocations_of_backwards_threads_are_in_the_lease(context):
    with KVPool(2 * GIB) as pool:
        lease = torch_pool(pool, context=context)
        w = torch.randn(2048, 2048, device="cuda", requires_grad=True)
        x = torch.randn(4096, 2048, device="cuda")
        ((x @ w).relu() @ w).sum().backward()
        w.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = default_segments()
        with lease:
            ((x @ w).relu() @ w).sum().backward()
            w.grad = None
        assert default_segments() - before <= 2 * MIB
        lease.close()


def test_out_of_memory_leaves_all_usable(context):
    with KVPool(1 * GIB) as pool:
        lease = torch_pool(pool, context=context)
        for _ in range(3):
            with pytest.raises(torch.cuda.OutOfMemoryError), lease:
                held = []
                while True:
                    held.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))
            del held
            with lease:
                x = torch.ones(1000, device="cuda")
                assert float(x.sum()) == 1000
                del x
        lease.reset()
        with lease:
            x = torch.ones(200 * MIB, dtype=torch.uint8, device="cuda")
            del x
        lease.trim()
        assert lease.stats().held_bytes == 0
        lease.close()
