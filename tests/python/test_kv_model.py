"""Random requests over a KV cache against a shadow that knows every row (hypothesis), on every backend.

SPDX-License-Identifier: MIT
"""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pyvmem
from conftest import BACKENDS
from pyvmem.kv.cache import KVCache, Spare, TensorSpec

SLOTS, TOKENS = 4, 300
SHAPES = {
    "k and v": [TensorSpec("k", (2, 256), torch.float16), TensorSpec("v", (2, 256), torch.float16)],
    "window beside full": [TensorSpec("f", (8, 128), torch.int32), TensorSpec("w", (8, 128), torch.int32, window=50)],
    "latent and fp8": [TensorSpec("c", (576,), torch.bfloat16), TensorSpec("q", (656,), torch.uint8)],
    "token-major": [TensorSpec("kv", (4, 2, 4, 64), torch.float32)],
}


class Requests(RuleBasedStateMachine):
    """Every token has a number from 1 to 100, and its row in tensor i is filled with that number plus i."""

    backend = "host"

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)),
        pages=st.integers(8, 90),
        tile=st.sampled_from([1, 1, 16]),
        overlap=st.booleans(),
        defer=st.booleans(),
        generous=st.booleans(),
        zero=st.booleans(),
    )
    def make(self, shape, pages, tile, overlap, defer, generous, zero):
        self.specs = SHAPES[shape]
        self.context = pyvmem.Context(self.backend)
        page = min(self.context.page_sizes)
        self.budget = pages * page
        self.cache = KVCache(
            self.specs, SLOTS, TOKENS, self.budget, context=self.context, tile_rows=tile,
            spare=Spare(overlap=overlap, defer=defer, generous=generous), zero=zero, check=True, name=None,
        )  # fmt: skip
        self.rows = {}  # slot -> numbers of its tokens
        self.swapped = set()
        self.prefixes = []  # (prefix, numbers)
        self.next = 1

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()
            assert self.context.stats().created == 0
            self.context.close()

    def sync(self):
        if self.backend != "host":
            torch.cuda.synchronize()

    def write(self, slot, start, stop):
        numbers = [(self.next + i) % 100 + 1 for i in range(stop - start)]
        self.next += stop - start
        self.rows[slot] = self.rows[slot][:start] + numbers
        values = torch.tensor(numbers).view(-1, 1)
        for i, tensor in enumerate(self.cache.tensors):
            rows = tensor[slot, start:stop].view(stop - start, -1)
            rows.copy_((values + i).to(tensor.dtype).expand_as(rows))
        self.sync()

    @property
    def running(self):
        return sorted(set(self.rows) - self.swapped)

    @rule(tokens=st.integers(0, TOKENS))
    def alloc(self, tokens):
        slot = self.cache.alloc(tokens)
        assert (slot is None) == (len(self.rows) == SLOTS)
        if slot is not None:
            assert slot not in self.rows
            self.rows[slot] = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data):
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.free(slot)
        del self.rows[slot]
        self.swapped.discard(slot)

    @rule(growth=st.lists(st.sampled_from([0, 1, 1, 1, 2, 40, 150]), min_size=SLOTS, max_size=SLOTS))
    def step(self, growth):
        lengths = [0] * SLOTS
        for slot in self.running:
            if growth[slot]:
                lengths[slot] = min(len(self.rows[slot]) + growth[slot], TOKENS)
        expected, before = self.cache.step(lengths, dry=True), [self.cache.slot(s).tokens for s in range(SLOTS)]
        stepped = self.cache.step(lengths)
        assert stepped == expected
        if not stepped:
            assert self.cache.shortage.missing_pages > 0
            assert [self.cache.slot(s).tokens for s in range(SLOTS)] == before
            return
        for slot, n in enumerate(lengths):
            if n > len(self.rows.get(slot, ())):
                self.write(slot, len(self.rows[slot]), n)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), back=st.integers(0, 30))
    def truncate(self, data, back):
        slot = data.draw(st.sampled_from(self.running))
        tokens = max(len(self.rows[slot]) - back, 0)
        try:
            fits = self.cache.truncate(slot, tokens)
        except pyvmem.VmemError as error:
            assert error.errno == 61  # the window has passed
        else:  # not: no memory for the copy
            assert self.cache.slot(slot).tokens == (tokens if fits else len(self.rows[slot]))
            self.rows[slot] = self.rows[slot][:tokens] if fits else self.rows[slot]

    @precondition(lambda self: any(self.rows[s] for s in self.running))
    @rule(data=st.data())
    def swap_out(self, data):
        slot = data.draw(st.sampled_from([s for s in self.running if self.rows[s]]))
        try:
            self.cache.swap_out(slot)
        except pyvmem.VmemError as error:
            assert error.errno == 61
        else:
            self.swapped.add(slot)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        slot = data.draw(st.sampled_from(sorted(self.swapped)))
        if self.cache.swap_in(slot):
            self.swapped.discard(slot)

    @precondition(lambda self: any(self.rows[s] for s in self.running))
    @rule(data=st.data())
    def save(self, data):
        slot = data.draw(st.sampled_from([s for s in self.running if self.rows[s]]))
        tokens = data.draw(st.integers(1, len(self.rows[slot])))
        try:
            prefix = self.cache.share(slot, tokens)
        except pyvmem.VmemError as error:
            assert error.errno == 61
        else:
            self.prefixes.append((prefix, self.rows[slot][:tokens]))

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data())
    def attach(self, data):
        prefix, numbers = data.draw(st.sampled_from(self.prefixes))
        slot = self.cache.alloc()
        if slot is None:
            return
        tokens = data.draw(st.integers(max(prefix.min_tokens, 1), prefix.tokens))
        if self.cache.attach(slot, prefix, tokens):
            self.rows[slot] = numbers[:tokens]
        else:
            self.cache.free(slot)

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data())
    def drop(self, data):
        prefix, _ = self.prefixes.pop(data.draw(st.integers(0, len(self.prefixes) - 1)))
        self.cache.drop(prefix)

    @rule(part=st.sampled_from([0.3, 0.6, 1.0]))
    def set_budget(self, part):
        self.cache.set_budget(max(int(self.budget * part), self.cache.page_size))

    @rule()
    def reclaim(self):
        self.cache.reclaim()

    @rule()
    def wait(self):
        self.cache.wait()

    @invariant()
    def rows_hold_what_was_written(self):
        for slot in getattr(self, "rows", {}):
            n = len(self.rows[slot])
            if slot in self.swapped or not n:
                continue
            numbers = torch.tensor(self.rows[slot]).view(-1, 1)
            for i, (spec, tensor) in enumerate(zip(self.specs, self.cache.tensors)):
                first = max(n - spec.window, 0) if spec.window else 0
                rows = tensor[slot, first:n].reshape(n - first, -1).cpu()
                want = (numbers[first:] + i).to(tensor.dtype)
                wrong = np.flatnonzero((rows != want).any(1).numpy())
                assert not len(wrong), f"slot {slot}, {spec.name}: rows {wrong[:5] + first} of {n}"

    @invariant()
    def books_balance(self):
        if hasattr(self, "cache"):
            stats = self.cache.stats()
            assert stats.worker_errors == 0
            assert stats.active_slots == len(self.running)
            assert stats.swapped_slots == len(self.swapped)
            assert stats.free_pages <= stats.budget_pages


@pytest.mark.parametrize("name", BACKENDS)
def test_random_requests(name):
    if name != "host" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    machine = type("Requests", (Requests,), {"backend": name})
    examples = min(settings().max_examples, 40 if name == "host" else 10)
    case = machine.TestCase
    case.settings = settings(settings(), stateful_step_count=40, max_examples=examples)
    case().runTest()
