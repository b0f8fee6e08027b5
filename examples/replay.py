"""Replay a trace of requests through a KVCache: a scheduler of fifty lines, and every row checked.

Continuous batching with chunked prefill, preemption, and prefixes found by hash: blocks of a finished request stay
cached, the least recently used go when a step needs their memory. There is no model. Where its kernels would write a
token's key and value, a number goes into every word of the row; where they would read, the rows are compared.

The same scheduler then runs over `Ideal`, a count of pages on paper, and the tokens found in either are compared.

    python examples/replay.py --trace mooncake_conversation.jsonl                  # on CPU memory
    python examples/replay.py --trace mooncake_conversation.jsonl --device cuda --budget 48G

SPDX-License-Identifier: MIT
"""

import argparse
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from pyvmem import KVCache
from pyvmem.kv.cache import TensorSpec
from pyvmem.tools import argtypes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.traces import HASHED_TOKENS, read_trace, synthetic_trace, trace_arguments  # noqa: E402


@dataclass(eq=False)
class Request:
    """Of the tokens known so far (the prompt and what was generated), `done` have their rows written."""

    id: int
    known: int
    end: int  # tokens at the end
    keys: list  # names of its blocks: an equal name means equal tokens up to there
    done: int = 0
    preempted: bool = False


class Scheduler:
    """First come, first served: an iteration takes up to `tokens` tokens, one of each request that decodes."""

    def __init__(self, memory, requests, batch, tokens):
        self.memory, self.batch, self.tokens = memory, batch, tokens
        self.waiting, self.running = deque(requests), []
        self.full = False  # somebody was preempted: nobody comes in before somebody has ended
        self.hits = self.hits_again = self.preemptions = self.iterations = self.ended = 0

    def admit(self):
        """Begin the next request with what is cached of it. False if none can begin now."""
        if self.full or not self.waiting or len(self.running) == self.batch:
            return False
        cached = self.memory.begin(self.waiting[0])
        if cached < 0:
            return False
        request = self.waiting.popleft()
        request.done = cached
        self.hits += 0 if request.preempted else cached
        self.hits_again += cached if request.preempted else 0
        self.running.append(request)
        return True

    def schedule(self):
        """The coming iteration, its rows backed: [(request, tokens)]. The youngest give way where memory is short."""
        while True:
            left, batch, who = self.tokens, [], 0
            while left and (who < len(self.running) or self.admit()):
                request = self.running[who]
                batch.append((request, min(request.known - request.done, left)))
                left, who = left - batch[-1][1], who + 1
            if self.memory.step(batch):
                return batch
            if len(self.running) == 1:
                raise MemoryError(f"request {self.running[0].id} alone needs more than the budget")
            self.full, request = True, self.running.pop()
            self.memory.end(request)
            request.done, request.preempted = 0, True
            self.waiting.appendleft(request)
            self.preemptions += 1

    def run(self):
        """Until every request has ended."""
        while self.waiting or self.running:
            batch = self.schedule()
            self.memory.run(batch)
            self.iterations += 1
            for request, tokens in batch:
                request.done += tokens
                request.known += request.done == request.known  # the model's next token
            for request in [r for r, _ in batch if r.done == r.end]:
                self.running.remove(request)
                self.memory.end(request)
                self.full, self.ended = False, self.ended + 1
            yield self.ended


class Cached:
    """The cached blocks: which requests use them, and which of the others goes first."""

    def __init__(self):
        self.users = {}  # key -> requests that use the block now
        self.unused = OrderedDict()  # keys of blocks without users, least recently used first

    def match(self, keys):
        """The longest beginning of `keys` that is cached; the caller uses it from now on."""
        found = list(takewhile(self.users.__contains__, keys))
        for key in found:
            self.users[key] += 1
            self.unused.pop(key, None)
        return found

    def insert(self, key):
        """True if the block is new; its user is the caller."""
        new = key not in self.users
        if new:
            self.users[key] = 1
        return new

    def leave(self, keys):
        """The caller uses these blocks no longer. The ends of prompts go before their beginnings."""
        for key in reversed(keys):
            self.users[key] -= 1
            if not self.users[key]:
                self.unused[key] = None

    def evict(self):
        """Forget the least recently used block; returns its key."""
        key, _ = self.unused.popitem(last=False)
        del self.users[key]
        return key


