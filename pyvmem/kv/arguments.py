"""Arguments of a KV cache's calls as the C structures of vmem_kv.h: tensors, and the lengths of a step.

SPDX-License-Identifier: MIT
"""

import array
import errno
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from pyvmem._checks import uint
from pyvmem._ffi import ffi
from pyvmem.errors import InvalidArgument
from pyvmem.kv.types import TensorSpec

# The lengths that a step takes: one token count per slot.
Lengths = Sequence[int] | npt.NDArray[Any] | torch.Tensor

_INT32 = np.dtype(np.int32)


def config_of(specs: list[TensorSpec], flags: int, **numbers: SupportsIndex) -> tuple[Any, Any]:
    """Build a struct vmem_kv_config and the array it points to. Both must stay alive until the call returns."""
    kinds: dict[torch.dtype, int] = {}
    raw = ffi.new("struct vmem_kv_tensor[]", len(specs))
    for spec, tensor in zip(specs, raw):
        tensor.row_bytes = uint("row_bytes", spec.row_bytes)
        tensor.max_tokens = uint("max_tokens", spec.max_tokens, 32)
        tensor.window = uint("window", spec.window, 32)
        tensor.kind = kinds.setdefault(spec.dtype, len(kinds))
    config = ffi.new("struct vmem_kv_config *")
    config.size = ffi.sizeof("struct vmem_kv_config")
    config.flags = flags
    config.tensors, config.n_tensors = raw, len(specs)
    fields = dict(ffi.typeof("struct vmem_kv_config").fields)
    for name, value in numbers.items():
        setattr(config, name, uint(name, value, 8 * ffi.sizeof(fields[name].type)))
    return config, raw


def _not_lengths(lengths: Iterable[Any]) -> Exception:
    """Return an exception that names the first invalid length."""
    for i, value in enumerate(lengths):
        if not hasattr(value, "__index__"):
            return TypeError(f"lengths must be integers; lengths[{i}] is {value!r}")
        if not -(2**31) <= value < 2**31:
            return InvalidArgument(errno.EINVAL, f"lengths[{i}] {value} must lie between 0 and max_tokens")
    return TypeError("lengths must be integers")


def lengths_of(lengths: Lengths, slots: int) -> Any:
    """A step's lengths as int32_t[slots]."""
    if type(lengths) is list:
        if len(lengths) != slots:
            raise ValueError(f"lengths has {len(lengths)} elements, not {slots}")
        try:
            return ffi.from_buffer("int32_t[]", array.array("i", lengths))
        except (OverflowError, TypeError) as error:
            raise _not_lengths(lengths) from error
    if not isinstance(lengths, np.ndarray):
        lengths = lengths.numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    if lengths.shape != (slots,):
        raise ValueError(f"lengths has shape {lengths.shape}, not ({slots},)")
    if lengths.dtype == _INT32 and lengths.flags.c_contiguous:
        return ffi.from_buffer("int32_t[]", lengths)
    if lengths.dtype.kind not in "iu":
        raise _not_lengths(lengths.tolist())
    narrow = lengths.astype(np.int32)
    if (narrow != lengths).any():
        raise _not_lengths(lengths.tolist())
    return ffi.from_buffer("int32_t[]", narrow)
