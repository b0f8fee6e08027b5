"""Rows of requests that an engine holds for others by itself: share, attach, drop, order.

SPDX-License-Identifier: MIT
"""

import errno
from itertools import pairwise

import pytest
import torch

import pyvmem
from pyvmem.kv.cache import KVCache, Spare, TensorSpec

PAGE, ROWS = 65536, 16  # rows to a page


def make(pages=40, window=0, **options):
    specs = [TensorSpec("kv", (PAGE // ROWS // 4,), torch.float32, window=window)]
    spare = Spare(overlap=False, generous=False, eager=False)
    return KVCache(specs, 4, 512, pages * PAGE, backend="host", page_size=PAGE, check=True, name=None, spare=spare,
                   **options)  # fmt: skip


def start(cache, tokens, value):
    slot = cache.alloc(tokens)
    assert cache.step([tokens if s == slot else 0 for s in range(4)])
    cache.tensors[0][slot, :tokens] = value
    return slot


def test_a_request_begins_with_the_runs_of_several_others():
    with make() as cache:
        writers, runs = [], []
        for first, end in pairwise((0, 32, 48, 90)):
            slot = cache.alloc()
            assert cache.attach(slot, runs) == first  # with none, too
            assert cache.step([end if s == slot else 0 for s in range(4)])
            cache.tensors[0][slot, first:end] = first + 1
            runs.append(cache.share(slot, end - first, first))
            writers.append(slot)
        for slot in writers:
            cache.free(slot)
        for most, tokens in ((None, 90), (90, 90), (89, 89), (33, 33), (0, 0)):
            slot = cache.alloc()
            assert cache.attach(slot, runs, most) == cache.slot(slot).tokens == tokens
            row = cache.tensors[0][slot, :tokens, 0]
            assert row.tolist() == [float(1 if i < 32 else 33 if i < 48 else 49) for i in range(tokens)]
            cache.free(slot)
        slot = cache.alloc()
        cache.drop(runs[1])
        cache.drop(runs[1])  # it is gone: skipped
        assert cache.attach(slot, runs) == 32  # those before it
        cache.drop(runs)
        assert cache.stats().prefixes == 0


def test_runs_are_kept_until_the_engine_drops_them():
    with make(pages=10) as cache:
        slots = [start(cache, 64, value) for value in (1, 2)]
        low, high = (cache.share(slot, 64) for slot in slots)
        assert (low.first, low.tokens, low.min_tokens) == (0, 64, 0)
        for slot in slots:
            cache.free(slot)
        other = cache.alloc()
        lengths = [96 if s == other else 0 for s in range(4)]
        assert not cache.step(lengths) and cache.shortage.prefix_pages == 8
        cache.drop(low)
        assert cache.step(lengths)
        slot = cache.alloc()
        assert cache.attach(slot, low) == 0
        assert cache.attach(slot, high) == 64 and (cache.tensors[0][slot, :64] == 2).all()


def test_a_run_has_what_its_request_has():
    with make(window=20) as cache:
        slot = start(cache, 100, 1)
        for tokens in (101, 102):
            assert cache.step([tokens if s == slot else 0 for s in range(4)])
        for tokens, first in ((103, 0), (1, 102), (102, 1)):
            with pytest.raises(pyvmem.InvalidArgument, match="tokens"):
                cache.share(slot, tokens, first)
        with pytest.raises(pyvmem.VmemError, match="a window has given up rows") as refused:
            cache.share(slot, 16)
        assert refused.value.errno == errno.ENODATA and cache.stats().prefixes == 0
        run = cache.share(slot, 102)
        assert 16 < run.min_tokens <= 102
        assert cache.attach(cache.alloc(), run, run.min_tokens - 1) == 0
