"""Checks of arguments before they become C integers, which would wrap, truncate or not say which argument was wrong.

Whether a number means anything (a page size, an address, a slot) is libvmem's to say.

SPDX-License-Identifier: MIT
"""

import errno
import operator

import numpy as np

from pyvmem.errors import InvalidArgument


def integer(name, value):
    """value as an int: of Python, numpy, or a torch scalar. Raises TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def uint(name, value, bits=64):
    """value as an int that fits an unsigned C integer of so many bits. Raises TypeError and `InvalidArgument`."""
    number = integer(name, value)
    if not 0 <= number < 1 << bits:
        raise InvalidArgument(errno.EINVAL, f"{name} {number} must lie between 0 and 2^{bits} - 1")
    return number


def uints(name, values):
    """values (an int, or a sequence or array of them) as a uint64 array, without a copy where it is one."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":  # also of integers whose types numpy has no common one for
        array = np.array([uint(name, value) for value in np.asarray(values, dtype=object).flat], np.uint64)
    if array.size and array.dtype.kind == "i" and array.min() < 0:
        raise InvalidArgument(errno.EINVAL, f"{name} {array.min()} must not be negative")
    return np.ascontiguousarray(array, dtype=np.uint64).reshape(-1)


def one_of(name, value, choices):
    """value, which must be one of the choices. Raises `InvalidArgument`."""
    if value not in choices:
        raise InvalidArgument(errno.EINVAL, f"{name} {value!r} must be one of {', '.join(map(str, choices))}")
    return value
