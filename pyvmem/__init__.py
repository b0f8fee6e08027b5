"""vMem: physical memory mapped on demand into large reserved address ranges, in pages of 64 KiB and up.

SPDX-License-Identifier: MIT
"""

import importlib as _importlib

from pyvmem._ffi import lib as _lib
from pyvmem.core import Context, Info, PageInfo, Pages, Reservation, Stats, backends, default_context, probe
from pyvmem.errors import InvalidArgument, OutOfMemory, VmemError
from pyvmem.paper import (
    vMemCreate,
    vMemFree,
    vMemMap,
    vMemMapBatch,
    vMemRelease,
    vMemReleaseBatch,
    vMemReserve,
    vMemUnmap,
    vMemUnmapBatch,
)

__version__ = ".".join(str(_lib.vmem_version() >> shift & 0xFF) for shift in (16, 8, 0))

__all__ = [
    "Context",
    "Info",
    "InvalidArgument",
    "KVCache",
    "OutOfMemory",
    "PageInfo",
    "Pages",
    "Reservation",
    "Stats",
    "TensorSpec",
    "VirtualTensor",
    "VmemError",
    "backends",
    "default_context",
    "model_specs",
    "probe",
    "vMemCreate",
    "vMemFree",
    "vMemMap",
    "vMemMapBatch",
    "vMemRelease",
    "vMemReleaseBatch",
    "vMemReserve",
    "vMemUnmap",
    "vMemUnmapBatch",
    "virtual_empty",
]


# torch is imported where tensors are made, and only then.
_NEED_TORCH = {
    "VirtualTensor": "tensor",
    "virtual_empty": "tensor",
    "KVCache": "kv",
    "TensorSpec": "kv",
    "model_specs": "kv",
}


def __getattr__(name):
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'pyvmem' has no attribute {name!r}")
    try:
        module = _importlib.import_module(f"pyvmem.{_NEED_TORCH[name]}")
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        raise ModuleNotFoundError(f"pyvmem.{name} needs torch: pip install pyvmem[torch]", name="torch") from None
    return getattr(module, name)
