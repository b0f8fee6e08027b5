"""transformers' continuous batching on vMem: a sector of its paged cache has memory only while requests use it.

transformers cuts one tensor into sectors, which its allocators ask for and return whole. A sector is a numbered block
of a virtual tensor here. The rest is transformers' own: scheduler, block tables, prefix sharing, attention.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as _cache_module
from transformers.generation.continuous_batching import continuous_api as _api_module

from pyvmem.blocks import BlockRange, Blocks
from pyvmem.core import Context
from pyvmem.errors import OutOfMemory
from pyvmem.kv.pool import KVPool
from pyvmem.tensor import VirtualTensor

_api: Any = _api_module
CachePool: Any = getattr(_cache_module, "CachePool", None)  # sectors are new in 5.24
PagedAttentionCache: Any = getattr(_cache_module, "PagedAttentionCache", None)
KEEP = 2  # free sectors that stay backed for the next request
WAIT, POLL = 10.0, 0.005  # seconds in which other members of a pool must give, if no request runs; and between looks


class _Place:
    """Where the sectors of a cache are. transformers copies the configuration that has it; it stays the same one."""

    def __init__(self, pool: KVPool | None, name: str, context: Context | None) -> None:
        self.pool, self.name, self.context = pool, name, context

    def __deepcopy__(self, memo: Any) -> _Place:
        return self


def batching_on_vmem(
    config: ContinuousBatchingConfig | None = None,
    *,
    pool: KVPool | None = None,
    name: str = "paged",
    context: Context | None = None,
) -> ContinuousBatchingConfig:
    """Have continuous batching with this configuration keep its cache on vMem; returns the configuration.

    ::

        config = batching_on_vmem(ContinuousBatchingConfig(page_size=32))
        model.generate_batch(prompts, continuous_batching_config=config)

    Parameters
    ----------
    config : ContinuousBatchingConfig, optional
        ``num_blocks``, or else ``max_memory_percent``, is the most that the cache may take.
    pool : KVPool, optional
        The cache becomes a member with a minimum of 0. A request waits while the others need the memory.
    name : str
        Of the pool's member.
    context : Context, optional
        By default a new one, on the model's device.

    Raises
    ------
    ImportError
        transformers is older than 5.24, whose paged cache has no sectors.
    """
    if CachePool is None:
        raise ImportError("continuous batching on vMem needs transformers 5.24 or newer, whose cache has sectors")
    config = ContinuousBatchingConfig() if config is None else config
    config._vmem = _Place(pool, name, context)  # type: ignore[attr-defined]
    _api.PagedAttentionCache = _cache
    return config


def _cache(config: Any, continuous_batching_config: Any, *args: Any, **kwargs: Any) -> Any:
    """What transformers calls to make a cache: its own, unless the configuration says otherwise."""
    kind = VMemPagedCache if hasattr(continuous_batching_config, "_vmem") else PagedAttentionCache
    return kind(config, continuous_batching_config, *args, **kwargs)


class _Tensor(TorchFunctionMode):
    """The cache's one ``torch.zeros`` of bytes becomes a virtual tensor with no memory behind it."""

    def __init__(self, cache: Any, place: _Place) -> None:
        super().__init__()
        self._cache, self._place = cache, place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.uint8 and len(args) == 1:
            return self._cache._make(args[0], torch.device(kwargs.get("device") or "cpu"), self._place)
        return func(*args, **kwargs)


