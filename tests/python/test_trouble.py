"""A driver that refuses several calls in a row: what Python is told, and that nothing is lost.

SPDX-License-Identifier: MIT
"""

import contextlib

import pytest
from trouble import trouble

import pyvmem

SOME = 40  # pages


@pytest.fixture
def rows(context):
    """A range of pages with their numbers, each mapped on its own."""
    size = min(context.page_sizes)
    with trouble(0, 0), context.reserve(SOME * size) as r:
        context.commit(r.addr, r.length, size)
        for i in range(SOME):
            context.fill(r.addr + i * size, i + 1, size)
        yield r, size
        context.decommit(r.addr, r.length)


def check(context, r, size, gone=()):
    for i in range(SOME):
        if i not in gone:
            assert context.read(r.addr + i * size, 8) == bytes([i + 1]) * 8


@pytest.mark.parametrize("calls", [1, 2, 5, 40])
def test_a_call_that_fails_loses_nothing(context, rows, calls):
    r, size = rows
    for first in range(1, 8):
        with trouble(first, calls):
            try:
                context.decommit(r.addr + 5 * size, size)
            except pyvmem.OutOfMemory:
                failed = True
            else:
                failed = False
        check(context, r, size, gone=() if failed else (5,))
        assert context.stats().absent == 0
        if not failed:
            context.commit(r.addr + 5 * size, size, size)
            context.fill(r.addr + 5 * size, 6, size)


def test_what_is_absent_is_named_until_it_is_back(context, rows):
    r, size = rows
    with trouble(1, 10_000):
        with contextlib.suppress(pyvmem.OutOfMemory):
            context.decommit(r.addr + 5 * size, size)
        lost = context.stats().absent
        assert (lost > 0) == (context.backend == "stock")  # cuda unmaps in one call, which needs no memory
        if lost:
            with pytest.raises(pyvmem.OutOfMemory, match=rf"\[0x{r.addr + 5 * size:x}, 0x[0-9a-f]+\) is absent"):
                context.read(r.addr + 5 * size, 8)
            with pytest.raises(pyvmem.OutOfMemory, match="is absent"):
                context.query(r.addr + 5 * size)
            with pytest.raises(pyvmem.OutOfMemory, match="is absent"):
                context.fill(r.addr + 5 * size, 0, size)
    check(context, r, size, gone=() if lost else (5,))
    assert context.stats().absent == 0
