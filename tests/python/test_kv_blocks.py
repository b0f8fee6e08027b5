"""Names for pages of a KV cache: pyvmem.kv.blocks."""

import pytest
import torch

from pyvmem.errors import InvalidArgument, VmemError
from pyvmem.kv.blocks import BlockNames
from pyvmem.kv.cache import KVCache, Spare, TensorSpec

TOKENS, PAGE = 8, 64 << 10
ROW = PAGE // TOKENS


@pytest.fixture
def cache():
    with KVCache([TensorSpec("kv", (ROW,), torch.uint8)], 4, 64, 64 * PAGE, backend="host", page_size=PAGE, check=True,
                 spare=Spare(overlap=False, generous=False, eager=False), name=None) as cache:  # fmt: skip
        yield cache


def test_named_pages_outlive_their_slot_and_start_another(cache):
    names = BlockNames(cache, 10, TOKENS)
    slot = cache.alloc()
    lengths = [0] * 4
    lengths[slot] = 3 * TOKENS
    assert cache.step(lengths)
    for i in range(3):
        cache.tensors[0][slot, i * TOKENS : (i + 1) * TOKENS] = i + 1
    names.bind([slot] * 3, [0, 1, 2], [7, 8, 9])
    cache.free(slot)
    assert cache.stats().prefix_pages == 3
    other = cache.alloc()
    names.attach(other, [9, 7])
    view = cache.tensors[0][other]
    assert (view[:TOKENS] == 3).all() and (view[TOKENS : 2 * TOKENS] == 1).all()
    names.drop([7, 8, 9])
    assert cache.stats().held_pages == 2
    assert (view[:TOKENS] == 3).all()
    cache.free(other)  # which keeps them now: they are nobody else's
    assert cache.stats().held_pages == cache.stats().kept_pages == 2


def test_bind_is_all_or_nothing(cache):
    names = BlockNames(cache, 10, TOKENS)
    slot = cache.alloc()
    lengths = [0] * 4
    lengths[slot] = 2 * TOKENS
    cache.step(lengths)
    names.bind([slot], [0], [1])
    with pytest.raises(VmemError, match="block 1 has pages already") as raised:
        names.bind([slot, slot], [1, 1], [2, 1])
    assert raised.value.index == 1
    cache.free(slot)
    assert cache.stats().prefix_pages == 1  # name 2 was not left behind
    assert cache.stats().held_pages == 1 + cache.stats().kept_pages
    with pytest.raises(VmemError, match="block 2 has no pages"):
        names.attach(cache.alloc(), [1, 2])


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda n, s: n.bind([s], [2], [0]), "index 2: slot . has not been stepped"),
        (lambda n, s: n.bind([s], [0], [10]), "block 10 is out of range: the cache has 10 blocks"),
        (lambda n, s: n.bind([9], [0], [0]), "slot 9"),
        (lambda n, s: n.attach(s, [0]), "not newly allocated"),
        (lambda n, s: n.drop([10]), "block 10 is out of range: the cache has 10 blocks"),
        (lambda n, s: n.bind([s], [0, 1], [0]), "1, 2 and 1 elements"),
    ],
)
def test_bad_names_are_refused(cache, call, text):
    names = BlockNames(cache, 10, TOKENS)
    slot = cache.alloc()
    lengths = [0] * 4
    lengths[slot] = 2 * TOKENS
    cache.step(lengths)
    with pytest.raises((InvalidArgument, ValueError), match=text):
        call(names, slot)
    assert cache.stats().held_pages == 2


def test_blocks_are_whole_pages(cache):
    with pytest.raises(InvalidArgument, match="not whole pages of 65536"):
        BlockNames(cache, 10, TOKENS // 2)


def test_blocks_need_tensors_without_windows():
    specs = [TensorSpec("kv", (ROW,), torch.uint8, window=16)]
    with KVCache(specs, 2, 64, 64 * PAGE, backend="host", page_size=PAGE, name=None) as cache:
        with pytest.raises(VmemError, match="without windows"):
            BlockNames(cache, 10, TOKENS)


@pytest.mark.parametrize("plenty", [True, False])
def test_the_background_thread_backs_a_growing_request_seldom(plenty):
    """Whole stretches at a time, even where a page is only some tokens."""
    page = 2 << 20
    spare = Spare(eager=False, ahead_tokens=64, ahead_min=64, reclaim_percent=10 if plenty else 50)
    with KVCache([TensorSpec("kv", (page // 16,), torch.uint8)], 2, 512, 128 * page, backend="host", page_size=page,
                 lazy=True, name=None, spare=spare) as cache:  # fmt: skip
        slot = cache.alloc()
        lengths = [0, 0]
        for tokens in range(1, 401):
            lengths[slot] = tokens
            assert cache.step(lengths)
            cache.wait()
        stats = cache.stats()
    assert stats.step_maps == 1
    assert stats.ahead_jobs <= 400 // 64 + 1
