"""Errors of each public call for an argument that it cannot take: the argument's name, whatever the value.

SPDX-License-Identifier: MIT
"""

import numpy as np
import paper
import pytest

import pyvmem

MIB = 1 << 20
SIZE = 64 << 10

WRONG = {
    "-1": -1,
    "1.5": 1.5,
    "an array": np.array([1.5, 2.5]),
    "a table": np.arange(64.0).reshape(8, 8),
    "lines": ["a\nb"] * 60,
    "None": None,
    "2^64": 1 << 64,
    "2^70": 1 << 70,
    "a word": "x",
    "True": True,
    "an object": object(),
    "rows of different lengths": [[1, 2], [3]],
}
# Values that these arguments take beside integers.
TAKES = {
    "backend": ["None"],
    "offset": [],
    "length": ["None"],
    "page_size": ["None"],
    "rows": ["None"],
    "bytes": ["None"],
    "dtype": ["None"],
    "context": ["None"],
    "data": ["an array", "a table"],
    **dict.fromkeys(("backdrop", "zero", "replace", "fine", "unknown_driver"), ["True"]),
}


class World:
    """Something of each kind, on the host."""

    def __init__(self, tensor=False):
        self.c = pyvmem.Context("host")
        self.r = self.c.reserve(16 * MIB)
        self.p = self.c.create(SIZE, 2)
        self.h = int(self.p.handles[0])
        self.v = pyvmem.virtual_empty((64, 4096), context=self.c) if tensor else None


CALLS = {
    "Context backend": lambda w, x: pyvmem.Context(x),
    "Context device": lambda w, x: pyvmem.Context("host", x),
    "Context budget": lambda w, x: pyvmem.Context("host", budget=x),
    "Context unknown_driver": lambda w, x: pyvmem.Context("host", unknown_driver=x),
    "default_context backend": lambda w, x: pyvmem.core.default_context(x),
    "default_context device": lambda w, x: pyvmem.core.default_context("host", x),
    "reserve length!": lambda w, x: w.c.reserve(x),
    "reserve backdrop": lambda w, x: w.c.reserve(SIZE, backdrop=x),
    "create page_size!": lambda w, x: w.c.create(x),
    "create n": lambda w, x: w.c.create(SIZE, x),
    "create zero": lambda w, x: w.c.create(SIZE, zero=x),
    "set_budget bytes!": lambda w, x: w.c.set_budget(x),
    "prealloc bytes!": lambda w, x: w.c.prealloc(x),
    "release pages": lambda w, x: w.c.release(x),
    "page_info page": lambda w, x: w.c.page_info(x),
    "map addrs": lambda w, x: w.c.map(x, w.h),
    "map pages": lambda w, x: w.c.map(w.r.addr, x),
    "map replace": lambda w, x: w.c.map(w.r.addr, w.h, replace=x),
    "map fine": lambda w, x: w.c.map(w.r.addr, w.h, fine=x),
    "unmap addrs": lambda w, x: w.c.unmap(x, SIZE),
    "unmap lengths": lambda w, x: w.c.unmap(w.r.addr, x),
    "query addr": lambda w, x: w.c.query(x),
    "commit addrs": lambda w, x: w.c.commit(x, SIZE, SIZE),
    "commit lengths": lambda w, x: w.c.commit(w.r.addr, x, SIZE),
    "commit page_size!": lambda w, x: w.c.commit(w.r.addr, SIZE, x),
    "decommit addrs": lambda w, x: w.c.decommit(x, SIZE),
    "decommit lengths": lambda w, x: w.c.decommit(w.r.addr, x),
    "copy dst": lambda w, x: w.c.copy(x, w.r.addr, 1),
    "copy src": lambda w, x: w.c.copy(w.r.addr, x, 1),
    "copy lengths": lambda w, x: w.c.copy(w.r.addr, w.r.addr, x),
    "fill addr": lambda w, x: w.c.fill(x, 0, 1),
    "fill value": lambda w, x: w.c.fill(w.r.addr, x, 1),
    "fill length!": lambda w, x: w.c.fill(w.r.addr, 0, x),
    "read addr": lambda w, x: w.c.read(x, 1),
    "read length!": lambda w, x: w.c.read(w.r.addr, x),
    "write addr": lambda w, x: w.c.write(x, b"a"),
    "write data": lambda w, x: w.c.write(w.r.addr, x),
    "Reservation.map pages": lambda w, x: w.r.map(x),
    "Reservation.map offset": lambda w, x: w.r.map(w.p, x),
    "Reservation.unmap offset": lambda w, x: w.r.unmap(x),
    "Reservation.unmap length": lambda w, x: w.r.unmap(0, x),
    "Reservation.commit offset": lambda w, x: w.r.commit(x),
    "Reservation.commit length": lambda w, x: w.r.commit(0, x),
    "Reservation.commit page_size": lambda w, x: w.r.commit(0, SIZE, x),
    "Reservation.decommit offset": lambda w, x: w.r.decommit(x),
    "Reservation.decommit length": lambda w, x: w.r.decommit(0, x),
    "Reservation.backdrop offset": lambda w, x: w.r.backdrop(x),
    "Reservation.backed offset": lambda w, x: w.r.backed(x),
    "vMemReserve context!": lambda w, x: paper.vMemReserve(x, SIZE),
    "vMemReserve length!": lambda w, x: paper.vMemReserve(w.c, x),
    "vMemCreate context!": lambda w, x: paper.vMemCreate(x, SIZE),
    "vMemCreate page_size!": lambda w, x: paper.vMemCreate(w.c, x),
    "vMemCreate n": lambda w, x: paper.vMemCreate(w.c, SIZE, x),
    "vMemMap addr": lambda w, x: paper.vMemMap(w.c, x, w.h),
    "vMemMap page": lambda w, x: paper.vMemMap(w.c, w.r.addr, x),
    "vMemUnmap addr": lambda w, x: paper.vMemUnmap(w.c, x, SIZE),
    "vMemUnmap length!": lambda w, x: paper.vMemUnmap(w.c, w.r.addr, x),
    "vMemRelease pages": lambda w, x: paper.vMemRelease(w.c, x),
    "vMemFree addr": lambda w, x: paper.vMemFree(w.c, x),
}
TENSOR_CALLS = {
    "virtual_empty shape": lambda w, x: pyvmem.virtual_empty(x, context=w.c),
    "virtual_empty dtype": lambda w, x: pyvmem.virtual_empty(4, x, context=w.c),
    "virtual_empty device": lambda w, x: pyvmem.virtual_empty(4, device=x, context=w.c),
    "virtual_empty page_size": lambda w, x: pyvmem.virtual_empty(4, page_size=x, context=w.c),
    "virtual_empty zero": lambda w, x: pyvmem.virtual_empty(4, zero=x, context=w.c),
    "virtual_empty context": lambda w, x: pyvmem.virtual_empty(4, context=x),
    "VirtualTensor.commit rows": lambda w, x: w.v.commit(x),
    "VirtualTensor.decommit rows": lambda w, x: w.v.decommit(x),
    "VirtualTensor.backdrop rows": lambda w, x: w.v.backdrop(x),
}


