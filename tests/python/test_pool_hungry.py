"""Memory that is given up is there for others: a hungry neighbour beside each member of a pool, in each way to give up.

SPDX-License-Identifier: MIT
"""

import gc
import math
import threading
import time

import pytest
import torch
from caching_allocator import FakeCuda
from hungry import Neighbour

from pyvmem import Context, KVCache, KVPool, TensorSpec
from pyvmem.blocks import BlockRange, Blocks
from pyvmem.kv.options import Spare
from pyvmem.kv.prefix import PrefixCache
from pyvmem.lease import Lease
from pyvmem.sleep.weights import Weights

from conftest import until

MIB = 1 << 20
PAGE = 64 << 10
POOL = 40 * MIB


@pytest.fixture
def pool():
    with KVPool(POOL) as pool:
        yield pool


@pytest.fixture(params=["one context", "two contexts"])
def neighbour(request, pool):
    """neighbour(context): made beside the member, in its context or in another."""
    made = []

    def build(context):
        made.append(Neighbour(pool, PAGE, context if request.param == "one context" else None))
        return made[-1]

    yield build
    for each in made:
        each.close()


# ---- KV caches: (how they give up, bytes that they may keep) --------------------------------------------------------

TOKENS = 1024  # a request: 4 MiB
SLOTS = 8


def filled(pool, **options):
    """A cache whose eight requests have 32 MiB, and the lengths of them."""
    cache = KVCache.for_model(2, 4, 128, SLOTS, TOKENS, POOL, dtype=torch.bfloat16, backend="host", page_size=PAGE,
                              pool=pool, idle_seconds=math.inf, **options)  # fmt: skip
    for _ in range(SLOTS):
        cache.alloc(TOKENS)
    assert cache.step([TOKENS] * SLOTS)
    return cache


def free(cache):
    for slot in range(SLOTS):
        cache.free(slot)


def begin_anew(cache):
    """As a batch that is over: each slot is free, and taken again for the next one."""
    for slot in range(SLOTS):
        cache.free(slot)
        cache.alloc(slot=slot)


def begin_anew_and_step(cache):
    begin_anew(cache)
    assert cache.step([0] * SLOTS)


def free_behind_a_fence(cache):
    for slot in range(SLOTS):
        cache.free(slot, after=cache.last_step)
    cache.retire()


def truncate(cache):
    for slot in range(SLOTS):
        assert cache.truncate(slot, 0)


def swap_out(cache):
    for slot in range(SLOTS):
        cache.swap_out(slot)


def drop_a_prefix(cache):
    run = cache.share(0, 512)
    free(cache)
    cache.drop(run)


def clear_prefixes(cache):
    prefixes = PrefixCache(cache, 128)
    prefixes.add(0, [bytes([n]) * 8 for n in range(8)])
    free(cache)
    prefixes.clear()


def leave_prefixes_that_may_go(cache):
    prefixes = PrefixCache(cache, 128)
    prefixes.add(0, [bytes([n]) * 8 for n in range(8)])
    free(cache)


def reclaim(cache):
    free(cache)
    cache.reclaim()


def close(cache):
    cache.close()


WAYS = [free, begin_anew, begin_anew_and_step, free_behind_a_fence, truncate, swap_out, drop_a_prefix, clear_prefixes,
        leave_prefixes_that_may_go, reclaim, close]  # fmt: skip


@pytest.mark.parametrize("spare", ["generous", "thrifty"])
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_what_a_cache_gives_up_a_neighbour_gets(pool, neighbour, way, spare):
    options = {} if spare == "generous" else {"spare": Spare(generous=False, eager=False)}
    cache = filled(pool, **options)
    other = neighbour(cache.context)
    assert other.misses()  # the requests have the memory
    way(cache)
    assert other.misses() == 0
    cache.close()


