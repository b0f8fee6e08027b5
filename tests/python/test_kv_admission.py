"""Admission: what a cache says of requests that wait is what happens when they come.

SPDX-License-Identifier: MIT
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_caches import grouped

from conftest import BACKENDS
import pyvmem
from pyvmem import KVCacheOptions
from pyvmem.kv.cache import KVCache, TensorSpec

PAGE = 65536
HALF = torch.float16
# Rows of 2 KiB (32 to a page); of 3 KiB, which does not divide a page; with a window; that end early.
MIXED = [
    TensorSpec("a", (8, 128), HALF),
    TensorSpec("b", (12, 128), HALF),
    TensorSpec("c", (8, 128), HALF, window=64),
    TensorSpec("d", (8, 128), HALF, max_tokens=100),
    TensorSpec("e", (8, 128), HALF),
]
STILL = {"generous": False, "eager": False, "overlap": False, "check": True, "name": None, "page_size": PAGE}


def make(specs=MIXED[:1], slots=6, max_tokens=400, pages=60, **options):
    backend = options.get("backend", "host")
    if PAGE not in pyvmem.core.default_context(backend).page_sizes:
        pytest.skip(f"{backend} has no pages of {PAGE} bytes, of which the shapes here are made")
    return KVCache(specs, slots, max_tokens, pages * PAGE, **grouped({"backend": "host", **STILL, **options}))


def started(cache, *sizes):
    lengths = [0] * cache.slots
    for size in sizes:
        lengths[cache.alloc(size)] = size
    assert cache.step(lengths)
    return lengths


def test_how_many_fit_is_how_many_can_begin(backend):
    with make(backend=backend, pages=20) as cache:
        started(cache, 320)  # 10 pages
        assert cache.fit([]) == 0
        assert cache.fit([64, 64, 64, 64, 64]) == 5
        assert cache.fit([64, 64, 64, 64, 65]) == 4 and cache.shortage.missing_pages == 1
        assert cache.shortage.reason == "budget" and cache.shortage.watermark_pages == 0
        assert cache.fit([1] * 6) == 5 and cache.shortage.missing_pages == 0
        assert cache.shortage.reason == "slots"
        assert cache.fit([321]) == 0 and cache.shortage.missing_pages == 1
        assert cache.fit(np.array([64, 64, 64])) == 3
        assert cache.stats().held_pages == 10  # nothing changed


def test_a_prefix_counts_for_its_rows(backend):
    with make(backend=backend, pages=20) as cache:
        lengths = started(cache, 320)
        slot = lengths.index(320)
        prefix = cache.share(slot, 304)  # 9 pages, and half of one, which is copied
        assert cache.fit([(320, 304)] * 6) == 5
        assert cache.fit([(400, 304)] * 3) == 2 and cache.shortage.missing_pages == 2
        for _ in range(2):
            new = cache.alloc(400, prefix_tokens=304)
            assert cache.attach(new, prefix) == 304
            lengths[new] = 400
        assert cache.step(lengths)
        assert cache.stats().free_pages == 2


def test_the_watermark_is_for_those_that_run(backend):
    with make(backend=backend, pages=20, watermark=4 * PAGE - 1) as cache:
        assert cache.stats().watermark_pages == 4
        assert cache.room() == 400 and cache.fit([400]) == 1  # nobody runs
        assert cache.fit([320, 192]) == 2 and cache.fit([320, 193]) == 1
        assert (cache.shortage.missing_pages, cache.shortage.watermark_pages) == (1, 1)
        lengths = started(cache, 320)
        slot = lengths.index(320)
        assert cache.room() == 6 * 32 and cache.fit([6 * 32]) == 1
        assert cache.fit([6 * 32 + 1]) == 0
        assert "watermark" not in str(cache.shortage.reason) and cache.shortage.reason == "budget"
        assert cache.fit([400]) == 0 and cache.shortage.missing_pages == 7 and cache.shortage.watermark_pages == 4
        assert cache.room(slot) == 400 and cache.step([400 if n else 0 for n in lengths])
        cache.set_budget(13 * PAGE)
        assert cache.room() == 0 and cache.fit([1]) == 0
    with make(backend=backend, pages=20) as cache:
        started(cache, 400)
        assert cache.stats().watermark_pages == 0 and cache.room() == 7 * 32


def test_the_watermark_as_an_option():
    with make(pages=20, watermark=0.1) as cache:
        assert cache.stats().watermark_pages == 2
    for whole in (1, 7, 29, 55, 58, 100):  # of which some are no exact hundredths
        with make(pages=100, watermark=whole / 100) as cache:
            assert cache.stats().watermark_pages == whole
    for watermark, pages in ((0.505, 11), (2**64 - 1, 20)):  # whole percentages; more than there is
        with make(pages=20, watermark=watermark) as cache:
            assert cache.stats().watermark_pages == pages
    with make(pages=20, watermark=3 * PAGE) as cache:
        assert cache.stats().watermark_pages == 3
    for wrong in (1.01, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"watermark {wrong} must lie between 0.0 and 1.0, or be an int of bytes"):
            KVCacheOptions(watermark=wrong)
    for wrong in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"watermark {wrong}"):
            KVCacheOptions(watermark=wrong)
    with pytest.raises(TypeError, match="watermark must be an integer, not '1'"):
        KVCacheOptions(watermark="1")


def test_tensors_of_several_shapes_need_pages_of_their_own(backend):
    with make(MIXED, backend=backend, slots=3, pages=200) as cache:
        lengths = started(cache, 350)
        assert cache.slot(lengths.index(350)).needed_pages == 22 + 17 + 11 + 4
        assert cache.stats().free_pages == 200 - 54


def test_rows_larger_than_a_page():
    with make([TensorSpec("big", (50000,), HALF)], max_tokens=9, pages=17, slots=2) as cache:
        started(cache, 9)
        assert cache.stats().free_pages == 17 - 14 and cache.room() == 1


@pytest.mark.parametrize("tile", [1, 48])
def test_free_tokens_can_be_filled(tile):
    """With one group, a new request gets what is free, to the token."""
    with make([TensorSpec("b", (12, 128), HALF)], max_tokens=2000, pages=40, tile_rows=tile) as cache:
        for size in (100, 333, 17):
            lengths = started(cache, size)
            cache.free(lengths.index(size))
            lengths = started(cache, 50)
            free = cache.room()
            assert free == free // tile * tile
            slot = cache.alloc(free)
            lengths[slot] = free + 1
            assert not cache.step(lengths, dry=True)
            lengths[slot] = free
            assert cache.step(lengths)
            for s, n in enumerate(lengths):
                if n:
                    cache.free(s)


REQUESTS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=7)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("specs", [MIXED[:1], MIXED], ids=["one", "mixed"])
def test_an_answer_is_exact(name, specs):
    options = st.fixed_dictionaries({
        "tile_rows": st.sampled_from([1, 40]), "defer": st.booleans(), "overlap": st.booleans(),
        "steps_in_flight": st.sampled_from([1, 2]), "lazy": st.booleans(),
    })  # fmt: skip

    @settings(max_examples=settings().max_examples if name == "host" else 8)
    @given(st.data(), options, st.integers(3, 25), REQUESTS, REQUESTS)
    def look(data, chosen, pages, first, then):
        with make(specs, backend=name, slots=5, pages=pages * len(specs), **chosen) as cache:
            lengths, prefix = [0] * 5, None
            for tokens, _ in first:
                slot = cache.alloc(tokens) if cache.room() >= tokens else None
                if slot is not None:
                    wanted = [tokens if s == slot else 0 for s in range(5)]
                    assert cache.step(wanted)
                    lengths[slot] = tokens
                    if prefix is None:
                        prefix = cache.share(slot, data.draw(st.integers(1, tokens)))
            for slot in range(5):
                if lengths[slot] and data.draw(st.booleans()):
                    cache.free(slot)
                    lengths[slot] = 0
                elif lengths[slot] and data.draw(st.booleans()):
                    grown = data.draw(st.integers(lengths[slot], 400))
                    if cache.step([grown if s == slot else 0 for s in range(5)]):
                        lengths[slot] = grown
            least = prefix.min_tokens if prefix else 0
            asked = []
            for tokens, part in then:
                part = min(part, tokens, prefix.tokens) if prefix else 0
                asked.append((tokens, part if part >= least else 0))
            before, fits = cache.stats().held_pages, cache.fit(asked)
            short = fits < len(asked)
            reason, missing = cache.shortage.reason, cache.shortage.missing_pages
            assert short == (reason is not None)
            slots = []
            for tokens, part in asked[: fits + short]:
                slot = cache.alloc(tokens, prefix_tokens=part)
                if slot is None:
                    break
                slots.append(slot)
                if part and not cache.attach(slot, prefix, part):
                    cache.free(slot)
                    break
                lengths[slot] = tokens
            began = sum(lengths[slot] > 0 for slot in slots)
            if short and began > fits:
                begins, lacks = cache.step(lengths, dry=True), cache.shortage.missing_pages
                # What a request has shared and its window has passed counts, although the step takes it back.
                passed = prefix is not None and any(spec.window for spec in specs)
                assert (not begins and lacks == missing) or (passed and lacks < missing), (before, asked)
                cache.free(slots[fits])
                lengths[slots[fits]] = 0
            elif short:
                assert began == fits and (reason == "slots") == (len(slots) == fits)
            assert not any(lengths) or cache.step(lengths)

    look()


def test_wrong_arguments_are_named():
    with make() as cache:
        for wrong, text in (
            ([0], r"requests\[0\].tokens 0 is not between 1 and max_tokens, 400"),
            ([1, 401], r"requests\[1\].tokens 401"),
            ([(5, 6)], r"requests\[0\].prefix_tokens 6 is over its tokens, 5"),
            ([1, -1], r"requests\[1\].tokens -1"),
            ([(1, 1 << 40)], r"requests\[0\].prefix_tokens"),
        ):
            with pytest.raises(ValueError, match=text):
                cache.fit(wrong)
        for wrong in ([1.5], ["a"], [(1, None)], [(1, 2, 3)], [None]):
            with pytest.raises(TypeError, match=r"requests\[0\]"):
                cache.fit(wrong)
        with pytest.raises(TypeError):
            cache.fit(5)
    with pytest.raises(ValueError, match="closed"):
        cache.fit([1])
