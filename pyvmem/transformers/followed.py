"""Compares a release of transformers that was never tried with the newest tried one, where `VMemCache` relies on it.

Each function or class is known by a digest of its source, without comments and docstrings. A release in which all are
the same is accepted: transformers publishes one about every month, and its users need not wait for one of vMem.

``VMEM_TRANSFORMERS_FORCE=1 python -m pyvmem.transformers.followed`` prints the table of the release that is installed.

SPDX-License-Identifier: MIT
"""

import ast
import hashlib
from pathlib import Path

# Digests of the newest release that `make test-transformers-releases` has passed: {file: {function or class: digest}}.
FOLLOWED = {
    "cache_utils.py": {
        "CacheLayerMixin": "ff278b39", "DynamicLayer": "a88a0d50", "DynamicSlidingWindowLayer": "19efd5c9",
        "LinearAttentionCacheLayerMixin": "7c72d6b5", "LinearAttentionLayer": "90c257e2", "Cache": "a0e00208",
        "get_layer_types_and_kwargs": "5c88e409", "DynamicCache": "c2444092", "EncoderDecoderCache": "6fed43cf",
    },
    "masking_utils.py": {
        "and_masks": "caa920d3", "causal_mask_function": "6a453693", "sliding_window_overlay": "33c8562c",
        "sliding_window_causal_mask_function": "cddb5904", "prepare_padding_mask": "2dd96ab7",
        "_ignore_causal_mask_sdpa": "8e0a9615", "sdpa_mask": "1c982347", "eager_mask": "8acd2201",
        "_preprocess_mask_arguments": "de739c88", "create_causal_mask": "d623ad69",
        "create_bidirectional_mask": "dc5467d0", "create_sliding_window_causal_mask": "b3066af2",
        "create_chunked_causal_mask": "25da5e02",
    },
    "integrations/sdpa_attention.py": {
        "repeat_kv": "176d70bc", "sdpa_attention_forward": "f868235c",
    },
}  # fmt: skip


def digests(folder: Path) -> dict[str, dict[str, str]]:
    """The same table of the transformers in a folder, without what it lacks."""
    return {
        file: {
            node.name: _digest(node, source)
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in known
        }
        for file, known in FOLLOWED.items()
        for source in [(folder / file).read_text(encoding="utf-8")]
    }


def _digest(node: ast.FunctionDef | ast.ClassDef, source: str) -> str:
    skipped: set[int] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part) is not None:
            first = part.body[0]
            skipped.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    lines = source.splitlines()
    kept = (lines[n - 1].strip() for n in numbers if n not in skipped)
    text = "\n".join(line for line in kept if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def changes(folder: Path) -> list[str]:
    """The functions and classes that differ from the newest tried release."""
    found = digests(folder)
    return [name for file, known in FOLLOWED.items() for name in known if found[file].get(name) != known[name]]


if __name__ == "__main__":
    import pprint

    import transformers

    pprint.pprint(digests(Path(transformers.__file__).parent), width=120, sort_dicts=False)
