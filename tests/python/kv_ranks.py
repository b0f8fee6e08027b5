"""The program of every rank of test_kv_ranks: random requests that begin alike, of which rank 0 decides everything.

The last rank has less memory, and ranks are slow in turns. Every row is verified, and after every iteration the ranks
compare what their caches hold.

    python -m torch.distributed.run --nproc-per-node 2 tests/python/kv_ranks.py BACKEND [STEPS [SEED]]

BACKEND is gloo, on the host, or nccl, on the GPUs.

SPDX-License-Identifier: MIT
"""

import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from kv_hash_caches import ALIKE, MIXED, PAGE

import pyvmem
from pyvmem.kv.cache import KVCache, Spare

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from ranks import Ranks, init_cache

SLOTS, TOKENS = 6, 400


def refused(call, error, text):
    """The call raises on this rank."""
    try:
        call()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"{text!r} was to be refused")


class Engine:
    """Requests over the ranks' caches. Rank 0 draws what happens; rows hold the numbers of their tokens."""

    def __init__(self, context, specs, pages, seed, **options):
        cache = KVCache(specs, SLOTS, TOKENS, pages * PAGE, context=context, check=True, name=None, page_size=PAGE,
                        idle_seconds=math.inf, **options)  # fmt: skip
        self.ranks, self.cache = Ranks(cache), cache
        self.rng, self.local = random.Random(seed), random.Random(seed + 100 + dist.get_rank())
        self.rows: dict[int, list[int]] = {}  # of the last iteration's requests, as every rank has been told
        self.prefixes: list[tuple[object, list[int]]] = []  # of rank 0: (run, tokens), the least recently used first
        self.windows = any(spec.window for spec in specs)
        self.refused = self.hits = 0

    # ---- rank 0 -----------------------------------------------------------------------------------------------

    def known(self, tokens):
        """The prefix with most of the first tokens."""

        def alike(has):
            return next((i for i, (a, b) in enumerate(zip(has, tokens[:-1])) if a != b), min(len(has), len(tokens) - 1))

        return max(((alike(has), i) for i, (_, has) in enumerate(self.prefixes)), default=(0, -1))

    def start(self, rows):
        tokens = [self.rng.randrange(3)] * self.rng.randrange(1, 300) + [5 + self.rng.randrange(3)] * 30
        (most, at), begun = self.known(tokens), 0
        slot = self.ranks.alloc(len(tokens), prefix_tokens=most)
        if slot is None:
            return
        if most:
            self.prefixes.append(self.prefixes.pop(at))
            begun = self.ranks.attach(slot, [self.prefixes[-1][0]], most) or 0
            self.hits += begun
        while not self.ranks.step([len(tokens) if s == slot else 0 for s in range(SLOTS)]):
            self.refused += 1
            if not self.prefixes:
                self.ranks.free(slot)
                return
            self.ranks.drop([self.prefixes.pop(0)[0]])  # the least recently used
        rows[slot], self.begun[slot] = tokens, begun
        if self.rng.random() < 0.5:
            shared = len(tokens) if self.windows else self.rng.randint(1, len(tokens))
            self.prefixes.append((self.ranks.share(slot, shared), tokens[:shared]))

    def decide(self, rows):
        """One iteration's calls; the requests that run in it, and how much those that began in it had already."""
        ranks, choice, self.begun = self.ranks, self.rng.random(), {}
        if choice < 0.02:
            ranks.set_budget(self.rng.choice((20, 40, 70)) * PAGE * len(self.cache.specs) // 2)
        elif choice < 0.2 or not rows:
            self.start(rows)
        elif choice < 0.27:
            slot = self.rng.choice(sorted(rows))
            ranks.free(slot, after=self.rng.choice([None, self.cache.last_step]))
            del rows[slot]
        elif choice < 0.34:
            slot = self.rng.choice(sorted(rows))
            tokens = self.rng.randint(1, len(rows[slot]))
            try:
                if ranks.truncate(slot, tokens, self.rng.choice([None, self.cache.last_step])):
                    rows[slot] = rows[slot][:tokens]
            except pyvmem.VmemError:  # a window has passed the rows, or kernels may use shared ones: nothing was sent
                pass
        elif choice < 0.38 and self.prefixes:
            ranks.drop([self.prefixes.pop(self.rng.randrange(len(self.prefixes)))[0]])
        elif choice < 0.4:
            ranks.retire(self.cache.last_step)
        # A request that begins has made its step: its kernels, which write all of its rows, run before the next one.
        grown = {s: (tokens + [self.rng.randrange(4)])[:TOKENS] for s, tokens in rows.items() if s not in self.begun}
        while grown and not ranks.step([len(grown.get(s, ())) for s in range(SLOTS)]):
            self.refused += 1
            if self.prefixes:
                ranks.drop([self.prefixes.pop(0)[0]])
                continue
            slot = max(grown, key=lambda s: len(grown[s]))
            ranks.free(slot)
            del grown[slot]
        return {**grown, **{slot: rows[slot] for slot in self.begun}}, self.begun

    # ---- every rank -------------------------------------------------------------------------------------------

    def write(self, slot, tokens, begun):
        """The rows from the first on that this rank's request does not have yet, and a look at all that it reads."""
        had = self.rows.get(slot, [])
        start = next((i for i, (a, b) in enumerate(zip(had, tokens)) if a != b), min(len(had), len(tokens)))
        start = start if begun is None else begun
        says = torch.tensor(tokens, device=self.cache.tensors[0].device).half()
        for spec, tensor in zip(self.cache.specs, self.cache.tensors):
            end = min(len(tokens), tensor.shape[1])
            first = max(len(tokens) - spec.window, 0) if spec.window else 0
            if start < end:
                tensor[slot, start:end] = says[start:end].view(-1, 1, 1)
            assert torch.equal(tensor[slot, first:end, 0, 0], says[first:end]), (slot, start, spec.name)

    def iterate(self):
        told = [self.decide(dict(self.rows)) if self.ranks.leads else None]
        if self.local.random() < 0.01:
            time.sleep(self.local.choice((0.001, 0.01)))  # a slow rank
        self.ranks.sync()
        dist.broadcast_object_list(told, src=0)
        rows, begun = told[0]
        for slot, tokens in rows.items():
            self.write(slot, tokens, begun.get(slot))
        self.rows = rows
        stats = self.cache.stats()
        slots = [
            (s.state, s.state == "active" and s.tokens, s.shared_tokens) for s in map(self.cache.slot, range(SLOTS))
        ]
        mine = (slots, stats.budget_pages, stats.prefix_pages, stats.shared_pages, stats.steps)
        every = self.ranks._gather(mine)
        assert all(other == every[0] for other in every), every

    def serve(self, steps):
        for _ in range(steps):
            self.iterate()
        assert self.cache.stats().worker_errors == 0
        self.cache.close()


def misuse(context):
    """Caches that differ are no group; only rank 0 decides; and a rank that parts says so."""
    first, world = dist.get_rank() == 0, dist.get_world_size()
    options = {"context": context, "dtype": torch.float16}
    with KVCache.for_model(1, 1, 64, 2, 100, 1 << 22, steps_in_flight=1 + first, name=None, **options) as cache:
        refused(lambda: Ranks(cache), RuntimeError, "caches differ")
    with KVCache.for_model(1, 1, 64, 2, 100, 1 << 22, lazy=True, name=None, **options) as cache:
        refused(lambda: Ranks(cache), ValueError, "hold its memory")
    refused(lambda: init_cache(1, world + 1, 64, 2, 100, 1 << 22, **options), ValueError, "multiple of the")
    ranks = init_cache(1, world, 64, 2, 100, (1 << 23) >> (not first), **options)
    assert ranks.cache.stats().budget_pages * ranks.cache.page_size == 1 << 22
    if first:
        assert ranks.alloc(10, slot=1) == 1 and ranks.alloc() == 0 and ranks.alloc() is None
        refused(lambda: ranks.step([101, 0]), ValueError, "max_tokens")
        assert ranks.step([5, 10])
    else:
        refused(ranks.alloc, RuntimeError, "rank 0 decides")
        refused(lambda: ranks.step([0, 0]), RuntimeError, "rank 0 decides")
    ranks.sync()
    assert ranks.cache.tokens([0, 1]) == [5, 10]
    if first:
        ranks.free(0)
        ranks.sync()
    else:
        ranks.cache.free(0)  # by itself
        refused(ranks.sync, pyvmem.VmemError, "slot 0 is free")
    ranks.cache.close()


def main(backend, steps=400, seed=1):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    starved = rank == dist.get_world_size() - 1
    with pyvmem.Context("host") if backend == "gloo" else pyvmem.Context("stock", rank) as context:
        misuse(context)
        hits = refusals = 0
        for number, (specs, options) in enumerate((
            (ALIKE, {}),
            (ALIKE, {"spare": Spare(generous=False), "tile_rows": 16}),
            (MIXED, {"steps_in_flight": 2}),
            (MIXED, {"spare": Spare(overlap=False)}),
        )):  # fmt: skip
            pages = (70 if starved else 130) * len(specs) // 2
            engine = Engine(context, specs, pages, seed + number, **options)
            engine.serve(steps)
            hits, refusals = hits + engine.hits, refusals + engine.refused
    if rank == 0:
        assert hits and refusals, (hits, refusals)
        print(f"{dist.get_world_size()} ranks agreed: {hits} tokens were known, {refusals} steps found no memory")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
