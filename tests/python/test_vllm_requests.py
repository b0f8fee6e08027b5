"""vLLM's requests in slots, without vLLM: pyvmem.vllm.slots.requests and the runs of its blocks.

SPDX-License-Identifier: MIT
"""

import itertools
import random

import pytest
import torch

from pyvmem.errors import InvalidArgument, VmemError
from pyvmem.kv.cache import KVCache, Spare, TensorSpec
from pyvmem.vllm.slots.requests import Requests
from pyvmem.vllm.slots.requests import BlockRuns

TOKENS, PAGE = 8, 64 << 10
ROW = PAGE // TOKENS


@pytest.fixture
def cache():
    with KVCache([TensorSpec("kv", (ROW,), torch.uint8)], 4, 64, 64 * PAGE, backend="host", page_size=PAGE, check=True,
                 spare=Spare(overlap=False, generous=False, eager=False), name=None) as cache:  # fmt: skip
        yield cache


def start(cache, blocks):
    """A slot with so many blocks; those of block i say i + 1."""
    slot = cache.alloc()
    assert cache.step([blocks * TOKENS if s == slot else 0 for s in range(cache.slots)])
    for i in range(blocks):
        cache.tensors[0][slot, i * TOKENS : (i + 1) * TOKENS] = i + 1
    return slot


def test_blocks_outlive_their_slot_and_start_another(cache):
    runs, slot = BlockRuns(cache, TOKENS), start(cache, 3)
    runs.share([(slot, 0, [7, 8, 9])])
    cache.free(slot)
    assert cache.stats().prefix_pages == 3
    other = cache.alloc()
    runs.attach(other, [7, 8])
    view = cache.tensors[0][other]
    assert (view[:TOKENS] == 1).all() and (view[TOKENS : 2 * TOKENS] == 2).all()
    runs.drop([7, 8, 9])
    runs.drop([7, 3])  # not held: skipped
    assert cache.stats().held_pages == 2
    assert (view[:TOKENS] == 1).all()
    cache.free(other)  # which keeps them now: they are nobody else's
    assert cache.stats().held_pages == cache.stats().kept_pages == 2


def test_blocks_are_shared_all_or_none(cache):
    runs, slot = BlockRuns(cache, TOKENS), start(cache, 2)
    runs.share([(slot, 0, [1])])
    with pytest.raises(ValueError, match="block 1 is held"):
        runs.share([(slot, 1, [2]), (slot, 0, [1])])
    with pytest.raises(InvalidArgument, match=r"runs\[1\]: 8 rows from row 16 on: slot . has 16 tokens"):
        runs.share([(slot, 1, [2, 3])])
    with pytest.raises(VmemError, match="slot 9"):
        runs.share([(slot, 1, [2]), (9, 0, [3])])
    cache.free(slot)
    assert cache.stats().prefix_pages == 1  # block 2 was not left behind
    slot = cache.alloc()
    with pytest.raises(ValueError, match="block 2 is not held as block 0 of a request"):
        runs.attach(slot, [2, 1])
    with pytest.raises(ValueError, match="block 2 is not held as block 1 of a request"):
        runs.attach(slot, [1, 2])
    assert cache.slot(slot).tokens == TOKENS


def test_a_block_is_found_only_at_its_place(cache):
    runs, slot = BlockRuns(cache, TOKENS), start(cache, 2)
    runs.share([(slot, 0, [5, 6])])
    with pytest.raises(ValueError, match="block 6 is not held as block 0 of a request"):
        runs.attach(cache.alloc(), [6, 5])


class Kernels:
    """Kernels of a step end when the next one's fence is made, or when somebody waits for them."""

    def __init__(self):
        self.n = self.passed = 0

    def fence(self):
        self.passed = self.n
        self.n += 1
        return Fence(self, self.n)


class Fence:
    def __init__(self, kernels, n):
        self.kernels, self.n = kernels, n

    def synchronize(self):
        self.kernels.passed = max(self.kernels.passed, self.n)

    def query(self):
        return self.n <= self.kernels.passed


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_read_what_was_written_for_their_blocks(overlap):
    """A scheduler like vLLM's: block numbers are reused, beginnings are shared, requests are preempted and resumed."""
    most, count, rnd, numbered = 4, 40, random.Random(7), itertools.count()
    spare = Spare(overlap=overlap, ahead_tokens=TOKENS, ahead_min=TOKENS)
    specs = [TensorSpec("kv", (ROW,), torch.uint8)]
    with KVCache(specs, 8, 16 * TOKENS, (count + 8) * PAGE, backend="host", page_size=PAGE, check=True, lazy=True,
                 spare=spare, name=None) as cache:  # fmt: skip
        requests = Requests(cache, TOKENS, most, Kernels().fence)
        rows = cache.flat(0).view(-1, PAGE)[:, ::8191].numpy()  # by places, as kernels see them
        says, free, unused = {}, list(range(count)), []  # block -> its bytes; blocks without, with bytes and no user
        written_as = {}  # block -> a number for what it holds, as vLLM's hash
        running, tables, ended, serial = {}, {}, [], 0

        def take():
            block = free.pop() if free else unused.pop(0) if unused else None
            says.pop(block, None)
            written_as.pop(block, None)
            return block

        def users(block):
            return sum(block in blocks for blocks in running.values())

        def leave(name):
            requests.finish(name)
            for block in reversed(running.pop(name)):
                if not users(block):
                    unused.append(block)
            tables.pop(name)

        for _ in range(600):
            requests.begin()
            written = []
            for name in list(running):
                if rnd.random() < 0.15:
                    ended.append([(block, written_as.get(block)) for block in running[name]])
                    leave(name)
                elif len(running[name]) < 15 and rnd.random() < 0.4 and (block := take()) is not None:
                    tables[name] += requests.extend(name, [block])
                    running[name].append(block)
                    written.append((name, len(running[name]) - 1))
            if len(running) < most and rnd.random() < 0.7:
                old = rnd.choice(ended) if ended and rnd.random() < 0.7 else []
                hits = 0
                while hits < min(len(old), 10) and old[hits][1] == written_as.get(old[hits][0], -1):
                    hits += 1
                blocks = [block for block, _ in old[:hits]]
                unused[:] = [block for block in unused if block not in blocks]
                blocks += [block for block in (take() for _ in range(rnd.randrange(1, 4))) if block is not None]
                serial += 1
                running[f"{serial}"] = blocks
                tables[f"{serial}"] = requests.start(f"{serial}", blocks, hits * TOKENS)
                written += [(f"{serial}", i) for i in range(hits, len(blocks))]
            requests.back()
            for name, i in written:
                block = running[name][i]
                says[block] = rnd.randrange(1, 256)
                written_as[block] = next(numbered)
                rows[tables[name][i]] = says[block]
            for name, blocks in running.items():
                for block, place in zip(blocks, tables[name]):
                    assert (rows[place] == says[block]).all(), (name, block)
            ended = ended[-8:]
        assert serial > 50 and cache.stats().attached_pages > 50
        requests.finish_all()
        requests.begin()
        requests.reset()
        assert requests.idle and cache.stats().prefix_pages == 0
        assert cache.stats().active_slots == 1  # slot 0