@pytest.mark.parametrize("way", [free, begin_anew, swap_out], ids=["free", "begin_anew", "swap_out"])
def test_a_minimum_is_all_that_a_cache_keeps(pool, neighbour, way):
    cache = filled(pool, pool_min=8 * MIB)
    other = neighbour(cache.context)
    way(cache)
    assert other.misses(8 * MIB) == 0
    assert other.misses(8 * MIB - PAGE) == 1
    cache.close()


def test_a_cache_that_nobody_holds_any_more_leaves(pool, neighbour):
    other = neighbour(filled(pool).context)
    gc.collect()
    assert other.misses() == 0


# ---- numbered blocks ------------------------------------------------------------------------------------------------


def blocks_of(pool, context):
    blocks = Blocks(context.reserve(POOL), [BlockRange(0, PAGE, PAGE)], POOL // PAGE)
    blocks.join(pool, name="blocks")
    blocks.back(range(500))
    return blocks


def unback(blocks):
    blocks.unback(range(500))
    blocks.flush()


def unback_behind_a_fence(blocks):
    fence = blocks.fence()
    blocks.unback(range(500), after=fence)
    blocks.passed(fence)


def release_one_by_one(blocks):
    for block in range(500):
        blocks.unback(block)


@pytest.mark.parametrize("way", [unback, unback_behind_a_fence, release_one_by_one, close],
                         ids=["unback", "fence", "one by one", "close"])  # fmt: skip
def test_what_blocks_give_up_a_neighbour_gets(pool, neighbour, way):
    with Context("host") as context:
        blocks = blocks_of(pool, context)
        other = neighbour(context)
        assert other.misses()
        way(blocks)
        assert other.misses() == 0
        other.close()
        blocks.close()


# ---- PyTorch's memory -----------------------------------------------------------------------------------------------


def leave_and_trim(lease):
    lease.trim()


def leave_it_parked(lease):
    pass


def reset(lease):
    lease.reset()


@pytest.mark.parametrize("way", [leave_it_parked, leave_and_trim, reset, close],
                         ids=["parked", "trim", "reset", "close"])  # fmt: skip
def test_what_a_lease_gives_up_a_neighbour_gets(pool, neighbour, way):
    cuda, context = FakeCuda(), Context("host")
    lease = Lease(pool, context, cuda, name="torch", page_size=PAGE, most=POOL, wait=60.0, alloc_wait=60.0)
    other = neighbour(context)
    with lease:
        block = cuda.alloc(30 * MIB)
        assert other.misses()
        cuda.free(block)
    way(lease)
    assert other.misses() == 0
    lease.close()


@pytest.mark.parametrize("way", ["park", "close"])
def test_what_weights_give_up_a_neighbour_gets(pool, neighbour, way):
    context = Context("host")
    weights = Weights(pool, context)
    net = torch.nn.Linear(1024, 4096)
    weights.adopt([net])
    weights.copy_behind()
    until(lambda: weights.gives == weights.bytes)  # until there is a copy, parked weights stay
    other = neighbour(context)
    assert other.misses()
    getattr(weights, way)()
    del net
    gc.collect()
    assert other.misses() == 0
    weights.close()


# ---- who is served --------------------------------------------------------------------------------------------------


def test_a_minimum_is_served_beside_members_that_ask_again_and_again(pool):
    """They hold what they can get, give it back, and ask again at once."""
    over = threading.Event()
    served = [0] * 8

    def ask(number, pool_min):
        cache = KVCache([TensorSpec("row", (PAGE,), torch.uint8)], 1, 640, POOL, backend="host", page_size=PAGE,
                        pool=pool, pool_min=pool_min, name=None)  # fmt: skip
        while not over.is_set():
            slot = cache.alloc()
            while not cache.step([128]) and not over.is_set():  # a fifth of the pool
                pool.wait(cache, 0.01)
            served[number] += 1
            cache.free(slot)
        cache.close()

    threads = [threading.Thread(target=ask, args=(number, 8 * MIB if number < 2 else 0)) for number in range(8)]
    for thread in threads:
        thread.start()
    while min(served[:2]) < 50:
        time.sleep(0.001)
    over.set()
    for thread in threads:
        thread.join()
