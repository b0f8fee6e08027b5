"""Blocks: names that an engine's block table has for pages of a KV cache (vmem_kv.h, "blocks").

SPDX-License-Identifier: MIT
"""

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pyvmem._checks import uint, uint32s
from pyvmem._ffi import ffi, lib
from pyvmem.errors import _check

if TYPE_CHECKING:
    from pyvmem.kv import KVCache


def _numbers(name: str, values: npt.ArrayLike) -> tuple[Any, int]:
    array = uint32s(name, values)
    return ffi.from_buffer("uint32_t[]", array), array.size


class BlockNames:
    """Names 0 to `blocks` - 1 for the pages behind `tokens` rows of a slot, in all tensors of `cache`.

    Named pages stay until `drop`, whatever becomes of the slot, and a new request can start with them (`attach`).
    Raises `ValueError` where `tokens` rows are not whole pages in each tensor, `VmemError` (EOPNOTSUPP) where tensors
    have windows.
    """

    def __init__(self, cache: "KVCache", blocks: int, tokens: int) -> None:
        _check(lib.vmem_kv_blocks_init(cache._use(), uint("blocks", blocks, 32), uint("tokens", tokens, 32)))
        self._cache = cache
        self.blocks = blocks
        self.tokens = tokens

    def bind(self, slots: npt.ArrayLike, index: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        """ids[i] names the pages at block index[i] of slots[i], which the slot's last step asked for. All or nothing.

        Raises `VmemError` (EEXIST) when a name is taken.
        """
        (of, n), (at, n_index), (names, n_ids) = (
            _numbers(name, values) for name, values in (("slots", slots), ("index", index), ("ids", ids))
        )
        if not n == n_index == n_ids:
            raise ValueError(f"slots, index and ids have {n}, {n_index} and {n_ids} elements")
        _check(lib.vmem_kv_block_bind(self._cache._use(), of, at, names, n, ffi.NULL))

    def attach(self, slot: int, ids: npt.ArrayLike) -> None:
        """Quiet. The newly allocated slot starts with these blocks; its length becomes ``len(ids) * tokens``.

        The pages are mapped at the slot a second time, in one batch. Raises `VmemError` (ENODATA) when a name has no
        pages.
        """
        names, n = _numbers("ids", ids)
        _check(lib.vmem_kv_block_attach(self._cache._use(), uint("slot", slot, 32), names, n, ffi.NULL))

    def compact(self) -> int:
        """Give unused device memory back, moving pages that only names hold close together where that gives more.

        For idle times. Returns the bytes of device memory that went back.
        """
        freed = ffi.new("uint64_t *")
        _check(lib.vmem_kv_block_compact(self._cache._use(), freed))
        return int(freed[0])

    def drop(self, ids: npt.ArrayLike) -> None:
        """Drop names; those that are not taken are skipped. Pages without another holder are released."""
        names, n = _numbers("ids", ids)
        _check(lib.vmem_kv_block_drop(self._cache._use(), names, n))
