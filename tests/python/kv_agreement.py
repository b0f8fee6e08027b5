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
import time
import zlib

import torch
import torch.distributed as dist

import pyvmem
from pyvmem import paper
from pyvmem.kv import view as kv_view
from pyvmem.kv.cache import KVCache
from pyvmem.kv.hashes import KEEP, BlockHashes
from pyvmem.kv.prefix import PrefixCache
from pyvmem.kv.types import Shortage
from pyvmem.parallel.cache import TensorParallelKVCache, init_cache
from pyvmem.parallel.pledge import AHEAD

SLOTS, TOKENS = 16, 600


def join(backend):
    """Join the process group, with a GPU for each rank of NCCL. Returns the rank."""
    dist.init_process_group(backend)
    rank = dist.get_rank()
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")  # the process's CUDA context, before the cache looks for it
    return rank


def same(device, *values):
    """Fail unless the values are equal on all ranks."""
    numbers = [zlib.crc32(repr(v).encode()) if isinstance(v, Shortage) else -1 if v is None else int(v) for v in values]
    mine = torch.tensor(numbers, device=device)
    most, least = mine.clone(), mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    assert torch.equal(most, least), f"rank {dist.get_rank()}: {values}, ranks differ: {least.tolist()} {most.tolist()}"


def full_house(tp, device, _starved):
    """With all slots taken, a swapped request comes back; a cache that chooses slots by its pages is refused."""
    slots = [tp.alloc(1) for _ in range(SLOTS)]
    same(device, *slots)
    assert tp.step([1] * SLOTS)
    tp.swap_out(slots[3])
    assert tp.swap_in(slots[3])
    for slot in slots:
        tp.free(slot)
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
    refused(lambda: tp.room() if first else tp.step([0] * SLOTS, dry=True), RuntimeError, "different calls")
    refused(lambda: tp.step([0] * SLOTS if first else [0] * (SLOTS - 1)), (RuntimeError, ValueError), "")
    refused(lambda: tp.step([0] * SLOTS if first else ["x"] * SLOTS), (RuntimeError, TypeError), "")
    refused(lambda: tp.swap_out(3 if first else None), (RuntimeError, TypeError, pyvmem.VmemError), "")
    refused(lambda: tp.set_budget(tp.stats().budget_pages * tp.page_size if first else 1), pyvmem.VmemError, "")
    refused(lambda: BlockHashes(tp, 64), TypeError, "need a KVCache")
    slot = tp.alloc(10)
    refused(lambda: tp.free(slot, after=torch.cuda.Event), TypeError, "after must be an integer")
    assert tp.step([10 if s == slot else 0 for s in range(SLOTS)])
    same(device, tp.stats().active_slots, tp.slot(slot).tokens)
    # A refusal names the rank, and what the others did meanwhile is undone: growth that was staged is staged again.
    assert tp.grow(slot, 20)
    text = "" if first else "failed on rank 0"
    refused(lambda: tp.swap_out(slot, None, torch.empty(0) if first else None), ValueError, text)
    refused(lambda: tp.truncate(slot, 5, tp.last_step if first else None), RuntimeError, "rank 0: truncate")
    refused(lambda: tp.truncate(slot, 5, tp.last_step + first), (RuntimeError, ValueError), "")
    assert tp.slot(slot).tokens == 10
    refused(lambda: tp.fit(None if first else [1]), (RuntimeError, TypeError), "")
    assert tp.commit() and tp.slot(slot).tokens == 20
    prefixes = [tp.share(slot, 10) for _ in range(2)]
    other = tp.alloc(10)
    refused(lambda: tp.attach(other, prefixes[first]), RuntimeError, "rank 0: attach")
    refused(lambda: tp.attach(None, prefixes[first], dry=True), RuntimeError, "rank 0: attach")
    refused(lambda: tp.attach(other, 7 if first else prefixes), (RuntimeError, TypeError), "")
    assert tp.attach(other, prefixes[0]) == 10
    tp.drop(prefixes)
    tp.free(other)
    tp.free(slot)


def older_prefix(tp, device, starved):
    """A prefix that one rank no longer has is attached on none."""
    slot = tp.alloc(40)
    assert tp.step([40 if s == slot else 0 for s in range(SLOTS)])
    prefix, gone = tp.share(slot, 40), tp.share(slot, 30)
    if starved:
        tp.cache.drop(gone)
    other = tp.alloc(40, prefix_tokens=30)
    same(device, slot, other)
    assert tp.attach(other, gone) == tp.attach(None, gone, dry=True) == 0
    assert tp.attach(other, prefix, 35) == 35
    same(device, tp.slot(other).tokens)
    tp.drop(prefix)
    if not starved:
        tp.cache.drop(gone)
    tp.free(slot)
    tp.free(other)