def refuses(call, calls, value):
    """True if the call's error for a wrong value names the argument, and nothing was changed."""
    name = call.split()[-1].rstrip("!")
    world = World(tensor=calls is TENSOR_CALLS)
    before = world.c.stats()
    with pytest.raises((TypeError, ValueError, IndexError, pyvmem.VmemError)) as caught:
        calls[call](world, WRONG[value])
    assert name in str(caught.value), f"{call}: {value}: {caught.value!r}"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250, f"{call}: {value}: {caught.value!r}"
    after = world.c.stats()
    assert (after.reserved, after.created, after.mapped) == (before.reserved, before.created, before.mapped)
    world.c.close()


def wrong_for(call):
    *_, name = call.split()
    taken = [] if name.endswith("!") else TAKES.get(name.rstrip("!"), [])
    return [value for value in WRONG if value not in taken]


@pytest.mark.parametrize("call", CALLS)
def test_the_argument_at_fault_is_named(call):
    for value in wrong_for(call):
        refuses(call, CALLS, value)


@pytest.mark.parametrize("call", TENSOR_CALLS)
def test_the_argument_at_fault_is_named_by_tensors(call):
    pytest.importorskip("torch")
    for value in wrong_for(call):
        if not (call.endswith("file") and value in ("an array", "a table")):
            refuses(call, TENSOR_CALLS, value)


@pytest.mark.parametrize("call", CALLS)
def test_numbers_that_fit_64_bits_but_mean_nothing(call):
    """Either an answer or one error; never a crash, a wrapped number or a change."""
    world = World()
    before = world.c.stats()
    for number in (1 << 62, (1 << 64) - 1, (1 << 63) + SIZE):
        if "budget" in call:
            continue
        try:
            CALLS[call](world, number)
        except (TypeError, pyvmem.VmemError):
            pass
        after = world.c.stats()
        assert (after.reserved, after.created, after.mapped) == (before.reserved, before.created, before.mapped)


def test_a_text_of_c_speaks_of_python():
    world = World()
    world.r.map(world.p)
    with pytest.raises(pyvmem.VmemError, match="replace=True is not set"):
        world.c.map(world.r.addr, world.h)
    with pytest.raises(pyvmem.VmemError, match="without backdrop=True"):
        world.r.backdrop()
