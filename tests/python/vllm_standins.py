"""What pyvmem.vllm sees of vLLM, in small: a block pool, a scheduler, a runner with its request tables, and a "GPU".

The GPU computes a step behind. tests/python/gpu/test_vllm_answers.py checks the interfaces against vLLM's own.

The model of the GPU is strict where a real one is not: every token's row holds a number made of the tokens before it,
and every step reads all rows of its requests back through their block tables.

SPDX-License-Identifier: MIT
"""

import collections
import types

import numpy as np


class Block:
    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash = None
        self.is_null = False
        self.prev_free_block = self.next_free_block = None


class FreeQueue:
    """A doubly linked list with sentinels, as FreeKVCacheBlockQueue."""

    def __init__(self, blocks):
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def _link(self, a, block, b):
        a.next_free_block, block.prev_free_block, block.next_free_block, b.prev_free_block = block, a, b, block
        self.num_free_blocks += 1

    def append_n(self, blocks):
        for block in blocks:
            self._link(self.fake_free_list_tail.prev_free_block, block, self.fake_free_list_tail)

    def prepend_n(self, blocks):
        for block in reversed(blocks):
            self._link(self.fake_free_list_head, block, self.fake_free_list_head.next_free_block)

    def remove(self, block):
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def popleft_n(self, n):
        popped = []
        for _ in range(n):
            popped.append(self.fake_free_list_head.next_free_block)
            self.remove(popped[-1])
        return popped


class BlockPool:
    def __init__(self, num_gpu_blocks):
        self.num_gpu_blocks = num_gpu_blocks
        self.blocks = [Block(i) for i in range(num_gpu_blocks)]
        self.blocks[0].is_null = True
        self.free_block_queue = FreeQueue(self.blocks[1:])
        self.cached = {}

    def get_num_free_blocks(self):
        return self.free_block_queue.num_free_blocks

    def _forget(self, block):
        if block.block_hash is not None and self.cached.get(block.block_hash) is block:
            del self.cached[block.block_hash]
        block.block_hash = None

    def get_new_blocks(self, n):
        blocks = self.free_block_queue.popleft_n(n)
        for block in blocks:
            self._forget(block)
            block.ref_cnt += 1
        return blocks

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def cache(self, block, key):
        if block.block_hash is None and key not in self.cached:
            block.block_hash = key
            self.cached[key] = block

    def free_blocks(self, ordered_blocks):
        freed = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_block_queue.prepend_n([b for b in freed if b.block_hash is None])
        self.free_block_queue.append_n([b for b in freed if b.block_hash is not None])

    def evict_blocks(self, block_ids):
        for i in block_ids:
            self._forget(self.blocks[i])

    def reset_prefix_cache(self):
        if self.num_gpu_blocks - self.get_num_free_blocks() != 1:
            return False
        self.evict_blocks(range(self.num_gpu_blocks))
        return True


class Request:
    def __init__(self, name, prompt, output):
        self.name = name
        self.tokens = list(prompt)
        self.end = len(prompt) + output
        self.computed = 0
        self.blocks = []

    def sample(self):
        """The next token: known here before the GPU has computed it, so that steps can be prepared ahead."""
        if len(self.tokens) <= self.end:  # one step more than needed: the end is seen late
            self.tokens.append(hash(tuple(self.tokens)) % 9)


