"""vMem reserves large virtual ranges and maps physical pages of 64 KiB or more into them on demand.

`core` has contexts, and `owned` what they own: reservations and pages. `tensor`, `blocks` and `lease` stand on these:
virtual tensors, numbered blocks, memory for PyTorch's allocator. The packages `kv`, `attention`, `transformers`,
`engine`, `sleep`, `vllm`, `sglang` and `tools` say for themselves whom they call. What needs torch is imported when it
is first asked for. Begin with `core`.

SPDX-License-Identifier: MIT
"""

import importlib as _importlib
import importlib.util as _importlib_util
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from pyvmem._ffi import lib as _lib
from pyvmem.core import Context, backends, probe
from pyvmem.errors import InvalidArgument, OutOfMemory, VmemError

if _TYPE_CHECKING:
    from pyvmem.kv.cache import KVCache, KVCacheOptions, Shortage, Spare, TensorSpec, model_specs
    from pyvmem.kv.pool import KVPool
    from pyvmem.lease import torch_pool
    from pyvmem.tensor import VirtualTensor, virtual_empty


def _release(version: int) -> str:
    return ".".join(str(version >> shift & 0xFF) for shift in (16, 8, 0))


__version__ = _release(_lib.vmem_version())
if _lib.vmem_version() != _lib.VMEM_VERSION:
    raise ImportError(f"pyvmem was compiled with vmem.h {_release(_lib.VMEM_VERSION)}, but runs libvmem {__version__}")

__all__ = [
    "Context",
    "InvalidArgument",
    "KVCache",
    "KVCacheOptions",
    "KVPool",
    "OutOfMemory",
    "Shortage",
    "Spare",
    "TensorSpec",
    "VirtualTensor",
    "VmemError",
    "__version__",
    "backends",
    "model_specs",
    "probe",
    "torch_pool",
    "virtual_empty",
]


# torch is imported where tensors are made, and only then.
_NEED_TORCH = {
    "KVCache": "kv.cache",
    "KVCacheOptions": "kv.options",
    "KVPool": "kv.pool",
    "Shortage": "kv.shortage",
    "Spare": "kv.options",
    "TensorSpec": "kv.types",
    "VirtualTensor": "tensor",
    "model_specs": "kv.types",
    "torch_pool": "lease",
    "virtual_empty": "tensor",
}
# Public names of modules, of which the error for a wrong name here tells.
_ELSEWHERE = {
    **dict.fromkeys(("Info", "PageInfo", "Pages", "Reservation", "Stats", "default_context"), "core"),
    "PrefixCache": "kv.prefix",
}


def __getattr__(name: str) -> _Any:
    if name not in _NEED_TORCH:
        place = _ELSEWHERE.get(name)
        text = f"module 'pyvmem' has no attribute {name!r}"
        raise AttributeError(f"{text}: from pyvmem.{place} import {name}" if place else text)
    try:
        module = _importlib.import_module(f"pyvmem.{_NEED_TORCH[name]}")
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        raise ModuleNotFoundError(f"pyvmem.{name} needs torch: pip install torch", name="torch") from None
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    """Everything public, but for what needs torch where there is none: help() looks at all of it."""
    torch = _importlib_util.find_spec("torch") is not None
    return sorted(name for name in __all__ if torch or name not in _NEED_TORCH)
