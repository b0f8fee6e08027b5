"""vMem's hooks into SGLang: where each goes, and what it does. `plugin` registers them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
import sys
from typing import Any

from pyvmem.engine import control
from pyvmem.engine.settings import Refused
from pyvmem.errors import OutOfMemory
from pyvmem.sglang import http, memory, settings, sleep

_BUSY = "release_memory_occupation: requests run or wait"
_KEPT = "resume_memory_occupation: these were not released: "
_LACKS = "the model lacks "


def _end(error: Exception) -> None:
    """End this process with one line: SGLang must not go on with its own KV cache."""
    sys.exit(f"pyvmem: {error}")


def create_buffers(original: Any, pool: Any) -> None:
    """A pool makes its KV buffers."""
    try:
        memory.here().make(pool, original)
    except ValueError as error:
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
    except ValueError as error:
        _end(error)


def before_step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The scheduler is about to choose what runs next."""
    scheduler._vmem.before()


def broadcast(original: Any, receiver: Any, recv_reqs: Any, local_reqs: Any = None) -> Any:
    """Rank 0 gives its requests to the other ranks, and with them what its budgets have seen."""
    from pyvmem.sglang.scheduler import Seen

    held = memory.here().scheduler
    if held is None:
        return original(receiver, recv_reqs, local_reqs)
    news = held.news() if held.ranks.size > 1 and held.ranks.leads else None
    came = original(receiver, recv_reqs, [*(local_reqs or ()), news] if news else local_reqs)
    for message in came or ():
        if isinstance(message, Seen):
            held.see(message)
    if held.asleep:
        held.sleep.turn(not came)
    elif held.rests:
        held.rest()
    return [request for request in came or () if not isinstance(request, Seen)]


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
        allocator._vmem.extend_prefill_budget(budget, tree_cache)
    return budget


def evict(original: Any, allocator: Any, tree_cache: Any, num_tokens: int) -> Any:
    """The allocator must have free tokens: by memory that can be backed before cached rows are forgotten."""
    held = getattr(allocator, "_vmem", None)
    if held is None:
        return original(allocator, tree_cache, num_tokens)
    if not held.evicts(num_tokens):
        held.ensure(num_tokens)
    result = original(allocator, tree_cache, num_tokens)
    if allocator.available_size() < num_tokens:
        held.await_memory(num_tokens)
        held.keep_beams(num_tokens)
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


def load(original: Any, runner: Any) -> None:
    """A model runner loads its weights."""
    try:
        memory.here().load(runner, original)
    except ValueError as error:
        _end(error)


def release(original: Any, updater: Any, recv_req: Any) -> Any:
    """The model is to release memory; with vMem's tag, it sleeps with what it has.

    SGLang asserts that no request runs, and would end. It keeps the buffers of weights that go, which a model that
    sleeps may not have: vMem brings them back itself.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    held, tags = memory.here().scheduler.sleep, _tags(recv_req)
    if sleep.TAG not in tags:
        if not updater.is_fully_idle(ignore_waiting=updater.scheduler._engine_paused):
            return ReleaseMemoryOccupationReqOutput(rid=_BUSY)
        if others := tags - {sleep.WEIGHTS}:
            original(updater, type(recv_req)(tags=sorted(others)))
        updater.offload_tags.update(tags)
    if tags & {sleep.WEIGHTS, sleep.TAG}:
        held.begin()
    return ReleaseMemoryOccupationReqOutput()


def resume(original: Any, updater: Any, recv_req: Any) -> Any:
    """The model is to take its memory back. If there is too little, it goes on sleeping."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    held, tags = memory.here().scheduler.sleep, _tags(recv_req)
    if sleep.TAG not in tags and (kept := tags - updater.offload_tags):  # SGLang would end
        return ResumeMemoryOccupationReqOutput(rid=f"{_KEPT}{', '.join(sorted(kept))}")
    if tags & {sleep.WEIGHTS, sleep.TAG}:
        held.end()
        if held.asleep:
            return ResumeMemoryOccupationReqOutput(rid=_lacks())
    if sleep.TAG not in tags:
        updater.offload_tags.discard(sleep.WEIGHTS)
        if others := tags - {sleep.WEIGHTS}:
            original(updater, type(recv_req)(tags=sorted(others)))
    return ResumeMemoryOccupationReqOutput()


def update(original: Any, updater: Any, recv_req: Any) -> Any:
    """New weights come, or are about to: the memory of the old ones must be there, also while the model sleeps."""
    held = memory.here().scheduler.sleep
    held.end()
    if not held.asleep:
        return original(updater, recv_req)
    from sglang.srt.managers import io_struct

    answer = getattr(io_struct, f"{type(recv_req).__name__.removesuffix('Input')}Output")
    return answer(success=False, message=_lacks())


def _lacks() -> str:
    """What a model says that cannot wake."""
    return f"{_LACKS}{memory.here().page.short >> 20} MiB of its pool to wake"


