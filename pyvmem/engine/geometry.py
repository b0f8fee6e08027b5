"""The pages under an engine's blocks: their size, and which blocks share one.

SPDX-License-Identifier: MIT
"""

import math
from collections.abc import Collection, Sequence

from pyvmem.blocks import BlockRange

PAGE = 2 << 20  # bytes of a page, if nothing else is set


def in_one_piece(ranges: Sequence[BlockRange]) -> bool:
    """Whether a block of all layers is one piece of memory, and the next block the next piece."""
    first = min(r.offset for r in ranges)
    end = max(r.offset + (r.layers - 1) * r.layer_stride + r.bytes for r in ranges)
    return len({r.stride for r in ranges}) == 1 and end - first <= ranges[0].stride


def page_size(ranges: Sequence[BlockRange], sizes: Collection[int]) -> int:
    """The page size for blocks, of those that the backend has.

    For blocks in one piece it is at most 2 MiB: the device finds the memory of few, large pages faster, and a request's
    blocks are mostly neighbours, which share pages. Where the layers are apart, a page of one layer would be shared by
    many blocks, so it is the largest of which every part of a block is a whole number; else the smallest.
    """
    if in_one_piece(ranges):
        return max((size for size in sizes if size <= PAGE), default=min(sizes))
    parts = math.gcd(*(n for r in ranges for n in (r.offset, r.bytes, r.stride, r.layer_stride)))
    return max((size for size in sizes if parts % size == 0), default=min(sizes))


def span(ranges: Sequence[BlockRange], page: int, block: int) -> int:
    """Bytes of the blocks, each of `block` bytes, that share a page of `page` bytes, or a page of each layer."""
    return page * block // min(r.stride for r in ranges)


def bytes_under(blocks: Collection[int], ranges: Sequence[BlockRange], page: int) -> int:
    """Bytes of the pages under some blocks."""
    parts = (
        (r.offset + layer * r.layer_stride + block * r.stride, r.bytes)
        for r in ranges for layer in range(r.layers) for block in blocks
    )  # fmt: skip
    return page * len({i for at, size in parts for i in range(at // page, -(-(at + size) // page))})
