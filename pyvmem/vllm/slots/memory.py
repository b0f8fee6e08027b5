"""Mode "slots": each request's rows follow each other in memory, so attention needs no block table.

The scheduler's side is that of mode "blocks". The worker's KV memory is a `pyvmem.KVCache`, in which a request has a
slot. vLLM's blocks are names of pages there, and each step's block numbers are replaced by those of their places in the
requests' slots before vLLM's model runner sees them. To vLLM's kernels, the slots are one cache with many more blocks.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyvmem.engine import control
from pyvmem.engine.control import Page
from pyvmem.engine.memory import PAGE, context_on
from pyvmem.engine.settings import Refused
from pyvmem.errors import OutOfMemory
from pyvmem.kv.cache import KVCache, Spare, TensorSpec
from pyvmem.vllm import plugin
from pyvmem.vllm.orders import AHEAD, StepOrders
from pyvmem.vllm.slots.requests import Fence, Requests
from pyvmem.vllm.worker import WorkerMemory

logger = logging.getLogger("vllm.vmem")

IDLE = 0.2  # seconds without a step after which what ended requests have goes back
PIECE = 2 << 20  # slots begin at multiples of it

SLACK = 16  # blocks beyond those that vLLM has: what ended requests have until their kernels have ended

active = False  # whether the KV cache that this process made last is in slots


def unfit(config: Any, vllm_config: Any) -> str:
    """Why a KV cache cannot be in slots; empty if it can. config: vLLM's KVCacheConfig."""
    parallel = vllm_config.parallel_config
    if len(config.kv_cache_groups) != 1:
        return f"the model has {len(config.kv_cache_groups)} groups of layers with block tables of their own"
    kind = type(config.kv_cache_groups[0].kv_cache_spec).__name__
    if kind != "FullAttentionSpec":
        return f"the layers' caches are of kind {kind}"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism has several steps in flight"
    if plugin.settings().pool:
        return "VMEM_VLLM_POOL lends blocks"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector copies blocks"
    sizes = {t.size for t in config.kv_cache_tensors}
    strides = {t.block_stride for t in config.kv_cache_tensors}
    if len(sizes) != 1 or len(strides) != 1 or sizes != {s * config.num_blocks for s in strides}:
        return f"layout {config.kv_cache_layout} does not keep a block's layers together"
    return ""


def choose(config: Any, worker: Any, place: Callable[[], tuple[Page, int]]) -> tuple[SlotsMemory, Any] | None:
    """The KV memory of a worker in slots, and the configuration for its model runner; None for mode "blocks"."""
    global active
    active = False
    if plugin.settings().layout != "slots" or not config.kv_cache_tensors:
        return None
    made = None
    why: Any = unfit(config, worker.vllm_config)
    if not why:
        made = SlotsMemory(*place())
        why = made.prepare(config, worker.vllm_config, worker.device)
    if made is None or isinstance(why, str):
        logger.warning("VMEM_VLLM_LAYOUT=slots does not apply: %s. The KV cache is in blocks.", why)
        return None
    active = True
    return made, why