class Ideal:
    """A model of a cache with so many pages, which maps nothing and counts pages."""

    def __init__(self, pages, page_tokens, block):
        self.free, self.page_tokens, self.block = pages, page_tokens, block
        self.cached, self.keys = Cached(), {}

    def pages(self, tokens):
        return -(-tokens // self.page_tokens)

    def begin(self, request):
        self.keys[request] = self.cached.match(request.keys[: (request.known - 1) // self.block])
        return len(self.keys[request]) * self.block

    def step(self, batch):
        need = sum(self.pages(r.done + n) - self.pages(r.done) for r, n in batch)
        while need > self.free and self.cached.unused:
            self.cached.evict()
            self.free += self.pages(self.block)
        if need > self.free:
            return False
        self.free -= need
        return True

    def run(self, batch):
        for request, n in batch:
            for key in request.keys[request.done // self.block : (request.done + n) // self.block]:
                if self.cached.insert(key):
                    self.keys[request].append(key)

    def end(self, request):
        keys = self.keys.pop(request)
        self.free += self.pages(request.done) - len(keys) * self.pages(self.block)
        self.cached.leave(keys)


class Memory:
    """The same over a KVCache, with the rows: K and V of one layer."""

    IN_FLIGHT = 2  # iterations whose kernels may run while the next is scheduled

    def __init__(self, batch, max_tokens, budget, row_bytes, block, check_every, device="cpu", event=None, **options):
        specs = [TensorSpec(name, (row_bytes // 8,), torch.int64) for name in "kv"]
        # Slots are only addresses: with twice as many, one that waits for its kernels keeps nobody out.
        self.kv = KVCache(specs, 2 * batch, max_tokens, budget, steps_in_flight=self.IN_FLIGHT, **options)
        self.page_tokens = self.kv.page_size // row_bytes
        self.block = block or self.page_tokens
        self.block_pages = len(specs) * (self.block * row_bytes // self.kv.page_size)
        self.pages = budget // self.kv.page_size // len(specs)  # as `Ideal` counts them
        self.held = {}  # key -> run of its block: only `step` decides what goes
        self.cached = Cached()
        self.slot, self.keys, self.begun = {}, {}, set()
        self.device, self.check_every = torch.device(device), check_every
        self.event = event  # recorded behind an iteration's kernels; None: they have ended when `run` returns
        self.blocks = self.to_device([[0] * -(-max_tokens // self.block)] * self.kv.slots)  # keys of each slot
        self.in_flight, self.rows_written, self.rows_read = deque(), 0, 0
        self.wrong = self.to_device(0)

    def to_device(self, values):
        """A copy of the values, without waiting for the kernels in flight."""
        pin = self.device.type != "cpu"
        return torch.tensor(values, dtype=torch.int64, pin_memory=pin).to(self.device, non_blocking=True)

    def begin(self, request):
        """A slot with the pages of the blocks that are cached; never all of the prompt: its last token is computed."""
        keys = self.cached.match(request.keys[: (request.known - 1) // self.block])
        slot = self.kv.alloc(request.known, prefix_tokens=len(keys) * self.block)
        if slot is None:
            self.cached.leave(keys)
            return -1
        if keys:
            self.kv.attach(slot, [self.held[key] for key in keys])
            self.begun.add(request)
        self.slot[request], self.keys[request] = slot, keys
        self.blocks[slot, : len(request.keys)] = self.to_device(request.keys)
        return len(keys) * self.block

    def step(self, batch):
        """Back the rows of the iteration; cached blocks go where memory is short."""
        lengths = [0] * self.kv.slots
        for request, n in batch:
            lengths[self.slot[request]] = request.done + n
        while len(self.in_flight) > self.IN_FLIGHT - 1:
            self.in_flight.popleft().synchronize()
        while not self.kv.step(lengths):
            if self.kv.shortage.ending_pages:  # they come back when the kernels in flight have ended
                self.drain()
            elif self.cached.unused:
                count = min(-(-self.kv.shortage.missing_pages // self.block_pages), len(self.cached.unused))
                self.kv.drop([self.held.pop(self.cached.evict()) for _ in range(count)])
            else:
                return False
        return True

    def launched(self):
        """Kernels were launched: the next iterations do not wait for them."""
        if self.event is not None:
            self.in_flight.append(self.event())
            self.in_flight[-1].record()

    def drain(self):
        """Wait for the kernels in flight, and say so."""
        while self.in_flight:
            self.in_flight.popleft().synchronize()
        self.kv.retire()

    def run(self, batch):
        """The model's part: write the new rows, read all; then cache the blocks that became full."""
        write, read, full = [], [], []
        for request, n in batch:
            slot, begin, end = self.slot[request], request.done, request.done + n
            write.append((slot, begin, end))
            first = request in self.begun
            if first or end == request.end or begin // self.check_every < end // self.check_every:
                self.begun.discard(request)
                read.append((slot, 0, end))
            at = begin // self.block
            keys = request.keys[at : end // self.block]
            self.keys[request] += [key for key in keys if self.cached.insert(key)]
            full += [(slot, keys, at)] if keys else []
        self.write(write)
        self.read(read)
        for slot, keys, at in full:
            for i, key in enumerate(keys, at):
                if key not in self.held:
                    self.held[key] = self.kv.share(slot, self.block, i * self.block)
        self.launched()
        if self.event is None:
            self.kv.retire()

    def rows(self, parts):
        """Of all rows of `parts`, (slot, begin, end): slot, number, and what it says; and how many there are."""
        total = sum(end - begin for _, begin, end in parts)
        slot, begin, end = self.to_device(parts).T
        part = torch.repeat_interleave(end - begin, output_size=total)  # knowing the size, it does not wait
        row = torch.arange(total, device=self.device) - ((end - begin).cumsum(0) - end)[part]
        slot = slot[part]
        return slot, row, self.blocks[slot, row // self.block] * self.block + row % self.block, total

    def write(self, parts):
        """Write rows: what a token says, and which tensor it is, in every word."""
        slot, row, says, total = self.rows(parts)
        for t, tensor in enumerate(self.kv.tensors):
            tensor.index_put_((slot, row), (says + t)[:, None])
        self.rows_written += total

    def read(self, parts):
        """Compare rows with what was written there, perhaps by another request."""
        if parts:
            slot, row, says, total = self.rows(parts)
            for t, tensor in enumerate(self.kv.tensors):
                self.wrong += (tensor[slot, row] != (says + t)[:, None]).any(1).sum()
            self.rows_read += total

    def end(self, request):
        """The request has ended, or is preempted and its rows are read once more: slot and pages are free when the
        kernels have ended that may touch them."""
        slot = self.slot.pop(request)
        if request.done < request.end and request.done:
            self.read([(slot, 0, request.done)])
            self.launched()
            self.drain()
        self.kv.free(slot, after=self.kv.last_step)
        self.cached.leave(self.keys.pop(request))
        self.begun.discard(request)


def requests_of(trace, block):
    """The trace's requests. Blocks that it has no name for get one that nobody else has."""
    parts = HASHED_TOKENS // block
    named = trace.hash_ids is not None and block * parts == HASHED_TOKENS
    unused = parts * (max(max(ids, default=0) for ids in trace.hash_ids) + 1) if named else 0
    requests = []
    for i, (prompt, output) in enumerate(zip(trace.prompt.tolist(), trace.output.tolist())):
        whole = trace.hash_ids[i][: prompt // HASHED_TOKENS] if named else []  # the last one may be shorter
        keys = [name * parts + part for name in whole for part in range(parts)]
        more = -(-(prompt + output) // block) - len(keys)
        keys += range(unused, unused + more)
        unused += more
        requests.append(Request(i, prompt, prompt + output, keys))
    return requests


def unlimited(requests, block):
    """Tokens that a cache would have which forgets nothing, and knows of a request's blocks at once."""
    known, hits = set(), 0
    for request in requests:
        keys = request.keys[: (request.known - 1) // block]
        hits += block * sum(1 for _ in takewhile(known.__contains__, keys))
        known.update(request.keys[: request.end // block])
    return hits


def replay(trace, batch, tokens, progress=lambda ended: None, limit=float("inf"), **memory):
    """Run a trace over a KVCache and over the ideal; returns both schedulers, the memory, and seconds of the first.

    After `limit` seconds no further request begins: the trace ends there, for both.
    """
    memory = Memory(batch, int((trace.prompt + trace.output).max()), **memory)
    requests = requests_of(trace, memory.block)
    start = time.perf_counter()
    real = Scheduler(memory, requests, batch, tokens)
    for ended in real.run():
        progress(ended)
        if time.perf_counter() - start > limit:
            real.waiting = deque(request for request in real.waiting if request.preempted)
    memory.drain()
    seconds = time.perf_counter() - start
    requests = requests_of(trace.head(real.ended), memory.block)
    ideal = Scheduler(Ideal(memory.pages, memory.page_tokens, memory.block), requests, batch, tokens)
    for _ in ideal.run():
        pass
    return real, ideal, memory, seconds


def reporter(total):
    """Says on standard error how far it is, every 10 seconds."""
    last = time.monotonic()

    def progress(ended):
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"  {ended} of {total} requests have ended", file=sys.stderr, flush=True)

    return progress


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    trace_arguments(parser)
    whole = argtypes.whole(1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--budget", type=argtypes.size, default="1G", metavar="SIZE", help="bytes of pages (1G)")
    parser.add_argument("--batch", type=whole, default=128, help="requests that run at once (128)")
    parser.add_argument("--tokens", type=whole, default=2048, help="tokens of an iteration (2048)")
    parser.add_argument("--row-bytes", type=whole, default=128, help="a token's K or V, a multiple of 8 (128)")
    parser.add_argument("--block", type=whole, help="tokens that are cached together; whole pages (one page)")
    parser.add_argument(
        "--check-every", type=whole, default=256, help="read all rows of a request every N of its tokens (256)"
    )
    parser.add_argument(
        "--seconds", type=whole, default=10**9, metavar="N", help="begin no request after N seconds (no limit)"
    )
    args = parser.parse_args()
    gpu = args.device != "cpu"
    torch.set_num_threads(1)  # rows are few: more threads wait for one another
    trace = read_trace(args.trace) if args.trace else synthetic_trace(1000)
    trace = trace.head(args.requests or len(trace))
    try:
        real, ideal, memory, seconds = replay(
            trace, args.batch, args.tokens, reporter(len(trace)), args.seconds, budget=args.budget,
            row_bytes=args.row_bytes, block=args.block, check_every=args.check_every, device=args.device,
            event=torch.cuda.Event if gpu else None, backend=None if gpu else "host",
        )  # fmt: skip
    except (MemoryError, ValueError) as error:
        raise SystemExit(f"replay: {error}") from None
    trace = trace.head(real.ended)
    kv, prompts = memory.kv, int(trace.prompt.sum())
    print(f"{trace.name}: {len(trace)} requests, {prompts} prompt and {int(trace.output.sum())} output tokens")
    print(f"  {kv.page_size >> 10} KiB pages of {memory.page_tokens} tokens, {2 * memory.pages} of them, {kv.context}")
    print(f"  {real.iterations} iterations, {real.preemptions} preemptions, {seconds:.1f} s")
    print(f"  {memory.rows_written} rows written, {memory.rows_read} read and compared, {int(memory.wrong)} wrong")
    bound = unlimited(requests_of(trace, memory.block), memory.block)
    print(f"  tokens found at the first admission: {real.hits} ({real.hits / prompts:.2%} of the prompts)")
    print(f"  ideal of this capacity: {ideal.hits}, {ideal.iterations} iterations, {ideal.preemptions} preemptions")
    print(f"  ideal without a limit: {bound} ({bound / prompts:.2%})")
    print(f"  found again after a preemption: {real.hits_again}; ideal {ideal.hits_again}")
    apart = abs(real.hits + real.hits_again - ideal.hits - ideal.hits_again)
    if int(memory.wrong) or apart > 0.001 * (ideal.hits + ideal.hits_again):
        raise SystemExit("rows are wrong, or the hits are not those of the ideal")
    kv.close()


if __name__ == "__main__":
    main()
