"""Which of vLLM's layouts the KV cache gets.

In a layout with blocks outermost (its name begins with B), a block of all layers is one piece, so blocks that stay when
their neighbours leave hold few pages that they do not fill, and few pieces of device memory. With layers outermost,
which is vLLM's choice, each layer has its own piece. If that is whole pages, no page is shared, but a block's pages are
scattered over device memory, which goes back to the device in pieces of 2 MiB.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyvmem.vllm import geometry, settings


def preferred(names: Sequence[str], worker: Any) -> list[str]:
    """The layouts that every attention backend of a worker takes, in the order in which vLLM shall choose."""
    if settings.read().layout == "vllm" or os.environ.get("VLLM_KV_CACHE_LAYOUT"):
        return list(names)
    if worker.device.type == "cpu" and settings.read().layout == "slots" and names == ["LBHNC"]:
        return ["BLHNC"]  # of one group of layers, CPU_ATTN reads it, too
    if worker.device.type == "cpu":  # backends there offer every layout, and some read vLLM's own only
        return list(names)
    specs = list(geometry.specs_of(worker.model_runner.get_kv_cache_spec().values()))
    return order(names, [int(s.page_size_bytes) for s in specs])


def order(names: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """`names` with block-outermost layouts first, where all layers have parts of one size.

    sizes : bytes of each layer's part of a block.
    """
    if len(set(sizes)) != 1:  # packing pages of several sizes may take more of them
        return list(names)
    return sorted(names, key=lambda name: not name.startswith("B"))
