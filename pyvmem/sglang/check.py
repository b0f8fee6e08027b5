"""Recognises releases of SGLang on which vMem cannot work: by `pyvmem.engine.sources`.

``python -m pyvmem.sglang.check FOLDER`` checks the SGLang in a folder, and prints its fingerprints.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import re
import sys

from pyvmem.engine import sources
from pyvmem.engine.settings import cannot
from pyvmem.sglang import hooks
from pyvmem.sglang.settings import SWITCH

_POOL, _SCHEDULER, _BASE, _TOKEN = hooks._POOL, hooks._SCHEDULER, hooks._BASE, hooks._TOKEN
_PAGED, _SWA = hooks._PAGED, hooks._SWA
_CHECKER = "srt/managers/scheduler_components/invariant_checker.py"
OLDEST = (0, 5, 21)
_STATS = "srt/managers/scheduler_components/pool_stats_observer.py"
_PREFILL, _HOOKS = "srt/mem_cache/prefill_budget.py", "srt/plugins/hook_registry.py"

# (file, function, parameters without annotations) of what vMem hooks, and of what it calls
SIGNATURES = (
    *(hook[:3] for hook in (*hooks.ENGINE, *hooks.WEIGHTS, *hooks.ORDERS, *hooks.EVERYWHERE)),
    (_BASE, "BaseTokenToKVPoolAllocator.merge_and_sort_free", "self"),
    (_TOKEN, "TokenToKVPoolAllocator.available_size", "self"),
    (_PAGED, "PagedTokenToKVPoolAllocator.available_size", "self"),
)

_SUMS = "full_tokens_per_layer max_total_num_tokens swa_tokens_per_layer"
_CACHE, _BATCH = "srt/mem_cache/base_prefix_cache.py", "srt/managers/schedule_batch.py"
_TREE = "srt/mem_cache/unified_radix_cache.py"

# Attributes that vMem reads of SGLang's classes.
NAMES = {
    "SchedulerInvariantChecker": (_CHECKER, _SUMS),
    "SchedulerPoolStatsObserver": (_STATS, _SUMS),
    "Scheduler": (_SCHEDULER, "_engine_paused chunked_prefill_size chunked_req cur_batch_for_debug "
                  "enable_hierarchical_cache forward_stream invariant_checker is_hybrid_ssm kv_shard_widening "
                  "last_batch max_prefill_tokens max_req_len pool_stats_observer running_batch server_args "
                  "sliding_window_size token_to_kv_pool_allocator tree_cache waiting_queue"),
    "ScheduleBatch": (_BATCH, "batch_is_full forward_mode reqs token_to_kv_pool_allocator"),
    "Req": (_BATCH, "beam_group cache_salt extra_key origin_input_ids output_ids prefix_indices<0.5.22 "
            "prefix_len>=0.5.22 sampling_params"),
    "BeamGroup": ("srt/beam_search/beam_group.py", "num_member_rows"),
    "SamplingParams": ("srt/sampling/sampling_params.py", "max_new_tokens"),
    "PrefillBudget": (_PREFILL, "check_prefill current_offset remaining_current total_offset"),
    "BaseTokenToKVPoolAllocator": (_BASE, "available_size free_pages get_all_free_pages get_kvcache "
                                   "merge_and_sort_free page_size"),
    "SWATokenToKVPoolAllocator": (_SWA, "full_attn_allocator swa_attn_allocator"),
    "BasePrefixCache": (_CACHE, "check_hicache_events evict evictable_size full_evictable_size "
                        "is_chunk_cache<0.5.22 match_prefix supports_prefix_sharing>=0.5.22 swa_evictable_size"),
    "MatchPrefixParams": (_CACHE, "key"),
    "MatchResult": (_CACHE, "device_indices<0.5.22 device_prefix_len>=0.5.22"),
    "RadixKey": ("srt/mem_cache/radix_cache.py", "cache_salt extra_key token_ids"),
    "EvictParams": (_CACHE, "num_tokens swa_num_tokens"),
    "KVCache": (_POOL, "device layer_num page_size size store_dtype"),
    "MHATokenToKVPool": (_POOL, "head_dim head_num k_buffer v_buffer v_head_dim"),
    "MLATokenToKVPool": (_POOL, "kv_buffer"),
    "SchedulerWeightUpdaterManager": (hooks._UPDATER, "is_fully_idle offload_tags scheduler"),
    "BaseReq": ("srt/managers/io_struct.py", "rid"),
    "ReleaseMemoryOccupationReqInput": ("srt/managers/io_struct.py", "tags"),
    "ModelRunner": ("srt/model_executor/model_runner.py", "device memory_saver_adapter model server_args"),
    "HookRegistry": (_HOOKS, "_patched apply_hooks register"),
}  # fmt: skip

# {(file, function or class): fingerprints} of the bodies that vMem relies on, in 0.5.21, 0.5.22 and 0.5.23. Those of
# UnifiedRadixCache unlock HiCache's rows when their copy has ended; an idle scheduler has no copies under way.
BODIES = {
    (_POOL, "MHATokenToKVPool._create_buffers_normal"): ("c7278d786a807c0e", "338c8fec9668d4e5"),
    (_POOL, "MLATokenToKVPool._create_buffers"): ("e7d22fab8355ba15",),
    (_BASE, "BaseTokenToKVPoolAllocator.merge_and_sort_free"): ("372c1b92db73f2f6",),
    (_BASE, "BaseTokenToKVPoolAllocator.evict_to_free_tokens"): ("6cf858676f06684a", "84a3148d15ee241c"),
    (_TOKEN, "TokenToKVPoolAllocator"): ("c86ff7007995df6c",),
    (_PAGED, "PagedTokenToKVPoolAllocator"): ("3d2323dd0be6abfb", "639b90b86df7e26a"),
    (_SWA, "SWATokenToKVPoolAllocator.alloc_extend"): ("0697d283b98535b9",),
    (_PREFILL, "PrefillBudget"): ("555350f18ccd3df1", "85bd2dc6930c7453", "2c0c2c497a5a400f"),
    (_CHECKER, "SchedulerInvariantChecker._check_full_pool"): ("ede9c28454374dc5", "f7d92ac86ab80a91"),
    (_STATS, "SchedulerPoolStatsObserver._get_token_info"): ("bc8a1782c2479f2a", "b4c06dfa30841a38"),
    (_STATS, "SchedulerPoolStatsObserver._get_swa_token_info"): ("45f19d2f8ddfaa4c",),
    (_SCHEDULER, "Scheduler.flush_cache"): ("474ee012af4a256f",),
    (_SCHEDULER, "Scheduler.is_fully_idle"): ("f81c29b6d76b054f", "4fdd82ca67332f81", "9e2df6850ffecb20"),
    (_TREE, "UnifiedRadixCache.writing_check"): ("f4ebc99cb84664d2",),
    (_TREE, "UnifiedRadixCache.loading_check"): ("06c83acf6705ebd4",),
    (hooks._UPDATER, "SchedulerWeightUpdaterManager.release_memory_occupation"): ("58a37cb27065cd13",),
    (hooks._UPDATER, "SchedulerWeightUpdaterManager.resume_memory_occupation"): ("814694e03ac040f3",),
    (hooks._ORDERS, "TokenizerControlMixin.release_memory_occupation"): ("74cad2db73e231cf",),
    (hooks._ORDERS, "TokenizerControlMixin.resume_memory_occupation"): ("762e91e0e7c27ce5",),
    (_HOOKS, "HookRegistry.apply_hooks"): ("1afac64ee46da0a7",),
}

NEEDS = sources.Needs("SGLang", "sglang", SWITCH, signatures=SIGNATURES, names=NAMES, bodies=BODIES)


def release(version: str) -> str | None:
    """Check the installed SGLang. Returns a line to log, or None; raises `Refused`."""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise cannot(SWITCH, f"SGLang {version} is older than {'.'.join(map(str, OLDEST))}, the first whose scheduler "
                             "asks an object (PrefillBudget) whether a request may begin, and vMem answers for it; "
                             "update SGLang")  # fmt: skip
    return NEEDS.release(version)


if __name__ == "__main__":
    sys.exit(NEEDS.main(sys.argv[1:]))
