"""Prefixes that requests share, and requests swapped out to CPU memory.

SPDX-License-Identifier: MIT
"""

import errno
import weakref
from typing import Any, SupportsIndex

import torch

from pyvmem._checks import uint
from pyvmem._ffi import ffi, lib
from pyvmem.errors import InvalidArgument, _check, structure
from pyvmem.kv_base import KVBase
from pyvmem.kv_types import Prefix


class KVSharing(KVBase):
    """The prefixes and the swapped requests of a KV cache."""

    tensors: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self._swapped: dict[int, torch.Tensor] = {}
        self._stop_copying: Any = None

    # ---- prefixes --------------------------------------------------------------------------------------------

    def save_prefix(self, slot: SupportsIndex, tokens: SupportsIndex) -> Prefix:
        """Save the slot's first `tokens` rows for other requests. Returns a `Prefix`.

        Kernels in flight may still be writing the rows: see `attach_prefix`.
        """
        prefix = ffi.new("uint64_t *")
        slot, tokens = uint("slot", slot, 32), uint("tokens", tokens, 32)
        _check(lib.vmem_kv_prefix_save(self._use(), slot, tokens, prefix))
        info = self._prefix_info(prefix[0])
        return Prefix(prefix[0], info.tokens, info.min_tokens)

    def _prefix_info(self, id: int) -> Any:
        info = structure("vmem_kv_prefix_info")
        _check(lib.vmem_kv_prefix_query(self._use(), id, info))
        return info

    @staticmethod
    def _of_prefix(prefix: Prefix, tokens: SupportsIndex | None) -> tuple[int, int]:
        if not isinstance(prefix, Prefix):
            raise TypeError(f"prefix must be a Prefix, not {prefix!r}")
        return prefix.id, prefix.tokens if tokens is None else uint("tokens", tokens, 32)

    def prefix_pages(self, prefix: Prefix) -> tuple[int, int]:
        """Return (pages held, pages without another holder). Dropping the prefix frees the latter."""
        info = self._prefix_info(self._of_prefix(prefix, None)[0])
        return info.pages, info.own_pages

    def attach_prefix(self, prefix: Prefix, slot: SupportsIndex, tokens: SupportsIndex | None = None) -> int:
        """Start a newly allocated slot with the prefix's first `tokens` rows (by default, all of them).

        Full pages are mapped, not copied. Kernels that write their rows may still be in flight, provided that kernels
        that read the rows in this slot run after them. Rows in a partial last page are copied, so they must have been
        written. Returns 0, or -1 as `step` does. Raises `VmemError` (ENODATA) if a tensor with a window no longer has
        the rows that the next token reads.
        """
        id, tokens = self._of_prefix(prefix, tokens)
        if self._events:
            self._poll()
        rc = lib.pv_kv_attach(self._use(), id, uint("slot", slot, 32), tokens)
        return self._short(rc) if rc else 0

    def check_attach(self, prefix: Prefix, tokens: SupportsIndex | None = None) -> int:
        """Return 0 if `attach_prefix` would find memory, or -1 as `step` does."""
        id, tokens = self._of_prefix(prefix, tokens)
        if self._events:
            self._poll()
        rc = lib.pv_kv_attach_check(self._use(), id, tokens)
        return self._short(rc) if rc else 0

    def drop_prefix(self, prefix: Prefix) -> None:
        """Drop a prefix. Pages without another holder are released."""
        _check(lib.vmem_kv_prefix_drop(self._use(), self._of_prefix(prefix, None)[0]))

    # ---- swapping -------------------------------------------------------------------------------------------

    def swap_out(self, slot: SupportsIndex, after: Any = None) -> None:
        """Copy the slot's rows to CPU memory and release its pages; the slot stays taken.

        Quiet, unless `after` is given, as in `free_reqid`. The call then returns at once, and the rows are copied when
        the kernels up to that point have ended, by the background thread if the cache has one (`overlap`). Until all
        rows are copied, the slot's state is "swapping", and `swap_in` takes it back without a copy. Then the state is
        "swapped". Once the kernels have ended, the pages count as free: a step that finds no others copies the rest
        itself.

        For a cache on a GPU, the CPU memory is pinned.
        """
        kv, slot, size = self._use(), uint("slot", slot, 32), ffi.new("uint64_t *")
        number = 0 if after is None else self._fence(after)
        _check(lib.vmem_kv_swap_size(kv, slot, size))
        if slot in self._swapped:
            raise InvalidArgument(errno.EINVAL, f"slot {slot} is swapped out, or being swapped out")
        host = torch.empty(size[0], dtype=torch.uint8, pin_memory=self.tensors[0].is_cuda)
        data = ffi.cast("void *", host.data_ptr())
        if after is None:
            _check(lib.vmem_kv_swap_out(kv, slot, data, size[0]))
            self._swapped[slot] = host
            return
        if self._stop_copying is None:  # a view of a tensor may outlive the cache and keep the background thread alive
            self._stop_copying = weakref.finalize(self, lib.pv_kv_close, kv, 0)
        self._swapped[slot] = host
        try:
            _check(lib.vmem_kv_swap_out_after(kv, slot, data, size[0], number))
        except Exception:
            del self._swapped[slot]
            raise
        self._watch(after, number)

    def swap_in(self, slot: SupportsIndex) -> int:
        """Copy a swapped slot back to the same addresses. Returns 0, or -1 as `step` does."""
        kv, slot = self._use(), uint("slot", slot, 32)
        host = self._swapped.get(slot)
        if host is None:
            raise ValueError(f"slot {slot} is not swapped out")
        if self._events:
            self._poll()
        data = ffi.cast("void *", host.data_ptr())
        rc = lib.pv_kv_swap_in(kv, slot, data, host.numel())
        if rc:
            return self._short(rc)
        del self._swapped[slot]
        return 0

    def check_swap_in(self, slot: SupportsIndex) -> int:
        """Return 0 if `swap_in` would find memory, or -1 as `step` does."""
        if self._events:
            self._poll()
        rc = lib.pv_kv_swap_check(self._use(), uint("slot", slot, 32))
        return self._short(rc) if rc else 0
