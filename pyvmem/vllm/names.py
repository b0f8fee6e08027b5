"""What the plugin reads of vLLM's classes: every name, once; and the functions of vLLM's that it was checked with.

A release that has none of these names any more is refused by `check`, also where the plugin reads it with a default:
a setting that is refused, or a feature, would vanish without a word otherwise.

SPDX-License-Identifier: MIT
"""

_CONNECTORS = "distributed/kv_transfer/kv_connector/v1/"
_CORE, _CONFIG, _INTERFACE = "v1/core/", "config/", "v1/kv_cache_interface.py"

# {class, perhaps with what tells it from another: (file, names)}. NAME>=0.30: the releases before do not have it;
# NAME<0.31: those since do not.
NAMES = {
    "Scheduler": (_CORE + "sched/scheduler.py", "add_request connector finish_requests finished_req_ids "
                  "kv_cache_config kv_cache_manager "
                  "kv_holding_waiting>=0.31 max_num_scheduled_tokens need_mamba_block_aligned_split pause_state "
                  "reset_prefix_cache running schedule scheduler_reserve_full_isl set_pause_state shutdown "
                  "skipped_waiting<0.31 update_from_output vllm_config waiting"),
    "SchedulerInterface": (_CORE + "sched/interface.py", "has_unfinished_requests"),
    "Request": ("v1/request.py", "arrival_time block_hashes drop_stale_output num_computed_tokens "
                "num_stale_output_tokens num_tokens request_id status"),
    "KVCacheManager": (_CORE + "kv_cache_manager.py", "block_pool coordinator prefix_cache_lookup_enabled "
                       "watermark_blocks"),
    "KVCacheCoordinator": (_CORE + "kv_cache_coordinator.py", "find_longest_cache_hit get_num_blocks_to_allocate"),
    "BlockPool": (_CORE + "block_pool.py", "blocks cached_block_hash_to_block evict_blocks free_block_queue "
                  "free_blocks get_cached_block get_new_blocks get_num_free_blocks get_usage metrics_collector "
                  "num_gpu_blocks reset_prefix_cache touch"),
    "BlockHashToBlockMap": (_CORE + "block_pool.py", "insert"),
    "FreeKVCacheBlockQueue": (_CORE + "kv_cache_utils.py", "get_all_free_blocks popleft popleft_n prepend_n remove"),
    "KVCacheMetricsCollector": (_CORE + "kv_cache_metrics.py", "block_metrics"),
    "KVCacheBlock": (_CORE + "kv_cache_utils.py", "block_hash block_id is_null ref_cnt set_block_hash"),
    "KVCacheBlockCopy": (_CORE + "kv_cache_utils.py", "dst_block_id src_block_id"),
    "SchedulerOutput": (_CORE + "sched/output.py", "finished_req_ids kv_cache_block_copies kv_connector_metadata "
                        "new_block_ids_to_zero num_scheduled_tokens preempted_req_ids scheduled_cached_reqs "
                        "scheduled_new_reqs total_num_scheduled_tokens"),
    "NewRequestData": (_CORE + "sched/output.py", "block_ids num_computed_tokens req_id"),
    "CachedRequestData": (_CORE + "sched/output.py", "new_block_ids num_computed_tokens req_ids resumed_req_ids"),
    "KVCacheTensor": (_INTERFACE, "block_stride host_resident>=0.30 layer_stride layers offset size"),
    "KVCacheConfig": (_INTERFACE, "kv_cache_groups kv_cache_layout kv_cache_tensors num_blocks"),
    "KVCacheGroupSpec": (_INTERFACE, "kv_cache_spec layer_names"),
    "KVCacheSpec": (_INTERFACE, "block_size block_stride_alignment>=0.31 max_memory_usage_bytes page_size_bytes"),
    "UniformTypeKVCacheSpecs": (_INTERFACE, "kv_cache_specs"),
    "VllmConfig": (_CONFIG + "vllm.py", "attention_config cache_config compilation_config diffusion_config "
                   "kv_transfer_config load_config model_config num_speculative_tokens parallel_config "
                   "scheduler_config"),
    "ParallelConfig": (_CONFIG + "parallel.py", "data_parallel_index decode_context_parallel_size "
                       "distributed_executor_backend enable_elastic_ep pipeline_parallel_size "
                       "prefill_context_parallel_size tensor_parallel_size worker_cls"),
    "SchedulerConfig": (_CONFIG + "scheduler.py", "async_scheduling enable_chunked_prefill get_scheduler_cls "
                        "max_num_batched_tokens max_num_seqs scheduler_cls"),
    "CacheConfig": (_CONFIG + "cache.py", "kv_offloading_backend kv_offloading_size num_gpu_blocks"),
    "KVTransferConfig": (_CONFIG + "kv_transfer.py", "kv_connector kv_connector_extra_config"),
    "OffloadingConnector": (_CONNECTORS + "offloading_connector.py", "connector_scheduler handle_preemptions"),
    "OffloadingConnectorScheduler": (_CONNECTORS + "offloading/scheduler.py", "_current_batch_allocated_block_ids"),
    "OffloadingConnectorMetadata": (_CONNECTORS + "offloading/common.py", "load_jobs store_jobs"),
    "OffloadingWorkerMetadata": (_CONNECTORS + "offloading/common.py", "completed_jobs"),
    "TransferJob": (_CONNECTORS + "offloading/common.py", "dst_spec src_spec"),
    "BlockIDsLoadStoreSpec": ("v1/kv_offload/base.py", "block_ids"),
    "ModelRunnerOutput": ("v1/outputs.py", "kv_connector_output"),
    "KVConnectorOutput": ("v1/outputs.py", "kv_connector_worker_meta"),
    "ModelConfig": (_CONFIG + "model.py", "is_hybrid max_model_len model revision served_model_name"),
    "LoadConfig": (_CONFIG + "load.py", "download_dir load_format"),
    "AttentionConfig": (_CONFIG + "attention.py", "flash_attn_version hisparse_config>=0.30"),
    "CompilationConfig": (_CONFIG + "compilation.py", "cudagraph_mode"),
    "Worker": ("v1/worker/gpu_worker.py", "_maybe_get_memory_pool_context compile_or_warm_up_model device "
               "discard>=0.31 execute_dummy_batch execute_model initialize_from_config load_model model_runner "
               "sample_tokens shutdown sleep wake_up"),
    "WorkerBase": ("v1/worker/worker_base.py", "cache_config get_supported_kv_cache_layouts rank vllm_config"),
    "GPUModelRunner": ("v1/worker/gpu/model_runner.py", "get_kv_cache_spec get_model kv_cache_config"),
    "GPUModelRunner of V1": ("v1/worker/gpu_model_runner.py", "drafter"),
    "AsyncLLM": ("v1/engine/async_llm.py", "sleep wake_up"),
    "FlashAttentionMetadata": ("v1/attention/backends/flash_attn.py", "block_table num_actual_tokens seq_lens "
                               "slot_mapping"),
    "CommonAttentionMetadata": ("v1/attention/backend.py", "max_query_len num_reqs"),
    "AttentionSelectorConfig": ("v1/attention/selector.py", "head_size"),
}  # fmt: skip

