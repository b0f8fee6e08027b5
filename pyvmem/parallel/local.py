"""What each rank of a tensor-parallel cache answers for itself, because no decision of the ranks depends on it.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

import numpy.typing as npt
import torch

from pyvmem.core import Context
from pyvmem.kv.cache import KVCache, KVCacheOptions
from pyvmem.kv.types import GroupInfo, KVStats, Run, RunInfo, SlotInfo, TensorSpec


class LocalCalls:
    """The attributes and calls of `KVCache` that concern this rank's `cache` alone."""

    cache: KVCache

    # ---- what the cache is made of ---------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this rank's cache is closed."""
        return self.cache.closed

    @property
    def context(self) -> Context:
        """The context that provides this rank's memory."""
        return self.cache.context

    @property
    def options(self) -> KVCacheOptions:
        """The options of this rank's cache."""
        return self.cache.options

    @property
    def specs(self) -> list[TensorSpec]:
        """As in `KVCache`."""
        return self.cache.specs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """This rank's tensors, as in `KVCache`."""
        return self.cache.tensors

    @property
    def keys(self) -> list[torch.Tensor]:
        """This rank's keys, as in `KVCache`."""
        return self.cache.keys

    @property
    def values(self) -> list[torch.Tensor]:
        """This rank's values, as in `KVCache`."""
        return self.cache.values

    @property
    def slots(self) -> int:
        """As in `KVCache`."""
        return self.cache.slots

    @property
    def max_tokens(self) -> int:
        """As in `KVCache`."""
        return self.cache.max_tokens

    @property
    def page_size(self) -> int:
        """Bytes of a page of this rank's."""
        return self.cache.page_size

    @property
    def tile_rows(self) -> int:
        """As in `KVCacheOptions`."""
        return self.cache.tile_rows

    @property
    def same_slots(self) -> bool:
        """True."""
        return self.cache.same_slots

    @property
    def sharing(self) -> bool:
        """As in `KVCache`."""
        return self.cache.sharing

    def layout(self, tensor: SupportsIndex) -> tuple[int, int, int, int]:
        """As `KVCache.layout`."""
        return self.cache.layout(tensor)

    def flat(self, tensor: int) -> torch.Tensor:
        """As `KVCache.flat`."""
        return self.cache.flat(tensor)

    # ---- requests and steps ----------------------------------------------------------------------------------

    def expect(self, tokens: npt.ArrayLike, prefix_tokens: npt.ArrayLike | None = None) -> None:
        """As `KVCache.expect`."""
        self.cache.expect(tokens, prefix_tokens)

    def slot(self, slot: SupportsIndex) -> SlotInfo:
        """As `KVCache.slot`, of this rank."""
        return self.cache.slot(slot)

    def tokens(self, slots: Iterable[int]) -> list[int]:
        """As `KVCache.tokens`."""
        return self.cache.tokens(slots)

    def run(self, run: Run) -> RunInfo:
        """As `KVCache.run`, of this rank."""
        return self.cache.run(run)

    def swap_size(self, slot: SupportsIndex) -> int:
        """As `KVCache.swap_size`, of this rank."""
        return self.cache.swap_size(slot)

    def set_watermark(self, watermark: SupportsIndex | float) -> None:
        """As `KVCache.set_watermark`: the ranks may have different ones."""
        self.cache.set_watermark(watermark)

    def wait(self) -> None:
        """As `KVCache.wait`, for this rank's background thread."""
        self.cache.wait()

    @property
    def last_step(self) -> int:
        """As in `KVCache`: the same number on every rank."""
        return self.cache.last_step

    # ---- metrics ---------------------------------------------------------------------------------------------

    @property
    def step_maps(self) -> int:
        """As in `KVCache`, of this rank."""
        return self.cache.step_maps

    def stats(self) -> KVStats:
        """As `KVCache.stats`, of this rank."""
        return self.cache.stats()

    def groups(self) -> list[GroupInfo]:
        """As `KVCache.groups`, of this rank."""
        return self.cache.groups()

    def picture(self, path: str | os.PathLike[str] | None = None, *, slots: int = 32, title: str = "") -> str:
        """As `KVCache.picture`, of this rank."""
        return self.cache.picture(path, slots=slots, title=title)

    def metrics_prometheus(self, prefix: str = "pyvmem_kv_", labels: Mapping[str, Any] | None = None) -> str:
        """As `KVCache.metrics_prometheus`, of this rank."""
        return self.cache.metrics_prometheus(prefix, labels)
