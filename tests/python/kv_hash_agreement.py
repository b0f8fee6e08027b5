"""What every rank of test_kv_distributed_hashes runs: random requests that begin alike, over blocks by hash.

The last rank has less memory, and evicts what the others keep. Every row is verified, and after every call the ranks
compare what they decided.

    python -m torch.distributed.run --nproc-per-node 2 tests/python/kv_hash_agreement.py BACKEND [STEPS [SEED]]

BACKEND is gloo, on the host, or nccl, on the GPUs.

SPDX-License-Identifier: MIT
"""

import random
import sys

import torch
import torch.distributed as dist
from kv_agreement import join, refused, same

import pyvmem
from pyvmem.parallel.cache import TensorParallelKVCache
from pyvmem.parallel.hashes import TensorParallelBlockHashes
from pyvmem.kv.cache import KVCache, Spare
from pyvmem.kv.hashes import KEEP, BlockHashes, block_hashes
from kv_hash_caches import ALIKE, MIXED, PAGE

SLOTS, TOKENS, BLOCK = 6, 400, 16


class Engine:
    """Requests over the ranks' caches; rows hold the numbers of their tokens."""

    def __init__(self, context, specs, pages, rng, **options):
        cache = KVCache(specs, SLOTS, TOKENS, pages * PAGE, context=context, same_slots=True, check=True, name=None,
                        page_size=PAGE, **options)  # fmt: skip
        self.tp, self.rng, self.device = TensorParallelKVCache(cache), rng, cache.tensors[0].device
        self.rows: dict[int, list[int]] = {}
        self.refused = self.hits = self.steps = 0

    def hash(self, **options):
        self.blocks = TensorParallelBlockHashes(self.tp, BLOCK, events=True, **options)

    def same(self, *values):
        same(self.device, *values)

    def write(self, slot, start, tokens):
        says = torch.tensor(tokens, device=self.device).half()
        for spec, tensor in zip(self.tp.specs, self.tp.tensors):
            end = min(len(tokens), tensor.shape[1])
            if start < end:
                tensor[slot, start:end] = says[start:end].view(-1, 1, 1)
            first = max(len(tokens) - spec.window, 0) if spec.window else 0
            assert torch.equal(tensor[slot, first:end, 0, 0], says[first:end]), (slot, start)

    def start(self):
        tokens = [self.rng.randrange(3)] * self.rng.randrange(300) + [5 + self.rng.randrange(3)] * 30
        hashes = block_hashes(tokens, BLOCK)[: (len(tokens) - 1) // BLOCK]
        fits = self.tp.fit([(len(tokens), hashes)])
        peeked = self.blocks.peek(hashes)
        would = self.blocks.attach(None, hashes, dry=True)
        if self.rng.random() < 0.5:
            slot, cached = self.blocks.alloc(len(tokens), hashes)
        else:
            slot, cached = self.tp.alloc(len(tokens), prefix_tokens=peeked), None
            if slot is not None:
                cached = self.blocks.attach(slot, hashes)
                if cached is None:
                    self.tp.free(slot)
                    slot, cached = None, 0
        self.same(fits, peeked, would, slot, cached, self.tp.shortage)
        if slot is None:
            self.refused += 1
            return
        assert cached == peeked == would
        ran = self.tp.step([len(tokens) if s == slot else 0 for s in range(SLOTS)])
        self.same(ran)
        assert ran or not fits
        if not ran:
            self.tp.free(slot)
            return
        self.hits += cached
        self.write(slot, cached, tokens)
        self.rows[slot] = tokens
        if self.rng.random() < 0.7:
            self.blocks.add(slot, hashes)

    def grow(self):
        lengths, grown = [0] * SLOTS, {}
        for slot, tokens in self.rows.items():
            grown[slot] = (tokens + [self.rng.randrange(4)])[:TOKENS]
            lengths[slot] = len(grown[slot])
        ran = self.tp.step(lengths)
        self.same(ran, self.tp.shortage)
        if not ran:
            self.end()
            return
        self.steps += 1
        for slot, tokens in grown.items():
            self.write(slot, len(self.rows[slot]), tokens)
        self.rows = grown

    def end(self):
        slot = self.rng.choice(sorted(self.rows))
        del self.rows[slot]
        self.tp.free(slot, after=self.rng.choice([None, self.tp.last_step]))

    def add(self):
        slot = self.rng.choice(sorted(self.rows))
        hashes = block_hashes(self.rows[slot], BLOCK)
        first = self.rng.randint(0, len(hashes))
        self.blocks.add(slot, hashes[first:], first)

    def truncate(self):
        slot = self.rng.choice(sorted(self.rows))
        tokens = self.rng.randint(1, len(self.rows[slot]))
        after = self.rng.choice([None, self.tp.last_step])
        try:
            fits = self.tp.truncate(slot, tokens, after)
        except pyvmem.VmemError as error:
            self.same(error.errno, self.tp.slot(slot).tokens)
            if after is None:
                del self.rows[slot]
                self.tp.free(slot)
        else:
            self.same(fits, self.tp.shortage, self.tp.slot(slot).tokens)
            self.rows[slot] = self.rows[slot][:tokens] if fits else self.rows[slot]

    def evict(self):
        choice, some = self.rng.randrange(5), []
        if self.rows:
            some = block_hashes(self.rng.choice(sorted(self.rows.values())), BLOCK)
        if choice == 0:
            self.same(self.blocks.evict(self.rng.randrange(20)), self.blocks.evict(2, some))
        elif choice == 1:
            self.blocks.drop(some)
        elif choice == 2:
            self.blocks.prioritize(some, self.rng.choice([0, 50, KEEP]))
        elif choice == 3:
            gone = self.blocks.evicted()
            self.same(len(gone), sum(int.from_bytes(h[:4], "little") for h in gone))
        elif self.rng.random() < 0.1:
            self.blocks.clear()

    def serve(self, steps):
        while self.steps < steps:
            choice = self.rng.random()
            if choice < 0.15 or not self.rows:
                self.start()
            elif choice < 0.2:
                self.end()
            elif choice < 0.35:
                self.add()
            elif choice < 0.4:
                self.truncate()
            elif choice < 0.45:
                self.evict()
            else:
                self.grow()
        self.same(self.tp.agreements, *sorted(self.rows))
        assert self.tp.stats().worker_errors == 0


def misuse(engine, first):
    """What one rank does wrong is refused on all of them."""
    tp, blocks = engine.tp, engine.blocks
    refused(lambda: BlockHashes(tp, 16), TypeError, "pyvmem.parallel.hashes")
    refused(lambda: TensorParallelBlockHashes(tp, 16), ValueError, "hashes already, of 16 tokens each")
    refused(lambda: blocks.peek([(b"1" if first else b"2") * 16]), RuntimeError, "different calls")
    refused(lambda: blocks.alloc(100, ["x" if first else b"x" * 16]), (RuntimeError, TypeError), "")
    refused(lambda: blocks.alloc(100 if first else -1, []), (RuntimeError, ValueError), "")
    for call in (
        blocks.peek,
        lambda h: blocks.attach(None, h, dry=True),
        lambda h: blocks.alloc(100, h),
        lambda h: blocks.evict(1, h),
    ):
        refused(lambda call=call: call(7 if first else []), (RuntimeError, TypeError), "")
    refused(lambda: blocks.evict(1 if first else 2), RuntimeError, "different calls")
    refused(
        lambda: blocks.attach(SLOTS, [b"\0" * 16]),
        ValueError,
        f"slot {SLOTS} is out of range: the cache has {SLOTS} slots",
    )
    engine.same(tp.stats().active_slots)


def one_evicts(context, starved):
    """A rank that has evicted the end of a sequence, or a rank short of memory for a copy, decides for all."""
    engine = Engine(context, ALIKE, 60, random.Random(1), spare=Spare(overlap=False))
    engine.hash()
    tp, blocks, tokens = engine.tp, engine.blocks, list(range(72))
    hashes = block_hashes(tokens, BLOCK)
    slot, cached = blocks.alloc(72, hashes)
    engine.same(slot, cached)
    assert cached == 0 and tp.step([72 if s == slot else 0 for s in range(SLOTS)])
    engine.write(slot, 0, tokens)
    assert blocks.add(slot, hashes) == 4
    tp.free(slot)
    if starved:
        blocks._blocks.drop(hashes[3:])
    assert blocks.peek(hashes) == blocks.attach(None, hashes, dry=True) == 48
    before, other = tp.cache.stats().budget_pages, tp.alloc(64)
    assert tp.step([64 if s == other else 0 for s in range(SLOTS)])
    if starved:
        tp.cache.set_budget(8 * PAGE)  # of the blocks, and of that request: nothing is left for a copy
    agreements = tp.agreements
    assert blocks.attach(None, hashes, dry=True) is None and tp.shortage.missing_pages
    assert tp.shortage.rank == dist.get_world_size() - 1
    assert blocks.alloc(72, hashes) == (None, 0) and tp.stats().active_slots == 1
    slot = tp.alloc(72)
    assert blocks.attach(slot, hashes) is None and tp.slot(slot).tokens == 0
    assert tp.agreements == agreements + 6
    tp.set_budget(before * PAGE)
    engine.same(blocks.peek(hashes))
    known = blocks.attach(slot, hashes)
    engine.same(known, tp.slot(slot).tokens)
    engine.write(slot, known, tokens[:known])
    misuse(engine, dist.get_rank() == 0)
    tp.close()


def main(backend, steps=400, seed=1):
    starved = join(backend) == dist.get_world_size() - 1
    with pyvmem.Context("host") if backend == "gloo" else pyvmem.Context("stock", dist.get_rank()) as context:
        one_evicts(context, starved)
        hits = refusals = 0
        for number, (specs, options, hashes) in enumerate((
            (ALIKE, {}, {}),
            (ALIKE, {"lazy": True, "spare": Spare(generous=False)}, {"max_tokens": 600}),
            (MIXED, {"steps_in_flight": 2}, {}),
            (MIXED, {}, {"max_tokens": 320}),
        )):  # fmt: skip
            pages = (70 if starved else 130) * len(specs) // 2
            engine = Engine(context, specs, pages, random.Random(seed + number), **options)
            engine.hash(**hashes)
            engine.serve(steps)
            hits, refusals = hits + engine.hits, refusals + engine.refused
            engine.tp.close()
    assert hits and refusals
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks agreed: {hits} tokens were known, {refusals} requests were refused")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
