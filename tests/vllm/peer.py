"""A connector with NIXL's life of blocks, in vLLM's scheduler: a peer sends prefixes, late or never, and reads some."""

import collections
import random

import numpy as np
from offload import OffloadingEngine
from steps import TOKENS, Engine, value
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Transfers(KVConnectorMetadata):
    """What a step begins: {request: (prompt, blocks that are loaded)}, {request: (tokens, blocks that are read)}."""

    def __init__(self, loads, reads):
        self.loads, self.reads = loads, reads


class Peer(KVConnectorBase_V1):
    """The scheduler's half. Each request asks the peer once."""

    draw = random.Random(2)

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._asked, self._loads, self._reads = set(), {}, {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count = request.num_prompt_tokens - num_computed_tokens
        known = request.request_id not in self._asked and count > 0 and hash(request.request_id) % 3
        return (count, True) if known else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._asked.add(request.request_id)
        if num_external_tokens > 0:
            taken = [block.block_id for block in blocks.blocks[0]]
            new = set(blocks.get_unhashed_block_ids_all_groups()[0])
            loaded = [(i, block) for i, block in enumerate(taken) if block in new]
            self._loads[request.request_id] = list(request.prompt_token_ids), loaded

    def build_connector_meta(self, scheduler_output):
        begun = Transfers(self._loads, self._reads)
        self._loads, self._reads = {}, {}
        return begun

    def request_finished(self, request, block_ids):
        whole = request.status.name == "FINISHED_LENGTH_CAPPED"
        reads = whole and bool(block_ids) and self.draw.random() < 0.4
        if reads:
            tokens = request.all_token_ids[: request.num_computed_tokens]
            self._reads[request.request_id] = list(tokens), list(block_ids)
        return reads, None

    def start_load_kv(self, forward_context, **kwargs):
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class WorkerHalf:
    """The worker's half. late: how likely a transfer goes on for one more step. fails: how likely a load does."""

    late, fails = 0.7, 0.3

    def __init__(self, worker):
        self.worker, self.draw, self.counts = worker, random.Random(5), collections.Counter()
        self.loads, self.reads = {}, {}

    def begin(self, scheduled):
        begun = scheduled.kv_connector_metadata
        self.loads.update(begun.loads)
        self.reads.update(begun.reads)

    def end(self, scheduled):
        from vllm.v1.outputs import KVConnectorOutput

        received, sent, invalid = set(), set(), set()
        backed = set(self.worker.memory.blocks.backed().tolist())
        rows, draw = self.worker.rows, self.draw.random
        for name in [name for name in self.loads if draw() >= self.late]:
            prompt, blocks = self.loads.pop(name)
            assert backed.issuperset(block for _, block in blocks)
            fails = draw() < self.fails
            whole = len(blocks) if not fails else int(draw() * len(blocks))  # before the peer was lost
            for i, block in blocks[:whole]:
                n = min(TOKENS, len(prompt) - i * TOKENS)
                rows[block, :n] = np.array([value(prompt[: i * TOKENS + j + 1]) for j in range(n)])[:, None]
            invalid.update(block for _, block in (blocks if fails and draw() < 0.5 else blocks[whole:]))
            received.add(name)
            self.counts["failed" if fails else "loaded"] += len(blocks)
        self.worker.finish()
        for name in [name for name in self.reads if draw() >= self.late]:
            tokens, blocks = self.reads.pop(name)
            assert backed.issuperset(blocks)
            for p in range(len(tokens)):
                assert (rows[blocks[p // TOKENS], p % TOKENS] == value(tokens[: p + 1])).all()
            sent.add(name)
            self.counts["read"] += len(blocks)
        return KVConnectorOutput(finished_sending=sent, finished_recving=received, invalid_block_ids=invalid)


class PeerEngine(OffloadingEngine):
    """An `Engine` with a `Peer`."""

    Copies = WorkerHalf

    def __init__(self, folder, policy="recompute", **options):
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        transfer = KVTransferConfig(kv_connector="Peer", kv_connector_module_path="peer", kv_role="kv_both",
                                    kv_load_failure_policy=policy)  # fmt: skip
        Engine.__init__(self, folder, transfer=transfer, kinds=("full",), **options)
        for worker in self.workers:
            worker.copies = WorkerHalf(worker)
        self.aggregator = KVOutputAggregator(len(self.workers))

    @property
    def counts(self):
        """{"loaded", "failed", "read"}: blocks."""
        return self.workers[0].copies.counts
