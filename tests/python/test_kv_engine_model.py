"""A random engine over a KV cache that schedules ahead, against a plain model of every row.

Kernels of the last steps read on until the rule says that they have ended: what they may read must stay as it was. What
a dry step answers is compared with what happens. Blocks that are kept are not evicted.

SPDX-License-Identifier: MIT
"""

import os
import random
import time

import numpy as np
import pytest
import torch
from kv_caches import Event

import pyvmem
from pyvmem.kv.cache import KVCache, Spare, TensorSpec
from pyvmem.kv.prefix import PrefixCache

SLOTS, TOKENS = 5, 300
SHAPES = {
    "k and v": [TensorSpec("k", (256,), torch.int64), TensorSpec("v", (256,), torch.int64)],  # 32 tokens a page
    "mixed rows": [TensorSpec("k", (256,), torch.int64), TensorSpec("s", (70,), torch.int64)],
    "window beside full": [TensorSpec("f", (256,), torch.int64), TensorSpec("w", (512,), torch.int64, window=40)],
    "fewer rows": [TensorSpec("f", (256,), torch.int64), TensorSpec("d", (256,), torch.int64, max_tokens=100)],
}


class Engine:
    """Row i of tensor t holds the number of its token plus t in every word."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.specs, self.flights = SHAPES[rng.choice(sorted(SHAPES))], rng.randint(1, 3)
        self.context = pyvmem.Context("host")
        self.budget = rng.randint(12, 80) << 16
        self.cache = KVCache(
            self.specs, SLOTS, TOKENS, self.budget, context=self.context, tile_rows=rng.choice([1, 1, 16]),
            spare=Spare(overlap=self.flip(), defer=self.flip()), lazy=self.flip(), zero=self.flip(),
            idle_seconds=rng.choice([0.002, float("inf")]), steps_in_flight=self.flights, check=True, name=None,
            page_size=1 << 16,
        )  # fmt: skip
        self.hashes = PrefixCache(self.cache, rng.choice([16, 32, 50]), events=True)
        self.known = {}  # hash -> numbers up to the end of its block, of what was ever added
        self.sequences = []  # numbers of requests whose blocks were added
        self.kept = set()  # hashes
        self.rows = {}  # slot -> numbers of its rows
        self.swapped, self.fresh = set(), set()
        self.running = []  # (step, {slot: numbers that its kernels read}), the oldest first
        self.ending = {}  # slot -> (step, event or None)
        self.events = []  # (step, event), as they were given
        self.prefixes = []  # (prefix, numbers)
        self.next = 1

    def end(self):
        self.cache.retire()
        self.running.clear()
        for slot in list(self.rows):
            self.cache.free(slot)
        for prefix, _ in self.prefixes:
            self.cache.drop(prefix)
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

    def flip(self):
        return self.rng.random() < 0.5

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
            written = tensor[slot, len(numbers) : tokens]
            written[:] = (torch.tensor(new[: len(written)]) + t)[:, None]
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
            wrong = np.flatnonzero((rows != np.array(numbers[first : first + len(rows)])[:, None] + t).any(1))
            assert not len(wrong), f"{what}: slot {slot}, {spec.name}: rows {wrong[:5] + first} of {len(numbers)}"

    # ---- rules -----------------------------------------------------------------------------------------------

    def alloc(self):
        self.polled()
        taken, tokens, prefix = self.taken(), self.rng.randint(0, TOKENS), self.rng.randint(0, 100)
        slot = self.rng.choice([None, None, *range(SLOTS)])
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

    def step(self):
        self.polled()
        growth = {s: self.rng.choice([0, 1, 1, 2, 31, 90]) for s in self.active}
        wanted = {s: min(len(self.rows[s]) + more, TOKENS) for s, more in growth.items() if more}
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

    def free(self):
        if not self.rows:
            return
        slot, how = self.rng.choice(sorted(self.rows)), self.rng.choice(["quiet", "last", "older", "event", "future"])
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

    def complete(self):
        """The oldest event comes."""
        if not any(not event.come for _, event in self.events):
            return
        next(event for _, event in self.events if not event.come).come = True

    def retire(self):
        if not self.running:
            return
        step = self.rng.choice([k for k, _ in self.running])
        self.cache.retire(step)
        self.ended(step)

    def truncate(self):
        if not self.active:
            return
        self.polled()
        slot, fenced = self.rng.choice(self.active), self.flip()
        tokens = max(len(self.rows[slot]) - self.rng.randint(0, 80), 0)
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

    def swap_out(self):
        if not any(self.rows[s] for s in self.active):
            return
        slot = self.rng.choice([s for s in self.active if self.rows[s]])
        self.quiet()
        self.cache.swap_out(slot)
        self.swapped.add(slot)

    def swap_in(self):
        if not self.swapped:
            return
        self.polled()
        slot = self.rng.choice(sorted(self.swapped))
        if self.cache.swap_in(slot):
            self.swapped.discard(slot)

    def save(self):
        if not any(self.rows[s] for s in self.active):
            return
        slot = self.rng.choice([s for s in self.active if self.rows[s]])
        tokens = self.rng.choice(range(1, len(self.rows[slot]) + 1))
        try:
            prefix = self.cache.share(slot, tokens)
        except pyvmem.VmemError as error:
            assert error.errno == 61
        else:
            self.prefixes.append((prefix, self.rows[slot][:tokens]))

    def attach(self):
        if not self.prefixes:
            return
        self.polled()
        prefix, numbers = self.rng.choice(self.prefixes)
        tokens = self.rng.choice(range(max(prefix.min_tokens, 1), prefix.tokens + 1))
        slot = self.cache.alloc(tokens, prefix_tokens=tokens)
        if slot is None:
            return
        answer = self.cache.attach(slot, prefix, tokens)
        assert answer in (None, tokens)
        self.begin(slot, numbers[:tokens] if answer else [])

    def drop(self):
        if not self.prefixes:
            return
        prefix, _ = self.prefixes.pop(self.rng.choice(range(len(self.prefixes))))
        self.cache.drop(prefix)

    def hashes_of(self, numbers):
        """A hash of each whole block, as a number; it covers all before it."""
        size = self.hashes.block_tokens
        return [hash(tuple(numbers[:end])) for end in range(size, len(numbers) + 1, size)]

    def add(self):
        """The blocks of a request are added, all or those behind the first."""
        if not any(self.rows[s] for s in self.active):
            return
        slot, first = self.rng.choice([s for s in self.active if self.rows[s]]), self.rng.choice([0, 0, 1])
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

    def attach_hashes(self):
        if not self.sequences:
            return
        self.polled()
        numbers = self.rng.choice(self.sequences)
        hashes = self.hashes_of(numbers) + ([12345] if self.flip() else [])
        found = self.hashes.peek(hashes)
        assert found % self.hashes.block_tokens == 0 and found <= len(numbers)
        slot = self.cache.alloc(len(numbers), prefix_tokens=found)
        if slot is None:
            return
        got = self.hashes.attach(slot, hashes)
        assert got == found or got is None and self.cache.shortage.missing_pages > 0
        self.begin(slot, numbers[: got or 0])

    def drop_hashes(self):
        if not self.known:
            return
        some = self.rng.choices(sorted(self.known), k=self.rng.randint(1, 3))
        self.hashes.drop(some)
        self.kept.difference_update(some)
        assert all(self.hashes.peek([name]) == 0 for name in some)

    def order(self):
        """The known first blocks of a sequence are kept, or let go."""
        if not self.sequences:
            return
        hashes, keep = self.hashes_of(self.rng.choice(self.sequences)), self.flip()
        self.hashes.order(hashes, keep=keep)
        found = hashes[: self.hashes.peek(hashes) // self.hashes.block_tokens]
        self.kept = self.kept.union(found) if keep else self.kept.difference(hashes)

    def evict(self):
        before, free = len(self.hashes), self.cache.stats().free_pages
        self.hashes.evict(self.rng.randint(0, 20))
        gone = self.hashes.evicted()
        assert not self.kept.intersection(gone)
        assert len(self.hashes) <= before and set(gone) <= set(self.known)
        assert self.cache.stats().free_pages >= free

    def misuse(self):
        """A slot that is being given up takes no call."""
        if not self.ending:
            return
        self.polled()
        if not self.ending:
            return
        slot = self.rng.choice(sorted(self.ending))
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

    def set_budget(self):
        self.polled()
        self.cache.set_budget(max(int(self.budget * self.rng.choice([0.3, 0.6, 1.0])), 1 << 16))

    def reclaim(self):
        self.polled()
        self.cache.reclaim(self.rng.choice([None, 1 << 16, 1 << 19]))

    def wait(self):
        self.cache.wait()

    def pause(self):
        time.sleep(0.006)  # perhaps long enough to be idle

    # ---- what always holds ------------------------------------------------------------------------------------

    def look(self):
        for slot in self.rows:
            if slot not in self.swapped and slot not in self.fresh:
                self.verify(slot, self.rows[slot], "active")
        for number, read in self.running:
            for slot, numbers in read.items():
                self.verify(slot, numbers, f"kernel of step {number}")
        assert not self.kept.intersection(self.hashes.evicted())
        stats = self.cache.stats()
        assert stats.worker_errors == 0 and stats.free_pages <= stats.budget_pages
        assert (stats.active_slots, stats.swapped_slots) == (len(self.active), len(self.swapped))
        assert [self.cache.slot(s).tokens for s in self.active] == [len(self.rows[s]) for s in self.active]


OFTEN = (Engine.alloc, Engine.step, Engine.step, Engine.step, Engine.free, Engine.add, Engine.attach_hashes)
SELDOM = (
    Engine.complete, Engine.retire, Engine.truncate, Engine.swap_out, Engine.swap_in, Engine.save, Engine.attach,
    Engine.drop, Engine.drop_hashes, Engine.order, Engine.evict, Engine.misuse, Engine.set_budget, Engine.reclaim,
    Engine.wait, Engine.pause,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(int(os.environ.get("VMEM_TEST_SEEDS", 16))))
def test_a_random_engine(seed):
    engine = Engine(seed)
    for _ in range(150):
        engine.rng.choice(OFTEN if engine.flip() else SELDOM)(engine)
        engine.look()
    engine.end()
