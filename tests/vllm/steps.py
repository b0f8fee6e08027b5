"""vLLM's own scheduler over vMem's own budget and pages, and a GPU that computes steps later.

What attention would read is read back row by row: a row holds a number made of every token up to its own.
"""

import collections
import importlib
import itertools
import json
import os
import random
import threading
import time
import uuid
from unittest import mock

import numpy as np
import torch

from pyvmem.engine import control
from pyvmem.vllm import budget, mixins, scheduler
from pyvmem.vllm.waiting import Pace
from pyvmem.vllm.worker import WorkerMemory

TOKENS, MOST, REQUESTS, WINDOW, VOCABULARY = 16, 256, 6, 40, 1000


class Gpu:
    """Runs what is enqueued, in order, when a fence is waited for."""

    def __init__(self):
        self.queue, self.marked, self.passed, self.lock = collections.deque(), 0, 0, threading.RLock()
        self.failed = None  # in whichever thread

    def enqueue(self, kernel):
        self.queue.append(kernel)

    def mark(self):
        with self.lock:
            self.marked += 1
            self.queue.append(self.marked)
            return self.marked

    def wait(self, n):
        with self.lock:
            while self.passed < n:
                item = self.queue.popleft()
                if not callable(item):
                    self.passed = item
                elif self.failed is None:
                    try:
                        item()
                    except AssertionError as error:
                        self.failed = error
            if self.failed is not None:
                raise self.failed


class Memory(WorkerMemory):
    """A worker's memory on the host, whose fences the `Gpu` passes."""

    gpu = None

    def _fence(self):
        with self.gpu.lock:  # of two threads, the one whose fence is older enqueues first
            fence = self._blocks.fence()
            self.gpu.enqueue(lambda: self._blocks.passed(fence))
        return fence


def value(tokens):
    return np.uint64(hash((7, *tokens)) & 0xFFFFFFFFFFFF)


def next_token(tokens, seed=11):
    return hash((seed, *tokens)) % (VOCABULARY - 100) + 3


def full_spec(page):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=page // TOKENS // 8, dtype=torch.float32)


def window_spec(page):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(block_size=TOKENS, num_kv_heads=1, head_size=page // TOKENS // 8, dtype=torch.float32,
                             sliding_window=WINDOW)  # fmt: skip


def mamba_spec(page):
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=TOKENS, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align",
                     page_size_padded=page)  # fmt: skip


KINDS = {"full": full_spec, "window": window_spec, "mamba": mamba_spec}


def kv_config(blocks, kinds, page):
    """vLLM's configuration of a worker's KV cache with one layer of each kind, whose blocks have `page` bytes."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    groups = [KVCacheGroupSpec([f"layer{i}"], KINDS[kind](page)) for i, kind in enumerate(kinds)]
    # Groups overlay each other: a block belongs to one of them at a time.
    tensors = [KVCacheTensor(size=blocks * page, layers=[f"layer{i}"], layer_stride=page * blocks, block_stride=page)
               for i in range(len(kinds))]  # fmt: skip
    return KVCacheConfig(blocks, tensors, groups)


def make_scheduler(folder, blocks, kinds, page, asynchronous=True, caching=True, engine=None, drafts=0, ranks=1,
                   batch=64, log_stats=False, transfer=None, plain=False):  # fmt: skip
    """A scheduler of vLLM's for a model with one layer of each kind. plain: as it is, and not as vMem extends it."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps(dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=256, intermediate_size=256,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=128, vocab_size=VOCABULARY,
        max_position_embeddings=MOST, rms_norm_eps=1e-5, torch_dtype="float16", hidden_act="silu")))  # fmt: skip
    chosen = SchedulerConfig(max_num_seqs=REQUESTS, max_num_batched_tokens=batch, max_model_len=MOST,
                             enable_chunked_prefill=True, async_scheduling=asynchronous,
                             is_encoder_decoder=False)  # fmt: skip
    more = dict(mamba_cache_mode="align", mamba_block_size=TOKENS) if "mamba" in kinds else {}
    cache = CacheConfig(block_size=TOKENS, cache_dtype="auto", enable_prefix_caching=caching, **more)
    config = VllmConfig(model_config=ModelConfig(model=str(folder), dtype="float16", skip_tokenizer_init=True,
                                                 max_model_len=MOST, enforce_eager=True),
                        scheduler_config=chosen, cache_config=cache, kv_transfer_config=transfer,
                        device_config=DeviceConfig(device="cpu"))  # fmt: skip
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    cache.num_gpu_blocks = blocks
    kv = kv_config(blocks, kinds, page)
    kind = "AsyncScheduler" if asynchronous else "Scheduler"
    module = f"vllm.v1.core.sched.{'async_scheduler' if asynchronous else 'scheduler'}"
    name = mixins.name_of("Scheduler", engine or uuid.uuid4().hex[:12], f"{module}.{kind}")
    own = getattr(importlib.import_module(module), kind)
    made = (own if plain else getattr(mixins, name.rpartition(".")[2]))(
        vllm_config=config, block_size=TOKENS, hash_block_size=TOKENS, log_stats=log_stats, kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config))  # fmt: skip
    made.use_v2_model_runner = True
    return made, kv


