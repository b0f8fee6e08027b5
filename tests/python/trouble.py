"""The fake GPU driver in trouble, for tests that run over it (tests/fakegpu/fakegpu.h).

SPDX-License-Identifier: MIT
"""

import contextlib
import ctypes
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def trouble(first: int, calls: int = 1) -> Iterator[None]:
    """Let so many driver calls in a row fail for lack of memory, from the `first` one from now on.

    Calls that undo what came before are among them. Skips the test where the fake driver is not preloaded.
    """
    try:
        fail = ctypes.CDLL(None).fakegpu_fail_many
    except AttributeError:
        pytest.skip("the fake driver is not preloaded")
    fail.argtypes = [ctypes.c_long, ctypes.c_long]
    fail(first, calls)
    try:
        yield
    finally:
        fail(0, 1)
