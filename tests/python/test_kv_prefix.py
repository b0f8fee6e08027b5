"""The prefix cache: what is found, shared, kept and given up.

SPDX-License-Identifier: MIT
"""

import numpy as np
import pytest
import torch

from pyvmem.kv.cache import KVCache, Spare, TensorSpec
from pyvmem.kv.prefix import PrefixCache, block_hashes

PAGE = 65536
TOKENS = 32  # of 2 KiB to a page


@pytest.fixture
def cache():
    specs = [TensorSpec(n, (8, 128), torch.float16) for n in "kv"]
    still = {"spare": Spare(generous=False, eager=False), "check": True, "name": None}
    with KVCache(specs, 6, 1000, 200 * PAGE, backend="host", **still) as cache:
        yield cache


@pytest.fixture
def prefixes(cache):
    return PrefixCache(cache, block_tokens=16)


def keys(prefixes, tokens):
    return block_hashes(tokens, prefixes.block_tokens)


def match(prefixes, tokens):
    """How many tokens of a prompt are known; they count as used."""
    hashes = keys(prefixes, tokens[:-1])
    found = prefixes.peek(hashes)
    prefixes.order(hashes[: found // prefixes.block_tokens])
    return found


def serve(prefixes, tokens, keep=True):
    """Run a prompt: every row holds its token's number. Returns (slot, cached tokens)."""
    cache = prefixes.cache
    slot, cached = prefixes.alloc(len(tokens), keys(prefixes, tokens))
    assert slot is not None
    lengths = [0] * cache.slots
    lengths[slot] = len(tokens)
    assert cache.step(lengths)
    for tensor in cache.tensors:
        tensor[slot, cached : len(tokens)] = torch.tensor(tokens[cached:]).half().view(-1, 1, 1)
        assert torch.equal(tensor[slot, : len(tokens), 0, 0], torch.tensor(tokens).half())
    if keep:
        prefixes.add(slot, keys(prefixes, tokens))
    return slot, cached


def test_a_known_beginning_is_not_computed_again(cache, prefixes):
    prompt = list(range(100))
    slot, cached = serve(prefixes, prompt)
    assert cached == 0
    cache.free(slot)
    before = cache.stats()
    assert serve(prefixes, prompt + [7, 8])[1] == 96
    assert serve(prefixes, prompt[:50] + [3] * 50)[1] == 48
    assert serve(prefixes, [9] + prompt)[1] == 0
    assert cache.stats().attached_pages - before.attached_pages == 2 * (3 + 1)
    assert cache.stats().hit_tokens == 144


def test_equal_tokens_after_different_beginnings_are_different(prefixes):
    serve(prefixes, [1] * 32 + [2] * 32)
    assert serve(prefixes, [3] * 32 + [2] * 32)[1] == 0
    assert serve(prefixes, [1] * 32 + [3] * 32)[1] == 32


def test_a_prefix_lives_on_when_its_request_has_ended(cache, prefixes):
    prompt = list(range(200))
    slot, _ = serve(prefixes, prompt)
    cache.free(slot)
    for i in range(5):  # others take slots and pages
        slot, _ = serve(prefixes, [500 + i] * 150, keep=False)
        cache.free(slot)
    assert serve(prefixes, prompt + [1])[1] == 192


def test_what_is_held_is_no_more_than_what_requests_leave(cache, prefixes):
    for i in range(30):  # three times what the budget has
        cache.free(serve(prefixes, [i * 90 + j for j in range(320)])[0])
    assert match(prefixes, [29 * 90 + j for j in range(320)]) == 304


def test_prefixes_that_share_all_their_pages_can_be_given_up(cache, prefixes):
    prompt = list(range(320))
    cache.free(serve(prefixes, prompt)[0])
    slot, _ = serve(prefixes, prompt + list(range(500, 532)))
    cache.free(slot)
    lengths = [0] * 6
    slots = [cache.alloc() for _ in range(3)]
    for slot in slots:
        lengths[slot] = 1000
    assert cache.step(lengths)
    assert cache.stats().prefix_pages <= 200 - 3 * 2 * 32


def test_an_empty_cache_is_one(cache, prefixes):
    assert len(prefixes) == 0 and prefixes


def test_the_same_prompt_is_held_once(cache, prefixes):
    prompt = list(range(64))
    slot, _ = serve(prefixes, prompt)
    assert not prefixes.add(slot, keys(prefixes, prompt))
    assert not prefixes.add(slot, keys(prefixes, prompt[:10]))
    assert len(prefixes) == 4


def test_windows_limit_what_can_be_attached():
    specs = [TensorSpec("f", (8, 128), torch.float16), TensorSpec("w", (8, 128), torch.float16, window=64)]
    with KVCache(specs, 4, 2000, 400 * PAGE, backend="host", check=True, name=None) as cache:
        prefixes = PrefixCache(cache, block_tokens=16)
        slot = cache.alloc()
        lengths = np.zeros(4, np.int32)
        for n in range(100, 1001, 100):
            lengths[slot] = n
            assert cache.step(lengths)
        cache.wait()
        prompt = list(range(1000))
        assert prefixes.add(slot, keys(prefixes, prompt))
        cache.free(slot)
        assert match(prefixes, prompt[:500]) == 0  # the window is past there
        other, cached = prefixes.alloc(1002, keys(prefixes, prompt + [1, 2]))
        assert cached == 992
        lengths[:] = 0
        lengths[other] = 1002
        assert cache.step(lengths)
