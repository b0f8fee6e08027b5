"""The loops of native.c, which time single calls of libvmem, of CUDA and of the system.

SPDX-License-Identifier: MIT
"""

import ctypes
import functools
from typing import Any

from benchmarks import ROOT
from pyvmem._ffi import ffi, lib
from pyvmem.errors import _check, _error

LIBRARY = ROOT / "build" / "libbench.so"
# The table of native.c, in its order.
CALLS = ("vMemCreate", "vMemMap", "vMemUnmap", "vMemRelease", "vMemReserve", "vMemFree", "vmem_context_info",
         "vmem_kv_step")  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise RuntimeError(f"make venv in {ROOT} builds what times single calls: {error}") from None
    library.bench_error.restype = ctypes.c_char_p
    table = [int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in CALLS]
    library.bench_use((ctypes.c_void_p * len(table))(*table))
    return library


def call(name: str, *arguments: Any) -> None:
    """Call ``bench_NAME``. arguments: integers, and pointers of pyvmem's. Raises what libvmem's own calls raise."""
    library = _library()
    words = [int(ffi.cast("uintptr_t", a)) if isinstance(a, ffi.CData) else int(a) for a in arguments]
    rc = getattr(library, f"bench_{name}")(*map(ctypes.c_uint64, words))
    text = library.bench_error() if rc else b""
    if text:  # of this library's own copy of libvmem
        raise _error(-rc, text.decode(errors="replace"))
    _check(rc)