class Scheduler:
    """First come, first served, with chunked prefill, a prefix cache and preemption of the last."""

    def __init__(self, num_blocks, block_tokens, max_requests, budget, caching=True):
        self.pool = BlockPool(num_blocks)
        self.kv_cache_manager = types.SimpleNamespace(block_pool=self.pool)
        self.block_tokens = block_tokens
        self.max_requests = max_requests
        self.budget = budget
        self.caching = caching
        self.waiting, self.running = collections.deque(), []
        self.finished, self.preempted = set(), set()
        self.preemptions = self.hits = 0

    def free(self, request):
        blocks, request.blocks = request.blocks, []
        self.free_blocks(reversed(blocks))

    def free_blocks(self, blocks):
        self.pool.free_blocks(blocks)

    def abort(self, request):
        if request in self.running:
            self.running.remove(request)
            self.free(request)
            self.finished.add(request.name)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _keys(self, request, tokens):
        n = self.block_tokens
        return [tuple(request.tokens[:k]) for k in range(n, tokens + 1, n)]

    def _grow(self, request, tokens):
        """Blocks for so many tokens; None where there are too few."""
        n = -(-tokens // self.block_tokens) - len(request.blocks)
        if n > self.pool.get_num_free_blocks():
            return None
        new = self.pool.get_new_blocks(n) if n > 0 else []
        request.blocks += new
        return new

    def _cache(self, request, tokens):
        if self.caching:
            for block, key in zip(request.blocks, self._keys(request, tokens)):
                self.pool.cache(block, key)

    def hits_of(self, request):
        """Blocks of the prefix cache that the request begins with."""
        hits = []
        for key in self._keys(request, len(request.tokens) - 1) if self.caching else ():
            if key not in self.pool.cached:
                break
            hits.append(self.pool.cached[key])
        return hits

    def schedule(self):
        new, more, scheduled, left = [], [], {}, self.budget
        for request in list(self.running):
            if request not in self.running or not left:
                continue
            if request.computed == len(request.tokens):
                request.sample()
            n = min(left, len(request.tokens) - request.computed)
            if not n:
                continue
            blocks = self._grow(request, request.computed + n)
            while blocks is None:
                victim = self.running.pop()
                self.free(victim)
                victim.computed = 0
                self.waiting.appendleft(victim)
                self.preempted.add(victim.name)
                self.preemptions += 1
                left += scheduled.pop(victim.name, 0)
                more = [m for m in more if m[0] is not victim]
                if victim is request:
                    break
                blocks = self._grow(request, request.computed + n)
            if blocks is None:
                continue
            self._cache(request, request.computed + n)
            more.append((request, [b.block_id for b in blocks], request.computed))
            scheduled[request.name] = n
            left -= n
        while self.waiting and left and len(self.running) < self.max_requests and not self.preempted:
            request = self.waiting[0]
            hits = self.hits_of(request)
            request.computed = len(hits) * self.block_tokens
            n = min(left, len(request.tokens) - request.computed)
            free = self.pool.get_num_free_blocks() - sum(b.ref_cnt == 0 for b in hits)
            if -(-(request.computed + n) // self.block_tokens) - len(hits) > free:
                break
            self.pool.touch(hits)
            request.blocks = list(hits)
            self._grow(request, request.computed + n)
            self._cache(request, request.computed + n)  # vLLM knows them from here on, though nothing is written yet
            self.hits += len(hits)
            self.waiting.popleft()
            self.running.append(request)
            new.append((request, [b.block_id for b in request.blocks], request.computed))
            scheduled[request.name] = n
            left -= n
        output = types.SimpleNamespace(new=new, more=more, scheduled=scheduled, finished=self.finished,
                                       preempted=self.preempted)  # fmt: skip
        self.finished, self.preempted, output.ends = set(), set(), set()
        for request in self.running:
            if request.name in scheduled:
                request.computed += scheduled[request.name]
                if request.computed >= request.end:
                    output.ends.add(request.name)
        return output

    def output(self, output):
        """The step's tokens are known: some requests are seen to be at their end."""
        for request in list(self.running):
            if request.name in output.ends:
                self.running.remove(request)
                self.free(request)
                self.finished.add(request.name)


class Gpu:
    """Runs what is enqueued, in order, when a fence is waited for."""

    def __init__(self):
        self.queue = collections.deque()
        self.marked = self.passed = 0

    def enqueue(self, kernel):
        self.queue.append(kernel)

    def mark(self):
        self.marked += 1
        self.queue.append(self.marked)
        return self.marked

    def wait(self, n):
        while self.passed < n:
            item = self.queue.popleft()
            if callable(item):
                item()
            else:
                self.passed = item

    def done(self, n):
        return self.passed >= n


def value(tokens):
    """What a row holds: a number made of all tokens up to its own."""
    return np.uint64(hash((7, *tokens)) & 0xFFFFFFFFFFFF)


class Runner:
    """The worker: request indices as RequestState gives them (the last freed first), tables as BlockTables has them."""

    def __init__(self, requests, rows, block_tokens, max_requests, blocks_per_request, gpu):
        self.requests = requests  # RequestSlots
        self.rows = rows  # uint64[rows, ...] over the whole tensor
        self.block_tokens = block_tokens
        self.free_indices = list(range(max_requests))
        self.index = {}
        self.table = np.zeros((max_requests, blocks_per_request), np.int64)
        self.num_blocks = np.zeros(max_requests, np.int64)
        self.gpu = gpu
        self.read = 0

    def execute(self, output, forgotten=(), waiting=()):
        self.requests.begin_step(forgotten, waiting)
        for name in output.finished | output.preempted:
            index = self.index.pop(name, None)
            if index is not None:
                self.requests.finish(index)
                self.free_indices.append(index)
        for request, ids, computed in output.new:
            index = self.index[request.name] = self.free_indices.pop()
            self.num_blocks[index] = 0
            self._put(index, self.requests.start(index, ids, computed))
        for request, ids, _ in output.more:
            index = self.index[request.name]
            if ids:
                self._put(index, self.requests.extend(index, ids))
        self.requests.back()
        steps = []
        for request, _, computed in output.new + output.more:
            n = output.scheduled[request.name]
            index = self.index[request.name]
            steps.append((list(request.tokens[: computed + n]), computed, self.table[index].copy()))
        if steps:
            self.gpu.enqueue(lambda: [self._write(*s) for s in steps] + [self._check(*s) for s in steps])

    def _put(self, index, numbers):
        first = self.num_blocks[index]
        self.table[index, first : first + len(numbers)] = numbers
        self.num_blocks[index] = first + len(numbers)

    def _row(self, table, position):
        return table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def _write(self, tokens, computed, table):
        for p in range(computed, len(tokens)):
            self.rows[self._row(table, p)] = value(tokens[: p + 1])

    def _check(self, tokens, computed, table):
        for p in range(len(tokens)):
            row = self.rows[self._row(table, p)]
            want = value(tokens[: p + 1])
            assert (row == want).all(), f"position {p} of {len(tokens)}, computed {computed}: {row} is not {want}"
            self.read += 1
