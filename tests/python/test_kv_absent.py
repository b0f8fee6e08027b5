"""Requests that take no part in a step: they wait, or they are over.

SPDX-License-Identifier: MIT
"""

import random

import numpy as np
import paper
import pytest
from kv_caches import make


def lengths_of(cache, wanted):
    return [wanted.get(slot, 0) for slot in range(cache.slots)]


def absent(cache, steps=1):
    """The active slots that took part in none of the last steps."""
    return [slot for slot in range(cache.slots) if cache.slot(slot).absent_steps >= steps]


def test_a_request_that_waits_is_reported_and_kept(backend):
    with make(backend) as cache:
        a, b = cache.alloc(10), cache.alloc(10)
        assert absent(cache) == [] and cache.stats().absent_slots == 0
        assert cache.step(lengths_of(cache, {a: 10, b: 10}))
        for n in range(11, 15):
            assert cache.step(lengths_of(cache, {a: n}))
        assert absent(cache) == [b] == absent(cache, 4) and absent(cache, 5) == []
        assert (cache.slot(a).absent_steps, cache.slot(b).absent_steps) == (0, 4)
        assert cache.stats().absent_slots == 1
        c = cache.alloc(10)
        assert absent(cache) == [b]  # the new one had no step yet
        assert cache.step(lengths_of(cache, {b: 20}))
        assert absent(cache) == [a, c] and cache.slot(b).tokens == 20
        cache.free(a)
        cache.swap_out(b)
        assert absent(cache) == [c]
        assert cache.swap_in(b) and absent(cache) == [c]


def ends(cache, lengths):
    """`paper.step` with `zero_ends`."""
    return paper.step(cache, lengths, zero_ends=True) == 0


def test_a_length_of_zero_ends_a_request(backend):
    with make(backend, steps_in_flight=2) as cache:
        a, b, c = (cache.alloc(100) for _ in range(3))
        assert ends(cache, lengths_of(cache, {a: 100, b: 100, c: 100}))
        cache.swap_out(c)
        assert ends(cache, lengths_of(cache, {a: 101}))
        assert [cache.slot(s).state for s in (a, b, c)] == ["active", "free", "swapped"] and cache.slot(b).after
        assert ends(cache, lengths_of(cache, {a: 102})) and cache.slot(b).after
        assert ends(cache, lengths_of(cache, {a: 103})) and cache.slot(b).state == "free" and not cache.slot(b).after
        with pytest.raises(ValueError, match="the slot is free"):
            ends(cache, lengths_of(cache, {b: 1}))
        assert cache.slot(a).state == "active"  # a step that is refused ends nothing
        d = cache.alloc(5)  # never takes part
        assert cache.step(lengths_of(cache, {a: 104}))
        assert cache.slot(d).state == "active"  # an ordinary step ends nobody
        assert ends(cache, lengths_of(cache, {a: 105}))
        assert cache.slot(d).state == "free"
        cache.retire()
        assert ends(cache, [0] * cache.slots)
        assert cache.slot(a).state == "free" and cache.stats().active_slots == 0
        assert cache.swap_in(c)


def test_what_ends_makes_room_once_its_kernels_have_ended(backend):
    with make(backend, pages=40) as cache:
        a, b = cache.alloc(), cache.alloc()
        assert ends(cache, lengths_of(cache, {a: 1280}))  # all 40 pages; b ends: it had no part
        assert cache.slot(b).state == "free"
        b = cache.alloc()
        assert not ends(cache, lengths_of(cache, {b: 1280}))  # kernels may still read what a had
        assert cache.slot(a).after and cache.shortage.ending_pages == 40
        cache.retire()
        assert ends(cache, lengths_of(cache, {b: 1280}))


@pytest.mark.parametrize("zero_ends", [False, True])
def test_the_demo_of_vattention_does_not_leak(backend, zero_ends):
    """It adds and removes a request every few steps; with zero_ends, a 0 in its list is all that it does at the end."""
    rng = random.Random(1)
    with make(backend, slots=8, pages=400) as cache:
        lengths, active = np.zeros(8, np.int32), []
        for i in range(200):
            assert paper.step(cache, lengths, zero_ends=zero_ends) == 0
            cache.retire()  # it waits for the GPU
            if i % 3 == 0 and len(active) < 7:
                slot = cache.alloc(100)
                assert slot is not None
                active.append(slot)
                lengths[slot] = 100
            if i % 3 == 1 and len(active) > 3:
                slot = active.pop(rng.randrange(len(active)))
                lengths[slot] = 0
                if not zero_ends:
                    cache.free(slot, after=cache.last_step)
            lengths[active] += 1
            assert absent(cache, 2) == []
        assert cache.stats().active_slots <= len(active) + 1


def test_without_the_option_zero_keeps(backend):
    with make(backend, slots=2) as cache:
        a = cache.alloc(10)
        assert cache.step(lengths_of(cache, {a: 10}))
        for _ in range(5):
            assert cache.step([0, 0])
        assert cache.slot(a).tokens == 10 and absent(cache, 5) == [a]


def test_calls_that_really_lack_memory_are_counted():
    with make("host", pages=40) as cache:
        a, b = cache.alloc(), cache.alloc()
        assert cache.step(lengths_of(cache, {a: 640}))
        cache.swap_out(a)
        assert cache.step(lengths_of(cache, {b: 1280}))
        assert not cache.swap_in(a)
        assert (cache.shortage.missing_pages, cache.shortage.reason, cache.stats().short_budget) == (20, "budget", 1)
        prefix = cache.share(b, 1270)
        assert not cache.truncate(b, 1260) and "4 pages are missing" in str(cache.shortage)
        assert cache.slot(b).tokens == 1280
        assert (cache.shortage.reason, cache.stats().short_budget) == ("budget", 2)
        c = cache.alloc()
        assert not cache.step(lengths_of(cache, {c: 1}), dry=True) and cache.shortage.reason == "budget"
        assert cache.stats().short_budget == 2
        cache.drop(prefix)
