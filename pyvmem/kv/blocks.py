"""Blocks: the names by which an engine's block table refers to pages of a KV cache (vmem_kv.h, "blocks").

SPDX-License-Identifier: MIT
"""

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pyvmem._checks import uint, uint32s
from pyvmem._ffi import ffi, lib
from pyvmem.errors import _check
from pyvmem.owned import no_index

if TYPE_CHECKING:
    from pyvmem.kv.cache import KVCache


def _numbers(name: str, values: npt.ArrayLike) -> tuple[Any, int]:
    array = uint32s(name, values)
    return ffi.from_buffer("uint32_t[]", array), array.size


class BlockNames:
    """Names 0 to `blocks` - 1 for the pages behind `tokens` rows of a slot, in all tensors of `cache`.

    Named pages stay until `drop`, even after their slot is freed. A new request can start with them (`attach`). Raises
    `ValueError` if `tokens` rows are not whole pages in each tensor, and `VmemError` (EOPNOTSUPP) if tensors have
    windows.
    """

    def __init__(self, cache: "KVCache", blocks: int, tokens: int) -> None:
        _check(lib.vmem_kv_blocks_init(cache._use(), uint("blocks", blocks, 32), uint("tokens", tokens, 32)))
        self._cache = cache
        self.blocks = blocks
        self.tokens = tokens

    def bind(self, slots: npt.ArrayLike, index: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        """Give the name ids[i] to the pages at block index[i] of slots[i]. All or nothing.

        The slot's last step must have asked for these pages. Raises `VmemError` (EEXIST) if a name is taken. The
        exception's `index` is that of the element at fault. The rows need not be written yet. Until another slot
        attaches them, the slot's request may also write them again, after a step back or a truncation: drop the name if
        that happens.
        """
        (of, n), (at, n_index), (names, n_ids) = (
            _numbers(name, values) for name, values in (("slots", slots), ("index", index), ("ids", ids))
        )
        if not n == n_index == n_ids:
            raise ValueError(f"slots, index and ids have {n}, {n_index} and {n_ids} elements")
        bad = no_index()
        _check(lib.vmem_kv_block_bind(self._cache._use(), of, at, names, n, bad), bad)

    def attach(self, slot: int, ids: npt.ArrayLike) -> None:
        """Start a newly allocated slot, which no kernel accesses, with these blocks.

        Its length becomes ``len(ids) * tokens``. One batch maps the pages at the slot, in addition to where they are
        mapped already. Kernels that write their rows may still be in flight, provided that kernels that read the rows
        in this slot run after them. Raises `VmemError` (ENODATA) if a name has no pages.
        """
        names, n = _numbers("ids", ids)
        bad = no_index()
        _check(lib.vmem_kv_block_attach(self._cache._use(), uint("slot", slot, 32), names, n, bad), bad)

    def compact(self) -> int:
        """Return unused device memory; returns the number of bytes.

        Where that frees more memory, pages that only names hold are moved closer together. Call it at idle times.
        """
        freed = ffi.new("uint64_t *")
        _check(lib.vmem_kv_reclaim(self._cache._use(), 0, lib.VMEM_KV_COMPACT, freed))
        return int(freed[0])

    def drop(self, ids: npt.ArrayLike) -> None:
        """Drop names, skipping any that are not taken. Pages without another holder are released."""
        names, n = _numbers("ids", ids)
        _check(lib.vmem_kv_block_drop(self._cache._use(), names, n))
