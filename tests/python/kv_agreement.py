"""What every rank of test_kv_distributed runs.

Random requests over a tensor-parallel cache of which the last rank is starved, and whose budgets change: after every
call the ranks compare what they decided. By hand:

    python -m torch.distributed.run --nproc-per-node 2 tests/python/kv_agreement.py BACKEND [STEPS [SEED]]

with the python that has pyvmem; BACKEND is gloo or nccl.

SPDX-License-Identifier: MIT
"""

import os
import random
import sys

import torch
import torch.distributed as dist

import pyvmem
from pyvmem import kv_view
from pyvmem.distributed import TensorParallelKVCache, init_cache
from pyvmem.kv import KVCache

SLOTS, TOKENS = 16, 600


def same(device, *values):
    """Fail unless the values are equal on all ranks."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    most, least = mine.clone(), mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    assert torch.equal(most, least), f"rank {dist.get_rank()}: {values}, ranks differ: {least.tolist()} {most.tolist()}"


def full_house(tp, device):
    """With all slots taken, a swapped request comes back; a cache that chooses slots by its pages is refused."""
    slots = [tp.alloc_reqid(1) for _ in range(SLOTS)]
    same(device, *slots)
    assert tp.step([1] * SLOTS) == 0
    tp.swap_out(slots[3])
    assert tp.swap_in(slots[3]) == 0
    for slot in slots:
        tp.free_reqid(slot)
    with KVCache.for_model(1, 1, 64, 2, 10, 1 << 22, backend="host", name=None) as other:
        try:
            TensorParallelKVCache(other)
        except ValueError as error:
            assert "same_slots" in str(error)
        else:
            raise AssertionError("a cache without same_slots was accepted")


def refused(call, error, text):
    """The call raises on this rank."""
    try:
        call()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"{text!r} was to be refused")


def part_ways(tp, device, rank):
    """What one rank does wrong, or cannot, is refused on all of them, and then they agree as before."""
    first = rank == 0
    refused(lambda: tp.room() if first else tp.check([0] * SLOTS), RuntimeError, "another rank made a different call")
    refused(lambda: tp.step([0] * SLOTS if first else [0] * (SLOTS - 1)), (RuntimeError, ValueError), "")
    refused(lambda: tp.step([0] * SLOTS if first else ["x"] * SLOTS), (RuntimeError, TypeError), "")
    refused(lambda: tp.swap_out(3 if first else None), (RuntimeError, TypeError, pyvmem.VmemError), "")
    refused(lambda: tp.set_budget(tp.stats().budget_pages * tp.page_size if first else 1), pyvmem.VmemError, "")
    slot = tp.alloc_reqid(10)
    refused(lambda: tp.free_reqid(slot, after=torch.cuda.Event), TypeError, "after must be an integer")
    assert tp.step([10 if s == slot else 0 for s in range(SLOTS)]) == 0
    same(device, tp.stats().active_slots, tp.slot(slot).tokens)
    tp.free_reqid(slot)


def differ(context, rank):
    """Caches that would not choose alike are no tensor-parallel cache."""
    options = {"context": context, "dtype": torch.float16, "name": None, "lazy": True, "same_slots": True}
    with KVCache.for_model(1, 1, 256, 2, 100, 1 << 24, steps_in_flight=1 + (rank == 0), **options) as cache:
        refused(lambda: TensorParallelKVCache(cache), RuntimeError, "another rank made a different call")


def staged(tp, device, starved):
    """What one rank has no memory for stays as it was staged; a budget that shrinks meanwhile is seen by all."""
    cache, slot = tp.cache, tp.alloc_reqid(10)
    before = cache.stats().budget_pages * cache.page_size
    if starved:
        cache.set_budget(4 * cache.page_size)
    assert tp.grow(slot, 10) == 0
    assert tp.grow(slot, TOKENS) == -1
    assert tp.commit() == 0
    same(device, tp.slot(slot).tokens)
    assert tp.slot(slot).tokens == 10
    tp.set_budget(before)
    assert tp.grow(slot, TOKENS) == 0
    if starved:
        view = next(v for v in kv_view.read_views() if v.pid == os.getpid() and v.name == "tp")
        kv_view.want_budget(view, 4 * cache.page_size)
    assert tp.commit() == -1
    assert tp.slot(slot).tokens == 10
    tp.set_budget(before)
    assert tp.commit() == 0
    same(device, tp.slot(slot).tokens)
    tp.free_reqid(slot)


def share(tp, device, rng, lengths, prefixes):
    """One call about prefixes, truncation or swapping."""
    running = [s for s in range(SLOTS) if lengths[s]]
    choice = rng.randrange(4)
    if choice == 0 and running:
        slot = rng.choice(running)
        tokens = rng.randint(1, lengths[slot])
        prefixes.append((tp.save_prefix(slot, tokens), tokens))
    elif choice == 1 and prefixes:
        prefix, tokens = rng.choice(prefixes)
        slot = tp.alloc_reqid(tokens, prefix_tokens=tokens)
        same(device, slot)
        if slot >= 0:
            rc = tp.attach_prefix(prefix, slot)
            same(device, rc, tp.missing_pages)
            lengths[slot] = 0 if rc else tokens
            if rc:
                tp.free_reqid(slot)
    elif choice == 2 and running:
        slot = rng.choice(running)
        tokens = rng.randint(1, lengths[slot])
        try:
            tp.truncate(slot, tokens)
        except pyvmem.VmemError as error:
            same(device, error.errno)
            tp.free_reqid(slot)
            lengths[slot] = 0
        else:
            same(device, 0)
            lengths[slot] = tokens
    elif prefixes:
        tp.drop_prefix(prefixes.pop(rng.randrange(len(prefixes)))[0])


def main(backend, steps=10_000, seed=1):
    if backend == "nccl":
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")  # the process's CUDA context, before the cache looks for it
        context, device = pyvmem.default_context("gpu", rank), torch.device("cuda", rank)
    else:
        dist.init_process_group(backend)
        rank = dist.get_rank()
        context, device = pyvmem.Context("host"), torch.device("cpu")
    world = dist.get_world_size()
    page = min(context.page_sizes)
    plenty = SLOTS * 8 * 2 * page
    starved = 5 * 8 * 2 * page
    options = {"context": context, "dtype": torch.float16, "name": "tp", "lazy": True}
    tp = init_cache(1, 2 * world, 256, SLOTS, TOKENS, plenty, **options)
    cache, rng = tp.cache, random.Random(seed)
    local = random.Random(seed + 100 + rank)  # what only this rank knows of
    lengths, failed, done, prefixes = [0] * SLOTS, 0, 0, []
    full_house(tp, device)
    part_ways(tp, device, rank)
    differ(context, rank)
    staged(tp, device, rank == world - 1)
    if rank == world - 1:
        cache.set_budget(starved)
    while done < steps:
        choice = rng.random()
        running = [s for s in range(SLOTS) if lengths[s]]
        if rank == world - 1 and local.random() < 0.002:
            view = next(v for v in kv_view.read_views() if v.pid == os.getpid())
            wanted = local.choice((starved, starved // 2, plenty // 2))
            kv_view.want_budget(view, wanted) if local.random() < 0.5 else cache.set_budget(wanted)
        if choice < 0.1:
            prompt = rng.randint(1, TOKENS // 2)
            slot = tp.admit(prompt)
            same(device, slot)
            if slot >= 0:
                prefill = [0] * SLOTS
                prefill[slot] = prompt
                rc = tp.step(prefill)
                same(device, rc)
                assert rc == 0, "admitted, and then there is no room"
                lengths[slot] = prompt
                done += 1
        elif choice < 0.13 and running:
            slot = rng.choice(running)
            tp.free_reqid(slot)
            lengths[slot] = 0
        elif choice < 0.2:
            share(tp, device, rng, lengths, prefixes)
        elif running:
            grown = [min(n + 1, TOKENS) if n else 0 for n in lengths]
            rc = tp.step(grown)
            same(device, rc, tp.missing_pages)
            done += 1
            if rc == 0:
                lengths = grown
            else:  # preempt the longest
                failed += 1
                slot = max(running, key=lambda s: lengths[s])
                tp.free_reqid(slot)
                lengths[slot] = 0
            same(device, tp.room())
    same(device, *lengths)
    assert failed, "the starved rank never held the others back"
    if rank == 0:
        print(f"{world} ranks agreed over {done} steps, of which {failed} found no memory")
    cache.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
