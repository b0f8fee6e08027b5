"""The worker's side: puts vLLM's KV tensors into a `KVCache`, and connects its request tables to `RequestSlots`.

The functions in this module replace vLLM's (see `patches`). Each gets the original as its first argument.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pyvmem import Context
from pyvmem.errors import InvalidArgument, OutOfMemory
from pyvmem.kv import KVCache, TensorSpec
from pyvmem.kv_blocks import BlockNames
from pyvmem.vllm import layout as layouts
from pyvmem.vllm import metrics, refuse, settings
from pyvmem.vllm.memory import Memory
from pyvmem.vllm.requests import RequestSlots
from pyvmem.vllm.scheduler import PoolKeeper

logger = logging.getLogger("vllm.vmem")

LOOK_SECONDS = 0.05  # between looks at the driver
ANNOUNCED = 32  # waiting requests, at most
SLACK = 64 << 20  # bytes of device memory beyond the KV cache's budget, so that every page of it can be made

_current: Engine | None = None  # vLLM has one worker per process


class CudaFences:
    """Fences in the order of the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}
        self._first = 1
        self._last = 0

    def mark(self) -> int:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._last += 1
        self._events[self._last] = event
        return self._last

    def _passed(self, n: int) -> None:
        for k in range(self._first, n + 1):
            self._events.pop(k, None)
        self._first = max(self._first, n + 1)

    def wait(self, n: int) -> None:
        if n >= self._first:
            self._events[n].synchronize()
            self._passed(n)

    def done(self, n: int) -> bool:
        if n >= self._first and not self._events[n].query():
            return False
        self._passed(n)
        return True


class Engine:
    """The KV cache of this process's worker and its requests."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, chosen: settings.Settings) -> None:
        scheduler = vllm_config.scheduler_config
        spec = config.kv_cache_groups[0].kv_cache_spec
        self.layers = [tensor.shared_by[0] for tensor in config.kv_cache_tensors]
        row = spec.page_size_bytes // spec.block_size
        self.layout = layouts.Layout(chosen.layout, len(self.layers), row, spec.block_size)
        self.num_blocks = config.num_blocks
        most = scheduler.max_num_seqs
        spare = max(8, most // 4) if chosen.spare_slots is None else chosen.spare_slots
        tokens = self.layout.slot_tokens(vllm_config.model_config.max_model_len + vllm_config.num_speculative_tokens)
        self.context = Context(device=device.index or 0)
        refuse.backend(self.context.backend, device.type)
        page = self.layout.page_size(self.context.page_sizes)
        shape = (self.layout.tensor_row // spec.dtype.itemsize,)
        specs = [TensorSpec(f"kv{i}", shape, spec.dtype) for i in range(self.layout.tensors)]
        # The scheduler treats pages of requests that just ended as free, but kernels may still read them.
        budget = self.num_blocks * self.layout.block_bytes
        budget += max(budget // 64, 16 * self.layout.block_bytes)
        # vLLM counts on every block that it has, so almost nothing is kept unused. Pages mapped ahead are reclaimed
        # when needed. A page has only a few tokens, so mapping ahead makes fewer calls for more pages each.
        try:
            self.cache = KVCache(specs, most + spare, tokens, budget // page * page, context=self.context,
                                 page_size=page, lazy=True, reclaim_percent=1, ahead_tokens=64, ahead_min=64,
                                 name="vllm")  # fmt: skip
        except (InvalidArgument, OutOfMemory) as error:  # no pages yet, so this is about addresses
            raise refuse.Refused(f"VMEM_VLLM=1: {error}: lower --max-num-seqs, --max-model-len or "
                                 "VMEM_VLLM_SPARE_SLOTS") from error  # fmt: skip
        # Nor may device memory that is made ahead, or kept while requests run, go beyond it.
        self.context.set_budget(budget // page * page + SLACK)
        caching = vllm_config.cache_config.enable_prefix_caching
        self._due = threading.Event()  # a step has left something to clear up
        names = BlockNames(self.cache, self.num_blocks, spec.block_size) if caching else None
        self.requests = RequestSlots(self.cache, spec.block_size, most, CudaFences(device), names, chosen.wait_seconds,
                                     -(-vllm_config.model_config.max_model_len // spec.block_size),
                                     self._due.set)  # fmt: skip
        self._memory = Memory(self.context)
        self.states: Any = None  # of vLLM's runner, set when the cache exists
        self.runner: Callable[[], Any] = lambda: None  # vLLM's, as long as it exists
        self._allowed: int = self.num_blocks
        self._stop = threading.Event()
        self._failure = ""  # of the background thread, the last
        threading.Thread(target=self._tend, name="vmem", daemon=True).start()
        logger.info(
            "KV cache on vMem: backend %s, layout %s, %d slots of %d tokens, blocks of %d tokens and %d KiB in pages "
            "of %d KiB, %.1f GiB at most, %s prefix cache", self.context.backend, chosen.layout, most + spare, tokens,
            spec.block_size, self.layout.block_bytes >> 10, page >> 10, budget / 2**30,
            "with" if caching else "without",
        )  # fmt: skip

    def _tend(self) -> None:
        looked = 0.0
        while not self._stop.is_set():
            self._due.wait(LOOK_SECONDS)
            self._due.clear()
            try:
                self.requests.tend()
                if time.monotonic() - looked >= LOOK_SECONDS:
                    looked = time.monotonic()
                    self.look()
            except Exception as error:
                if self._stop.is_set():  # closed meanwhile
                    return
                if str(error) != self._failure:  # steps clear up themselves when they must
                    self._failure = str(error)
                    logger.exception("vMem: the background thread failed and goes on")

    def settle(self, finished: Iterable[str], forgotten: Sequence[int]) -> None:
        """The scheduler is idle: these requests have ended, and these blocks are forgotten."""
        index = self.states.req_id_to_index
        self.requests.settle([index[i] for i in finished if i in index], forgotten)

    def close(self) -> None:
        """Free the KV cache, unless views of it still exist. No request may be running."""
        with self.requests.lock:
            if self._stop.is_set():
                return
            self._stop.set()
            self._due.set()
            self.requests.reset()
            self.cache.close()
            self.context.close()

    @property
    def closed(self) -> bool:
        return self._stop.is_set()

    def allowed_blocks(self) -> int:
        """Blocks that the scheduler may use now, given the limit and the device's other users."""
        return self._allowed

    def look(self) -> None:
        """Update `allowed_blocks` from the driver. Runs in a thread, so the scheduler does not wait."""
        limit = self.requests.poll_limit() * self.cache.page_size
        reachable = self._memory.look(limit, self.requests.busy)
        self._allowed = min(min(limit, reachable) // self.layout.block_bytes, self.num_blocks)


def current() -> Engine | None:
    """The `Engine` of this process, or None."""
    return _current


def attention_names(engine: Engine) -> list[str]:
    """The names of the attention backends that the engine's layers have."""
    runner = engine.runner()
    return sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}) if runner else []


