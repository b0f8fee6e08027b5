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


def test_free_while_mapped(context, page_size):
    addr = paper.vMemReserve(context, page_size)
    page = context.create(page_size)
    context.map(addr, page)
    refused(errno.EBUSY, paper.vMemFree, context, addr)
    page.close()
    paper.vMemFree(context, addr)
    refused(errno.EINVAL, paper.vMemFree, context, addr)


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


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(pyvmem.OutOfMemory(errno.ENOMEM, "text", 3)))
    assert (type(error), error.errno, error.index, error.args[0]) == (pyvmem.OutOfMemory, errno.ENOMEM, 3, "text")
    assert isinstance(error, MemoryError)
