"""The errors that libvmem's calls raise.

SPDX-License-Identifier: MIT
"""

import errno
import os

from pyvmem._ffi import ffi, lib


class VmemError(Exception):
    """A call of libvmem failed; nothing was changed.

    Attributes
    ----------
    errno : int
        The positive error number, such as ``errno.EBUSY``.
    index : int or None
        The element of the batch at fault, for batched calls that name one.
    """

    def __init__(self, number, text, index=None):
        super().__init__(text)
        self.errno = number
        self.index = index

    def __str__(self):
        name = errno.errorcode.get(self.errno, str(self.errno))
        return f"{self.args[0] or os.strerror(self.errno)} [{name}]"

    def __reduce__(self):
        return type(self), (self.errno, self.args[0], self.index)


class OutOfMemory(VmemError, MemoryError):
    """The device's memory or the context's budget is exhausted: free something and try again."""


class InvalidArgument(VmemError, ValueError):
    """An argument is outside what the call accepts; the text names it and its limit."""


_TYPES = {errno.ENOMEM: OutOfMemory, errno.EINVAL: InvalidArgument}


def _check(rc, bad=None):
    """Raise what a call's return code says. bad: the ``size_t *`` that received the element at fault."""
    if rc:
        index = None if bad is None or bad[0] == lib.PV_NO_INDEX else int(bad[0])
        raise _TYPES.get(-rc, VmemError)(-rc, ffi.string(lib.vmem_last_error()).decode(errors="replace"), index)