def _tags(recv_req: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return set(recv_req.tags or GPU_MEMORY_ALL_TYPES)


async def released(original: Any, manager: Any, obj: Any, request: Any = None) -> None:
    """The process that gave the order hears what its engines answer. Raises `RuntimeError` if one has refused."""
    manager.auto_create_handle_loop()
    _raise(await manager.release_memory_occupation_communicator(obj))


async def resumed(original: Any, manager: Any, obj: Any, request: Any = None) -> None:
    """As `released`. Raises `OutOfMemory` if an engine still sleeps."""
    manager.auto_create_handle_loop()
    _raise(await manager.resume_memory_occupation_communicator(obj))


def _raise(answers: Any) -> None:
    """Raise what an engine's answer says, in a field that SGLang leaves empty."""
    for why in filter(None, (answer.rid for answer in answers)):
        raise OutOfMemory(errno.ENOMEM, why) if why.startswith(_LACKS) else RuntimeError(why)


def paused(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """An order has paused the engine, or has it go on."""
    scheduler._vmem.sleep.paused()


def retracted(result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Running requests went back to the waiting ones."""
    held = getattr(batch.token_to_kv_pool_allocator, "_vmem", None)
    if held is not None:
        held.page[control.PREEMPTED] += len(result[0])


def serve() -> None:
    """Have SGLang's HTTP application answer for vMem, whoever runs it: RL frameworks do so themselves."""
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(http.Serve if settings.read().weights else http.Limits)


def check_arguments(result: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang has checked its arguments."""
    try:
        settings.check_arguments(server_args)
    except Refused as error:
        _end(error)


_POOL, _SCHEDULER = "srt/mem_cache/memory_pool.py", "srt/managers/scheduler.py"
_BASE, _TOKEN = "srt/mem_cache/allocator/base.py", "srt/mem_cache/allocator/token.py"
_PAGED, _SWA = "srt/mem_cache/allocator/paged.py", "srt/mem_cache/allocator/swa.py"
_BUDGET = "self, tree_cache, *, num_mixed_decode_tokens=0"
_EXTEND = "self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens"

# (file, function, its parameters without annotations, kind of SGLang's HookType, hook): of processes with a scheduler
ENGINE = (
    (_POOL, "MHATokenToKVPool._create_buffers_normal", "self", "AROUND", create_buffers),
    (_POOL, "MLATokenToKVPool._create_buffers", "self", "AROUND", create_buffers),
    ("srt/mem_cache/kv_cache_configurator.py", "KVCacheConfigurator._profile_available_bytes",
     "self, pre_model_load_memory", "AROUND", profile),
    (_SCHEDULER, "Scheduler.__init__", "self, server_args, port_args", "AFTER", started),
    (_SCHEDULER, "Scheduler.get_next_batch_to_run", "self, running_batch, last_batch", "BEFORE", before_step),
    ("srt/managers/scheduler_components/request_receiver.py", "SchedulerRequestReceiver._broadcast_reqs_across_ranks",
     "self, recv_reqs, local_reqs=None", "AROUND", broadcast),
    (_SCHEDULER, "Scheduler.flush_cache", "self, empty_cache=True", "AROUND", flush),
    (_BASE, "BaseTokenToKVPoolAllocator.create_prefill_budget", _BUDGET, "AROUND", prefill_budget),
    (_SWA, "SWATokenToKVPoolAllocator.create_prefill_budget", _BUDGET, "AROUND", prefill_budget),
    (_BASE, "BaseTokenToKVPoolAllocator.evict_to_free_tokens", "self, tree_cache, num_tokens", "AROUND", evict),
    (_SWA, "SWATokenToKVPoolAllocator.evict_to_free_tokens", "self, tree_cache, num_tokens", "AROUND", evict),
    (_TOKEN, "TokenToKVPoolAllocator.alloc", "self, need_size", "AROUND", alloc),
    (_PAGED, "PagedTokenToKVPoolAllocator.alloc", "self, need_size", "AROUND", alloc),
    (_SWA, "SWATokenToKVPoolAllocator.alloc", "self, need_size", "AROUND", alloc),
    (_PAGED, "PagedTokenToKVPoolAllocator.alloc_extend", f"{_EXTEND}, num_new_pages=None", "AROUND", alloc_extend),
    (_SWA, "SWATokenToKVPoolAllocator.alloc_extend", _EXTEND, "AROUND", alloc_extend),
    ("srt/managers/schedule_batch.py", "ScheduleBatch.retract_decode", "self", "AFTER", retracted),
)  # fmt: skip
# With weights in the pool, of processes with a scheduler, and of those that give orders
_UPDATER = "srt/managers/scheduler_components/weight_updater.py"
_UPDATES = ("begin_weight_update", "update_weights_from_disk", "update_weights_from_tensor",
            "update_weights_from_distributed", "update_weights_from_ipc")  # fmt: skip
WEIGHTS = (
    ("srt/model_executor/model_runner.py", "ModelRunner.load_model", "self", "AROUND", load),
    (_UPDATER, "SchedulerWeightUpdaterManager.release_memory_occupation", "self, recv_req", "AROUND", release),
    (_UPDATER, "SchedulerWeightUpdaterManager.resume_memory_occupation", "self, recv_req", "AROUND", resume),
    *((_UPDATER, f"SchedulerWeightUpdaterManager.{name}", "self, recv_req", "AROUND", update) for name in _UPDATES),
    (_SCHEDULER, "Scheduler.pause_generation", "self, recv_req", "AFTER", paused),
    (_SCHEDULER, "Scheduler.continue_generation", "self, recv_req", "AFTER", paused),
)
_ORDERS = "srt/managers/tokenizer_control_mixin.py"
ORDERS = (
    (_ORDERS, "TokenizerControlMixin.release_memory_occupation", "self, obj, request=None", "AROUND", released),
    (_ORDERS, "TokenizerControlMixin.resume_memory_occupation", "self, obj, request=None", "AROUND", resumed),
)
# of all processes
EVERYWHERE = (("srt/server_args.py", "ServerArgs.check_server_args", "self", "AFTER", check_arguments),)


def target(file: str, function: str) -> str:
    """The name by which SGLang's registry knows a function of a file."""
    return f"sglang.{file.removesuffix('.py').replace('/', '.')}.{function}"