class SlotsMemory(WorkerMemory):
    """The KV memory of one worker, in slots."""

    def __init__(self, page: Page, rank: int) -> None:
        super().__init__(page, rank)
        self._cache: KVCache | None = None
        self._requests: Requests | None = None
        self._orders: collections.deque[int] = collections.deque()
        self._count = 0  # blocks that the scheduler has not given up
        self._dirty = False
        self._still = 0.0  # since when no step runs; while one does, which may take long, it is infinite

    # ---- the start -------------------------------------------------------------------------------------------

    def prepare(self, config: Any, vllm_config: Any, device: torch.device) -> Any:
        """Reserve the slots. Returns the configuration for vLLM's model runner, or a reason against slots."""
        self._device = device
        context = context_on(device, plugin.settings())
        self._block = block = config.kv_cache_tensors[0].block_stride
        tokens = config.kv_cache_groups[0].kv_cache_spec.block_size
        largest = plugin.settings().page_size or PAGE
        fitting = [size for size in context.page_sizes if block % size == 0 and size <= largest]
        if not fitting:
            context.close()
            return (f"a block of {tokens} tokens has {block} bytes, not whole pages of {min(context.page_sizes)}; "
                    "--block-size may help")  # fmt: skip
        most = vllm_config.scheduler_config.max_num_seqs
        drafts = int(getattr(vllm_config, "num_speculative_tokens", 0) or 0)
        step = math.lcm(tokens, PIECE // math.gcd(PIECE, block // tokens))
        rows = -(-(vllm_config.model_config.max_model_len + drafts) // step) * step
        slots, budget = 1 + most + max(8, most // 4), config.num_blocks * block
        budget += max(budget // 64 // block, SLACK) * block
        # While memory is scarce, a block ahead is enough, and what is free stays so for new requests.
        self._cache = cache = KVCache(
            [TensorSpec("kv", (block // tokens,), torch.int8)], slots, rows, budget, context=context,
            page_size=max(fitting), lazy=True, name=None,
            spare=Spare(reclaim_percent=2, ahead_tokens=max(AHEAD, tokens), ahead_min=tokens),
        )  # fmt: skip
        self._context, self._most = context, budget // cache.page_size * cache.page_size
        self._budget = self._most
        self._requests = Requests(cache, tokens, most, self._slots_fence)
        places = self._requests.blocks_per_slot * slots
        tensors = [dataclasses.replace(t, size=places * block) for t in config.kv_cache_tensors]
        logger.info(
            "KV cache on vMem in slots: backend %s, %d slots of %d tokens, blocks of %d tokens and %d KiB in pages of "
            "%d KiB, %.2f GiB at most, layout %s", context.backend, slots, rows, tokens, block >> 10,
            cache.page_size >> 10, config.num_blocks * block / 2**30, config.kv_cache_layout,
        )  # fmt: skip
        return dataclasses.replace(config, num_blocks=places, kv_cache_tensors=tensors)

    def _slots_fence(self) -> Fence | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        assert self._cache is not None
        flat = self._cache.flat(0).view(-1)
        if size != flat.numel():
            raise Refused(f"VMEM_VLLM=1: vLLM allocated {size} bytes of KV cache, not {flat.numel()} "
                                 "(or set VMEM_VLLM_LAYOUT=auto)")  # fmt: skip
        return flat

    def start(self, config: Any) -> None:
        self.publish()
        self._page[control.NULL + self._rank] = int(self._board[control.HELD])
        self._attach(control.IN_SLOTS)

    @property
    def active(self) -> bool:
        return self._requests is not None

    # ---- steps -----------------------------------------------------------------------------------------------

    def begin(self, output: Any) -> Any:
        requests = self._requests
        assert requests is not None
        orders: StepOrders | None = getattr(output, "vmem", None)
        with self._lock:
            self._asleep, self._dirty, self._still = None, True, math.inf
            requests.begin()
            if orders is not None:
                if not self._warm:  # the warm-up is over: give up its blocks
                    self._warm = True
                    self._synchronize()
                    requests.reset()
                self._ring(orders.position)
                self._give_up(orders.gone)
                requests.forget(orders.evicted)
                for number, ids in enumerate(orders.ahead, orders.order):
                    self._count += len(ids)
                    self._orders.append(number)
                    self._wake.set()
            output = self._translated(output)
            maps = requests.back()
        if orders is not None:
            self._count_maps(maps)
        return output

    def end(self, output: Any) -> None:
        orders: StepOrders | None = getattr(output, "vmem", None)
        if orders is not None and (orders.gone or orders.ahead):
            self.publish()  # before the scheduler sees that the step is over
        super().end(output)
        self._still = time.monotonic()

    def _translated(self, output: Any) -> Any:
        """A copy of vLLM's SchedulerOutput with the places of blocks in place of their numbers."""
        requests = self._requests
        assert requests is not None
        if output.new_block_ids_to_zero or output.kv_cache_block_copies:
            raise RuntimeError(
                "vLLM clears or copies blocks, which VMEM_VLLM_LAYOUT=slots does not support: set it to auto"
            )
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            requests.finish(name)
        new = []
        for request in output.scheduled_new_reqs:
            places = requests.start(request.req_id, request.block_ids[0], request.num_computed_tokens)
            new.append(dataclasses.replace(request, block_ids=(places,)))
        cached = output.scheduled_cached_reqs
        tables: list[tuple[list[int]] | None] = []
        for name, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids):
            if name in cached.resumed_req_ids:
                tables.append((requests.start(name, ids[0], computed),))
            else:
                tables.append((requests.extend(name, ids[0]),) if ids is not None else None)
        return dataclasses.replace(output, scheduled_new_reqs=new,
                                   scheduled_cached_reqs=dataclasses.replace(cached, new_block_ids=tables))  # fmt: skip

    def _give_up(self, ids: Sequence[int]) -> None:
        assert self._requests is not None
        if ids:
            self._count, self._dirty = self._count - len(ids), True
            self._requests.forget(ids)

    # ---- between steps ---------------------------------------------------------------------------------------

    def tend(self) -> None:
        self._carry_out()
        self.publish()

    def _carry_out(self) -> None:
        """Make memory for the blocks that were ordered, and give back what is not needed."""
        cache, requests = self._cache, self._requests
        assert cache is not None and requests is not None
        while self._orders:
            order = self._orders.popleft()
            refused = 0
            try:
                self._fit()
                self._context.prealloc(max(self._count * self._block - self._context.stats().created, 0))
            except OutOfMemory:
                refused = 1
            self._board[control._FIRST_ANSWER + order % control.ANSWERS] = order << 1 | refused
            self._board[control.DONE] = order
        if not self._warm or not self._dirty:  # while vLLM captures graphs, other threads may make no calls
            return
        self._fit()
        with self._lock:
            idle = time.monotonic() - self._still > IDLE
            if idle and not self._page[control.USED]:  # the next step, which says who has ended, may be far away
                self._synchronize()
                requests.finish_all()
            if idle and requests.idle:
                self._dirty = False
                requests.shrink()

    def _fit(self) -> None:
        """Hold the cache to what the scheduler has not given up."""
        assert self._cache is not None
        budget = min((self._count + 1 + SLACK) * self._block, self._most)
        if budget != self._budget:
            with self._lock:
                self._cache.set_budget(budget)
            self._budget = budget

    def publish(self) -> None:
        stats = self._context.stats()
        self._board[control.HELD] = stats.created
        self._page.words[control.RESIDENT + self._rank] = stats.created + stats.overhead

    # ---- sleep and the end -----------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def drop(self) -> None:
        with self._lock:
            if self._requests is not None and self._asleep is None:
                self._synchronize()
                self._requests.reset()
                self._asleep = []
        self.publish()

    def wake(self, weights: bool = True, blocks: bool = True) -> bool:
        if blocks:
            self._asleep = None
        return super().wake(weights, blocks)

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        with self._lock:
            if self._cache is not None and not self._cache.closed:
                self._synchronize()
                self._cache.close()
                self._context.close()
        self._page[control.ATTACHED + self._rank] = 0
