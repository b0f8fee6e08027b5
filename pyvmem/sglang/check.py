"""Recognises releases of SGLang on which vMem cannot work: by `pyvmem.engine.sources`, and the fields that vMem reads.

``python -m pyvmem.sglang.check FOLDER`` checks the SGLang in a folder, and prints its fingerprints.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pyvmem.engine import sources
from pyvmem.engine.refuse import Refused
from pyvmem.sglang import hooks
from pyvmem.sglang.settings import SWITCH

_POOL, _SCHEDULER, _BASE, _TOKEN = hooks._POOL, hooks._SCHEDULER, hooks._BASE, hooks._TOKEN
_PAGED, _SWA = hooks._PAGED, hooks._SWA
_CHECKER = "srt/managers/scheduler_components/invariant_checker.py"
OLDEST = (0, 5, 21)
_STATS = "srt/managers/scheduler_components/pool_stats_observer.py"

# (file, function, parameters without annotations) of what vMem hooks, and of what it calls
SIGNATURES = (
    *((file, path, wanted) for file, path, wanted, _, _ in (*hooks.ENGINE, *hooks.EVERYWHERE)),
    (_BASE, "BaseTokenToKVPoolAllocator.merge_and_sort_free", "self"),
    (_TOKEN, "TokenToKVPoolAllocator.available_size", "self"),
    (_PAGED, "PagedTokenToKVPoolAllocator.available_size", "self"),
)

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
    ("srt/mem_cache/prefill_budget.py", "PrefillBudget"),
    (_CHECKER, "SchedulerInvariantChecker._check_full_pool"),
    (_STATS, "SchedulerPoolStatsObserver._get_token_info"),
    (_STATS, "SchedulerPoolStatsObserver._get_swa_token_info"),
    (_SCHEDULER, "Scheduler.flush_cache"),
    ("srt/plugins/hook_registry.py", "HookRegistry.apply_hooks"),
)

# Fingerprints of these that vMem was checked with: of releases 0.5.21, 0.5.22 and 0.5.23.
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


def differences(folder: Path) -> Iterator[str]:
    """Signatures and fields of the SGLang in `folder` that are not as vMem needs them."""
    source = sources.Source(folder)
    yield from sources.other_signatures(source, SIGNATURES)
    for file, path, fields in FIELDS:
        node = source.find(file, path)
        names = {n.target.id for n in getattr(node, "body", ()) if isinstance(n, ast.AnnAssign)
                 and isinstance(n.target, ast.Name)}  # fmt: skip
        yield from (f"{path} has no field {name}" for name in fields if name not in names)


def installed() -> Path:
    """The folder of the SGLang that this process would import."""
    return sources.installed("sglang", "SGLang", SWITCH)


def release(version: str, strict: bool) -> str | None:
    """Check the installed SGLang. Returns a line to log, or None; raises `Refused`."""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise Refused(f"VMEM_SGLANG=1: SGLang {version} is older than {'.'.join(map(str, OLDEST))}, the first whose "
                      "scheduler asks an object (PrefillBudget) whether a request may begin, and vMem answers for it; "
                      "update SGLang (or unset VMEM_SGLANG)")  # fmt: skip
    folder = installed()
    changed = sources.unknown(sources.fingerprints(folder, BODIES), KNOWN)
    return sources.verdict(f"SGLang {version}", SWITCH, differences(folder), changed, strict)


if __name__ == "__main__":
    sys.exit(sources.main(sys.argv[1:], differences, BODIES, KNOWN))