class Worker:
    """One worker: it backs blocks as the product does, and computes rows on the `Gpu`."""

    def __init__(self, page, rank, kv, kinds, size, depth, pages, copied):
        self.gpu, self.depth, self.kinds = Gpu(), depth, kinds
        self.memory = Memory(page, rank)
        self.memory.gpu = self.gpu
        self.held = lambda: page.board_word(rank, control.HELD)  # bytes
        self.memory.expect(kv, copied)
        blocks = kv.num_blocks
        with mock.patch.dict(os.environ, VMEM_VLLM="1", VMEM_VLLM_PAGE_SIZE=str(pages)):
            flat = self.memory.allocate(blocks * size, torch.device("cpu"))
        self.memory.start(kv)
        self.rows = flat.numpy().view(np.uint64).reshape(blocks, TOKENS, -1)
        self.tokens, self.table, self.computed = {}, {}, {}
        self.read, self.states, self.page_size = 0, 0, pages
        self.resident = []
        self.copies = None  # of a connector, and what they answer
        self.copied = None

    def execute(self, scheduled, seed=11):
        output = self.memory.begin(scheduled)
        if self.copies is not None:
            self.copies.begin(scheduled)
        fence = self.gpu.mark()
        for i in output.new_block_ids_to_zero or ():
            self.gpu.enqueue(lambda i=i: self.rows[i].fill(0))
        for copy in output.kv_cache_block_copies or ():
            self.gpu.enqueue(lambda c=copy: self.rows.__setitem__(c.dst_block_id, self.rows[c.src_block_id]))
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.table.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.table[new.req_id] = [list(ids) for ids in new.block_ids]
            self.computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids):
            self.computed[name] = computed
            if name in cached.resumed_req_ids:
                self.table[name] = [list(ids) for ids in blocks]
            else:
                for have, ids in zip(self.table[name], blocks or ()):
                    have += ids
        work, sampled = [], {}
        for name, n in output.num_scheduled_tokens.items():
            first, tokens = self.computed[name], self.tokens[name]
            work.append((tokens[: first + n], first, [np.array(t) for t in self.table[name]]))
            if first + n == len(tokens):
                sampled[name] = next_token(tokens, seed)
                tokens.append(sampled[name])
        if work:
            self.gpu.enqueue(lambda: [self._write(*w) for w in work] + [self._check(*w) for w in work])
        if self.copies is not None:
            self.copied = self.copies.end(scheduled)
        self.gpu.wait(fence - self.depth)  # so many steps are in flight
        self.memory.end(scheduled)
        self.resident.append(self.held())
        return sampled

    def _write(self, tokens, first, tables):
        for g, (kind, table) in enumerate(zip(self.kinds, tables)):
            if kind == "mamba":
                if first:
                    before = table[(first - 1) // TOKENS]
                    assert before, "the state's block is the null block"
                    assert self.rows[before, 0, 0] == value(tokens[:first]) + np.uint64(g), ("state", first)
                    self.states += 1
                self.rows[table[(len(tokens) - 1) // TOKENS], 0] = value(tokens) + np.uint64(g)
                continue
            for p in range(first, len(tokens)):
                assert table[p // TOKENS]
                self.rows[table[p // TOKENS], p % TOKENS] = value(tokens[: p + 1]) + np.uint64(g)

    def _check(self, tokens, first, tables):
        for g, (kind, table) in enumerate(zip(self.kinds, tables)):
            if kind == "mamba":
                continue
            for p in range(max(0, first - WINDOW + 1) if kind == "window" else 0, len(tokens)):
                want = value(tokens[: p + 1]) + np.uint64(g)
                assert (self.rows[table[p // TOKENS], p % TOKENS] == want).all(), (kind, p, len(tokens))
                self.read += 1

    def finish(self):
        self.gpu.wait(self.gpu.mark())


class Engine:
    """A scheduler and its workers, as vLLM's engine core joins them.

    page : bytes of a block. stages: of each worker, if they differ, the first of which the scheduler knows. pages: of a
        page.
    """

    def __init__(self, folder, blocks=400, kinds=("full", "window"), page=64 << 10, seed=3, depth=1, queue=2, ranks=1,
                 pages=64 << 10, stages=(), **options):  # fmt: skip
        stages = stages or [page] * ranks
        self.scheduler, self.kv = make_scheduler(folder, blocks, kinds, stages[0], ranks=len(stages), **options)
        self.memory = self.scheduler._vmem
        self.budget, self.page = self.memory.budget, self.memory.page
        self.random, self.queue = random.Random(seed), queue
        name, rank, _ = self.page.path.stem.split("-")
        self.workers = [Worker(control.open_page(name, int(rank)), r, kv_config(blocks, kinds, size), kinds, size,
                               depth, pages, "transfer" in options)
                        for r, size in enumerate(stages)]  # fmt: skip
        self.preempted = self.steps = 0
        self.every = lambda: None  # called before each step
        self.prompts = 1, 100  # tokens of prompts that begin anew

    @property
    def read(self):
        return min(w.read for w in self.workers)

    def limit(self, blocks):
        self.page[control.LIMIT] = blocks * self.budget.block_bytes

    def step(self):
        """Schedule and execute once."""
        self.every()
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        self.steps += 1
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free + self.budget.num_withheld <= self.budget.total
        sampled = [w.execute(output) for w in self.workers]
        return output, sampled[0]

    def update(self, output, sampled):
        self.scheduler.update_from_output(output, self.answer_of(output, sampled))

    def answer_of(self, output, sampled):
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[sampled[i]] if i in sampled else [] for i in ids], logprobs=None,
            prompt_logprobs_dict={}, pooler_output=[])  # fmt: skip

    def run(self, n=60, abort=0.03):
        """Serve `n` requests to their ends, some of which are aborted."""
        from vllm.v1.request import RequestStatus

        waiting, flight = self.requests(n), collections.deque()
        while waiting or self.scheduler.has_unfinished_requests() or flight:
            while waiting and self.random.random() < 0.5:
                self.scheduler.add_request(waiting.pop(0))
            if self.scheduler.running and self.random.random() < abort:
                victim = self.random.choice(self.scheduler.running).request_id
                self.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
            self.turn(flight)
        self.settle()

    def answer(self, requests):
        """Serve requests that come at once, up to the last answer."""
        flight = collections.deque()
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.has_unfinished_requests() or flight:
            self.turn(flight)

    def converse(self, inputs):
        """One streaming session: an input of so many tokens, its answer, and idleness, again and again."""
        draw, name = self.random.randrange, f"r{next(_numbers)}"
        for n in inputs:
            self.answer([self.session(name, [draw(3, 900) for _ in range(n)])])
            self.settle()
            self.idle()
        self.scheduler.add_request(self.session(name, [0], False))
        self.settle()

    def session(self, name, prompt, more=True):
        """An input of a streaming session, or its end."""
        return self.request(name, prompt, 5, resumable=more)

    def turn(self, flight):
        """One step, and the answer of the oldest in flight if the queue is full or nothing was scheduled."""
        output, sampled = self.step()
        if output.total_num_scheduled_tokens:
            flight.append((output, sampled))
        if len(flight) == self.queue or (flight and not output.total_num_scheduled_tokens):
            self.update(*flight.popleft())
        assert self.steps < 8000, "requests wait for ever"

    def settle(self):
        """vLLM's last, empty steps, and the time after them."""
        for _ in range(3):
            self.step()
        for worker in self.workers:
            worker.finish()
        self.flush()

    def idle(self):
        """The engine has been without requests for a while."""
        self.flush()  # orders on their way
        with self.memory.lock:
            self.budget.between_steps(True)
        for worker in self.workers:
            worker.finish()
            with worker.memory._lock:
                worker.memory._ring(self.page[control.POSITION])
            worker.finish()  # the device has passed the last of its events
        self.flush()
        for worker in self.workers:
            worker.memory.publish()

    def flush(self):
        for worker in self.workers:
            if worker.memory._blocks:
                worker.memory.blocks.flush()

    def cached(self):
        return sum(b.block_hash is not None for b in self.scheduler.kv_cache_manager.block_pool.blocks)

    def resident(self):
        """Blocks that are backed, in each worker, without the null block."""
        for worker in self.workers:
            worker.memory.publish()
        words = self.page.cells[control.RESIDENT : control.RESIDENT + len(self.workers)].tolist()
        return [held // self.budget.block_bytes - 1 for held in words]

    def requests(self, n):
        draw = self.random.randrange
        prefixes = [[draw(3, 900) for _ in range(80)] for _ in range(3)]
        made = []
        for i in range(n):
            prompt = [draw(3, 900) for _ in range(draw(*self.prompts))]
            if self.random.random() < 0.5:
                prompt = self.random.choice(prefixes) + prompt[:50]
            made.append(self.request(f"r{next(_numbers)}", prompt, draw(1, 60)))
        return made

    def request(self, name, prompt, out, **options):
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        params = SamplingParams(max_tokens=out, ignore_eos=True, temperature=0)
        return Request(request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling_params=None,
                       block_hasher=get_request_block_hasher(TOKENS, sha256), arrival_time=0.0, **options)  # fmt: skip

    def close(self):
        self.memory.close()
        for worker in self.workers:
            worker.finish()
            worker.memory.close()


class Clock:
    """Stands for module `time` from now on: seconds go by only where somebody sleeps."""

    def __init__(self):
        self.now = time.monotonic()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def steps_of_a_prompt(e, monkeypatch, tokens, block, token, prepare):
    """The sizes of an idle engine's steps for one prompt, and the seconds without work of its device between them.

    block, token : seconds in which a block comes and in which a token is computed. prepare: seconds from the schedule
    of a step until the device has it, and until the next one can be scheduled.
    """
    clock, ready, made, flight = Clock(), {}, [], collections.deque()
    arrives = ends = idle = 0.0
    for module in (budget, scheduler):
        monkeypatch.setattr(module, "time", clock)
    for worker in e.workers:
        monkeypatch.setattr(worker, "_write", lambda *work: None)
        monkeypatch.setattr(worker, "_check", lambda *work: None)
    with e.memory.lock:
        e.answer([e.request("first", [5] * 1000, 1)])
        e.memory.pace = Pace(512)  # what the first request has taught is of no use: its steps took no time
        e.memory.pace.begin(0, 512, 0.0)
        e.memory.pace.end(0, 512 * token)
        clock.now += 10
        e.scheduler.reset_prefix_cache()
        e.flush()
        e.budget.between_steps(True, e.budget.floor)
        e.flush()
        told = e.page.answer
        e.page.answer = lambda order, rank: told(order, rank) if ready.get(order, 0) <= clock.now else -1
        e.scheduler.add_request(e.request("long", [i % 900 for i in range(tokens)], 1))
        while e.scheduler.has_unfinished_requests() or flight:
            if len(flight) == 2 or (flight and flight[0][2] <= clock.now):
                output, sampled, end = flight.popleft()
                clock.now = max(clock.now, end)
                e.update(output, sampled)
                continue
            output, sampled = e.step()
            clock.now += prepare
            arrives = max(arrives, clock.now)
            for order, ids in enumerate(output.vmem.ahead, output.vmem.order):
                ready[order] = arrives = arrives + len(ids) * block
            e.flush()
            if n := output.total_num_scheduled_tokens:
                idle += max(clock.now - ends, 0) * bool(made)
                ends = max(clock.now, ends) + n * token
                made.append(n)
                flight.append((output, sampled, ends))
    return made, idle


_numbers = itertools.count()