def steady(tp, device, starved):
    """Steps that all ranks know will fit ask nobody; a limit on one rank is taken over when they ask again."""
    lengths = [20] * 4 + [0] * (SLOTS - 4)
    for tokens in lengths[:4]:
        tp.alloc(tokens)
    before, steps = tp.agreements, 4 * AHEAD
    for _ in range(steps):
        assert tp.step(lengths)
        lengths = [n + 1 if n else 0 for n in lengths]
    asked = tp.agreements - before
    page_tokens = tp.page_size // tp.specs[0].row_bytes
    # With memory in their hands they ask once for AHEAD tokens; else where a page begins, and after AHEAD steps.
    assert asked <= (steps // AHEAD + 1 if not tp.options.lazy else steps // page_tokens + 1 + steps // AHEAD), asked
    budget = tp.stats().budget_pages * tp.page_size
    if starved:
        kv_view.want_budget(own_view(), 8 * tp.page_size)
    tried, fits = 0, True
    while fits and tried <= 4 * AHEAD:
        tried += 1
        fits = tp.step(lengths)
        same(device, fits, tp.shortage)
        lengths = [n + 1 if n else 0 for n in lengths]
    assert not fits and tp.shortage.rank == dist.get_world_size() - 1
    assert tp.shortage.reason == ("budget" if starved else tp.shortage.reason)
    for slot in range(4):
        tp.free(slot)
    tp.set_budget(budget)


def prefix_cache(tp, device, starved):
    """A prefix cache finds and evicts the same on every rank."""
    prefixes, prompt = PrefixCache(tp, block_tokens=64), list(range(200))
    for tokens, found in ((200, 0), (200, 192), (150, 128)):
        slot, cached = prefixes.alloc(prompt[:tokens])
        same(device, slot, cached)
        assert cached == found
        assert tp.step([tokens if s == slot else 0 for s in range(SLOTS)])
        prefixes.insert(slot, prompt[:tokens])
        tp.free(slot)
    same(device, prefixes.match(prompt)[1], prefixes.evict(2), prefixes.hits, prefixes.hit_tokens)
    prefixes.clear()
    same(device, prefixes.match(prompt)[1])


def zero_ends(context, device, world):
    """With zero_ends, a step first ends the requests of length 0 on every rank, and can have their memory."""
    page = min(context.page_sizes)
    options = {"context": context, "dtype": torch.float16, "name": None}
    with init_cache(1, 2 * world, 256, 4, TOKENS, 10 * page, **options) as tp:
        a, b = tp.alloc(100), tp.alloc(100)
        lengths = [0] * 4
        lengths[a] = lengths[b] = 100

        def step(lengths):
            return paper.step(tp, lengths, zero_ends=True) == 0

        assert step(lengths)
        lengths[a], lengths[b] = 0, 200
        refused(lambda: step([*lengths[:2], TOKENS + 1, 0]), ValueError, "max_tokens")
        # What only one rank refuses ends nothing on the others either, which do not wait for it.
        wrong = TOKENS + 1 if dist.get_rank() == 0 else 0
        refused(lambda: step([*lengths[:2], wrong, 0]), (ValueError, RuntimeError), "")
        assert tp.slot(a).state == "active"
        tp.retire()
        assert step(lengths) and step(lengths)
        same(device, tp.alloc(10, slot=a))
        lengths[a] = 10
        before = tp.agreements
        assert step(lengths) and tp.agreements > before  # nobody knew of the new request
        same(device, tp.slot(a).tokens, tp.slot(b).tokens)


def own_view():
    return next(v for v in kv_view.read_views() if v.pid == os.getpid() and v.name == "tp")


def parts(tp, rank):
    """Ranks that made different calls while they asked nobody: the next question shows it, and every one after it."""
    slot = tp.alloc(5, slot=rank)
    for _ in range(2):
        refused(tp.room, RuntimeError, "cannot agree any more")
    refused(lambda: tp.step([0] * SLOTS), RuntimeError, "cannot agree any more")
    refused(lambda: tp.alloc(), RuntimeError, "cannot agree any more")
    assert slot == rank
    tp.close()


def interrupted(tp, rank):
    """A rank left a call in the middle, as by Ctrl-C: the next question says so on every rank."""

    def leave(*_):
        raise KeyboardInterrupt

    room = tp.cache.room
    if rank == 0:
        tp.cache.room = leave
        refused(tp.room, KeyboardInterrupt, "")
        tp.cache.room = room
    refused(tp.room, RuntimeError, "made other calls before than rank 0")
    tp.close()


def dropped(tp, rank):
    """Ranks that drop different prefixes part."""
    slot = tp.alloc(10)
    assert tp.step([10 if s == slot else 0 for s in range(SLOTS)])
    prefixes = [tp.share(slot, 10) for _ in range(2)]
    tp.drop(prefixes[rank == 0])
    refused(tp.room, RuntimeError, "cannot agree any more")
    tp.close()


def differ(context, rank):
    """Caches that would not choose alike are no tensor-parallel cache."""
    options = {"context": context, "dtype": torch.float16, "name": None, "lazy": True, "same_slots": True}
    with KVCache.for_model(1, 1, 256, 2, 100, 1 << 24, steps_in_flight=1 + (rank == 0), **options) as cache:
        refused(lambda: TensorParallelKVCache(cache), RuntimeError, "different calls")


def staged(tp, device, starved):
    """What one rank has no memory for stays as it was staged; a budget that shrinks meanwhile is seen by all."""
    cache, slot = tp.cache, tp.alloc(10)
    before = cache.stats().budget_pages * cache.page_size
    if starved:
        cache.set_budget(4 * cache.page_size)
    assert tp.grow(slot, 10)
    assert not tp.grow(slot, TOKENS)
    assert tp.commit()
    same(device, tp.slot(slot).tokens)
    assert tp.slot(slot).tokens == 10
    # A step makes the growth of its requests void. What a rank refuses afterwards does not bring it back.
    assert tp.grow(slot, 20)
    assert tp.step([20 if s == slot else 0 for s in range(SLOTS)])
    assert not tp.grow(slot, TOKENS)
    refused(tp.commit, ValueError, "no growth is staged")
    assert tp.truncate(slot, 10)
    tp.set_budget(before)
    assert tp.grow(slot, TOKENS)
    if starved:
        view = next(v for v in kv_view.read_views() if v.pid == os.getpid() and v.name == "tp")
        kv_view.want_budget(view, 4 * cache.page_size)
    assert not tp.commit()
    assert tp.slot(slot).tokens == 10
    tp.set_budget(before)
    assert tp.commit()
    same(device, tp.slot(slot).tokens)
    tp.free(slot)


def share(tp, device, rng, lengths, prefixes):
    """One call about prefixes or truncation."""
    running = [s for s in range(SLOTS) if lengths[s]]
    choice = rng.randrange(5)
    if choice == 0 and running:
        slot = rng.choice(running)
        tokens = rng.randint(1, lengths[slot])
        prefixes.append((tp.share(slot, tokens), tokens))
    elif choice == 1 and prefixes:
        prefix, tokens = rng.choice(prefixes)
        slot = tp.alloc(tokens, prefix_tokens=tokens)
        same(device, slot)
        if slot is not None:
            fits = tp.attach(slot, prefix)
            same(device, fits, tp.shortage)
            assert fits in (None, 0, tokens)  # 0: a rank has evicted it
            lengths[slot] = fits or 0
            if not fits:
                tp.free(slot)
    elif choice == 2 and running:
        slot = rng.choice(running)
        tokens = rng.randint(1, lengths[slot])
        try:
            fits = tp.truncate(slot, tokens)
        except pyvmem.VmemError as error:
            same(device, error.errno)
            tp.free(slot)
            lengths[slot] = 0
        else:
            same(device, fits, tp.shortage)
            lengths[slot] = tokens if fits else lengths[slot]
    elif choice == 3 and prefixes:
        tp.order([prefix for prefix, _ in prefixes[-2:]], rng.choice([0, 50, KEEP]))
    elif prefixes:
        tp.drop(prefixes.pop(rng.randrange(len(prefixes)))[0])


def main(backend, steps=10_000, seed=1):
    rank = join(backend)
    if backend == "nccl":
        context, device = pyvmem.core.default_context("gpu", rank), torch.device("cuda", rank)
    else:
        context, device = pyvmem.Context("host"), torch.device("cpu")
    world = dist.get_world_size()
    page = min(context.page_sizes)
    starved = rank == world - 1
    options = {"context": context, "dtype": torch.float16, "name": "tp"}
    plenty = SLOTS * 8 * 2 * page
    part_ways_and_meet = (full_house, older_prefix, staged, steady, prefix_cache)
    failed = 0
    for lazy in (True, False):
        with init_cache(1, 2 * world, 256, SLOTS, TOKENS, plenty, lazy=lazy, idle_seconds=0.01, **options) as tp:
            part_ways(tp, device, rank)
            for check in part_ways_and_meet:
                check(tp, device, starved)
            failed += serve(tp, device, starved, steps // 2, seed + lazy)
    assert failed, "the starved rank never held the others back"
    zero_ends(context, device, world)
    differ(context, rank)
    for way in (parts, interrupted, dropped):
        way(init_cache(1, 2 * world, 256, SLOTS, TOKENS, plenty, lazy=True, **options), rank)
    if rank == 0:
        print(f"{world} ranks agreed over {steps} steps, of which {failed} found no memory")
    dist.destroy_process_group()


def admit(tp, tokens):
    """A slot for a request of so many tokens if every rank has room for it, else None."""
    return tp.alloc(tokens) if tp.room() >= tokens else None


def crowd(tp, device, rng, lengths):
    """Begin requests until a rank has no memory for another: a few steps later, one is short."""
    while (slot := admit(tp, prompt := rng.randint(1, TOKENS // 2))) is not None:
        same(device, slot)
        lengths[slot] = prompt
        assert tp.step([prompt if s == slot else 0 for s in range(SLOTS)])


def serve(tp, device, starved, steps, seed):
    """Random requests; what only this rank knows of changes its memory. Returns how many steps found too little."""
    cache, rng, local = tp.cache, random.Random(seed), random.Random(seed + 100 + dist.get_rank())
    page = tp.page_size
    little = 5 * 8 * 2 * page
    plenty = SLOTS * 8 * 2 * page
    lengths, failed, done, prefixes = [0] * SLOTS, 0, 0, []
    tp.set_budget(little if starved else plenty)
    crowd(tp, device, rng, lengths)
    while done < steps:
        choice = rng.random()
        running = [s for s in range(SLOTS) if lengths[s]]
        if starved and local.random() < 0.002:
            wanted = local.choice((little, little // 2, plenty // 2))
            # By hand only where the cache takes memory when needed: else the others rely on the budget.
            by_hand = tp.options.lazy and local.random() < 0.5
            cache.set_budget(wanted) if by_hand else kv_view.want_budget(own_view(), wanted)
        if local.random() < 0.002:
            time.sleep(local.choice((0.001, 0.03)))  # a slow rank, perhaps slow enough to be idle
        if choice < 0.002:
            some = rng.choice((little, 2 * little))
            tp.set_budget(some if starved else plenty)
        elif choice < 0.004:
            for slot in running:
                tp.free(slot)
            lengths = [0] * SLOTS
        elif choice < 0.1:
            prompt = rng.randint(1, TOKENS // 2)
            slot = admit(tp, prompt)
            same(device, slot)
            if slot is not None:
                prefill = [0] * SLOTS
                prefill[slot] = prompt
                fits = tp.step(prefill)
                same(device, fits)
                assert fits or starved or tp.shortage.missing_pages, "admitted, and then there is no room"
                if not fits:  # a limit came between
                    tp.free(slot)
                else:
                    lengths[slot] = prompt
                done += 1
        elif choice < 0.13 and running:
            slot = rng.choice(running)
            tp.free(slot, after=tp.last_step if choice < 0.115 else None)
            lengths[slot] = 0
        elif choice < 0.2:
            share(tp, device, rng, lengths, prefixes)
        elif running:
            grown = [min(n + 1, TOKENS) if n else 0 for n in lengths]
            if choice < 0.3:
                fits = all(tp.grow(s, grown[s]) for s in running) and tp.commit()
                if not fits:
                    for slot in running:
                        tp.grow(slot, 0)
            else:
                fits = tp.step(grown)
            same(device, fits, tp.shortage)
            done += 1
            if fits:
                lengths = grown
            else:  # preempt the longest
                failed += 1
                slot = max(running, key=lambda s: lengths[s])
                tp.free(slot)
                lengths[slot] = 0
            if choice < 0.5:
                same(device, tp.room())
    same(device, *lengths, tp.agreements)
    assert tp.stats().worker_errors == 0
    for slot in range(SLOTS):
        if lengths[slot]:
            tp.free(slot)
    for prefix, _ in prefixes:
        tp.drop(prefix)
    return failed


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