class _Sectors(CachePool or object):  # type: ignore[misc]
    """The free sectors of a cache. Those at the end of the list are backed, and taken first."""

    blocks: Blocks
    cuda: bool
    sector: int  # bytes of one, in a pool
    sure = False  # whether only sectors that are backed count as free

    def start(self, blocks: Blocks, cuda: bool, sector: int) -> None:
        self.blocks, self.cuda, self.sector = blocks, cuda, sector
        self.spare: list[int] = []
        self.blocks.back(range(self.num_reserved_sectors))  # which padding reads and writes

    @property
    def num_free_sectors(self) -> int:
        return len(self.spare) if self.sure else len(self.free_sectors)

    @contextlib.contextmanager
    def ensured(self, n: int) -> Iterator[None]:
        """A block in which sectors count as free if they are backed: `n` of them, if there is memory."""
        self._back(n - len(self.spare))
        self.sure = True
        try:
            yield
        finally:
            self.sure = False

    def _back(self, n: int) -> None:
        left = len(self.free_sectors) - len(self.spare)
        some = self.free_sectors[max(left - n, 0) : left] if n > 0 else []
        if not some:
            return
        end, tried = time.monotonic() + WAIT, False
        while True:
            try:
                if self.sector:
                    self.blocks.ask(len(some) * self.sector)
                self.blocks.back(some)
                break
            except OutOfMemory:
                # If requests run, theirs will come. transformers ends all of them if none can.
                if tried and (len(self.free_sectors) < self.num_sectors or time.monotonic() >= end):
                    return
            self.blocks.flush()  # what left a moment ago
            tried = True
            time.sleep(POLL)
        self.spare = some + self.spare

    def allocate_sector(self, index: int) -> None:
        if not self.spare:
            self.blocks.back(self.free_sectors[-1:])
        else:
            self.spare.pop()
        super().allocate_sector(index)

    def try_to_free_sectors(self) -> None:
        before = len(self.free_sectors)
        super().try_to_free_sectors()
        self.spare += self.free_sectors[before:]
        self._give(self.spare[:-KEEP])

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        super().free_blocks(index, block_ids)
        self.try_to_free_sectors()

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "blocks"):
            self.spare = []
            self._give(self.free_sectors)

    def _give(self, sectors: list[int]) -> None:
        """Take the memory of free sectors. Kernels of several streams may still read them."""
        if not sectors:
            return
        if self.cuda:
            torch.cuda.synchronize()
        self.blocks.unback(sectors)
        self.spare = self.spare[len(sectors) :]


class VMemPagedCache(PagedAttentionCache or object):  # type: ignore[misc]
    """A ``PagedAttentionCache`` in a virtual tensor. `batching_on_vmem` has transformers make one.

    Attributes
    ----------
    blocks : Blocks
        One for each sector; `Blocks.stats` tells what they hold.
    """

    def __init__(self, config: Any, continuous_batching_config: Any, *args: Any, **kwargs: Any) -> None:
        place: _Place = continuous_batching_config._vmem
        with _Tensor(self, place):
            super().__init__(config, continuous_batching_config, *args, **kwargs)
        self.pool.__class__ = _Sectors  # the allocators have it already
        self.pool.start(self.blocks, self._virtual.tensor.is_cuda, self.bytes_per_sector if place.pool else 0)

    def _make(self, size: int, device: torch.device, place: _Place) -> torch.Tensor:
        sector = self.bytes_per_sector
        context = place.context
        if context is None:
            context = Context(device=device.index or 0) if device.type == "cuda" else Context("host")
        self._virtual = VirtualTensor((size,), torch.uint8, device, zero=True, context=context)
        self.blocks = Blocks(self._virtual, [BlockRange(offset=0, bytes=sector, stride=sector)], size // sector)
        if place.pool is not None:
            self.blocks.join(place.pool, name=place.name)
        return self._virtual.tensor

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        if dry_run:
            return bool(super().can_store_request_tokens(state, request_len, dry_run))
        asked = state.request_id, state.current_len(), request_len
        with self.pool.ensured(sum(max(a.needs_new_sectors(*asked), 0) for a in self.cache_allocators.values())):
            return bool(super().can_store_request_tokens(state, request_len))

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        blocks = sum(a.count_non_shareable_blocks(src_state.request_id, src_state.current_len())
                     for a in self.cache_allocators.values())  # fmt: skip
        with self.pool.ensured(blocks * len(dst_req_ids)):
            forked: list[str] = super().prepare_fork_request(src_state, dst_req_ids, copy_src_and_dst)
        return forked

    def close(self) -> None:
        """Give all memory back. The cache must not be used afterwards."""
        self.blocks.close()
