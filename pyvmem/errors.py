"""The errors that libvmem's calls raise.

SPDX-License-Identifier: MIT
"""

import errno
import os
import threading
from typing import Any

from pyvmem._ffi import ffi, lib
from pyvmem.kv.shortage import Shortage


class VmemError(Exception):
    """A call of libvmem failed; nothing was changed.

    Attributes
    ----------
    errno : int
        The positive error number, such as ``errno.EBUSY``.
    index : int or None
        The element of the batch at fault, for batched calls that name one.
    """

    errno: int
    index: int | None

    def __init__(self, number: int, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.errno = number
        self.index = index

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno, str(self.errno))
        return f"{self.args[0] or os.strerror(self.errno)} [{name}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errno, self.args[0], self.index)


class OutOfMemory(VmemError, MemoryError):
    """The device's memory or the context's budget is exhausted: free something and try again.

    Attributes
    ----------
    shortage : Shortage or None
        Of a `Lease` that could not be entered: what is missing, and why.
    """

    shortage: Shortage | None = None


class InvalidArgument(VmemError, ValueError):
    """An argument is outside what the call accepts; the text names it and its limit."""


_TYPES: dict[int, type[VmemError]] = {errno.ENOMEM: OutOfMemory, errno.EINVAL: InvalidArgument}

# Names of C in libvmem's texts, and those of Python.
_NAMES = {
    "VMEM_MAP_REPLACE": "replace=True",
    "VMEM_MAP_FINE": "fine=True",
    "VMEM_RESERVE_BACKDROP": "backdrop=True",
    "VMEM_CREATE_ZERO": "zero=True",
    "VMEM_OPT_UNKNOWN_DRIVER": "unknown_driver=True",
    "VMEM_OPT_BY_DEFAULT": "by_default=True",
    "VMEM_BLOCKS_OVER": "over=True",
    "opts->": "",
    "cfg->": "",
}


def _error(number: int, text: str, index: int | None = None) -> VmemError:
    """The exception of the class that belongs to an error number."""
    return _TYPES.get(number, VmemError)(number, text, index)


# The exception that a signal's handler raised in the middle of a native call, until the call has ended.
_raised: list[BaseException] = []


def keep_raised(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    _raised.append(error)


@ffi.def_extern(error=1, onerror=keep_raised)  # type: ignore[untyped-decorator]
def pv_run_handlers() -> int:
    for _ in range(2):  # the interpreter runs them when a function begins and when a loop goes round
        pass
    return 0


def _watch_signals() -> None:
    """Long calls of the main thread run the handlers of signals (pyvmem/native/signals.c)."""
    lib.pv_watch_signals(threading.main_thread().ident, lib.pv_run_handlers)


_watch_signals()
os.register_at_fork(after_in_child=_watch_signals)  # the thread that forked is the main thread


def structure(name: str) -> Any:
    """A structure of libvmem's that says its size, for libvmem to fill in."""
    return ffi.new(f"struct {name} *", {"size": ffi.sizeof(f"struct {name}")})


def _check(rc: int, bad: Any = None) -> None:
    """Raise what a call's return code says. bad: the ``size_t *`` that received the element at fault."""
    if rc or _raised:
        _raise(rc, bad)


def _raise(rc: int, bad: Any) -> None:
    # The main thread's call was undone, or completed anyway.
    if _raised and threading.get_ident() == threading.main_thread().ident:
        raise _raised.pop()
    if not rc:
        return
    index = None if bad is None or bad[0] == lib.PV_NO_INDEX else int(bad[0])
    text = ffi.string(lib.vmem_last_error()).decode(errors="replace")
    for c, python in _NAMES.items():
        text = text.replace(c, python)
    raise _error(-rc, text, index)
