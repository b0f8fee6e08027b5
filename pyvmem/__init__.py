"""vMem: physical memory mapped on demand into large reserved address ranges, in pages of 64 KiB and up.

SPDX-License-Identifier: MIT
"""

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

__version__ = "0.1.0"

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


def __getattr__(name):
    # torch is imported where tensors are made, and only then.
    if name in ("VirtualTensor", "virtual_empty"):
        from pyvmem import tensor

        return getattr(tensor, name)
    if name in ("KVCache", "TensorSpec", "model_specs"):
        from pyvmem import kv

        return getattr(kv, name)
    raise AttributeError(f"module 'pyvmem' has no attribute {name!r}")
