"""vMem's hooks into SGLang: where each goes, and what it does. `plugin` registers them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import sys
from typing import Any

from pyvmem.engine import control, refuse
from pyvmem.sglang import memory, settings

_POOL, _SCHEDULER = "sglang.srt.mem_cache.memory_pool.", "sglang.srt.managers.scheduler.Scheduler."
_ALLOCATOR = "sglang.srt.mem_cache.allocator."


def _end(error: Exception) -> None:
    """End this process with one line: SGLang must not go on with its own KV cache."""
    sys.exit(f"pyvmem: {error}")


def create_buffers(original: Any, pool: Any) -> None:
    """A pool makes its KV buffers."""
    try:
        memory.here().make(pool, original)
    except (refuse.Refused, ValueError) as error:
        _end(error)


def profile(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang asks how many bytes its KV cache may take. In a pool, that is all of it: memory comes when it is used."""
    chosen = settings.read()
    if not chosen.pool:
        return original(configurator, *args, **kwargs)
    import torch

    from pyvmem.engine.memory import context_on
    from pyvmem.engine.pools import open_pool

    with context_on(torch.device(configurator.device), chosen) as context, open_pool(chosen, context) as pool:
        return min(pool.budget, chosen.maximum or pool.budget)


def started(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """A scheduler is there, with its pools."""
    from pyvmem.sglang.scheduler import SchedulerMemory

    try:
        scheduler._vmem = SchedulerMemory(scheduler)
    except (refuse.Refused, ValueError) as error:
        _end(error)


def before_step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The scheduler is about to choose what runs next."""
    scheduler._vmem.before()


def before_idle(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The scheduler has nothing to run."""
    scheduler._vmem.idle()


def flush(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler flushes its cache, if it may."""
    done = original(scheduler, *args, **kwargs)
    if done:
        scheduler._vmem.flushed()
    return done


def prefill_budget(original: Any, allocator: Any, tree_cache: Any, **kwargs: Any) -> Any:
    """The scheduler asks what a prefill pass may take."""
    budget = original(allocator, tree_cache, **kwargs)
    if hasattr(allocator, "_vmem"):
        allocator._vmem.budget(budget, tree_cache)
    return budget


def evict(original: Any, allocator: Any, tree_cache: Any, num_tokens: int) -> Any:
    """The allocator must have free tokens: by memory that can be backed before cached rows are forgotten."""
    held = getattr(allocator, "_vmem", None)
    if held is None:
        return original(allocator, tree_cache, num_tokens)
    held.ensure(num_tokens)
    result = original(allocator, tree_cache, num_tokens)
    if allocator.available_size() < num_tokens:
        held.await_memory(num_tokens)
    return result


def alloc(original: Any, allocator: Any, need_size: int) -> Any:
    """The allocator gives tokens. It must, once a request has begun."""
    found = original(allocator, need_size)
    if found is None and hasattr(allocator, "_vmem") and allocator._vmem.force(need_size):
        found = original(allocator, need_size)
    return found


def alloc_extend(original: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
    """The allocator gives the tokens of prompts."""
    found = original(allocator, *args, **kwargs)
    if found is None and hasattr(allocator, "_vmem"):
        tokens = kwargs.get("extend_num_tokens", args[5] if len(args) > 5 else 0)
        requests = len(kwargs.get("prefix_lens", args[0] if args else ()))
        if allocator._vmem.force(tokens + (requests + 1) * allocator.page_size):
            found = original(allocator, *args, **kwargs)
    return found


def retracted(result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Running requests went back to the waiting ones."""
    held = getattr(batch.token_to_kv_pool_allocator, "_vmem", None)
    if held is not None:
        held.page[control.PREEMPTED] += len(result[0])


def serve(*args: Any, **kwargs: Any) -> None:
    """The HTTP server is about to run."""
    from sglang.srt.entrypoints import http_server

    from pyvmem.sglang.http import Limits

    if settings.read().http:
        http_server.app.add_middleware(Limits)


def check_arguments(result: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang has checked its arguments."""
    from pyvmem.sglang.refuse import arguments

    try:
        arguments(server_args)
    except refuse.Refused as error:
        _end(error)


# (target, kind of SGLang's HookType, hook), of the processes that have a scheduler
ENGINE = (
    (_POOL + "MHATokenToKVPool._create_buffers_normal", "AROUND", create_buffers),
    (_POOL + "MLATokenToKVPool._create_buffers", "AROUND", create_buffers),
    ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", "AROUND", profile),
    (_SCHEDULER + "__init__", "AFTER", started),
    (_SCHEDULER + "get_next_batch_to_run", "BEFORE", before_step),
    (_SCHEDULER + "on_idle", "BEFORE", before_idle),
    (_SCHEDULER + "flush_cache", "AROUND", flush),
    (_ALLOCATOR + "base.BaseTokenToKVPoolAllocator.create_prefill_budget", "AROUND", prefill_budget),
    (_ALLOCATOR + "swa.SWATokenToKVPoolAllocator.create_prefill_budget", "AROUND", prefill_budget),
    (_ALLOCATOR + "base.BaseTokenToKVPoolAllocator.evict_to_free_tokens", "AROUND", evict),
    (_ALLOCATOR + "swa.SWATokenToKVPoolAllocator.evict_to_free_tokens", "AROUND", evict),
    (_ALLOCATOR + "token.TokenToKVPoolAllocator.alloc", "AROUND", alloc),
    (_ALLOCATOR + "paged.PagedTokenToKVPoolAllocator.alloc", "AROUND", alloc),
    (_ALLOCATOR + "swa.SWATokenToKVPoolAllocator.alloc", "AROUND", alloc),
    (_ALLOCATOR + "paged.PagedTokenToKVPoolAllocator.alloc_extend", "AROUND", alloc_extend),
    (_ALLOCATOR + "swa.SWATokenToKVPoolAllocator.alloc_extend", "AROUND", alloc_extend),
    ("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", "AFTER", retracted),
)
# and of all processes
EVERYWHERE = (("sglang.srt.server_args.ServerArgs.check_server_args", "AFTER", check_arguments),)
SERVER = ((("sglang.srt.entrypoints.http_server._setup_and_run_http_server"), "BEFORE", serve),)
