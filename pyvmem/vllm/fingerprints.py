"""Fingerprints of functions of vLLM's that vMem was checked with (`check`): releases 0.30.0, 0.31.0, 0.32.0 and 0.33.0.

SPDX-License-Identifier: MIT
"""

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
}
