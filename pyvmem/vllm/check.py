"""Recognises releases of vLLM on which vMem cannot work.

By `pyvmem.engine.sources`, by all names that vMem reads (`names`), and by the behaviour of the block pool, which is
tried. None of these imports a part of vLLM that needs a GPU.

``python -m pyvmem.vllm.check FOLDER`` checks the vLLM in a folder, and prints its fingerprints.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyvmem.engine import sources
from pyvmem.engine.refuse import Refused
from pyvmem.vllm.names import KNOWN, NAMES
from pyvmem.vllm.settings import SWITCH

_WORKER, _SCHEDULER = "v1/worker/gpu_worker.py", "v1/core/sched/scheduler.py"
_POOL, _UTILS, _OUTPUT = "v1/core/block_pool.py", "v1/core/kv_cache_utils.py", "v1/core/sched/output.py"
_INTERFACE = "v1/kv_cache_interface.py"
_MANAGER, _COORDINATOR = "v1/core/kv_cache_manager.py", "v1/core/kv_cache_coordinator.py"
_OFFLOADING = "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"
_TO_ALLOCATE = ("self, request_id, num_tokens, new_computed_blocks, num_encoder_tokens, total_computed_tokens, "
                "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=False")  # fmt: skip

# (file, function, parameters without annotations; releases may differ)
SIGNATURES = (
    ("platforms/interface.py", "Platform.check_and_update_config", "cls, vllm_config"),
    (_WORKER, "Worker._maybe_get_memory_pool_context", "self, tag"),
    (_WORKER, "Worker.initialize_from_config", "self, kv_cache_config"),
    (_WORKER, "Worker.execute_model", "self, scheduler_output"),
    (_WORKER, "Worker.execute_dummy_batch", "self"),
    (_WORKER, "Worker.sleep", "self, level=1"),
    (_WORKER, "Worker.wake_up", "self, tags=None"),
    (_WORKER, "Worker.shutdown", "self"),
    (_WORKER, "Worker.compile_or_warm_up_model", "self"),
    ("v1/worker/worker_base.py", "WorkerBase.get_supported_kv_cache_layouts", "self"),
    (_SCHEDULER, "Scheduler.schedule", "self, throttle_prefills=False"),
    (_SCHEDULER, "Scheduler.update_from_output", "self, scheduler_output, model_runner_output"),
    (_SCHEDULER, "Scheduler.add_request", "self, request"),
    (_SCHEDULER, "Scheduler.finish_requests", "self, request_ids, finished_status"),
    (_SCHEDULER, "Scheduler.reset_prefix_cache", "self, reset_running_requests=False, reset_connector=False"),
    (_SCHEDULER, "Scheduler.set_pause_state", "self, pause_state"),
    (_SCHEDULER, "Scheduler.shutdown", "self"),
    (_MANAGER, "KVCacheManager.prefix_cache_lookup_enabled", "self, request"),
    *(
        (_COORDINATOR, f"{kind}.find_longest_cache_hit", "self, block_hashes, max_cache_hit_length")
        for kind in ("KVCacheCoordinator", "UnitaryKVCacheCoordinator", "HybridKVCacheCoordinator")
    ),
    (_COORDINATOR, "KVCacheCoordinator.get_num_blocks_to_allocate", _TO_ALLOCATE, _TO_ALLOCATE + ", prefill_end=0"),
    (_POOL, "BlockPool.get_new_blocks", "self, num_blocks"),
    (_POOL, "BlockPool.free_blocks", "self, ordered_blocks"),
    (_POOL, "BlockPool.touch", "self, blocks"),
    (_POOL, "BlockPool.evict_blocks", "self, block_ids"),
    (_POOL, "BlockPool.reset_prefix_cache", "self"),
    (_POOL, "BlockPool.get_num_free_blocks", "self"),
    (_POOL, "BlockPool.get_usage", "self"),
    (_UTILS, "FreeKVCacheBlockQueue.popleft", "self"),
    (_UTILS, "FreeKVCacheBlockQueue.popleft_n", "self, n"),
    (_UTILS, "FreeKVCacheBlockQueue.remove", "self, block"),
    (_UTILS, "FreeKVCacheBlockQueue.append", "self, block"),
    (_UTILS, "FreeKVCacheBlockQueue.append_n", "self, blocks"),
    (_UTILS, "FreeKVCacheBlockQueue.prepend_n", "self, blocks"),
    (_UTILS, "FreeKVCacheBlockQueue.get_all_free_blocks", "self"),
)

# Fields that vMem does not know may carry blocks: SchedulerOutput's must all be known, by name.
BODIES = (
    ("v1/worker/utils.py", "allocate_kv_cache"),
    ("v1/worker/gpu/attn_utils.py", "init_kv_cache"),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner.initialize_kv_cache_tensors"),
    (_INTERFACE, "create_kv_cache_views"),
    (_OUTPUT, "SchedulerOutput"),
    (_POOL, "BlockPool.get_new_blocks"),
    (_POOL, "BlockPool.free_blocks"),
    (_POOL, "BlockPool.touch"),
    (_POOL, "BlockPool.evict_blocks"),
    (_POOL, "BlockPool.reset_prefix_cache"),
    (_UTILS, "FreeKVCacheBlockQueue"),
    ("v1/worker/utils.py", "KVBlockZeroer"),
    ("v1/worker/gpu/block_table.py", "BlockTables.get_dummy_block_tables"),
    (_OFFLOADING, "OffloadingConnectorScheduler.build_connector_meta"),
    (_OFFLOADING, "OffloadingConnectorScheduler.request_finished"),
    (_OFFLOADING, "OffloadingConnectorScheduler._update_req_states"),
)


def differences(folder: Path) -> Iterator[str]:
    """Signatures and names of the vLLM in `folder` that are not as vMem needs them."""
    source = sources.Source(folder)
    yield from sources.other_signatures(source, SIGNATURES)
    number = _number(folder)
    for kind, (file, names) in NAMES.items():
        there = _names_of(source.find(file, kind.partition(" ")[0]))
        for name, sign, since in re.findall(r"(\w+)(>=|<)?([0-9.]*)", names):
            if name not in there and (not sign or (number >= _parts(since)) == (sign == ">=")):
                yield f"{kind} in {file} has no {name}"


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _number(folder: Path) -> tuple[int, ...]:
    """The release in a folder, (0, 33); a later one than all if it does not say."""
    try:
        found = re.search(r"^__version__ = .*?'([0-9.]+)", (folder / "_version.py").read_text(), re.M)
    except OSError:
        found = None
    return _parts(found[1]) if found else (sys.maxsize,)


def _names_of(kind: Any) -> set[str]:
    """The attributes that a class defines: in its body, and of `self` in its functions."""
    names = {getattr(node, "name", "") for node in getattr(kind, "body", ())}
    for node in ast.walk(kind) if kind is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    for node in getattr(kind, "body", ()):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def installed() -> Path:
    """The folder of the vLLM that this process would import."""
    return sources.installed("vllm", "vLLM", SWITCH)


def release(version: str, strict: bool) -> str | None:
    """Check the installed vLLM. Returns a line to log, or None; raises `Refused`."""
    folder = installed()
    changed = sources.unknown(sources.fingerprints(folder, BODIES), KNOWN)
    return sources.verdict(f"vLLM {version}", SWITCH, differences(folder), changed, strict)


def _misbehaviour(pool: Any) -> Iterator[str]:
    """What a pool of 8 blocks, with block 0 the null block, does otherwise than vMem needs."""
    queue = pool.free_block_queue

    def order() -> list[int]:
        return [b.block_id for b in queue.get_all_free_blocks()]

    if pool.get_num_free_blocks() != 7 or order() != [1, 2, 3, 4, 5, 6, 7]:
        yield "a new pool does not have all blocks but the null block in its queue"
    held = pool.get_new_blocks(4)
    if [b.block_id for b in held] != [1, 2, 3, 4] or any(b.ref_cnt != 1 for b in held):
        yield "get_new_blocks does not take the first free blocks"
    cached = held[3]
    cached.set_block_hash(b"vmem", num_tokens=16)
    pool.cached_block_hash_to_block.insert(b"vmem", cached)
    pool.free_blocks([cached, held[2]])
    if order() != [3, 5, 6, 7, 4]:
        yield "free_blocks does not put cached blocks last and others first"
    pool.touch([cached])
    if order() != [3, 5, 6, 7]:
        yield "touch does not take a block off the queue"
    pool.free_blocks([cached])
    taken = pool.get_new_blocks(5)
    if [b.block_id for b in taken] != [3, 5, 6, 7, 4] or cached.block_hash is not None:
        yield "get_new_blocks does not evict the cached block last"
    pool.free_blocks([held[0], held[1]])
    if order() != [1, 2]:
        yield "free_blocks changes the order of its blocks"


def behaviour() -> None:
    """Try the block pool of the vLLM that is imported. Raises `Refused`."""
    from vllm.v1.core.block_pool import BlockPool

    for wrong in _misbehaviour(BlockPool(8, True, 16)):
        raise Refused(f"VMEM_VLLM=1: vLLM's block pool is not as vMem needs it: {wrong} (or unset VMEM_VLLM)")


if __name__ == "__main__":
    sys.exit(sources.main(sys.argv[1:], differences, BODIES, KNOWN))