# {function: fingerprints (`check`)} of the bodies that vMem relies on, in the releases 0.30.0, 0.31.0, 0.32.0, 0.33.0.
KNOWN: dict[str, tuple[str, ...]] = {
    "allocate_kv_cache": ("a8d78466837b65bc", "3de4f8c655e7633f"),
    "init_kv_cache": ("437af52748fdb03d", "f9cbb5de964d6969"),
    "GPUModelRunner.initialize_kv_cache_tensors": ("e4ab5fd51df2896a", "9b5bb43fd76ded15"),
    "create_kv_cache_views": ("b75f829e3f560fb3",),
    "SchedulerOutput": ("67306401c1602734", "50a6609d307fa220", "ed8d6b9006956398", "bf97b16c93564cdf"),
    "BlockPool.get_new_blocks": ("97c798cdba867c44",),
    "BlockPool.free_blocks": ("b88b78a0eabbf2ba", "6d87133b1995685c"),
    "BlockPool.touch": ("d40848179309a5cc", "f3ff989445d1969a"),
    "BlockPool.evict_blocks": ("3f8d7a3d62bb98bd",),
    "BlockPool.reset_prefix_cache": ("bc0cf1689fa2a801",),
    "FreeKVCacheBlockQueue": ("71012622eeb26846", "37d424ec8c163358"),
    "KVBlockZeroer": ("65be0f4cff8cf23e", "98335838cffda01f"),
    "BlockTables.get_dummy_block_tables": ("de87ed5b5677c52a", "e40296e2394e8763"),
    "OffloadingConnectorScheduler.build_connector_meta": ("562f90165057f9b8", "29425cd1c014f5dd"),
    "OffloadingConnectorScheduler.request_finished": ("e976b044e49cc15c", "e1d216a519d3616c"),
    "OffloadingConnectorScheduler._update_req_states": ("74edd42810dba020", "a2314f5a8c1465dd"),
}