# ---- in the place of vLLM's functions ---------------------------------------------------------------------------


def _engine() -> Engine:
    """The `Engine` of this process, which `initialize_kv_cache` created."""
    assert _current is not None
    return _current


def create_engine_config(original: Callable[..., Any], args: Any, *more: Any, **named: Any) -> Any:
    """Refuse what cannot work in the process that the user started: the refusal is the last line that it prints."""
    config = original(args, *more, **named)
    refuse.settings(config)
    return config


def init_device(original: Callable[..., Any], worker: Any) -> Any:
    """Refuse the same where a configuration was made in another way. Model runner V1 calls no later patch."""
    refuse.settings(worker.vllm_config)
    return original(worker)


@functools.cache
def _say(text: str, *values: Any) -> None:
    """Log a line once per process."""
    logger.info(text, *values)


def attention_backend(
    original: Callable[..., Any], backend: Any, attn_selector_config: Any, num_heads: Any = None
) -> Any:
    """Attention by slots for a layer, where the user named no backend and vLLM chooses FlashAttention.

    What slots do not support keeps vLLM's choice.
    """
    chosen = original(backend, attn_selector_config, num_heads)
    if backend is not None or settings.read().attention == "table":
        return chosen
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    if chosen is not FlashAttentionBackend:
        return chosen
    from pyvmem.vllm import attention

    reasons = attention.unsupported(attn_selector_config)
    if reasons:
        _say("Attention by table on vMem: by slots, this is not supported: %s", "; ".join(reasons))
        return chosen
    _say("Attention by slots on vMem in place of FLASH_ATTN; VMEM_VLLM_ATTENTION=table keeps FLASH_ATTN")
    return attention.SlotsBackend


