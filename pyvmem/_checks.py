"""Checks of arguments before they become C integers, which would wrap, truncate or not say which argument was wrong.

libvmem says whether a number means anything (a page size, an address, a slot).

SPDX-License-Identifier: MIT
"""

import errno
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pyvmem.errors import InvalidArgument

T = TypeVar("T")
UInts = npt.NDArray[np.uint64]


def shown(value: Any) -> str:
    """value in an error's one line. Arrays and tensors by their shape: they are long, and may be unbacked."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer(name: str, value: Any) -> int:
    """value as an int: of Python, numpy, or a torch scalar, but no bool. Raises TypeError."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, not {shown(value)}")


def uint(name: str, value: Any, bits: int = 64) -> int:
    """value as an int that fits an unsigned C integer of so many bits. Raises TypeError and `InvalidArgument`."""
    number = value if type(value) is int else integer(name, value)
    if number < 0 or number >> bits:
        raise InvalidArgument(errno.EINVAL, f"{name} {number} must lie between 0 and 2^{bits} - 1")
    return number


def uints(name: str, values: Any) -> UInts:
    """values (an int, or a sequence or array of them) as a uint64 array, without a copy where it is one."""
    try:
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":  # also of integers whose types numpy has no common one for
            array = np.array([uint(name, value) for value in np.asarray(values, dtype=object).flat], np.uint64)
    except InvalidArgument:
        raise
    except (ValueError, RuntimeError):  # of numpy for rows of different lengths; of torch for a tensor with a gradient
        raise TypeError(f"{name} must be an integer or an array of integers, not {shown(values)}") from None
    if array.size and array.dtype.kind == "i" and array.min() < 0:
        raise InvalidArgument(errno.EINVAL, f"{name} {array.min()} must not be negative")
    return np.ascontiguousarray(array, dtype=np.uint64).reshape(-1)


def uint32s(name: str, values: Any) -> npt.NDArray[np.uint32]:
    """values (an int, or a sequence or array of them) as a uint32 array, without a copy where it is one."""
    if not isinstance(values, np.ndarray) or values.dtype != np.uint32:
        values = uints(name, values)
        if values.size and values.max() >> np.uint64(32):
            raise InvalidArgument(errno.EINVAL, f"{name} {values.max()} must lie between 0 and 2^32 - 1")
    return np.ascontiguousarray(values, np.uint32)


def integers(name: str, values: Any) -> npt.NDArray[Any]:
    """values, a sequence of integers or an array, as an array of one dimension. Raises TypeError."""
    try:
        array = np.asarray(values)
    except (ValueError, RuntimeError):  # of sequences that differ in length; of a tensor with a gradient
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"{name} must be a sequence of integers, not {shown(values)}")
    return array


def elements(name: str, values: Any) -> list[Any]:
    """The elements of a sequence, or of anything that can be iterated over but text and bytes. Raises TypeError."""
    try:
        if not isinstance(values, str | bytes):
            return list(iter(values))
    except TypeError:
        pass
    raise TypeError(f"{name} must be a sequence, not {shown(values)}")


def flag(name: str, value: Any) -> bool:
    """value as a bool, which it must be. Raises TypeError."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {shown(value)}")


def one_of(name: str, value: T, choices: Iterable[T]) -> T:
    """value, which must be one of the choices. Raises `InvalidArgument`."""
    choices = tuple(choices)
    # An array compares element by element, and True is no size.
    if isinstance(value, str | int | np.integer) and value in choices:
        return value
    raise InvalidArgument(errno.EINVAL, f"{name} {shown(value)} must be one of {', '.join(map(str, choices))}")
