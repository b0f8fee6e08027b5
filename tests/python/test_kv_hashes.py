"""Prefixes by hash: what is found, shared, kept and evicted, with hashes of the engine's own.

SPDX-License-Identifier: MIT
"""

import threading

import numpy as np
import pytest
import torch

from pyvmem import KVPool
from pyvmem.kv.cache import TensorSpec
from pyvmem.kv.prefix import PrefixCache, block_hashes
from kv_hash_caches import PAGE, known, make, serve


@pytest.fixture
def cache():
    with make() as cache:
        yield cache


def test_a_request_begins_with_blocks_of_several(cache):
    blocks = PrefixCache(cache, 16)
    assert len(blocks) == 0 and blocks
    first, _ = serve(blocks, list(range(100)))
    assert len(blocks) == 6 and known(blocks, list(range(100))) == 96
    cache.free(first)
    slot, cached = serve(blocks, list(range(100)) + list(range(300, 350)))
    assert cached == 96 and len(blocks) == 9
    cache.free(slot)
    slot, cached = serve(blocks, list(range(100)) + list(range(300, 360)))
    assert cached == 144 and cache.stats().hit_tokens == 96 + 144
    assert serve(blocks, [7, *range(100)])[1] == 0
    assert cache.stats().hashed_blocks == len(blocks) == 9 + 1 + 6


