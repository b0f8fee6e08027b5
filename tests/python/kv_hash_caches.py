"""Caches with prefixes by hash, and prompts in them, for tests.

SPDX-License-Identifier: MIT
"""

import torch
from kv_caches import grouped

from pyvmem.kv.cache import KVCache, TensorSpec
from pyvmem.kv.prefix import block_hashes

PAGE = 65536
HALF = torch.float16
ALIKE = [TensorSpec(n, (8, 128), HALF) for n in "kv"]  # 32 rows to a page
MIXED = [
    TensorSpec("a", (8, 128), HALF),
    TensorSpec("b", (12, 128), HALF),  # pages hold no whole number of rows
    TensorSpec("w", (8, 128), HALF, window=70),
    TensorSpec("d", (8, 128), HALF, max_tokens=100),
]
STILL = {
    "generous": False,
    "eager": False,
    "overlap": False,
    "check": True,
    "name": None,
    "backend": "host",
    "page_size": PAGE,
}


def make(specs=ALIKE, slots=6, max_tokens=1000, pages=200, **options):
    return KVCache(specs, slots, max_tokens, pages * PAGE, **grouped({**STILL, **options}))


def serve(blocks, tokens, add=True):
    """Run a prompt: every row holds its token's number. Returns (slot, tokens that it had already)."""
    cache = blocks.cache
    hashes = block_hashes(tokens, blocks.block_tokens)
    slot, cached = blocks.alloc(len(tokens), hashes)
    assert slot is not None
    lengths = [0] * cache.slots
    lengths[slot] = len(tokens)
    assert cache.step(lengths)
    for tensor in cache.tensors:
        rows = tensor[slot, : len(tokens)]
        rows[cached:] = torch.tensor(tokens[cached:]).half().view(-1, 1, 1)
        assert torch.equal(rows[:, 0, 0], torch.tensor(tokens).half())
        assert torch.equal(rows[:, -1, -1], torch.tensor(tokens).half())
    if add:
        blocks.add(slot, hashes)
    return slot, cached


def known(blocks, tokens):
    return blocks.peek(block_hashes(tokens, blocks.block_tokens))
