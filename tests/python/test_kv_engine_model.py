"""A random engine over a KV cache that schedules ahead, against a plain model of every row (hypothesis).

Kernels of the last steps read on until the rule says that they have ended: what they may read must stay as it was. What
the cache answers in advance (check, room, fit) is compared with what happens.

SPDX-License-Identifier: MIT
"""

import time

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from block_runs import BlockRuns
from kv_caches import Event
from kv_draws import NUMBERS, pick, when

import pyvmem
from pyvmem.kv.cache import KVCache, Spare, TensorSpec
from pyvmem.kv.prefix import PrefixCache

SLOTS, TOKENS, BLOCK = 5, 300, 32
SHAPES = {
    "k and v": [TensorSpec("k", (256,), torch.int64), TensorSpec("v", (256,), torch.int64)],  # 32 tokens a page
    "mixed rows": [TensorSpec("k", (256,), torch.int64), TensorSpec("s", (70,), torch.int64)],
    "window beside full": [TensorSpec("f", (256,), torch.int64), TensorSpec("w", (512,), torch.int64, window=40)],
}


class Engine(RuleBasedStateMachine):
    """Row i of tensor t holds the number of its token plus t in every word."""

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)), pages=st.integers(12, 80), flights=st.integers(1, 3),
        tile=st.sampled_from([1, 1, 16]), overlap=st.booleans(), defer=st.booleans(), lazy=st.booleans(),
        zero=st.booleans(), idle=st.sampled_from([0.002, float("inf")]), hashed=st.sampled_from([16, 32, 50]),
    )  # fmt: skip
    def make(self, shape, pages, flights, tile, overlap, defer, lazy, zero, idle, hashed):
        self.specs, self.flights = SHAPES[shape], flights
        self.context = pyvmem.Context("host")
        self.budget = pages << 16
        self.cache = KVCache(
            self.specs, SLOTS, TOKENS, self.budget, context=self.context, tile_rows=tile,
            spare=Spare(overlap=overlap, defer=defer), lazy=lazy, zero=zero, idle_seconds=idle, steps_in_flight=flights,
            check=True, name=None, page_size=1 << 16,
        )  # fmt: skip
        self.runs = BlockRuns(self.cache, BLOCK) if shape == "k and v" else None
        self.hashes = PrefixCache(self.cache, hashed, events=True)
        self.known = {}  # hash -> numbers up to the end of its block, of what was ever added
        self.sequences = []  # numbers of requests whose blocks were added
        self.rows = {}  # slot -> numbers of its rows
        self.swapped, self.fresh = set(), set()
        self.running = []  # (step, {slot: numbers that its kernels read}), the oldest first
        self.ending = {}  # slot -> (step, event or None)
        self.events = []  # (step, event), as they were given
        self.prefixes, self.held = [], {}  # (prefix, numbers); block -> (its place, numbers up to its end)
        self.next = 1

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        self.cache.retire()
        self.running.clear()
        for slot in list(self.rows):
            self.cache.free(slot)
        for prefix, _ in self.prefixes:
            self.cache.drop(prefix)
        if self.runs:
            self.runs.drop(list(self.held))
        self.hashes.clear()
        assert len(self.hashes) == 0
        self.cache.wait()
        stats = self.cache.stats()
        assert stats.active_slots == stats.swapped_slots == stats.prefix_pages == stats.prefixes == 0
        assert stats.free_pages == stats.budget_pages and stats.worker_errors == 0
        assert all(self.cache.slot(s).state == "free" for s in range(SLOTS))
        self.cache.close()
        assert self.context.stats().created == 0
        self.context.close()

    # ---- the model -------------------------------------------------------------------------------------------

    @property
    def active(self):
        return sorted(set(self.rows) - self.swapped)

    def ended(self, step):
        """Kernels up to this step have ended."""
        self.running = [(k, read) for k, read in self.running if k > step]

    def taken(self):
        """Slots that cannot be had. One that was given up is free only when no kernel touches it any more."""
        for slot, (fence, _) in list(self.ending.items()):
            if not self.cache.slot(slot).after:
                assert not any(slot in read for k, read in self.running if k <= fence), "freed below its kernels"
                del self.ending[slot]
        return set(self.rows) | set(self.ending)

    def quiet(self):
        """Wait for every kernel."""
        self.cache.retire()
        self.ended(self.cache.last_step)

    def polled(self):
        """Complete events are seen at the next call for a slot or memory: the oldest first, up to one that is not."""
        for fence, event in sorted(self.events, key=lambda item: item[0]):
            if not event.come:
                break
            self.ended(fence)
            self.events.remove((fence, event))
        self.cache.step([0] * SLOTS, dry=True)

    def begin(self, slot, numbers):
        """A request has the slot, with these rows."""
        assert slot not in self.taken()  # which sees that it is ending no more
        self.rows[slot] = numbers
        if not numbers:
            self.fresh.add(slot)

    def write(self, slot, tokens):
        numbers = self.rows[slot]
        new = list(range(self.next, self.next + tokens - len(numbers)))
        self.next += len(new)
        for t, tensor in enumerate(self.cache.tensors):
            tensor[slot, len(numbers) : tokens] = (torch.tensor(new) + t)[:, None]
        self.rows[slot] = numbers + new

    def stepped(self, lengths):
        """A step succeeded: its kernels write what is new, and read."""
        number = self.cache.last_step
        self.ended(number - 1 - self.flights)
        read = {}
        for slot, tokens in lengths.items():
            self.fresh.discard(slot)
            self.rows[slot] = self.rows[slot][:tokens]
            self.write(slot, tokens)
            read[slot] = self.rows[slot]
        self.running.append((number, read))

    def lengths(self, wanted):
        return [wanted.get(slot, 0) for slot in range(SLOTS)]

    def verify(self, slot, numbers, what):
        for t, (spec, tensor) in enumerate(zip(self.specs, self.cache.tensors)):
            first = max(len(numbers) - spec.window, 0) if spec.window else 0
            rows = tensor[slot, first : len(numbers)].numpy()
            wrong = np.flatnonzero((rows != np.array(numbers[first:])[:, None] + t).any(1))
            assert not len(wrong), f"{what}: slot {slot}, {spec.name}: rows {wrong[:5] + first} of {len(numbers)}"

    # ---- rules -----------------------------------------------------------------------------------------------

    @rule(tokens=st.integers(0, TOKENS), slot=st.sampled_from([None, None, *range(SLOTS)]), prefix=st.integers(0, 100))
    def alloc(self, tokens, slot, prefix):
        self.polled()
        taken = self.taken()
        if slot is not None and slot in taken:
            with pytest.raises(pyvmem.VmemError):
                self.cache.alloc(tokens, slot=slot)
            return
        got = self.cache.alloc(tokens, slot=slot, prefix_tokens=prefix)
        if got is None:
            assert len(taken) == SLOTS and self.cache.shortage.reason == "slots"
            return
        assert got not in taken and slot in (None, got)
        self.begin(got, [])

    @rule(growth=st.lists(st.sampled_from([0, 1, 1, 2, 31, 90]), min_size=SLOTS, max_size=SLOTS))
    def step(self, growth):
        self.polled()
        wanted = {s: min(len(self.rows[s]) + growth[s], TOKENS) for s in self.active if growth[s]}
        lengths = self.lengths(wanted)
        predicted = self.cache.step(lengths, dry=True)
        number = self.cache.last_step
        answer = self.cache.step(lengths)
        if not answer:
            # A step that fails has been called, too: kernels of older steps have ended by then.
            assert self.cache.shortage.missing_pages > 0 and self.cache.last_step == number
            self.ended(number - self.flights)
        else:
            assert self.cache.last_step == number + 1
            self.stepped(wanted)
        assert answer == predicted or self.ending or answer  # those that end during the call give pages to it

    @rule(data=NUMBERS, how=st.sampled_from(["quiet", "last", "older", "event", "future"]))
    @when(lambda self: self.rows)
    def free(self, data, how):
        slot = pick(data, sorted(self.rows))
        last = self.cache.last_step
        fence, event = last, None
        if how == "quiet":
            self.quiet()
            self.cache.free(slot)
        elif how == "future":
            with pytest.raises(ValueError):
                self.cache.free(slot, after=last + 1)
            return
        elif how == "event":
            event = Event()
            self.cache.free(slot, after=event)
            self.events.append((fence, event))
        else:
            # No kernel of a later step may touch it.
            touched = [k for k, read in self.running if slot in read]
            fence = max(touched, default=0) if how == "older" else last
            self.cache.free(slot, after=fence)
        assert self.cache.slot(slot).state == "free"
        self.ending[slot] = (fence, event)
        del self.rows[slot]
        self.taken()
        self.swapped.discard(slot)
        self.fresh.discard(slot)

    @rule()
    @when(lambda self: any(not event.come for _, event in self.events))
    def complete(self):
        """The oldest event comes."""
        next(event for _, event in self.events if not event.come).come = True

    @rule(data=NUMBERS)
    @when(lambda self: self.running)
    def retire(self, data):
        step = pick(data, [k for k, _ in self.running])
        self.cache.retire(step)
        self.ended(step)

    @rule(data=NUMBERS, back=st.integers(0, 80), fenced=st.booleans())
    @when(lambda self: self.active)
    def truncate(self, data, back, fenced):
        slot = pick(data, self.active)
        tokens = max(len(self.rows[slot]) - back, 0)
        if not fenced:
            self.quiet()
        try:
            fits = self.cache.truncate(slot, tokens, after=self.cache.last_step if fenced else None)
        except pyvmem.VmemError as error:
            assert error.errno in (61, *((16,) if fenced else ()))
            return
        assert fits or self.cache.shortage.missing_pages > 0
        assert self.cache.slot(slot).tokens == (tokens if fits else len(self.rows[slot]))
        if fits:
            self.rows[slot] = self.rows[slot][:tokens]
            self.cut(slot, tokens)

    def cut(self, slot, tokens):
        """Later steps may write these rows again, in the order of the stream."""
        for _, read in self.running:
            if slot in read:
                read[slot] = read[slot][:tokens]

    @rule(data=NUMBERS)
    @when(lambda self: any(self.rows[s] for s in self.active))
    def swap_out(self, data):
        slot = pick(data, [s for s in self.active if self.rows[s]])
        self.quiet()
        self.cache.swap_out(slot)
        self.swapped.add(slot)

    @rule(data=NUMBERS)
    @when(lambda self: self.swapped)
    def swap_in(self, data):
        self.polled()
        slot = pick(data, sorted(self.swapped))
        if self.cache.swap_in(slot):
            self.swapped.discard(slot)

    @rule(data=NUMBERS)
    @when(lambda self: any(self.rows[s] for s in self.active))
    def save(self, data):
        slot = pick(data, [s for s in self.active if self.rows[s]])
        tokens = pick(data, range(1, len(self.rows[slot]) + 1))
        try:
            prefix = self.cache.share(slot, tokens)
        except pyvmem.VmemError as error:
            assert error.errno == 61
        else:
            self.prefixes.append((prefix, self.rows[slot][:tokens]))

    @rule(data=NUMBERS)
    @when(lambda self: self.prefixes)
    def attach(self, data):
        self.polled()
        prefix, numbers = pick(data, self.prefixes)
        tokens = pick(data, range(max(prefix.min_tokens, 1), prefix.tokens + 1))
        slot = self.cache.alloc(tokens, prefix_tokens=tokens)
        if slot is None:
            return
        answer = self.cache.attach(slot, prefix, tokens)
        assert answer in (None, tokens)
        self.begin(slot, numbers[:tokens] if answer else [])

    @rule(data=NUMBERS)
    @when(lambda self: self.prefixes)
    def drop(self, data):
        prefix, _ = self.prefixes.pop(pick(data, range(len(self.prefixes))))
        self.cache.drop(prefix)

    @rule(data=NUMBERS)
    @when(lambda self: self.runs and any(len(self.rows[s]) >= BLOCK for s in self.active))
    def share(self, data):
        slot = pick(data, [s for s in self.active if len(self.rows[s]) >= BLOCK])
        place = pick(data, range(len(self.rows[slot]) // BLOCK))
        block = pick(data, range(12))
        if block in self.held:
            with pytest.raises(ValueError, match="is held"):
                self.runs.share([(slot, place, [block])])
        else:
            self.runs.share([(slot, place, [block])])
            self.held[block] = place, self.rows[slot][place * BLOCK : (place + 1) * BLOCK]

    @rule(data=NUMBERS)
    @when(lambda self: self.runs and self.held)
    def attach_blocks(self, data):
        """Blocks of several writers; perhaps the last one does not belong there."""
        self.polled()
        some = []
        for place in range(pick(data, range(1, 6))):
            if len(some) == place:
                some += [block for block in sorted(self.held) if self.held[block][0] == place][:1]
        some += [pick(data, sorted(self.held))] if pick(data, range(3)) == 0 else []
        slot = self.cache.alloc(len(some) * BLOCK, prefix_tokens=len(some) * BLOCK)
        if slot is None:
            return
        if some and all(self.held[block][0] == place for place, block in enumerate(some)):
            self.runs.attach(slot, some)
        elif some:
            with pytest.raises(ValueError, match="is not held as block"):
                self.runs.attach(slot, some)
            some = some[:-1]
        self.begin(slot, [number for block in some for number in self.held[block][1]])

    @rule(data=NUMBERS)
    @when(lambda self: self.runs and self.held)
    def drop_blocks(self, data):
        some = sorted({pick(data, range(12)) for _ in range(pick(data, range(5)))})
        self.runs.drop(some)
        for block in some:
            self.held.pop(block, None)

    def hashes_of(self, numbers):
        """A hash of each whole block, as a number; it covers all before it."""
        size = self.hashes.block_tokens
        return [hash(tuple(numbers[:end])) for end in range(size, len(numbers) + 1, size)]

    @rule(data=NUMBERS, first=st.sampled_from([0, 0, 1]))
    @when(lambda self: any(self.rows[s] for s in self.active))
    def add(self, data, first):
        """The blocks of a request are added, all or those behind the first."""
        slot = pick(data, [s for s in self.active if self.rows[s]])
        numbers = self.rows[slot]
        if len(numbers) < first * self.hashes.block_tokens:
            with pytest.raises(ValueError):
                self.hashes.add(slot, [hash(tuple(numbers))], first)
            return
        hashes, before = self.hashes_of(numbers)[first:], len(self.hashes)
        try:
            added = self.hashes.add(slot, hashes, first)
        except pyvmem.VmemError as error:
            assert error.errno == 61  # the window has passed
            return
        assert added <= len(hashes) and len(self.hashes) <= before + added
        self.sequences.append(numbers)
        for i, name in enumerate(hashes):
            self.known[name] = numbers[: (first + i + 1) * self.hashes.block_tokens]

    @rule(data=NUMBERS, longer=st.booleans())
    @when(lambda self: self.sequences)
    def attach_hashes(self, data, longer):
        self.polled()
        numbers = pick(data, self.sequences)
        hashes = self.hashes_of(numbers) + ([12345] if longer else [])
        found = self.hashes.peek(hashes)
        assert found % self.hashes.block_tokens == 0 and found <= len(numbers)
        slot = self.cache.alloc(len(numbers), prefix_tokens=found)
        if slot is None:
            return
        got = self.hashes.attach(slot, hashes)
        assert got == found or got is None and self.cache.shortage.missing_pages > 0
        self.begin(slot, numbers[: got or 0])

    @rule(data=NUMBERS)
    @when(lambda self: self.known)
    def drop_hashes(self, data):
        some = [pick(data, sorted(self.known)) for _ in range(pick(data, range(1, 4)))]
        self.hashes.drop(some)
        assert all(self.hashes.peek([name]) == 0 for name in some)

    @rule(pages=st.integers(0, 20))
    def evict(self, pages):
        before, free = len(self.hashes), self.cache.stats().free_pages
        self.hashes.evict(pages)
        gone = self.hashes.evicted()
        assert len(self.hashes) <= before and set(gone) <= set(self.known)
        assert self.cache.stats().free_pages >= free

    @rule(data=NUMBERS)
    @when(lambda self: self.ending)
    def misuse(self, data):
        """A slot that is being given up takes no call."""
        self.polled()
        if not self.ending:
            return
        slot = pick(data, sorted(self.ending))
        if slot not in self.taken():
            return
        for call in (
            lambda: self.cache.free(slot), lambda: self.cache.step(self.lengths({slot: 1})),
            lambda: self.cache.truncate(slot, 0), lambda: self.cache.swap_out(slot),
            lambda: self.cache.share(slot, 1),
        ):  # fmt: skip
            with pytest.raises((ValueError, pyvmem.VmemError)):
                call()
        self.ended(self.cache.last_step - 1 - self.flights)  # the step was called

    @rule(part=st.sampled_from([0.3, 0.6, 1.0]))
    def set_budget(self, part):
        self.cache.set_budget(max(int(self.budget * part), 1 << 16))

    @rule(bytes=st.sampled_from([None, 1 << 16, 1 << 19]))
    def reclaim(self, bytes):
        self.cache.reclaim(bytes)

    @rule()
    def wait(self):
        self.cache.wait()

    @rule()
    def pause(self):
        time.sleep(0.006)  # perhaps long enough to be idle

    # ---- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def rows_hold_what_was_written(self):
        for slot in getattr(self, "rows", {}):
            if slot not in self.swapped and slot not in self.fresh:
                self.verify(slot, self.rows[slot], "active")

    @invariant()
    def kernels_in_flight_read_what_they_should(self):
        for number, read in getattr(self, "running", []):
            for slot, numbers in read.items():
                self.verify(slot, numbers, f"kernel of step {number}")

    @invariant()
    def books_balance(self):
        if hasattr(self, "cache"):
            stats = self.cache.stats()
            assert stats.worker_errors == 0
            assert stats.active_slots == len(self.active)
            assert stats.swapped_slots == len(self.swapped)
            assert stats.free_pages <= stats.budget_pages
            assert [self.cache.slot(s).tokens for s in self.active] == [len(self.rows[s]) for s in self.active]


def test_a_random_engine():
    case = Engine.TestCase
    case.settings = settings(settings(), stateful_step_count=60, phases=[Phase.generate])  # shrink by hand
    case().runTest()
