"""Requests that take no part in a step: they wait, or they are over.

SPDX-License-Identifier: MIT
"""

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
