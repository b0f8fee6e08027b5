"""vLLM's own scheduler over pyvmem.vllm, without a GPU: what the worker does with its outputs, row by row.

The scheduler, its block pool and its outputs are vLLM's; the tables and the "GPU" are those of vllm_standins, and every
step reads every row of every request back. Part of `make test-vllm`: vLLM must be installed. VMEM_VLLM_FORCE=1 tries a
release that is not in pyvmem/vllm/patches.py.

SPDX-License-Identifier: MIT
"""

import importlib.util
import json
import os
import random
import types

import numpy as np
import pytest
import torch
import vllm_standins

from pyvmem.kv import KVCache, TensorSpec
from pyvmem.kv_blocks import BlockNames
from pyvmem.vllm.requests import RequestSlots

pytestmark = pytest.mark.skipif(
    not os.environ.get("VMEM_TEST_VLLM") or importlib.util.find_spec("vllm") is None,
    reason="make test-vllm: needs vLLM",
)
TOKENS, PAGE, MOST, REQUESTS = 16, 64 << 10, 256, 6
ROW = PAGE // TOKENS


def own_scheduler(folder, blocks):
    """vLLM's asynchronous scheduler for a model of one layer."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=256, intermediate_size=256,
                  num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=128, vocab_size=1000,
                  max_position_embeddings=MOST, rms_norm_eps=1e-5, torch_dtype="float16",
                  hidden_act="silu")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    scheduler_config = SchedulerConfig(max_num_seqs=REQUESTS, max_num_batched_tokens=64, max_model_len=MOST,
                                       enable_chunked_prefill=True, async_scheduling=True,
                                       is_encoder_decoder=False)  # fmt: skip
    cache_config = CacheConfig(block_size=TOKENS, cache_dtype="auto", enable_prefix_caching=True)
    vllm_config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float16", skip_tokenizer_init=True, max_model_len=MOST,
                                 enforce_eager=True),
        scheduler_config=scheduler_config, cache_config=cache_config, device_config=DeviceConfig(device="cpu"),
    )  # fmt: skip
    cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    made = AsyncScheduler(
        vllm_config=vllm_config, block_size=TOKENS, hash_block_size=TOKENS, log_stats=False,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
    )  # fmt: skip
    made.use_v2_model_runner = True  # which needs Triton to be configured
    return made


class Tables:
    """RequestState and BlockTables, as far as the worker's functions look at them."""

    def __init__(self, engine):
        self.vmem = engine
        self.free_indices = list(range(REQUESTS))
        self.req_id_to_index = {}
        self.num_computed_tokens_np = np.zeros(REQUESTS, np.int32)
        self.blocks_per_kv_block = [1]
        self.num_blocks = types.SimpleNamespace(np=np.zeros((1, REQUESTS), np.int32))
        self.table = np.zeros((REQUESTS, MOST // TOKENS), np.int64)

    def remove_request(self, req_id):
        index = self.req_id_to_index.pop(req_id, None)
        if index is not None:
            self.free_indices.append(index)
        return index

    def append_block_ids(self, req_index, new_block_ids, overwrite):
        first = 0 if overwrite else int(self.num_blocks.np[0, req_index])
        self.table[req_index, first : first + len(new_block_ids[0])] = new_block_ids[0]
        self.num_blocks.np[0, req_index] = first + len(new_block_ids[0])

    def apply_staged_writes(self):
        pass


class Engine:
    def __init__(self, folder, blocks, monkeypatch, cap=None):
        import vllm

        from pyvmem.vllm import patches, settings, worker

        monkeypatch.setenv("VMEM_VLLM", "1")  # or no other setting counts
        if cap is not None:
            monkeypatch.setenv("VMEM_VLLM_CACHE_TOKENS", str(cap))
        patches.install(vllm.__version__, settings.read().force)
        self.worker = worker
        self.scheduler = own_scheduler(folder, blocks)
        self.cache = KVCache([TensorSpec("kv", (ROW // 8,), torch.int64)], REQUESTS + 4, MOST, (blocks + 8) * PAGE,
                             backend="host", page_size=PAGE, check=True, lazy=True, ahead_tokens=TOKENS, eager=False,
                             generous=False, name=None)  # fmt: skip
        self.gpu = vllm_standins.Gpu()
        self.requests = RequestSlots(self.cache, TOKENS, REQUESTS, self.gpu, BlockNames(self.cache, blocks, TOKENS),
                                     table_blocks=MOST // TOKENS)  # fmt: skip
        self.states = self.tables = Tables(self)
        self.rows = self.cache.flat(0).numpy().view(np.uint64)
        self.tokens = {}
        self.read = 0
        self.random = random.Random(3)
        monkeypatch.setattr(worker, "_current", self)

    def allowed_blocks(self):
        return None

    def execute(self, output):
        """As GPUModelRunner.execute_model: the tokens that the step samples."""
        tables, worker = self.tables, self.worker

        def finish(runner, output):
            for name in output.finished_req_ids | (output.preempted_req_ids or set()):
                worker.remove_request(Tables.remove_request, tables, name)

        worker.finish_requests(finish, None, output)
        for new in output.scheduled_new_reqs:
            index = tables.req_id_to_index[new.req_id] = tables.free_indices.pop()
            tables.num_computed_tokens_np[index] = new.num_computed_tokens
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            worker.append_block_ids(Tables.append_block_ids, tables, index, new.block_ids, True)
        cached = output.scheduled_cached_reqs
        for name, computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids):
            index = tables.req_id_to_index[name]
            tables.num_computed_tokens_np[index] = computed
            if blocks is not None:
                worker.append_block_ids(Tables.append_block_ids, tables, index, blocks, False)
        worker.apply_staged_writes(Tables.apply_staged_writes, tables)
        work, sampled = [], {}
        for name, n in output.num_scheduled_tokens.items():
            index = tables.req_id_to_index[name]
            first, tokens = int(tables.num_computed_tokens_np[index]), self.tokens[name]
            work.append((tokens[: first + n], first, tables.table[index].copy()))
            if first + n == len(tokens):
                sampled[name] = hash((11, *tokens)) % 900 + 3
                tokens.append(sampled[name])
        if work:
            self.gpu.enqueue(lambda: [self._write(*w) for w in work] + [self._check(*w) for w in work])
        return sampled

    def _row(self, table, position):
        return table[position // TOKENS] * TOKENS + position % TOKENS

    def _write(self, tokens, first, table):
        for p in range(first, len(tokens)):
            self.rows[self._row(table, p)] = vllm_standins.value(tokens[: p + 1])

    def _check(self, tokens, first, table):
        for p in range(len(tokens)):
            assert (self.rows[self._row(table, p)] == vllm_standins.value(tokens[: p + 1])).all(), (p, len(tokens))
            self.read += 1

    def settle(self, finished, forgotten):
        self.worker.Engine.settle(self, finished, forgotten)

    def run(self, n, deliver=True):
        """n requests to their end. deliver: with the steps in which vLLM's engine says which have ended."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        waiting, flight, preempted, steps = self._requests(n), [], 0, 0
        while waiting or self.scheduler.has_unfinished_requests() or flight:
            while waiting and self.random.random() < 0.5:
                self.scheduler.add_request(waiting.pop(0))
            if self.scheduler.running and self.random.random() < 0.03:
                victim = self.random.choice(self.scheduler.running).request_id
                self.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
            output = self.scheduler.schedule()
            preempted += len(output.preempted_req_ids or ())
            sampled = self.execute(output)
            if output.total_num_scheduled_tokens:
                flight.append((output, sampled))
            if len(flight) == 2 or (flight and not output.total_num_scheduled_tokens):
                done, sampled = flight.pop(0)
                ids = list(done.num_scheduled_tokens)
                self.scheduler.update_from_output(done, ModelRunnerOutput(
                    req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)},
                    sampled_token_ids=[[sampled[i]] if i in sampled else [] for i in ids], logprobs=None,
                    prompt_logprobs_dict={}, pooler_output=[]))  # fmt: skip
            steps += 1
            assert steps < 4000
        if deliver:
            self.execute(self.scheduler.schedule())
            self.execute(self.scheduler.schedule())
        self.gpu.wait(self.gpu.marked)
        self.cache.wait()
        return preempted

    def _requests(self, n):
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        hasher = get_request_block_hasher(TOKENS, sha256)
        prefixes = [[self.random.randrange(3, 900) for _ in range(80)] for _ in range(3)]
        made = []
        for i in range(n):
            prompt = [self.random.randrange(3, 900) for _ in range(self.random.randrange(1, 100))]
            if self.random.random() < 0.5:
                prompt = self.random.choice(prefixes) + prompt[:50]
            params = SamplingParams(max_tokens=self.random.randrange(1, 60), ignore_eos=True, temperature=0)
            made.append(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling_params=params,
                                pooling_params=None, block_hasher=hasher, arrival_time=0.0))  # fmt: skip
        return made

    def rest(self):
        """Long without a step: ended requests leave their slots."""
        self.requests.IDLE_SECONDS = -1
        while self.requests.tend():
            pass
        self.requests.IDLE_SECONDS = RequestSlots.IDLE_SECONDS

    def cached(self):
        return sum(b.block_hash is not None for b in self.scheduler.kv_cache_manager.block_pool.blocks)


@pytest.mark.parametrize("blocks", [60, 24])
def test_every_row_is_read_back_as_written(tmp_path, monkeypatch, blocks):
    engine = Engine(tmp_path, blocks, monkeypatch)
    preempted = engine.run(50)
    assert engine.read > 50_000
    assert engine.requests.hit_blocks
    assert bool(preempted) == (blocks == 24)
    engine.rest()
    assert engine.cache.stats().prefix_pages == engine.cached() > 0


def test_cached_blocks_stay_up_to_the_cap(tmp_path, monkeypatch):
    engine = Engine(tmp_path, 60, monkeypatch, cap=7 * TOKENS)
    engine.run(30)
    engine.rest()
    assert engine.cache.stats().prefix_pages == engine.cached() == 7


def test_an_engine_that_makes_no_further_step_still_gives_back(tmp_path, monkeypatch):
    engine = Engine(tmp_path, 60, monkeypatch, cap=5 * TOKENS)
    engine.run(20, deliver=False)
    engine.rest()
    stats = engine.cache.stats()
    assert (stats.held_pages, stats.prefix_pages, stats.active_slots) == (5, 5, 0)
    engine.run(10)  # and goes on
    engine.rest()
    assert engine.cache.stats().prefix_pages == engine.cached() == 5


def test_reset_and_a_smaller_limit_reach_the_worker(tmp_path, monkeypatch):
    engine = Engine(tmp_path, 60, monkeypatch)
    engine.run(20)
    assert engine.cached() > 30
    engine.allowed_blocks = lambda: 20
    monkeypatch.setattr("pyvmem.vllm.scheduler.PoolKeeper.PERIOD", 0)
    engine.run(10)
    engine.rest()
    assert engine.cache.stats().prefix_pages == engine.cache.stats().held_pages == engine.cached() < 20
    assert engine.scheduler.reset_prefix_cache()  # with no step after it
    engine.rest()
    assert engine.cache.stats().held_pages == 0
    engine.run(10)  # and goes on