def test_blocks_are_added_as_they_are_computed(cache):
    blocks = PrefixCache(cache, 16)
    tokens = list(range(200))
    hashes = block_hashes(tokens, 16)
    slot, lengths = cache.alloc(200), [0] * 6
    for n in range(1, 201):
        lengths[slot] = n
        assert cache.step(lengths)
        for tensor in cache.tensors:
            tensor[slot, n - 1] = tokens[n - 1]
        if n % 16 == 0:
            assert blocks.add(slot, [hashes[n // 16 - 1]], first=n // 16 - 1) == 1
            assert blocks.peek(hashes) == n
    assert blocks.add(slot, hashes) == 0
    assert serve(blocks, tokens + [5])[1] == 192


def test_blocks_of_whole_pages_are_added_before_their_rows_are_written(cache):
    """As an engine does that launches ahead; and a request that never took part in a step has the fence 0."""
    blocks, hashes = PrefixCache(cache, 32), block_hashes(list(range(96)), 32)
    writer, readers = cache.alloc(96), []
    assert cache.step([96 if s == writer else 0 for s in range(6)])
    assert blocks.add(writer, hashes) == 3
    for _ in range(2):
        reader, cached = blocks.alloc(97, hashes)
        assert cached == 96
        readers.append(reader)
    for tensor in cache.tensors:
        tensor[writer, :96] = 7  # a kernel that ran late
        assert all((tensor[reader, :96] == 7).all() for reader in readers)
    cache.free(readers.pop(), after=0)
    assert cache.stats().ending_slots == 0 and cache.stats().active_slots == 2


def test_equal_tokens_after_different_beginnings_are_different(cache):
    blocks = PrefixCache(cache, 16)
    serve(blocks, [1] * 32 + [2] * 32)
    assert serve(blocks, [3] * 32 + [2] * 32)[1] == 0
    assert serve(blocks, [1] * 32 + [3] * 32)[1] == 32


def test_windows_limit_what_can_be_attached():
    specs = [TensorSpec("f", (8, 128), torch.float16), TensorSpec("w", (8, 128), torch.float16, window=64)]
    with make(specs) as cache:
        blocks, prompt, slot = PrefixCache(cache, 16), list(range(1000)), cache.alloc()
        for n in range(100, 1001, 100):
            assert cache.step([n if s == slot else 0 for s in range(6)])
        assert blocks.add(slot, block_hashes(prompt, 16))
        cache.free(slot)
        assert known(blocks, prompt[:500]) == 0  # the window is past there
        assert blocks.alloc(1000, block_hashes(prompt, 16))[1] == 992


def test_the_last_token_is_left_to_be_computed(cache):
    blocks = PrefixCache(cache, 16)
    serve(blocks, list(range(64)))
    assert serve(blocks, list(range(64)))[1] == 48


def test_peeking_changes_nothing(cache):
    blocks = PrefixCache(cache, 32, events=True)
    prompts = [[100 * i + j for j in range(64)] for i in range(2)]
    for prompt in prompts:
        cache.free(serve(blocks, prompt)[0])
    before = cache.stats()
    for _ in range(5):
        assert known(blocks, prompts[0]) == 64  # is not used by that
    assert cache.stats() == before
    assert blocks.evict(1) == 2
    assert blocks.evicted() == block_hashes(prompts[0], 32)[1:]  # the end of the older one
    assert [known(blocks, p) for p in prompts] == [32, 64]
    cache.free(serve(blocks, prompts[0])[0])  # used again, and so is now the newer
    assert blocks.evict(3) == 4
    assert [known(blocks, p) for p in prompts] == [64, 0]
    assert blocks.evicted() == block_hashes(prompts[1], 32)[::-1] and blocks.evicted() == []
    assert cache.stats().evicted_blocks == 3


def test_blocks_give_way_to_requests(cache):
    blocks = PrefixCache(cache, 32, events=True)
    for i in range(8):
        cache.free(serve(blocks, [i * 90 + j for j in range(320)])[0])
    stats = cache.stats()
    assert stats.evictable_pages == stats.prefix_pages == 8 * 20
    assert stats.free_pages == 200  # as if they were not there
    slots = [cache.alloc(990) for _ in range(3)]
    lengths = [990 if s in slots else 0 for s in range(6)]
    assert cache.step(lengths, dry=True) and len(blocks) == 80
    assert cache.step(lengths)
    assert len(blocks) == 7 and cache.stats().evictable_pages == 14
    assert len(blocks.evicted()) == 73 == cache.stats().evicted_blocks
    assert cache.stats().step_failures == 0


def test_the_background_thread_keeps_some_memory_unused():
    """Blocks fill the memory in time; then steps find pages that it has made free meanwhile."""
    with make(overlap=True, defer=False) as cache:  # 200 pages; scarce below 20 unused
        blocks = PrefixCache(cache, 32)
        for i in range(40):
            cache.free(serve(blocks, [i * 40 + j for j in range(320)])[0])
            cache.wait()
            stats = cache.stats()
            assert stats.budget_pages - stats.held_pages >= 5
        assert stats.held_pages >= 190 and stats.evicted_blocks > 300 and stats.worker_errors == 0


def test_a_pool_takes_blocks_for_a_member_that_needs_memory():
    with KVPool(200 * PAGE) as pool, make(pool=pool) as cache, make(pool=pool) as other:
        blocks = PrefixCache(cache, 32)
        for i in range(9):
            cache.free(serve(blocks, [i * 40 + j for j in range(320)])[0])
        assert cache.stats().held_pages >= 180
        slots = [other.alloc(960) for _ in range(2)]
        lengths = [960 if s in slots else 0 for s in range(6)]
        while not other.step(lengths):
            assert pool.wait(other, 60) != "refused"
        assert other.stats().needed_pages == 120
        assert 0 < len(blocks) <= 40 and blocks.peek(block_hashes([320 + j for j in range(320)], 32)) > 0


def test_memory_that_requests_use_is_not_evicted(cache):
    blocks = PrefixCache(cache, 32)
    slot, _ = serve(blocks, list(range(960)))  # 60 pages
    assert cache.stats().evictable_pages == 0 and cache.stats().free_pages == 140
    others = [cache.alloc(960) for _ in range(3)]
    lengths = [960 if s in others else 0 for s in range(6)]
    assert not cache.step(lengths) and cache.shortage.prefix_pages == 0
    assert blocks.peek(block_hashes(list(range(960)), 32)) == 960
    cache.free(slot)
    assert cache.stats().evictable_pages == 60
    assert cache.step(lengths) and len(blocks) == 10


def test_the_least_recently_used_blocks_go_first(cache):
    blocks = PrefixCache(cache, 32, events=True)
    prompts = [[100 * i + j for j in range(96)] for i in range(3)]
    hashes = [block_hashes(prompt, 32) for prompt in prompts]
    for i in (0, 1, 2, 0):
        cache.free(serve(blocks, prompts[i])[0])
    assert blocks.evict(2 * 5) == 2 * 5
    assert blocks.evicted() == [*hashes[1][::-1], hashes[2][2], hashes[2][1]]
    assert blocks.evict(100) == 2 * 4
    assert blocks.evicted() == [hashes[2][0], *hashes[0][::-1]]


def test_blocks_in_use_may_be_dropped(cache):
    blocks = PrefixCache(cache, 16)
    tokens = list(range(100))
    slot, _ = serve(blocks, tokens)
    other, cached = serve(blocks, [*tokens, 5])
    assert cached == 96
    blocks.clear()
    assert len(blocks) == 0 and cache.stats().prefix_pages == 0
    assert torch.equal(cache.tensors[0][slot, :100, 0, 0], cache.tensors[0][other, :100, 0, 0])
    cache.free(slot)
    assert torch.equal(cache.tensors[1][other, :100, 0, 0], torch.tensor(tokens).half())
    assert blocks.add(other, block_hashes(tokens, 16)) == 6
    cache.free(other)
    assert serve(blocks, tokens)[1] == 96


def test_the_same_hash_at_another_place(cache):
    blocks = PrefixCache(cache, 16)
    hashes = block_hashes(list(range(64)), 16)
    slot, _ = serve(blocks, list(range(64)))
    with pytest.raises(ValueError, match=r"hashes\[0\] is that of block 0: a hash covers all tokens before it"):
        blocks.add(slot, hashes[:1], first=1)
    assert blocks.peek([hashes[0], hashes[0]]) == 16 and blocks.peek(hashes[1:]) == 0
    other, _ = serve(blocks, list(range(64)), add=False)
    assert blocks.add(other, hashes) == 0 and len(blocks) == 4


def test_rows_that_are_rejected_after_all(cache):
    """A block of a request that is shortened stays as it was: the request gets a copy before it writes again."""
    blocks = PrefixCache(cache, 16)
    tokens = list(range(64))
    slot, _ = serve(blocks, tokens)
    lengths = [0] * 6
    lengths[slot] = 41
    with pytest.raises(ValueError, match="rows below 64 are shared; truncate"):
        cache.step(lengths)
    assert cache.truncate(slot, 40)
    assert cache.step(lengths)
    for tensor in cache.tensors:
        tensor[slot, 40] = 999
    other = list(range(40)) + [999] * 24
    hashes = block_hashes(other, 16)
    lengths[slot] = 64
    assert cache.step(lengths)
    for tensor in cache.tensors:
        tensor[slot, 41:64] = 999
    assert blocks.add(slot, hashes[2:], first=2) == 2
    cache.free(slot)
    assert serve(blocks, tokens + [1])[1] == 64
    assert serve(blocks, other + [1])[1] == 64


def test_blocks_of_a_running_request_whose_page_it_has_no_more():
    """Two blocks have a page in common that their request let go of: both must be evicted to have it."""
    with make(pages=12) as cache:
        blocks = PrefixCache(cache, 16)
        tokens = list(range(64))
        slot, _ = serve(blocks, tokens)  # two pages in each tensor, of two blocks each
        assert cache.truncate(slot, 40)  # the second is copied; blocks 2 and 3 still hold what it was
        assert cache.stats().evictable_pages == 2 and cache.stats().held_pages == 6
        other = cache.alloc(128)
        lengths = [128 if s == other else 0 for s in range(6)]
        assert cache.step(lengths, dry=True) and cache.step(lengths)
        assert len(blocks) == 2 and cache.stats().held_pages == 12


def test_a_budget_below_what_is_held(cache):
    blocks = PrefixCache(cache, 32)
    slot, _ = serve(blocks, list(range(320)))
    cache.free(serve(blocks, list(range(400, 720)))[0])
    cache.set_budget(10 * PAGE)
    assert cache.stats().held_pages == 20 and cache.stats().evictable_pages == 0
    assert known(blocks, list(range(320))) == 320
    cache.free(slot)
    assert cache.stats().held_pages == 10
    assert known(blocks, list(range(320))) == 160  # the first rows stay longest


def test_reclaiming_leaves_the_blocks(cache):
    blocks = PrefixCache(cache, 32)
    cache.free(serve(blocks, list(range(320)))[0])
    cache.reclaim()
    assert len(blocks) == 10
    assert blocks.evict(1 << 60) == 20 and len(blocks) == 0


def test_no_memory_for_a_copy():
    with make(pages=8) as cache:
        blocks = PrefixCache(cache, 16)
        slot, _ = serve(blocks, list(range(48)))  # two pages in each tensor, the second half full
        other = cache.alloc(64)
        lengths = [0] * 6
        lengths[other] = 64
        assert cache.step(lengths)
        hashes = block_hashes(list(range(48)), 16)
        assert blocks.peek(hashes[:2]) == 32 and blocks.peek([]) == 0
        assert blocks.alloc(100, hashes) == (None, 0)
        assert cache.shortage.missing_pages == 2 and cache.shortage.reason == "budget"
        new = cache.alloc(100)
        assert blocks.attach(new, hashes) is None and cache.shortage.missing_pages == 2
        assert cache.stats().short_budget == 2
        assert blocks.attach(new, hashes[:2]) == 32  # needs no copy
        assert cache.stats().active_slots == 3


def test_hashes_of_both_kinds():
    kinds = (lambda h: h, lambda h: int.from_bytes(h, "little") - (1 << 127), lambda h: h * 20,
             lambda h: torch.tensor(int.from_bytes(h[:7], "little")))  # fmt: skip
    for kind in kinds:
        with make() as cache:
            blocks = PrefixCache(cache, 16, events=True)
            hashes = [kind(h) for h in block_hashes(list(range(64)), 16)]
            slot, lengths = cache.alloc(64), [0] * 6
            lengths[slot] = 64
            assert cache.step(lengths)
            assert blocks.add(slot, hashes) == 4 and blocks.peek(tuple(hashes)) == 64
            cache.free(slot)
            blocks.clear()
            assert blocks.evicted() == hashes[::-1]


def test_salts_keep_equal_tokens_apart():
    tokens = list(range(64))
    found = [block_hashes(tokens, 16, salt) for salt in (b"", b"adapter 1", b"adapter 2")]
    assert len({h for hashes in found for h in hashes}) == 12
    assert block_hashes(np.array(tokens), 16, b"adapter 1") == block_hashes(torch.tensor(tokens), 16, b"adapter 1")
    assert block_hashes([], 16) == [] == block_hashes([1] * 15, 16)


def test_wrong_arguments_are_named(cache):
    for value in (0, 1001, -1, 1 << 32, 1 << 64):
        with pytest.raises(ValueError, match="tokens"):
            PrefixCache(cache, value)
    with pytest.raises(TypeError, match="events"):
        PrefixCache(cache, 16, events="yes")
    blocks = PrefixCache(cache, 16)
    with pytest.raises(ValueError, match="has a PrefixCache already, of blocks of 16"):
        PrefixCache(cache, 16)
    for wrong in ([1.5], ["text"], [None], [True]):
        with pytest.raises(TypeError, match=r"hashes\[0\] must be bytes or an integer"):
            blocks.peek(wrong)
    assert blocks.peek([]) == 0 and blocks.peek([b"12"]) == 0
    for wrong in (5, None, "text", b"12", np.array(5)):
        for call in (
            blocks.peek,
            blocks.drop,
            lambda wrong: blocks.add(0, wrong),
            lambda wrong: blocks.alloc(20, wrong),
        ):
            with pytest.raises(TypeError, match="hashes must be a sequence, not"):
                call(wrong)
    slot = cache.alloc()
    with pytest.raises(ValueError, match=r"runs\[0\]: 16 rows from row 0 on: slot 0 has 0 tokens"):
        blocks.add(slot, [b"12"])
    with pytest.raises(ValueError, match="slot 5 is free"):
        blocks.add(5, [b"12"])
    with pytest.raises(ValueError, match="slot 6 is out of range: the cache has 6 slots"):
        blocks.attach(6, [b"12"])
    lengths = [0] * 6
    lengths[slot] = 20
    assert cache.step(lengths)
    with pytest.raises(ValueError, match="not newly allocated"):
        blocks.attach(slot, [b"12"])
    assert blocks.add(slot, [b"12"]) == 1 and blocks.peek([np.bytes_(b"12")]) == 16
    with pytest.raises(ValueError, match=r"runs\[0\]: 16 rows from row 16 on: slot 0 has 20 tokens"):
        blocks.add(slot, [b"34"], first=1)
    with pytest.raises(ValueError, match="first"):
        blocks.add(slot, [b"12"], first=1 << 32)
    with pytest.raises(ValueError, match="pages"):
        blocks.evict(-1)
    for wrong in ("text", [1.5], 5, [[1, 2], [3, 4]]):
        with pytest.raises(TypeError, match="tokens"):
            block_hashes(wrong, 16)
    with pytest.raises(ValueError, match="block_tokens"):
        block_hashes([1], 0)
    with pytest.raises(TypeError, match="salt"):
        block_hashes([1], 16, "salt")
    with pytest.raises(ValueError, match="closed"):
        blocks.cache.close()
        blocks.peek([b"12"])


def test_threads_may_drain_what_was_evicted():
    with make(pages=60, check=False) as cache:
        blocks = PrefixCache(cache, 16, events=True)
        found, done = [], threading.Event()

        def drain():
            while not done.is_set():
                found.extend(blocks.evicted())

        thread = threading.Thread(target=drain)
        thread.start()
        added = 0
        try:
            for i in range(60):
                before = len(blocks) + cache.stats().evicted_blocks
                cache.free(serve(blocks, [(37 * i + j) % 1000 for j in range(200)])[0])
                added += len(blocks) + cache.stats().evicted_blocks - before
        finally:
            done.set()
            thread.join()
        found += blocks.evicted()
        assert len(found) == cache.stats().evicted_blocks > 100 and added == len(found) + len(blocks)
