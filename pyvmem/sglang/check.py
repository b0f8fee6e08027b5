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
from pyvmem.sglang import doors
from pyvmem.sglang.fingerprints import KNOWN

_POOL, _SCHEDULER, _BASE, _TOKEN = doors._POOL, doors._SCHEDULER, doors._BASE, doors._TOKEN
_PAGED, _SWA = doors._PAGED, doors._SWA
_CHECKER = "srt/managers/scheduler_components/invariant_checker.py"
_STATS = "srt/managers/scheduler_components/pool_stats_observer.py"

# (file, function, parameters without annotations) of what vMem hooks, and of what it calls
SIGNATURES = (
    *((file, path, wanted) for file, path, wanted, _, _ in (*doors.ENGINE, *doors.EVERYWHERE)),
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
