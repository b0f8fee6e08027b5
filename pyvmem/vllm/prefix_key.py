"""Which engines of vLLM's have the same prefixes: the key of what outlives an engine (`prefixes`).

What is saved is vLLM's hash of a prefix, which covers tokens, images, adapters and salts. The key covers what the hash
does not: all that decides which rows a model computes from tokens, how rows lie in a block, and where vLLM begins to
hash.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pyvmem.sleep.image import Different


def _reasons(c: Any, config: Any) -> Iterator[str]:
    """Why this engine saves no prefixes."""
    specs = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    if not c.cache_config.enable_prefix_caching:
        yield "--no-enable-prefix-caching"
    if specs not in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
        yield f"its layers are of several kinds, or have windows or states: {', '.join(specs)}"
    if c.parallel_config.world_size != 1 or c.parallel_config.distributed_executor_backend not in ("uni", None):
        yield "its workers are in other processes"
    if c.kv_transfer_config is not None:
        yield "a KV connector"
    if c.speculative_config is not None:
        yield "a draft model"
    if c.kv_events_config is not None and c.kv_events_config.enable_kv_cache_events:
        yield "KV events, which would not tell of blocks that are restored"


def _first_hash(algorithm: str) -> str:
    """The hash with which vLLM begins every prefix. Raises Different if each process has another one."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        raise Different(f"--prefix-caching-hash-algo {algorithm} hashes otherwise in each process; set PYTHONHASHSEED "
                        "to a number that is secret, or choose sha256")  # fmt: skip
    return bytes(function(seed)).hex()


def key_of(c: Any, config: Any, weights: str, ranges: Sequence[Any], size: int) -> str:
    """The key of an engine's prefixes. Raises Different with the reason why they do not outlive it.

    c, config : vLLM's VllmConfig and KVCacheConfig. weights: the key of those in common. ranges: where blocks lie.
    size: most bytes of the file, which the next engine takes as it is.
    """
    for reason in _reasons(c, config):
        raise Different(reason)
    if not weights:
        raise Different("its weights are not in common")
    cache = c.cache_config
    about = dict(
        weights=weights, size=size, config=c.compute_hash(), length=c.model_config.max_model_len, python=sys.version,
        algorithm=cache.prefix_caching_hash_algo, first=_first_hash(cache.prefix_caching_hash_algo),
        specs=[repr(group) for group in config.kv_cache_groups], dtype=str(cache.cache_dtype),
        layout=getattr(config, "kv_cache_layout", None), media=repr(c.model_config.multimodal_config),
        ranges=[(r.bytes, r.layers) for r in ranges],
    )  # fmt: skip
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()
