"""The place of each block in the one allocation that holds vLLM's KV cache, and the choice among vLLM's layouts.

vLLM places layer ``l`` of block ``b`` at ``offset + l * layer_stride + b * block_stride`` (``KVCacheTensor``). That
covers every kind of layer: full and latent attention, windows, states of Mamba, drafts. Groups of layers overlay each
other, so a block's bytes are those of all groups, whichever of them uses it.

In a layout with blocks outermost (its name begins with B), a block of all layers is one piece. So blocks that stay when
their neighbours leave hold few pages that they do not fill, and few pieces of device memory. With layers outermost,
which is vLLM's choice, each layer has its own piece. If that is whole pages, no page is shared, but a block's pages are
scattered over device memory, which goes back to the device in pieces of 2 MiB.

This module does not import vLLM: the configuration is vLLM's KVCacheConfig.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyvmem.blocks import BlockRange
from pyvmem.engine.memory import in_one_piece
from pyvmem.vllm import plugin

UNEVEN, PADDING = 80 << 10, 512  # see `spread`


def _layer_bytes(config: Any, tensor: Any) -> int:
    """Bytes of one layer's part of a block, without padding to `block_stride`."""
    layer = tensor.layers[0]
    group = next(g for g in config.kv_cache_groups if layer in g.layer_names)
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    return int((inner[layer] if inner else spec).page_size_bytes)


def specs_of(specs: Iterable[Any]) -> Iterator[Any]:
    """vLLM's KVCacheSpecs of layers, of which some share one of a group."""
    for spec in specs:
        inner = getattr(spec, "kv_cache_specs", None)
        yield from specs_of(inner.values()) if inner else [spec]


def ranges_of(config: Any) -> list[BlockRange]:
    """The parts of a block for each KVCacheTensor; tensors in host memory are left out."""
    found = []
    for tensor in config.kv_cache_tensors:
        if getattr(tensor, "host_resident", False):
            continue
        size, layers = _layer_bytes(config, tensor), len(tensor.layers)
        if tensor.layer_stride == size:  # the layers of a block are adjacent
            found.append(BlockRange(tensor.offset, size * layers, tensor.block_stride))
        else:
            found.append(BlockRange(tensor.offset, size, tensor.block_stride, layers, tensor.layer_stride))
    return list(dict.fromkeys(found))


def spread(config: Any) -> None:
    """Put some unused bytes after each block if the distance of blocks overuses a part of the device's memory.

    A GPU spreads its addresses over the stacks of its memory, five on an H100. If blocks are a multiple of `UNEVEN`
    apart, what attention reads of a layer begins in the same stack in every block. That stack then has more of it than
    the others. On an H100, reading 64 KiB of each block took 1.23 times as long with 5, 10 or 15 layers in a block. It
    took no longer with other numbers of layers from 3 to 16, or with 512 bytes after each block. On an H200, all took
    equally long. The configuration is changed in place, before vLLM allocates its KV cache.
    """
    ranges = ranges_of(config)
    stride = ranges[0].stride if ranges else 1
    if stride % UNEVEN or not in_one_piece(ranges):
        return
    specs = list(specs_of(group.kv_cache_spec for group in config.kv_cache_groups))
    rows = {s.page_size_bytes // s.block_size for s in specs if s.page_size_bytes % s.block_size == 0}  # else: states
    odd = {row for row in rows if row % PADDING and PADDING % row}  # of latent attention, which may count in rows
    if len(odd) > 1 or any(row % 16 for row in odd) or any(getattr(s, "block_stride_alignment", None) for s in specs):
        return  # some kernel relies on the distance
    for tensor in config.kv_cache_tensors:
        tensor.block_stride = stride + max(odd, default=PADDING)
        tensor.size = config.num_blocks * tensor.block_stride


def bytes_of(config: Any) -> int:
    """Bytes of the allocation that holds every block."""
    return int(config.kv_cache_tensors[0].size) if config.kv_cache_tensors else 0


def preferred(names: Sequence[str], worker: Any) -> list[str]:
    """The layouts that every attention backend of a worker takes, in the order in which vLLM shall choose."""
    if plugin.settings().layout == "vllm" or os.environ.get("VLLM_KV_CACHE_LAYOUT"):
        return list(names)
    if worker.device.type == "cpu":  # backends there offer every layout, and some read vLLM's own only
        return list(names)
    specs = list(specs_of(worker.model_runner.get_kv_cache_spec().values()))
    copied = worker.vllm_config.kv_transfer_config is not None
    return order(names, [int(s.page_size_bytes) for s in specs], copied)


def order(names: Sequence[str], sizes: Sequence[int], copied: bool = False) -> list[str]:
    """`names` with block-outermost layouts first, where all layers have parts of one size.

    sizes : bytes of each layer's part of a block. copied: whether a connector copies blocks. It prefers layers
        outermost, where each layer of a block is a copy of its own, so such layouts are then left out.
    """
    if len(set(sizes)) != 1:  # packing pages of several sizes may take more of them
        return list(names)
    whole = [name for name in names if name.startswith("B")]
    return whole if whole and copied else sorted(names, key=lambda name: name not in whole)
