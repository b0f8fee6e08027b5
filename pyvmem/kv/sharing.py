"""Prefixes that requests share, and requests swapped out to CPU memory.

SPDX-License-Identifier: MIT
"""

import errno
import weakref
from typing import Any, SupportsIndex

import torch

from pyvmem._checks import shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.errors import InvalidArgument, _check, structure
from pyvmem.kv.base import KVBase
from pyvmem.kv.types import Prefix


class KVSharing(KVBase):
    """The prefixes and the swapped requests of a KV cache."""

    tensors: list[torch.Tensor]
    _pinned: bool  # whether CPU memory for swapped rows is pinned

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
        return self._answer(lib.pv_kv_attach(self._ready(), id, uint("slot", slot, 32), tokens))

    def check_attach(self, prefix: Prefix, tokens: SupportsIndex | None = None) -> int:
        """Return 0 if `attach_prefix` would find memory, or -1 as `step` does."""
        id, tokens = self._of_prefix(prefix, tokens)
        return self._answer(lib.pv_kv_attach_check(self._ready(), id, tokens))

    def drop_prefix(self, prefix: Prefix) -> None:
        """Drop a prefix. Pages without another holder are released."""
        _check(lib.vmem_kv_prefix_drop(self._use(), self._of_prefix(prefix, None)[0]))

    # ---- swapping -------------------------------------------------------------------------------------------

    def swap_size(self, slot: SupportsIndex) -> int:
        """Return the bytes of CPU memory that `swap_out` needs for the slot as it is now."""
        size = ffi.new("uint64_t *")
        _check(lib.vmem_kv_swap_size(self._use(), uint("slot", slot, 32), size))
        return int(size[0])

    def _swap_memory(self, slot: int, size: int, host: torch.Tensor | None) -> torch.Tensor:
        """CPU memory for the slot's rows: the caller's if it can be used."""
        pinned = self._pinned
        if host is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        if not isinstance(host, torch.Tensor):
            raise TypeError(f"host must be a CPU tensor, not {shown(host)}")
        wrong = None
        if host.device.type != "cpu":
            wrong = f"is on {host.device}, not on the CPU"
        elif host.layout != torch.strided or not host.is_contiguous():
            wrong = "is not contiguous"
        elif host.nbytes < size:
            wrong = f"has {host.nbytes} bytes: slot {slot} needs {size}"
        elif pinned and not host.is_pinned():
            wrong = "is not pinned (torch.empty(..., pin_memory=True))"
        begin = 0 if wrong else host.data_ptr()
        for other, taken in () if wrong else self._swapped.copy().items():  # other threads swap, too
            if begin < taken.data_ptr() + taken.nbytes and taken.data_ptr() < begin + size:
                wrong = f"overlaps the memory of slot {other}, which is swapped out"
        if wrong:
            raise InvalidArgument(errno.EINVAL, f"host {wrong}")
        return host.detach().view(-1).view(torch.uint8)[:size]

    def swap_out(self, slot: SupportsIndex, after: Any = None, host: torch.Tensor | None = None) -> None:
        """Copy the slot's rows to CPU memory and release its pages; the slot stays taken.

        Quiet, unless `after` is given, as in `free_reqid`. The call then returns at once, and the rows are copied when
        the kernels up to that point have ended, by the background thread if the cache has one (`overlap`). Until all
        rows are copied, the slot's state is "swapping", and `swap_in` takes it back without a copy. Then the state is
        "swapped". Once the kernels have ended, the pages count as free: a step that finds no others copies the rest
        itself.

        The CPU memory is allocated, pinned for a cache on a GPU, which may take milliseconds. `host` avoids that: a
        contiguous CPU tensor of `swap_size` bytes or more, which must be pinned for a cache on a GPU. The cache keeps a
        reference, and nobody else may write to it until the request has been swapped in or has ended.
        """
        kv, slot = self._use(), uint("slot", slot, 32)
        number = 0 if after is None else self._fence(after)
        size = self.swap_size(slot)
        if slot in self._swapped:
            raise InvalidArgument(errno.EINVAL, f"slot {slot} is swapped out, or being swapped out")
        memory = self._swap_memory(slot, size, host)
        data = ffi.cast("void *", memory.data_ptr())
        if after is None:
            _check(lib.vmem_kv_swap_out(kv, slot, data, size))
            self._swapped[slot] = memory
            return
        if self._stop_copying is None:  # a view of a tensor may outlive the cache and keep the background thread alive
            self._stop_copying = weakref.finalize(self, lib.pv_kv_close, kv, 0)
        self._swapped[slot] = memory
        try:
            _check(lib.vmem_kv_swap_out_after(kv, slot, data, size, number))
        except Exception:
            self._swapped.pop(slot, None)  # close() in another thread may have taken it
            raise
        self._watch(after, number)

    def swap_in(self, slot: SupportsIndex) -> int:
        """Copy a swapped slot back to the same addresses. Returns 0, or -1 as `step` does."""
        kv, slot = self._ready(), uint("slot", slot, 32)
        host = self._swapped.get(slot)
        if host is None:
            raise ValueError(f"slot {slot} is not swapped out")
        data = ffi.cast("void *", host.data_ptr())
        if self._answer(lib.pv_kv_swap_in(kv, slot, data, host.numel())):
            return -1
        self._swapped.pop(slot, None)  # close() in another thread may have taken it
        return 0

    def check_swap_in(self, slot: SupportsIndex) -> int:
        """Return 0 if `swap_in` would find memory, or -1 as `step` does."""
        return self._answer(lib.pv_kv_swap_check(self._ready(), uint("slot", slot, 32)))
