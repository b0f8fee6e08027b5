"""Every way to be refused: the exception's type, its errno, and that nothing was changed.

SPDX-License-Identifier: MIT
"""

import errno
import pickle

import numpy as np
import paper
import pytest

import pyvmem

KIB, MIB = 1 << 10, 1 << 20


def refused(number, call, *args, **kwargs):
    """The error's text, after checking that the call was refused with this errno."""
    with pytest.raises(pyvmem.VmemError) as caught:
        call(*args, **kwargs)
    assert caught.value.errno == number, caught.value
    assert str(caught.value)
    return str(caught.value)


@pytest.fixture
def untouched(context):
    """Fails the test if the refused calls changed what the context holds."""
    before = context.stats()
    yield
    after = context.stats()
    for name in ("reserved", "created", "mapped", "map_ops", "unmap_ops"):
        assert getattr(after, name) == getattr(before, name), name


# Errors of each public call for an argument that is no number, or one that no C integer holds.
CALLS = {
    "device": lambda c, x: pyvmem.Context(c.backend, x),
    "budget": lambda c, x: pyvmem.Context(c.backend, budget=x),
    "reserve length": lambda c, x: c.reserve(x),
    "create n": lambda c, x: c.create(c.page_sizes[0], x),
    "set_budget bytes": lambda c, x: c.set_budget(x),
    "prealloc bytes": lambda c, x: c.prealloc(x),
    "map addrs": lambda c, x: c.map(x, 1),
    "map pages": lambda c, x: c.map(0, [x, 1]),
    "unmap addrs": lambda c, x: c.unmap([x], 1),
    "unmap lengths": lambda c, x: c.unmap(0, x),
    "release pages": lambda c, x: c.release([1, x]),
    "page_info page": lambda c, x: c.page_info(x),
    "query addr": lambda c, x: c.query(x),
    "commit lengths": lambda c, x: c.commit(0, x, c.page_sizes[0]),
    "decommit addrs": lambda c, x: c.decommit(x, 0),
    "copy dst": lambda c, x: c.copy(x, 0, 0),
    "copy src": lambda c, x: c.copy(0, x, 0),
    "fill addr": lambda c, x: c.fill(x, 0, 0),
    "fill value": lambda c, x: c.fill(0, x, 0),
    "fill length": lambda c, x: c.fill(0, 0, x),
    "read length": lambda c, x: c.read(0, x),
    "vMemReserve length": lambda c, x: paper.vMemReserve(c, x),
    "vMemFree addr": lambda c, x: paper.vMemFree(c, x),
    "vMemMap addr": lambda c, x: paper.vMemMap(c, x, 1),
    "vMemMap page": lambda c, x: paper.vMemMap(c, 0, x),
    "vMemUnmap length": lambda c, x: paper.vMemUnmap(c, 0, x),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_argument_at_fault_is_named(context, untouched, call):
    name = call.split()[-1]
    for value in (-1, 1 << 64):
        assert name in refused(errno.EINVAL, CALLS[call], context, value)
    for value in (1.5, "x", None):
        with pytest.raises(TypeError, match=name):
            CALLS[call](context, value)


def test_integers_of_every_kind_are_taken(context):
    size = min(context.page_sizes)
    range_, pages = context.reserve(4 * size), context.create(size, 4)
    addrs = [range_.addr, np.uint64(range_.addr + size), np.int64(range_.addr + 2 * size)]
    context.map(addrs, list(pages.handles[:3]))
    range_.map(context.create(np.int64(size), np.uint8(1)), np.int32(3 * size))
    assert context.stats().mapped == 4 * size
    context.release(pages)
    assert context.stats().mapped == size


def test_arrays_of_different_sizes(context, untouched):
    with pytest.raises(ValueError, match="addrs has 3, pages has 2"):
        context.map([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="addrs has 2, lengths has 3"):
        context.unmap([1, 2], [1, 2, 3])


def test_more_handles_than_memory_for_them(context, untouched):
    assert "1099511627776" in refused(errno.ENOMEM, context.create, min(context.page_sizes), 1 << 40)


def test_unknown_backend():
    assert "nonsense" in refused(errno.EINVAL, pyvmem.Context, "nonsense")
    assert isinstance(pyvmem.probe("nonsense"), ValueError)


def test_unknown_backend_from_the_environment(monkeypatch):
    monkeypatch.setenv("VMEM_BACKEND", "nonsense")
    assert "VMEM_BACKEND" in refused(errno.EINVAL, pyvmem.Context)


def test_the_environment_names_the_backend(monkeypatch):
    monkeypatch.setenv("VMEM_BACKEND", "host")
    with pyvmem.Context() as context:
        assert context.backend == "host"


def test_negative_device(backend):
    refused(errno.EINVAL, pyvmem.Context, backend, -1)


def test_a_device_that_is_not_there(backend):
    if backend != "host":
        with pytest.raises(pyvmem.VmemError):
            pyvmem.Context(backend, 99)


@pytest.mark.parametrize("length", [0, 1, 64 * KIB + 1, (1 << 46) + 64 * KIB])
def test_reserve_of_a_wrong_length(context, untouched, length):
    assert "length" in refused(errno.EINVAL, context.reserve, length)


@pytest.mark.parametrize("size", [0, -1, 4 * KIB, 96 * KIB, 4 * MIB, 64 * KIB + 1, "64K", None])
def test_a_wrong_page_size(context, untouched, size):
    assert f"page_size {size!r} must be one of {context.page_sizes[0]}" in refused(errno.EINVAL, context.create, size)
    refused(errno.EINVAL, context.commit, 0, 2 * MIB, size)


def test_create_more_than_there_is(context, untouched):
    size = max(context.page_sizes)
    many = context.info().memory_total // size + 1024
    refused(errno.ENOMEM, context.create, size, many)
    with pytest.raises(MemoryError):
        context.create(size, many)


def test_budget(backend):
    size = 2 * MIB
    with pyvmem.Context(backend, budget=4 * size) as context:
        pages = context.create(size, 4)
        assert context.stats().budget == 4 * size
        assert "budget" in refused(errno.ENOMEM, context.create, size)
        pages.close()
        context.set_budget(2 * size)
        refused(errno.ENOMEM, context.create, size, 3)
        context.create(size, 2)
        context.set_budget(0)
        context.create(size, 3)


def test_map_of_no_page(context):
    range_ = context.reserve(2 * MIB)
    for handle in (0, 12345, (1 << 64) - 1):
        assert "page" in refused(errno.EINVAL, context.map, range_.addr, handle)


def test_a_released_handle_never_comes_back(context):
    size = min(context.page_sizes)
    range_ = context.reserve(size)
    seen = set()
    for _ in range(50):
        page = context.create(size)
        handle = int(page.handles[0])
        assert handle not in seen
        seen.add(handle)
        page.close()
        refused(errno.EINVAL, context.map, range_.addr, handle)
        refused(errno.EINVAL, context.release, handle)
        refused(errno.EINVAL, context.page_info, handle)


def test_map_at_a_wrong_address(context, page_size):
    range_ = context.reserve(4 * page_size)
    page = context.create(page_size)
    assert "addr" in refused(errno.EINVAL, context.map, range_.addr + 4096, page)
    assert "addr" in refused(errno.EINVAL, context.map, range_.addr + 4 * page_size, page)
    assert "addr" in refused(errno.EINVAL, context.map, 0, page)
    if page_size > 64 * KIB:
        refused(errno.EINVAL, context.map, range_.addr + 64 * KIB, page)


def test_map_past_the_end_of_the_reservation(context):
    size = max(context.page_sizes)
    range_ = context.reserve(size + 64 * KIB)
    refused(errno.EINVAL, context.map, range_.addr + size, context.create(size))


def test_map_where_something_is_mapped(context, page_size):
    range_ = context.reserve(page_size)
    range_.map(context.create(page_size))
    refused(errno.EEXIST, range_.map, context.create(page_size))


def test_map_of_one_address_twice_in_a_batch(context, page_size):
    range_ = context.reserve(page_size)
    pages = context.create(page_size, 2)
    with pytest.raises(pyvmem.VmemError) as caught:
        context.map([range_.addr] * 2, pages)
    assert caught.value.index == 1
    assert context.stats().mapped == 0


def test_replacing_a_page_that_sticks_out(context):
    if len(context.page_sizes) == 1:
        return
    small, large = min(context.page_sizes), max(context.page_sizes)
    range_ = context.reserve(large)
    range_.map(context.create(large))
    refused(errno.EINVAL, context.map, range_.addr, context.create(small), replace=True)
    refused(errno.EINVAL, context.map, range_.addr + small, context.create(small), replace=True)


def test_unmap_of_what_is_no_reservation(context):
    refused(errno.EINVAL, context.unmap, 0, 64 * KIB)
    range_ = context.reserve(2 * MIB)
    refused(errno.EINVAL, context.unmap, range_.addr, 4 * MIB)
    refused(errno.EINVAL, context.unmap, range_.addr, 0)
    refused(errno.EINVAL, context.unmap, range_.addr + 1, 64 * KIB)
    refused(errno.EINVAL, context.unmap, range_.addr, 64 * KIB + 1)


def test_unmap_that_cuts_a_page(context):
    size = max(context.page_sizes)
    range_ = context.reserve(2 * size)
    range_.map(context.create(size, 2))
    assert "cuts" in refused(errno.EINVAL, context.unmap, range_.addr, size - 64 * KIB)
    refused(errno.EINVAL, context.unmap, range_.addr + 64 * KIB, size - 64 * KIB)
    assert context.stats().mapped == 2 * size


def test_free_while_mapped(context, page_size):
    addr = paper.vMemReserve(context, page_size)
    page = context.create(page_size)
    context.map(addr, page)
    refused(errno.EBUSY, paper.vMemFree, context, addr)
    page.close()
    paper.vMemFree(context, addr)
    refused(errno.EINVAL, paper.vMemFree, context, addr)


def test_free_of_what_is_no_reservation(context):
    range_ = context.reserve(2 * MIB)
    refused(errno.EINVAL, paper.vMemFree, context, range_.addr + 64 * KIB)
    refused(errno.EINVAL, paper.vMemFree, context, 0)


def test_query_outside_every_reservation(context):
    try:
        assert context.query(4096) == (0, 0)
    except pyvmem.InvalidArgument:
        pass


def test_commit_is_refused(context, untouched):
    size, large = min(context.page_sizes), max(context.page_sizes)
    range_ = context.reserve(4 * MIB)
    try:
        refused(errno.EINVAL, context.commit, range_.addr, size, 3 * KIB)
        refused(errno.EINVAL, context.commit, range_.addr + 4096, size, size)
        refused(errno.EINVAL, context.commit, range_.addr, size + 4096, size)
        refused(errno.EINVAL, context.commit, range_.addr, 6 * MIB, large)
        refused(errno.EINVAL, context.commit, 0, size, size)
        refused(errno.EINVAL, context.decommit, 0, size)
        refused(errno.EINVAL, context.decommit, range_.addr + 4096, size)
    finally:
        range_.close()


def test_commit_over_smaller_pages(context):
    if len(context.page_sizes) == 1:
        return
    small, large = min(context.page_sizes), max(context.page_sizes)
    range_ = context.reserve(2 * large)
    for offset in (0, small):
        range_.map(context.create(small), large + offset)
        before = context.stats()
        refused(errno.EEXIST, context.commit, range_.addr, 2 * large, large)
        after = context.stats()
        assert (after.created, after.mapped) == (before.created, before.mapped)
        range_.unmap()


def test_decommit_that_cuts_a_page(context):
    size = max(context.page_sizes)
    range_ = context.reserve(size)
    context.commit(range_.addr, size, size)
    refused(errno.EINVAL, context.decommit, range_.addr, size - 64 * KIB)
    refused(errno.EINVAL, context.decommit, range_.addr + 64 * KIB, size - 64 * KIB)
    assert context.stats().mapped == size


def test_access_to_unbacked_memory_is_refused_not_taken(context):
    size = min(context.page_sizes)
    range_ = context.reserve(2 * size)
    range_.map(context.create(size))
    refused(errno.EFAULT, context.read, range_.addr, size + 1)
    refused(errno.EFAULT, context.fill, range_.addr + size - 1, 0, 2)


def test_closed_objects_say_so(context):
    size = min(context.page_sizes)
    range_, pages = context.reserve(size), context.create(size)
    range_.close()
    range_.close()
    with pytest.raises(ValueError, match="closed"):
        range_.map(pages)
    with pytest.raises(ValueError, match="closed"):
        range_.unmap()
    pages.close()
    pages.close()
    with pytest.raises(ValueError, match="closed"):
        context.map(0, pages)
    context.close()
    context.close()
    calls = (context.stats, context.info, context.trim, lambda: context.reserve(size), lambda: context.create(size))
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


def test_offsets_outside_a_reservation(context):
    size = min(context.page_sizes)
    range_ = context.reserve(4 * size)
    pages = context.create(size, 2)
    for offset in (-size, 4 * size, np.array([0, 4 * size])):
        with pytest.raises(ValueError, match="offset"):
            range_.map(pages, offset)
    for offset in (1.5, "x", None):
        with pytest.raises(TypeError, match="offset"):
            range_.map(pages, offset)
    with pytest.raises(TypeError, match="Pages"):
        range_.map(pages.handles)
    assert context.stats().mapped == 0


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(pyvmem.OutOfMemory(errno.ENOMEM, "text", 3)))
    assert (type(error), error.errno, error.index, error.args[0]) == (pyvmem.OutOfMemory, errno.ENOMEM, 3, "text")
    assert isinstance(error, MemoryError)
