"""Recognises releases of SGLang on which vMem cannot work, without importing a part of SGLang that needs a GPU.

1. **Signatures** of the functions that vMem hooks or calls, and the names of the fields that it reads. Any difference
   refuses the release.
2. **Fingerprints** of the bodies that vMem relies on. An unknown one is reported; VMEM_SGLANG_STRICT=1 refuses it.

``python -m pyvmem.sglang.check FOLDER`` checks the SGLang in a folder, and prints its fingerprints.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from pyvmem.engine.refuse import Refused
from pyvmem.engine.sources import Source, fingerprint, parameters
from pyvmem.sglang.fingerprints import KNOWN

_BASE, _TOKEN = "srt/mem_cache/allocator/base.py", "srt/mem_cache/allocator/token.py"
_PAGED, _SWA = "srt/mem_cache/allocator/paged.py", "srt/mem_cache/allocator/swa.py"
_POOL, _SCHEDULER = "srt/mem_cache/memory_pool.py", "srt/managers/scheduler.py"
_CHECKER = "srt/managers/scheduler_components/invariant_checker.py"
_STATS = "srt/managers/scheduler_components/pool_stats_observer.py"
_EXTEND = "self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens"
_BUDGET = "srt/mem_cache/prefill_budget.py"

# (file, function, parameters without annotations)
SIGNATURES = (
    (_POOL, "MHATokenToKVPool._create_buffers_normal", "self"),
    (_POOL, "MLATokenToKVPool._create_buffers", "self"),
    ("srt/mem_cache/kv_cache_configurator.py", "KVCacheConfigurator._profile_available_bytes",
     "self, pre_model_load_memory"),
    (_SCHEDULER, "Scheduler.get_next_batch_to_run", "self, running_batch, last_batch"),
    (_SCHEDULER, "Scheduler.on_idle", "self"),
    (_SCHEDULER, "Scheduler.flush_cache", "self, empty_cache=True"),
    (_BASE, "BaseTokenToKVPoolAllocator.create_prefill_budget", "self, tree_cache, *, num_mixed_decode_tokens=0"),
    (_SWA, "SWATokenToKVPoolAllocator.create_prefill_budget", "self, tree_cache, *, num_mixed_decode_tokens=0"),
    (_BASE, "BaseTokenToKVPoolAllocator.evict_to_free_tokens", "self, tree_cache, num_tokens"),
    (_SWA, "SWATokenToKVPoolAllocator.evict_to_free_tokens", "self, tree_cache, num_tokens"),
    (_BASE, "BaseTokenToKVPoolAllocator.merge_and_sort_free", "self"),
    (_TOKEN, "TokenToKVPoolAllocator.alloc", "self, need_size"),
    (_TOKEN, "TokenToKVPoolAllocator.available_size", "self"),
    (_PAGED, "PagedTokenToKVPoolAllocator.alloc", "self, need_size"),
    (_PAGED, "PagedTokenToKVPoolAllocator.alloc_extend", f"{_EXTEND}, num_new_pages=None"),
    (_PAGED, "PagedTokenToKVPoolAllocator.available_size", "self"),
    (_SWA, "SWATokenToKVPoolAllocator.alloc", "self, need_size"),
    (_SWA, "SWATokenToKVPoolAllocator.alloc_extend", _EXTEND),
    ("srt/managers/schedule_batch.py", "ScheduleBatch.retract_decode", "self"),
    ("srt/server_args.py", "ServerArgs.check_server_args", "self"),
)  # fmt: skip

# (file, class, fields)
FIELDS = (
    (_CHECKER, "SchedulerInvariantChecker", ("full_tokens_per_layer", "swa_tokens_per_layer", "max_total_num_tokens")),
    (_STATS, "SchedulerPoolStatsObserver", ("full_tokens_per_layer", "swa_tokens_per_layer", "max_total_num_tokens")),
)

BODIES = (
    (_POOL, "MHATokenToKVPool._create_buffers_normal"),
    (_POOL, "MLATokenToKVPool._create_buffers"),
    (_BASE, "BaseTokenToKVPoolAllocator.merge_and_sort_free"),
    (_BASE, "BaseTokenToKVPoolAllocator.evict_to_free_tokens"),
    (_TOKEN, "TokenToKVPoolAllocator"),
    (_PAGED, "PagedTokenToKVPoolAllocator"),
    (_SWA, "SWATokenToKVPoolAllocator.alloc_extend"),
    (_BUDGET, "PrefillBudget"),
    (_CHECKER, "SchedulerInvariantChecker._check_full_pool"),
    (_STATS, "SchedulerPoolStatsObserver._get_token_info"),
    (_STATS, "SchedulerPoolStatsObserver._get_swa_token_info"),
    (_SCHEDULER, "Scheduler.flush_cache"),
    ("srt/plugins/hook_registry.py", "HookRegistry.apply_hooks"),
)


def fingerprints(folder: Path) -> dict[str, str]:
    """{function: fingerprint} of the bodies that vMem relies on, of the SGLang in `folder`."""
    source = Source(folder)
    return {path: fingerprint(source.find(file, path)) for file, path in BODIES}


def differences(folder: Path) -> Iterator[str]:
    """Signatures and fields of the SGLang in `folder` that are not as vMem needs them."""
    source = Source(folder)
    for file, path, wanted in SIGNATURES:
        node = source.find(file, path)
        if node is None or not hasattr(node, "args"):
            yield f"{path} is not in {file}"
        elif (found := parameters(node.args)) != wanted:
            yield f"{path} takes ({found}), not ({wanted})"
    for file, path, fields in FIELDS:
        node = source.find(file, path)
        names = {n.target.id for n in getattr(node, "body", ()) if isinstance(n, ast.AnnAssign)
                 and isinstance(n.target, ast.Name)}  # fmt: skip
        yield from (f"{path} has no field {name}" for name in fields if name not in names)


def unknown(folder: Path) -> list[str]:
    """Bodies that vMem relies on and that no release has that it was checked with."""
    return [path for path, found in fingerprints(folder).items() if found not in KNOWN.get(path, ())]


def installed() -> Path:
    """The folder of the SGLang that this process would import."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise Refused("VMEM_SGLANG=1: SGLang is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def release(version: str, strict: bool) -> str | None:
    """Check the installed SGLang. Returns a line to log, or None; raises `Refused`."""
    folder = installed()
    for difference in differences(folder):
        raise Refused(f"VMEM_SGLANG=1: vMem does not know SGLang {version}: {difference}; docs/sglang.md names the "
                      "releases that it runs on (or unset VMEM_SGLANG)")  # fmt: skip
    changed = unknown(folder)
    if not changed:
        return None
    what = f"vMem was not checked with SGLang {version}, where these have changed: {', '.join(changed)}"
    if strict:
        raise Refused(f"VMEM_SGLANG_STRICT=1: {what}")
    return f"{what}. It goes on, since the signatures are as it needs (VMEM_SGLANG_STRICT=1 refuses)"


def main(folders: list[str]) -> int:
    """Check the SGLang in each folder; returns the number of those that differ."""
    wrong = 0
    for name in folders:
        found, changed = list(differences(Path(name))), unknown(Path(name))
        wrong += bool(found or changed)
        print(name, "fits" if not found and not changed else "; ".join([*found, *(f"new: {c}" for c in changed)]))
        for path, value in fingerprints(Path(name)).items():
            print(f"    {path} {value}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
