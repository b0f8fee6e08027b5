"""The list of every function that is replaced in vLLM, and of the supported versions.

A replacement gets the original function as its first argument; its other arguments have vLLM's names. `install` looks
up every function before it replaces any, so an unknown version of vLLM is refused as a whole or tried as a whole.

SPDX-License-Identifier: MIT
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHECKED = ("0.26.0",)

_RUNNER = "vllm.v1.worker.gpu"


@dataclass(frozen=True)
class Patch:
    """`name` (perhaps a method, ``Class.method``) of `module` is replaced by `by` of pyvmem.vllm.worker."""

    module: str
    name: str
    by: str
    parameters: tuple[str, ...]  # of vLLM's function; different parameters mean a different function


PATCHES = (
    # Before other processes start; before the model is loaded, and once for each of its layers.
    Patch("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "create_engine_config",
          ("self", "usage_context", "headless")),
    Patch("vllm.v1.worker.gpu_worker", "Worker.init_device", "init_device", ("self",)),
    Patch("vllm.v1.attention.selector", "_cached_get_attn_backend", "attention_backend",
          ("backend", "attn_selector_config", "num_heads")),
    # The KV tensors, and the size of a block.
    Patch(f"{_RUNNER}.model_runner", "GPUModelRunner.get_kv_cache_spec", "get_kv_cache_spec", ("self",)),
    Patch(f"{_RUNNER}.model_runner", "GPUModelRunner.initialize_kv_cache", "initialize_kv_cache",
          ("self", "kv_cache_config")),
    Patch(f"{_RUNNER}.attn_utils", "_allocate_kv_cache", "allocate_kv_cache",
          ("kv_cache_config", "shared_layers", "device")),
    Patch(f"{_RUNNER}.attn_utils", "_reshape_kv_cache", "reshape_kv_cache",
          ("attn_groups", "kv_cache_raw_tensors", "cache_dtype", "kernel_block_sizes", "shared_kv_cache_layers",
           "kv_cache_config")),
    # A step of the worker, in the order of its calls.
    Patch(f"{_RUNNER}.model_runner", "GPUModelRunner.finish_requests", "finish_requests", ("self", "scheduler_output")),
    Patch(f"{_RUNNER}.states", "RequestState.remove_request", "remove_request", ("self", "req_id")),
    Patch(f"{_RUNNER}.block_table", "BlockTables.append_block_ids", "append_block_ids",
          ("self", "req_index", "new_block_ids", "overwrite")),
    Patch(f"{_RUNNER}.block_table", "BlockTables.apply_staged_writes", "apply_staged_writes", ("self",)),
    Patch("vllm.v1.worker.gpu_worker", "Worker.sleep", "sleep", ("self", "level")),
    Patch(f"{_RUNNER}.model_runner", "GPUModelRunner.shutdown", "shutdown", ("self",)),
    # The scheduler, and its block pool.
    Patch("vllm.v1.core.sched.scheduler", "Scheduler.add_request", "add_request", ("self", "request")),
    Patch("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "schedule", ("self", "throttle_prefills")),
    Patch("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", "update_from_output",
          ("self", "scheduler_output", "model_runner_output")),
    Patch("vllm.v1.core.block_pool", "BlockPool.free_blocks", "free_blocks", ("self", "ordered_blocks")),
    Patch("vllm.v1.core.block_pool", "BlockPool.reset_prefix_cache", "reset_prefix_cache", ("self",)),
    # Several API servers have a registry of metrics of their own.
    Patch("vllm.v1.metrics.prometheus", "get_prometheus_registry", "get_prometheus_registry", ()),
)  # fmt: skip


class UnknownVersion(RuntimeError):
    """The patches do not support this version of vLLM."""


def _find(version: str, patch: Patch) -> tuple[Any, str, Callable[..., Any]]:
    owner = importlib.import_module(patch.module)
    *path, name = patch.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    found = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    code = inspect.unwrap(found).__code__  # vLLM decorates some, and an earlier `install` replaced all
    parameters = code.co_varnames[: code.co_argcount]
    if parameters != patch.parameters:
        raise UnknownVersion(
            f"VMEM_VLLM=1: vLLM {version}'s {patch.module}.{patch.name} takes {parameters}, not {patch.parameters}"
        )
    return owner, name, found


def _replacement(original: Callable[..., Any], by: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the original's signature that calls `by` with the original and then all arguments."""

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(replaced, "vmem", True)
    return replaced


def install(version: str, force: bool = False) -> None:
    """Replace every function of the list.

    Raises `UnknownVersion`, and changes nothing, if vLLM does not match the list.
    """
    if version.partition("+")[0] not in CHECKED and not force:  # +cu129 names a build of the same source
        raise UnknownVersion(
            f"VMEM_VLLM=1: vLLM {version} must be {' or '.join(CHECKED)}; VMEM_VLLM_FORCE=1 tries it anyway"
        )
    from pyvmem.vllm import worker

    try:
        found = [_find(version, p) for p in PATCHES]
    except (ImportError, AttributeError, KeyError) as error:
        raise UnknownVersion(f"VMEM_VLLM=1: vLLM {version} lacks a function that vMem replaces: {error}") from error
    for patch, (owner, name, original) in zip(PATCHES, found):
        if not getattr(original, "vmem", False):
            setattr(owner, name, _replacement(original, getattr(worker, patch.by)))
