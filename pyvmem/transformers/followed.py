"""Compares a release of transformers that was never tried with the functions that `VMemCache` and "vmem" rely on.

Each function is known by the digests of its source, without comments and docstrings, in the releases that were tried
(`known.py`). A release in which all of them are known is accepted: transformers publishes one about every month, and
its users need not wait for one of vMem.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from pyvmem.transformers.known import DIGESTS

# File, and the functions and classes in it. Of a class, every method.
FOLLOWED = {
    "cache_utils.py": (
        "CacheLayerMixin", "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionCacheLayerMixin",
        "LinearAttentionLayer", "Cache", "get_layer_types_and_kwargs", "DynamicCache", "EncoderDecoderCache",
    ),
    "masking_utils.py": (
        "causal_mask_function", "and_masks", "sliding_window_overlay", "sliding_window_causal_mask_function",
        "prepare_padding_mask", "_ignore_causal_mask_sdpa", "sdpa_mask", "eager_mask", "_preprocess_mask_arguments",
        "create_causal_mask", "create_bidirectional_mask", "create_sliding_window_causal_mask",
        "create_chunked_causal_mask",
    ),
    "integrations/sdpa_attention.py": ("repeat_kv", "sdpa_attention_forward"),
}  # fmt: skip


def _functions(source: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name, digest) of each function."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            whole = isinstance(node, ast.FunctionDef)
            for each in [node] if whole else node.body:
                if isinstance(each, ast.FunctionDef):
                    yield node.name if whole else f"{node.name}.{each.name}", _digest(each, lines)


def _digest(function: ast.FunctionDef, lines: list[str]) -> str:
    first = function.body[0]
    skipped: range = range(0)
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        skipped = range(first.lineno, (first.end_lineno or first.lineno) + 1)
    numbers = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    kept = (lines[n - 1].strip() for n in numbers if n not in skipped)
    text = "\n".join(line for line in kept if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def digests(folder: Path) -> dict[str, str]:
    """Of every followed function of the transformers in a folder: its name and digest."""
    found: dict[str, str] = {}
    for file, names in FOLLOWED.items():
        found.update(_functions((folder / file).read_text(encoding="utf-8"), names))
    return found


def changes(folder: Path) -> list[str]:
    """The functions that differ from every tried release: "Cache.update", "Cache.new (new)", "sdpa_mask (gone)"."""
    found = digests(folder)
    changed = [
        name if name in DIGESTS else f"{name} (new)"
        for name, digest in found.items()
        if digest not in DIGESTS.get(name, ())
    ]
    # A function that some tried release lacks may be absent from this one as well.
    return changed + [f"{name} (gone)" for name, known in DIGESTS.items() if name not in found and "" not in known]