def _full(spec: Any) -> Any:
    """The spec of a sliding-window layer that keeps its passed blocks, as vLLM creates it for mixed models."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    names = {f.name for f in dataclasses.fields(FullAttentionSpec)}
    return FullAttentionSpec(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name in names})


def get_kv_cache_spec(original: Callable[..., Any], runner: Any) -> Any:
    """Make blocks whole pages, if necessary of several of vLLM's. Sliding windows keep passed blocks."""
    specs = original(runner)
    # FlashAttention takes the window from its group's spec, so layers of one group must have the same.
    if len({(type(s).__name__, getattr(s, "sliding_window", None)) for s in specs.values()}) == 1:
        specs = {n: _full(s) if type(s).__name__ == "SlidingWindowSpec" else s for n, s in specs.items()}
    chosen = settings.read()
    rows = {s.page_size_bytes // s.block_size for s in specs.values()}
    if len(rows) != 1:
        return specs  # refused later, by name
    base = next(iter(specs.values())).block_size
    tokens = layouts.block_tokens(chosen.layout, len(specs), rows.pop(), base)
    return {name: dataclasses.replace(spec, block_size=tokens) for name, spec in specs.items()}


def initialize_kv_cache(original: Callable[..., Any], runner: Any, kv_cache_config: Any) -> None:
    """Create the `Engine`, and remember the runner whose request tables it follows."""
    refuse.kv_cache(kv_cache_config)
    global _current
    if _current is not None and not _current.closed:
        if _current.runner() is not None:
            raise refuse.Refused("VMEM_VLLM=1: this process has an engine already; shut it down first, or give each "
                                 "its own process (VLLM_ENABLE_V1_MULTIPROCESSING=1)")  # fmt: skip
        _current.close()
    _current = Engine(kv_cache_config, runner.vllm_config, runner.device, settings.read())
    _current.runner = weakref.ref(runner)
    original(runner, kv_cache_config)
    runner.req_states.vmem = runner.block_tables.vmem = _current
    _current.states = runner.req_states


def allocate_kv_cache(
    original: Callable[..., Any], kv_cache_config: Any, shared_layers: Any, device: Any
) -> dict[str, torch.Tensor]:
    """The bytes of the virtual tensors, by layer."""
    engine = _engine()
    flat = [engine.cache.flat(i).view(torch.int8).view(-1) for i in range(engine.layout.tensors)]
    return {name: flat[i if len(flat) > 1 else 0] for i, name in enumerate(engine.layers)}


def reshape_kv_cache(
    original: Callable[..., Any],
    attn_groups: Any,
    kv_cache_raw_tensors: dict[str, torch.Tensor],
    cache_dtype: str,
    kernel_block_sizes: Sequence[int],
    shared_kv_cache_layers: Mapping[str, str],
    kv_cache_config: Any = None,
) -> dict[str, torch.Tensor]:
    """Each layer's view of its virtual tensor."""
    engine, raw, shared = _engine(), kv_cache_raw_tensors, shared_kv_cache_layers
    views = {}
    for group in attn_groups:
        spec = group.kv_cache_spec
        tokens = kernel_block_sizes[group.kv_cache_group_id]
        blocks = raw[engine.layers[0]].numel() // (engine.layout.tensor_row * tokens)
        shape = group.backend.get_kv_cache_shape(
            blocks, tokens, spec.num_kv_heads, spec.head_size, cache_dtype_str=cache_dtype
        )
        try:
            order = group.backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        for name in group.layer_names:
            if name not in shared:
                layer = engine.layers.index(name)
                views[name] = layouts.view(raw[name], engine.layout, layer, spec.dtype, shape, order)
    for name, target in shared.items():
        views[name] = views[target]
    return views


def finish_requests(original: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    """Begin a step: the first call of each step."""
    if _current is not None:
        _current.requests.begin_step(getattr(scheduler_output, "vmem_forgotten", ()),
                                     getattr(scheduler_output, "vmem_waiting", ()))  # fmt: skip
    return original(runner, scheduler_output)


def remove_request(original: Callable[..., Any], states: Any, req_id: str) -> Any:
    index = original(states, req_id)
    if index is not None and hasattr(states, "vmem"):
        states.vmem.requests.finish(index)
    return index


def append_block_ids(
    original: Callable[..., Any], tables: Any, req_index: int, new_block_ids: Any, overwrite: bool
) -> Any:
    """Replace the names of blocks by the numbers of their places in the request's slot."""
    engine = getattr(tables, "vmem", None)
    if engine is None:
        return original(tables, req_index, new_block_ids, overwrite)
    (ids,) = new_block_ids
    if overwrite:
        computed = int(engine.states.num_computed_tokens_np[req_index])
        numbers = engine.requests.start(req_index, ids, computed)
    else:
        numbers = engine.requests.extend(req_index, ids)
    return original(tables, req_index, (numbers,), overwrite) if numbers else None


def apply_staged_writes(original: Callable[..., Any], tables: Any) -> Any:
    """Back the step: the last call before its kernels."""
    if hasattr(tables, "vmem"):
        tables.vmem.requests.back()
    return original(tables)


def sleep(original: Callable[..., Any], worker: Any, level: int = 1) -> Any:
    if _current is not None:
        _current.requests.reset()
    return original(worker, level)


def shutdown(original: Callable[..., Any], runner: Any) -> None:
    """vLLM releases its tensors here, for processes that live on. So is what is behind them."""
    global _current
    engine = getattr(getattr(runner, "req_states", None), "vmem", None)
    original(runner)
    if engine is not None:
        engine.close()
        if _current is engine:
            _current = None


# ---- in the scheduler's process ---------------------------------------------------------------------------------


def allowed_blocks(config: Any) -> int | None:
    """Blocks that the scheduler may use now; None if unknown.

    If the workers are separate processes, this is the smallest of the limits that they publish.
    """
    if _current is not None:
        return _current.allowed_blocks()
    block = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes * len(config.kv_cache_tensors)
    limits = [view.stats["budget_pages"] * view.stats["page_size"] // block for view in metrics.own_views()]
    return min(*limits, config.num_blocks) if limits else None


def keeper(scheduler: Any) -> PoolKeeper:
    """The `PoolKeeper` of a scheduler's block pool."""
    pool = scheduler.kv_cache_manager.block_pool
    if not hasattr(pool, "vmem"):
        chosen = settings.read()
        tokens = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        cap = None if chosen.cache_tokens is None else chosen.cache_tokens // tokens
        least = -(-scheduler.vllm_config.model_config.max_model_len // tokens) + 1
        pool.vmem = PoolKeeper(pool, cap, least, functools.partial(allowed_blocks, scheduler.kv_cache_config))
    kept: PoolKeeper = pool.vmem
    return kept


def cached_tokens(manager: Any, request: Any) -> int:
    """Tokens of a waiting request that the prefix cache had when this was first asked."""
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        return 0
    if not hasattr(request, "vmem_cached"):
        found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        request.vmem_cached = found[1]
    return int(request.vmem_cached)


def waiting(scheduler: Any) -> tuple[tuple[int, int], ...]:
    """The next requests, for about two steps: tokens after the first step, and how many of them come from the cache."""
    found: list[tuple[int, int]] = []
    most = scheduler.max_num_scheduled_tokens
    left = 2 * most
    if isinstance(scheduler.waiting, collections.deque):  # other queues take as long to inspect as to schedule
        for request in itertools.islice(scheduler.waiting, ANNOUNCED):
            cached = cached_tokens(scheduler.kv_cache_manager, request)
            tokens = min(request.num_tokens, cached + most)
            found.append((tokens, cached))
            left -= tokens - cached
            if left <= 0:
                break
    return tuple(found)


def add_request(original: Callable[..., Any], scheduler: Any, request: Any) -> None:
    """Announce the first requests after an idle time at once. Later ones are announced with each step."""
    original(scheduler, request)
    if _current is not None and not scheduler.running and len(scheduler.waiting) <= ANNOUNCED:
        _current.requests.announce(waiting(scheduler))


def schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    kept = keeper(scheduler)
    kept.before_schedule()
    output = original(scheduler, *args, **kwargs)
    output.vmem_forgotten = kept.take_forgotten()
    output.vmem_waiting = waiting(scheduler)
    return output


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """When nothing is left to do, tell a worker in this process at once: the next step may be far away."""
    outputs = original(scheduler, scheduler_output, model_runner_output)
    if not scheduler.has_unfinished_requests():
        kept = keeper(scheduler)
        kept.before_schedule(idle=True)
        if _current is not None:
            _current.settle(scheduler.finished_req_ids, kept.take_forgotten())
    return outputs


def free_blocks(original: Callable[..., Any], pool: Any, ordered_blocks: Iterable[Any]) -> None:
    blocks = list(ordered_blocks)
    original(pool, blocks)
    if hasattr(pool, "vmem"):
        pool.vmem.freed(blocks)


def reset_prefix_cache(original: Callable[..., Any], pool: Any) -> Any:
    if not hasattr(pool, "vmem"):
        return original(pool)
    known = pool.vmem.resetting()
    done = original(pool)
    if done:
        pool.vmem.reset(known)
        if _current is not None:  # there may be no next step for long
            _current.settle((), pool.vmem.take_forgotten())
    return done


# ---- in the API servers' processes ------------------------------------------------------------------------------


def get_prometheus_registry(original: Callable[..., Any]) -> Any:
    """The registry that is served has vMem's metrics as well."""
    registry = original()
    metrics.register(registry)
    return registry
