"""One copy of memory that several processes read: addresses for it, and descriptors that keep it (vmem_common.h).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from typing import SupportsIndex

from pyvmem._checks import flag, uint
from pyvmem._ffi import ffi, lib
from pyvmem.core import Context
from pyvmem.errors import _check
from pyvmem.owned import _check_context, _Owned

__all__ = ["Common"]


class Common(_Owned):
    """Addresses for common memory: `addr`, and `parts` parts of `part_bytes` each, none of which is mapped at first.

    Closing it, or dropping the last reference, unmaps everything when the last tensor over it is gone and all kernels
    of the device have ended.

    Parameters
    ----------
    context : Context
    part_bytes : int
        A multiple of 2 MiB.
    parts : int

    Raises
    ------
    InvalidArgument
        An argument is out of range; the text names it.
    VmemError
        As libvmem's calls have it. EEXIST: the part is mapped already.
    """

    _what = "common memory"

    def __init__(self, context: Context, part_bytes: SupportsIndex, parts: SupportsIndex) -> None:
        _check_context(context)
        self.part_bytes, self.parts = uint("part_bytes", part_bytes), uint("parts", parts, 32)
        owner, out, addr = self._new_owner(context._owned()), ffi.new("vmem_common **"), ffi.new("uint64_t *")
        _check(lib.pv_own_common(owner, context._use(), self.part_bytes, self.parts, out, addr))
        self._own(owner, out[0])
        self.context = context
        self.addr = int(addr[0])

    def new(self) -> int:
        """Allocate the memory of a part, with undefined contents; returns the descriptor that keeps it.

        Raises `OutOfMemory`.
        """
        fd = ffi.new("int *")
        _check(lib.vmem_common_new(self._use(), fd))
        return int(fd[0])

    def map(self, part: SupportsIndex, fd: SupportsIndex, *, writable: bool = False) -> None:
        """Map the memory of a descriptor, which stays the caller's, as a part. It is read-only unless `writable`."""
        flags = lib.VMEM_COMMON_WRITABLE if flag("writable", writable) else 0
        _check(lib.vmem_common_map(self._use(), uint("part", part, 32), uint("fd", fd, 31), flags))

    def seal(self, part: SupportsIndex) -> None:
        """Make a mapped part read-only."""
        _check(lib.vmem_common_seal(self._use(), uint("part", part, 32)))

    def unmap(self, first: SupportsIndex = 0, n: SupportsIndex | None = None) -> None:
        """Unmap parts, all by default, which no kernel in flight may access; those that are not mapped are skipped."""
        first = uint("first", first, 32)
        _check(lib.vmem_common_unmap(self._use(), first, self.parts - first if n is None else uint("n", n, 32)))
