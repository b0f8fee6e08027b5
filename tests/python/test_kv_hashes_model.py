"""Prefixes by hash: random requests against a plain model (hypothesis).

SPDX-License-Identifier: MIT
"""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyvmem import VmemError
from pyvmem.kv.prefix import PrefixCache, block_hashes

from kv_draws import NUMBERS, pick, when
from kv_hash_caches import ALIKE, MIXED, PAGE, make


class Engine(RuleBasedStateMachine):
    """Requests that begin alike, over a cache that is too small for what they leave."""

    @initialize(
        specs=st.sampled_from([ALIKE, MIXED]), block=st.sampled_from([8, 16, 32, 50]), pages=st.integers(30, 90),
        tile=st.sampled_from([1, 24]), steps=st.sampled_from([1, 2]), overlap=st.booleans(), defer=st.booleans(),
    )  # fmt: skip
    def begin(self, specs, block, pages, tile, steps, overlap, defer):
        self.cache = make(specs, 4, 300, pages * len(specs) // 2, tile_rows=tile, steps_in_flight=steps,
                          overlap=overlap, defer=defer)  # fmt: skip
        self.blocks = PrefixCache(self.cache, block, events=True)
        self.overlap = overlap
        self.rows: dict[int, list[int]] = {}
        self.known: set[bytes] = set()
        self.kept: set[bytes] = set()
        self.pages = self.cache.stats().budget_pages

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()

    def some(self, data, most):
        """Up to so many of the known hashes."""
        known = sorted(self.known)
        return [pick(data, known) for _ in range(data.next() % (most + 1))]

    def hashes(self, tokens):
        return block_hashes(tokens, self.blocks.block_tokens)

    def write(self, slot, start, tokens):
        for tensor in self.cache.tensors:
            end = min(len(tokens), tensor.shape[1])
            if start < end:
                tensor[slot, start:end] = torch.tensor(tokens[start:end]).half().view(-1, 1, 1)

    @rule(kind=st.integers(0, 2), split=st.integers(0, 150), length=st.integers(1, 290), extra=st.integers(0, 1))
    def start(self, kind, split, length, extra):
        tokens = [kind] * min(split, length) + [10 + extra] * max(length - split, 0)
        hashes = self.hashes(tokens)[: (length - 1) // self.blocks.block_tokens]
        expected = self.blocks.peek(hashes)
        slot, cached = self.blocks.alloc(length, hashes)
        if slot is None:
            return
        # Making room for the copy of a page may have evicted others, but none of those: only the background thread can.
        assert cached == expected or (cached < expected and self.overlap)
        lengths = [length if s == slot else 0 for s in range(4)]
        would, ending = self.cache.step(lengths, dry=True), self.cache.stats().ending_slots
        if not self.cache.step(lengths):
            assert not would
            self.cache.free(slot)
            return
        assert would or ending  # which the step ended
        self.write(slot, cached, tokens)
        self.rows[slot] = tokens

    @rule(data=NUMBERS, n=st.integers(1, 40))
    @when(lambda self: self.rows)
    def grow(self, data, n):
        slot = pick(data, sorted(self.rows))
        tokens = (self.rows[slot] + [data.next() % 4] * n)[:300]
        lengths = [len(tokens) if s == slot else 0 for s in range(4)]
        expected, ending = self.cache.step(lengths, dry=True), self.cache.stats().ending_slots
        answer = self.cache.step(lengths)
        assert answer == expected or (ending and answer)
        if answer:
            self.write(slot, len(self.rows[slot]), tokens)
            self.rows[slot] = tokens

    @rule(data=NUMBERS)
    @when(lambda self: self.rows)
    def add(self, data):
        slot = pick(data, sorted(self.rows))
        hashes = self.hashes(self.rows[slot])
        first, last = sorted(pick(data, range(len(hashes) + 1)) for _ in range(2))
        self.blocks.add(slot, hashes[first:last], first)
        self.known.update(hashes[first:last])

    @rule(data=NUMBERS)
    @when(lambda self: self.rows)
    def free(self, data):
        slot = pick(data, sorted(self.rows))
        del self.rows[slot]
        self.cache.free(slot, pick(data, [None, self.cache.last_step]))
        if pick(data, [False, True]):
            self.cache.retire()

    @rule(data=NUMBERS)
    @when(lambda self: self.rows)
    def truncate(self, data):
        slot = pick(data, sorted(self.rows))
        tokens = pick(data, range(1, len(self.rows[slot]) + 1))
        try:
            fits = self.cache.truncate(slot, tokens)
        except VmemError as error:
            assert error.errno == 61
            return
        assert self.cache.slot(slot).tokens == (tokens if fits else len(self.rows[slot]))
        self.rows[slot] = self.rows[slot][: self.cache.slot(slot).tokens]

    @rule(data=NUMBERS)
    @when(lambda self: self.known)
    def drop(self, data):
        dropped = self.some(data, 4)
        self.blocks.drop(dropped)
        self.kept.difference_update(dropped)

    @rule(data=NUMBERS, keep=st.booleans())
    @when(lambda self: self.known)
    def order(self, data, keep):
        hashes = self.some(data, 6)
        before = {hash for hash in self.kept if hash not in hashes}
        self.blocks.order(hashes, keep=keep)
        found: set[bytes] = set()  # of those that are known now: others may be added later, and are new then
        for chain in map(self.hashes, self.rows.values()):
            found.update(chain[: self.blocks.peek(chain) // self.blocks.block_tokens])
        self.kept = before | (found.intersection(hashes) if keep else set())

    @rule(pages=st.integers(0, 20))
    def evict(self, pages):
        free = self.cache.stats().free_pages
        freed = self.blocks.evict(pages)
        assert self.cache.stats().free_pages == free
        assert freed == 0 or pages > 0

    @rule(part=st.sampled_from([0.3, 0.6, 1.0]))
    def set_budget(self, part):
        self.cache.set_budget(max(int(self.pages * part), 1) * PAGE)

    @rule()
    def wait(self):
        self.cache.wait()

    @rule(data=NUMBERS)
    @when(lambda self: self.rows)
    def swap(self, data):
        slot = pick(data, sorted(self.rows))
        try:
            self.cache.swap_out(slot)
        except VmemError as error:
            assert error.errno == 61
            return
        if not self.cache.swap_in(slot):
            self.cache.free(slot)
            del self.rows[slot]

    @invariant()
    def rows_hold_what_was_written(self):
        for slot, tokens in getattr(self, "rows", {}).items():
            want = torch.tensor(tokens).half()
            for spec, tensor in zip(self.cache.specs, self.cache.tensors):
                first, end = max(len(tokens) - spec.window, 0) if spec.window else 0, min(len(tokens), tensor.shape[1])
                for column in (0, -1):
                    found = tensor[slot, first:end, column, column]
                    assert torch.equal(found, want[first:end]), f"slot {slot}, {spec.name}"

    @invariant()
    def kept_blocks_stay(self):
        if hasattr(self, "blocks"):
            assert not self.kept & set(self.blocks.evicted())

    @invariant()
    def the_thread_has_no_errors(self):
        if hasattr(self, "blocks"):
            assert self.cache.stats().worker_errors == 0


def test_random_requests():
    case = Engine.TestCase
    case.settings = settings(settings(), stateful_step_count=40, max_examples=settings().max_examples)
    case().runTest()
