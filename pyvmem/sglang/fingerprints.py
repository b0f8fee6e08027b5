"""Fingerprints of functions of SGLang's that vMem was checked with (`check`): releases 0.5.21, 0.5.22 and 0.5.23.

SPDX-License-Identifier: MIT
"""

KNOWN: dict[str, tuple[str, ...]] = {
    "MHATokenToKVPool._create_buffers_normal": ("c7278d786a807c0e", "338c8fec9668d4e5"),
    "MLATokenToKVPool._create_buffers": ("e7d22fab8355ba15",),
    "BaseTokenToKVPoolAllocator.merge_and_sort_free": ("372c1b92db73f2f6",),
    "BaseTokenToKVPoolAllocator.evict_to_free_tokens": ("6cf858676f06684a", "84a3148d15ee241c"),
    "TokenToKVPoolAllocator": ("c86ff7007995df6c",),
    "PagedTokenToKVPoolAllocator": ("3d2323dd0be6abfb", "639b90b86df7e26a"),
    "SWATokenToKVPoolAllocator.alloc_extend": ("0697d283b98535b9",),
    "PrefillBudget": ("555350f18ccd3df1", "85bd2dc6930c7453", "2c0c2c497a5a400f"),
    "SchedulerInvariantChecker._check_full_pool": ("ede9c28454374dc5", "f7d92ac86ab80a91"),
    "SchedulerPoolStatsObserver._get_token_info": ("bc8a1782c2479f2a", "b4c06dfa30841a38"),
    "SchedulerPoolStatsObserver._get_swa_token_info": ("45f19d2f8ddfaa4c",),
    "Scheduler.flush_cache": ("474ee012af4a256f",),
    "HookRegistry.apply_hooks": ("1afac64ee46da0a7",),
}
