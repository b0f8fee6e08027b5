"""Recognises releases of vLLM on which vMem cannot work.

By `pyvmem.engine.sources`, by all names that vMem reads (`NAMES`), and by the behaviour of the block pool, which is
tried. None of these imports a part of vLLM that needs a GPU.

``python -m pyvmem.vllm.check FOLDER`` checks the vLLM in a folder, and prints its fingerprints.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pyvmem.engine import sources
from pyvmem.engine.settings import cannot
from pyvmem.vllm.plugin import SWITCH

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
    ("platforms/interface.py", "Platform.update_block_size_for_backend", "cls, vllm_config"),
    (_WORKER, "Worker._maybe_get_memory_pool_context", "self, tag"),
    (_WORKER, "Worker.initialize_from_config", "self, kv_cache_config"),
    (_WORKER, "Worker.execute_model", "self, scheduler_output"),
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
    (
        _POOL,
        "BlockPool.cache_full_blocks",
        "self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask=None",
    ),
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

_CONNECTORS = "distributed/kv_transfer/kv_connector/v1/"
_CORE, _CONFIG = "v1/core/", "config/"

# Attributes that the plugin reads of vLLM's classes. A release without one of them is refused, also where the plugin
# reads it with a default. Otherwise, a feature or a setting that is refused would vanish without a word.
NAMES = {
    "Scheduler": (_CORE + "sched/scheduler.py", "_inflight_prefills add_request connector "
                  "failed_recving_kv_req_ids finish_requests finished_req_ids "
                  "finished_recving_kv_req_ids get_request_counts has_requests kv_cache_config kv_cache_manager "
                  "kv_holding_waiting>=0.31 max_num_running_reqs max_num_scheduled_tokens "
                  "need_mamba_block_aligned_split pause_state requests reset_prefix_cache running schedule "
                  "scheduler_reserve_full_isl set_pause_state shutdown "
                  "skipped_waiting<0.31 update_from_output vllm_config waiting"),
    "SchedulerInterface": (_CORE + "sched/interface.py", "has_unfinished_requests"),
    "Request": ("v1/request.py", "arrival_time block_hashes drop_stale_output num_computed_tokens num_preemptions "
                "num_stale_output_tokens num_tokens request_id resumable status"),
    "KVCacheManager": (_CORE + "kv_cache_manager.py", "block_pool coordinator free prefix_cache_lookup_enabled "
                       "watermark_blocks"),
    "KVCacheCoordinator": (_CORE + "kv_cache_coordinator.py", "find_longest_cache_hit get_num_blocks_to_allocate"),
    "BlockPool": (_CORE + "block_pool.py", "blocks cache_full_blocks cached_block_hash_to_block evict_blocks "
                  "free_block_queue free_blocks get_cached_block get_new_blocks get_num_free_blocks get_usage "
                  "hash_block_size metrics_collector num_gpu_blocks reset_prefix_cache touch"),
    "BlockHashToBlockMap": (_CORE + "block_pool.py", "get_one_block insert"),
    "FreeKVCacheBlockQueue": (_CORE + "kv_cache_utils.py", "fake_free_list_head fake_free_list_tail "
                              "get_all_free_blocks popleft popleft_n prepend_n remove"),
    "KVCacheMetricsCollector": (_CORE + "kv_cache_metrics.py", "block_metrics"),
    "KVCacheBlock": (_CORE + "kv_cache_utils.py", "block_hash block_id is_null next_free_block ref_cnt "
                     "set_block_hash"),
    "KVCacheBlockCopy": (_CORE + "kv_cache_utils.py", "dst_block_id src_block_id"),
    "SchedulerOutput": (_CORE + "sched/output.py", "kv_cache_block_copies kv_connector_metadata "
                        "new_block_ids_to_zero num_scheduled_tokens preempted_req_ids scheduled_cached_reqs "
                        "scheduled_new_reqs total_num_scheduled_tokens"),
    "NewRequestData": (_CORE + "sched/output.py", "block_ids num_computed_tokens"),
    "CachedRequestData": (_CORE + "sched/output.py", "new_block_ids"),
    "KVCacheTensor": (_INTERFACE, "block_stride host_resident>=0.30 layer_stride layers offset size"),
    "KVCacheConfig": (_INTERFACE, "kv_cache_groups kv_cache_layout kv_cache_tensors num_blocks"),
    "KVCacheGroupSpec": (_INTERFACE, "kv_cache_spec layer_names"),
    "KVCacheSpec": (_INTERFACE, "block_size block_stride_alignment>=0.31 max_memory_usage_bytes page_size_bytes"),
    "UniformTypeKVCacheSpecs": (_INTERFACE, "kv_cache_specs"),
    "VllmConfig": (_CONFIG + "vllm.py", "attention_config cache_config compilation_config compute_hash device_config "
                   "diffusion_config kernel_config kv_events_config kv_transfer_config load_config lora_config "
                   "model_config num_speculative_tokens parallel_config scheduler_config speculative_config "
                   "weight_transfer_config"),
    "CompilationConfig": (_CONFIG + "compilation.py", "static_all_moe_layers static_forward_context"),
    "ParallelConfig": (_CONFIG + "parallel.py", "data_parallel_index data_parallel_size decode_context_parallel_size "
                       "distributed_executor_backend enable_elastic_ep enable_eplb enable_expert_parallel "
                       "pipeline_parallel_size "
                       "prefill_context_parallel_size tensor_parallel_size worker_cls world_size"),
    "SchedulerConfig": (_CONFIG + "scheduler.py", "async_scheduling enable_chunked_prefill get_scheduler_cls "
                        "max_num_batched_tokens max_num_seqs scheduler_cls"),
    "CacheConfig": (_CONFIG + "cache.py", "block_size cache_dtype enable_prefix_caching gpu_memory_utilization "
                    "kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_offloading_backend kv_offloading_size "
                    "num_gpu_blocks_override prefix_cache_retention_interval prefix_caching_hash_algo "
                    "prefix_match_unit user_specified_block_size"),
    "KVEventsConfig": (_CONFIG + "kv_events.py", "enable_kv_cache_events"),
    "KVTransferConfig": (_CONFIG + "kv_transfer.py", "kv_buffer_device kv_connector kv_connector_extra_config "
                         "kv_connector_module_path"),
    "DeviceConfig": (_CONFIG + "device.py", "device_type"),
    "KVConnectorBase_V1": (_CONNECTORS + "base.py", "handle_preemptions has_pending_push_work"),
    "MultiConnector": (_CONNECTORS + "multi_connector.py", "sub_connectors"),
    "MultiKVConnectorMetadata": (_CONNECTORS + "multi_connector.py", "metadata"),
    "OffloadingConnector": (_CONNECTORS + "offloading_connector.py", "connector_scheduler"),
    "OffloadingConnectorScheduler": (_CONNECTORS + "offloading/scheduler.py", "_current_batch_allocated_block_ids"),
    "OffloadingConnectorMetadata": (_CONNECTORS + "offloading/common.py", "load_jobs store_jobs"),
    "OffloadingWorkerMetadata": (_CONNECTORS + "offloading/common.py", "completed_jobs"),
    "TransferJob": (_CONNECTORS + "offloading/common.py", "dst_spec src_spec"),
    "BlockIDsLoadStoreSpec": ("v1/kv_offload/base.py", "block_ids"),
    "ModelRunnerOutput": ("v1/outputs.py", "kv_connector_output"),
    "KVConnectorOutput": ("v1/outputs.py", "kv_connector_worker_meta"),
    "ModelConfig": (_CONFIG + "model.py", "architecture convert_type dtype enable_sleep_mode enforce_eager hf_config "
                    "is_attention_free is_hybrid is_moe max_model_len model model_impl multimodal_config quantization "
                    "revision runner_type served_model_name trust_remote_code"),
    "LoadConfig": (_CONFIG + "load.py", "device download_dir load_format model_loader_extra_config"),
    "AttentionConfig": (_CONFIG + "attention.py", "hisparse_config>=0.30"),
    "Worker": ("v1/worker/gpu_worker.py", "_maybe_get_memory_pool_context compile_or_warm_up_model "
               "determine_available_memory device discard>=0.31 execute_model init_device initialize_from_config "
               "load_model model_runner reload_weights reset_weights>=0.32 sample_tokens shutdown sleep wake_up"),
    "WorkerBase": ("v1/worker/worker_base.py", "cache_config get_supported_kv_cache_layouts model_config rank "
                   "synchronize_device vllm_config"),
    "GPUModelRunner": ("v1/worker/gpu/model_runner.py", "get_kv_cache_spec get_model model"),
    "GPUModelRunner of V1": ("v1/worker/gpu_model_runner.py", "drafter"),
    "AsyncLLM": ("v1/engine/async_llm.py", "collective_rpc sleep vllm_config wake_up"),
    "Platform": ("platforms/interface.py", "is_zen_cpu"),
    "module platforms": ("platforms/__init__.py", "builtin_platform_plugins"),
    "module interface": ("platforms/interface.py", "UnspecifiedPlatform"),
    "module logger": ("logger.py", "init_logger"),
    "module import_utils": ("utils/import_utils.py", "resolve_obj_by_qualname"),
    "module hashing": ("utils/hashing.py", "get_hash_fn_by_name"),
    "module kv_cache_utils": (_CORE + "kv_cache_utils.py", "resolve_none_hash_seed"),
    "module _custom_ops": ("_custom_ops.py", "_supports_onednn"),
    "module utils": ("model_executor/layers/utils.py", "check_cpu_sgl_kernel"),
    "module dummy_loader": ("model_executor/model_loader/dummy_loader.py", "initialize_single_dummy_weight"),
    "module kv_transfer": ("distributed/kv_transfer/__init__.py", "get_kv_transfer_group has_kv_transfer_group"),
}  # fmt: skip

# {(file, function or class): fingerprints} of the bodies that vMem relies on, in 0.30.0, 0.31.0, 0.32.0 and 0.33.0.
# Fields that vMem does not know may carry blocks: SchedulerOutput's must all be known, by name.
BODIES = {
    ("v1/worker/utils.py", "allocate_kv_cache"): ("a8d78466837b65bc", "3de4f8c655e7633f"),
    ("v1/worker/gpu/attn_utils.py", "init_kv_cache"): ("437af52748fdb03d", "f9cbb5de964d6969"),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner.initialize_kv_cache_tensors"):
        ("e4ab5fd51df2896a", "9b5bb43fd76ded15"),
    (_INTERFACE, "create_kv_cache_views"): ("b75f829e3f560fb3",),
    (_OUTPUT, "SchedulerOutput"): ("67306401c1602734", "50a6609d307fa220", "ed8d6b9006956398", "bf97b16c93564cdf"),
    (_POOL, "BlockPool.get_new_blocks"): ("97c798cdba867c44",),
    (_POOL, "BlockPool.free_blocks"): ("b88b78a0eabbf2ba", "6d87133b1995685c"),
    (_POOL, "BlockPool.touch"): ("d40848179309a5cc", "f3ff989445d1969a"),
    (_POOL, "BlockPool.evict_blocks"): ("3f8d7a3d62bb98bd",),
    (_POOL, "BlockPool.reset_prefix_cache"): ("bc0cf1689fa2a801",),
    (_UTILS, "FreeKVCacheBlockQueue"): ("71012622eeb26846", "37d424ec8c163358"),
    ("v1/worker/utils.py", "KVBlockZeroer"): ("65be0f4cff8cf23e", "98335838cffda01f"),
    ("v1/worker/gpu/block_table.py", "BlockTables.get_dummy_block_tables"): ("de87ed5b5677c52a", "e40296e2394e8763"),
    (_OFFLOADING, "OffloadingConnectorScheduler.build_connector_meta"): ("562f90165057f9b8", "29425cd1c014f5dd"),
    (_OFFLOADING, "OffloadingConnectorScheduler.request_finished"): ("e976b044e49cc15c", "e1d216a519d3616c"),
    (_OFFLOADING, "OffloadingConnectorScheduler._update_req_states"): ("74edd42810dba020", "a2314f5a8c1465dd"),
}  # fmt: skip

NEEDS = sources.Needs("vLLM", "vllm", SWITCH, signatures=SIGNATURES, names=NAMES, bodies=BODIES)


def _misbehaviour(pool: Any) -> Iterator[str]:
    """Yield how a pool of 8 blocks, with block 0 the null block, behaves otherwise than vMem needs."""
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
        raise cannot(SWITCH, f"vLLM's block pool is not as vMem needs it: {wrong}")


if __name__ == "__main__":
    sys.exit(NEEDS.main(sys.argv[1:]))
