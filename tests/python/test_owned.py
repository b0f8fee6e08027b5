"""Whose memory it is: objects that are closed, copied, of another context, at the end of their addresses, or used from
several threads, and what they must leave alone.

SPDX-License-Identifier: MIT
"""

import copy
import errno
import gc
import pickle
import threading

import numpy as np
import paper
import pytest

import pyvmem
from pyvmem._ffi import lib

from conftest import python

KIB, MIB = 1 << 10, 1 << 20


# ---- closed objects -----------------------------------------------------------------------------------------


def reserve_at(context, addr, length):
    """A reservation at an address that has just become free; its fellows, which took the free places before it."""
    fellows = []
    while True:
        fellows.append(context.reserve(length))
        if fellows[-1].addr == addr:
            return fellows[-1], fellows[:-1]
        assert len(fellows) < 100, "the address is not given out again"


def test_a_closed_reservation_lets_the_next_one_at_its_address_be(context):
    size = min(context.page_sizes)
    old, behind = context.reserve(16 * MIB), context.reserve(16 * MIB)
    old.commit(0, 4 * size)
    old.close()
    behind.close()  # the next one may need more room: the fake driver has others' memory behind every second range
    new, _ = reserve_at(context, old.addr, 16 * MIB)
    new.commit(0, 4 * size)
    context.write(new.addr, b"mine")
    pages = context.create(size)
    calls = {
        "map": lambda: old.map(pages, 8 * size),
        "unmap": old.unmap,
        "commit": lambda: old.commit(8 * size, size),
        "decommit": old.decommit,
        "backdrop": old.backdrop,
        "backed": old.backed,
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="closed"):
            call()
        assert new.resident_bytes == 4 * size, name
    assert old.resident_bytes == 0
    assert context.read(new.addr, 4) == b"mine"


# ---- other contexts -----------------------------------------------------------------------------------------


def test_pages_of_another_context_are_refused(backend):
    with pyvmem.Context(backend) as one, pyvmem.Context(backend) as other:
        size = min(one.page_sizes)
        mine, theirs = one.create(size, 2), other.create(size, 2)
        range_ = one.reserve(16 * MIB)
        for call in (
            lambda: range_.map(theirs),
            lambda: range_.map(theirs, [0, size]),
            lambda: one.map([range_.addr, range_.addr + size], theirs),
            lambda: one.release(theirs),
            lambda: paper.vMemMapBatch(one, [range_.addr, range_.addr + size], theirs),
            lambda: paper.vMemRelease(one, theirs),
        ):
            with pytest.raises(pyvmem.InvalidArgument, match="another context"):
                call()
        assert one.stats().created == other.stats().created == 2 * size
        assert one.stats().mapped == 0
        range_.map(mine)
        mine.close()
        for call in lambda: range_.map(mine), lambda: one.map(range_.addr, mine), lambda: one.release(mine):
            with pytest.raises(ValueError, match="the pages are closed"):
                call()


def test_a_context_of_another_gpu_is_refused(context, monkeypatch):
    if "gpu" not in context.capabilities:
        return
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="cuda:1: the context's device is cuda:0"):
        pyvmem.virtual_empty(4, device="cuda:1", context=context)


# ---- the end of a reservation -------------------------------------------------------------------------------


def test_a_mapping_ends_within_its_reservation(context):
    size = min(context.page_sizes)
    first, second = sorted((context.reserve(16 * MIB) for _ in range(2)), key=lambda r: r.addr)  # neighbours on GPUs
    pages = context.create(size, 4)
    last = first.length - size
    for offset in (last, last - 2 * size, [0, size, last, first.length], [last] * 3 + [1 << 63], (1 << 64) - size):
        with pytest.raises(pyvmem.InvalidArgument, match="offset .*(reservation|2.64)"):
            first.map(pages, offset)
    for call in (first.unmap, first.commit, first.decommit, first.backed, first.backdrop):
        for offset, length in ((last, 2 * size), (first.length, size), (0, first.length + size), (last, (1 << 64) - 1)):
            with pytest.raises(pyvmem.InvalidArgument, match="length"):
                call(offset, length)
        with pytest.raises(pyvmem.InvalidArgument, match="offset"):
            call(first.length + size)
    with pytest.raises(pyvmem.InvalidArgument, match="within"):
        first.unmap([0, last], [size, 2 * size])
    assert context.stats().mapped == first.resident_bytes == second.resident_bytes == 0
    first.map(pages, last - 3 * size)
    assert first.resident_bytes == 4 * size


# ---- arrays of any shape ------------------------------------------------------------------------------------


def test_arrays_of_any_shape_are_all_mapped(context):
    size = min(context.page_sizes)
    range_, pages = context.reserve(16 * MIB), context.create(size, 6)
    addrs, handles = range_.addr + np.arange(6).reshape(2, 3) * size, pages.handles.reshape(2, 3)
    context.map(addrs, handles)
    assert range_.resident_bytes == 6 * size
    range_.unmap()
    context.map(addrs.T, handles.T)
    assert [context.query(range_.addr + i * size)[0] for i in range(6)] == pages.handles.tolist()


# ---- what belongs to whom -----------------------------------------------------------------------------------


def test_the_backed_parts_are_known(context, page_size):
    range_ = context.reserve(64 * MIB)
    assert range_.backed() == [] and range_.resident_bytes == 0
    for first in (0, 3, 4, 9):
        range_.commit(first * page_size, page_size, page_size)
    end = range_.length - page_size
    range_.commit(end, page_size, page_size)
    expected = [(0, page_size), (3 * page_size, 2 * page_size), (9 * page_size, page_size), (end, page_size)]
    assert range_.backed() == expected
    assert range_.backed(4 * page_size, 5 * page_size) == [(4 * page_size, page_size)]
    assert range_.resident_bytes == 5 * page_size
    assert range_.decommit(page_size, 4 * page_size) == 2 * page_size
    assert range_.resident_bytes == 3 * page_size
    assert range_.commit() == range_.length - 3 * page_size
    assert range_.backed() == [(0, range_.length)]


def test_resident_bytes_do_not_depend_on_who_backs(context):
    size = min(context.page_sizes)
    range_ = context.reserve(64 * MIB)
    range_.commit(0, 4 * size)
    context.decommit(range_.addr, 2 * size)
    assert range_.resident_bytes == 2 * size
    range_.map(context.create(size, 3), 8 * size)
    assert range_.resident_bytes == 5 * size
    assert range_.decommit() >= 2 * size
    assert range_.resident_bytes == 0
    context.commit(range_.addr, size, size)
    assert range_.resident_bytes == size


def test_a_reservation_takes_along_what_was_committed_there(context, page_size):
    before = context.stats().created
    for commit in (
        lambda r: r.commit(0, 8 * page_size, page_size),
        lambda r: context.commit(r.addr, 8 * page_size, page_size),
    ):
        for end in (lambda r: r.close(), lambda r: r.unmap(), lambda r: r.decommit()):
            range_ = context.reserve(16 * page_size)
            commit(range_)
            assert context.stats().created == before + 8 * page_size
            end(range_)
            assert context.stats().created == before


def test_a_reservation_leaves_other_objects_pages(context, page_size):
    pages, handles = context.create(page_size, 2), paper.vMemCreate(context, page_size, 2)
    home = context.reserve(4 * page_size)
    home.map(pages)
    context.fill(home.addr, 7, 2 * page_size)
    for end in (lambda r: r.close(), lambda r: r.unmap(), lambda r: r.decommit()):
        range_ = context.reserve(16 * page_size)
        range_.commit(0, 4 * page_size, page_size)
        range_.map(pages, 8 * page_size)
        context.map(range_.addr + np.arange(12, 14, dtype=np.uint64) * np.uint64(page_size), handles)
        end(range_)
        assert context.stats().created == 4 * page_size
        assert context.read(home.addr, 2 * page_size) == b"\7" * (2 * page_size)
        assert [context.page_info(h).mappings for h in handles] == [0, 0]


def test_what_another_thread_holds_goes_when_it_lets_go(context, page_size, monkeypatch):
    """Closing beside a long call of another thread neither waits nor fails nor leaks."""
    from pyvmem import owned

    inside, closed = threading.Event(), threading.Event()
    reserved = []

    range_ = context.reserve(16 * page_size)
    pages = context.create(page_size, 8)

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def vMemUnmap(self, *arguments):
            inside.set()
            assert closed.wait(60)
            reserved.append(context.stats().reserved)  # the call's argument keeps it
            return lib.vMemUnmap(*arguments)

    range_.map(pages)
    monkeypatch.setattr(owned, "lib", Library())
    thread = threading.Thread(target=range_.unmap)
    thread.start()
    assert inside.wait(60)
    range_.close()
    pages.close()
    closed.set()
    thread.join()
    assert reserved == [16 * page_size]
    assert (context.stats().reserved, context.stats().created) == (0, 0)


# ---- copies -------------------------------------------------------------------------------------------------


def owned_objects(context):
    size = min(context.page_sizes)
    return [context, context.reserve(16 * MIB), context.create(size)]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda info: pickle.loads(pickle.dumps(info))])
def test_facts_about_a_context_can_be_copied(context, how):
    info = context.info()
    other = how(info)
    assert other == info and other.page_sizes == context.page_sizes


@pytest.mark.parametrize("what", [5, None, "host", pyvmem.Context])
def test_what_is_no_context_is_named(context, what):
    with pytest.raises(TypeError, match="context must be a Context, not "):
        pyvmem.core.Pages(what, 65536)
    with pytest.raises(TypeError, match="context must be a Context, not "):
        pyvmem.core.Reservation(what, 65536)
    with context.reserve(2 << 20) as range_, pytest.raises(TypeError, match="context must be a Context, not "):
        pyvmem.core.Pages(range_, 65536)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_owns_memory_cannot_be_copied(context, how):
    for thing in owned_objects(context):
        with pytest.raises(TypeError, match=f"{type(thing).__name__} owns native memory and cannot be copied"):
            how(thing)


# ---- threads ------------------------------------------------------------------------------------------------


def test_closing_beside_calls_of_other_threads(backend):
    """Every thread is inside calls while the context closes; each ends with the answer or with "closed"."""
    for _ in range(12):
        context = pyvmem.Context(backend)
        size = min(context.page_sizes)
        begun = threading.Barrier(5)
        failed = []

        def work(call):
            begun.wait()
            try:
                while True:
                    call()
            except ValueError as error:
                if "closed" not in str(error):
                    failed.append(error)

        ranges = [context.reserve(64 * MIB) for _ in range(2)]
        handles = paper.vMemCreate(context, size, 4)

        def commit():
            try:
                context.commit(ranges[0].addr, 32 * size, size)
                context.decommit(ranges[0].addr, 32 * size)
            except pyvmem.VmemError as error:
                if error.errno not in (errno.EBUSY, errno.EINVAL):  # the reservation is closed before the context is
                    raise
                context.stats()

        def remap():
            try:
                context.map(ranges[1].addr + np.arange(4, dtype=np.uint64) * np.uint64(size), handles, replace=True)
            except pyvmem.VmemError as error:
                if error.errno not in (errno.EBUSY, errno.EINVAL):  # as above
                    raise
                context.stats()

        calls = (commit, remap, context.stats, lambda: context.create(size, 8))
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        begun.wait()
        context.close()
        for thread in threads:
            thread.join(60)
        assert not failed and not any(thread.is_alive() for thread in threads)


# ---- names --------------------------------------------------------------------------------------------------


def test_probe_passes_a_name_that_exists(monkeypatch):
    from pyvmem import core

    class Library:
        """Sees what is passed: only libvmem's own strings outlive every call."""

        def __getattr__(self, name):
            return getattr(lib, name)

        def vmem_probe(self, options):
            names = lib.vmem_backends()
            assert options.backend in [names[i] for i in range(len(pyvmem.backends()))]
            return lib.vmem_probe(options)

    monkeypatch.setattr(core, "lib", Library())
    assert pyvmem.probe("host") is None


def test_a_closed_context_is_forgotten_at_once(context):
    before = context.stats()
    pages, range_ = context.create(min(context.page_sizes), 3), context.reserve(16 * MIB)
    range_.map(pages)
    del pages, range_
    gc.collect()
    assert (context.stats().reserved, context.stats().created) == (before.reserved, before.created)


def test_what_a_context_runs_on_is_asked_once(context, monkeypatch):
    """Reservations and tensors look at it for every argument."""
    info = context.info()
    assert 0 < context.memory_free <= info.memory_total

    class Library:
        def __getattr__(self, name):
            assert name not in ("vmem_context_info", "vmem_context_memory")
            return getattr(lib, name)

    monkeypatch.setattr("pyvmem.core.lib", Library())
    assert context.info() == info
    context.reserve(16 * MIB, backdrop="backdrop" in context.info().capabilities).commit()
    monkeypatch.undo()
    context.close()
    for look in (context.info, lambda: context.memory_free):
        with pytest.raises(ValueError, match="closed"):
            look()


def test_pages_stay_when_another_call_maps_them_too(context, page_size, monkeypatch):
    """Two threads map the same pages into one reservation, and one meets EBUSY: the other's mapping keeps them."""
    from pyvmem import owned

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def pv_map(self, *arguments):
            monkeypatch.undo()
            range_.map(pages, page_size)  # the other thread, in the middle of this one's call
            return -errno.EBUSY

    range_, pages = context.reserve(8 * page_size), context.create(page_size)
    monkeypatch.setattr(owned, "lib", Library())
    with pytest.raises(pyvmem.VmemError):
        range_.map(pages, 0)
    handle = int(pages.handles[0])
    pages = None
    assert context.page_info(handle).mappings == 1
    range_.close()
    assert context.stats().created == 0


@pytest.mark.parametrize("which", ["range_", "pages"])
def test_what_is_closed_in_the_middle_of_a_map_keeps_nothing(context, page_size, monkeypatch, which):
    from pyvmem import owned

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def pv_map(self, *arguments):
            done = lib.pv_map(*arguments)
            {"range_": range_, "pages": pages}[which].close()
            return done

    range_, pages = context.reserve(8 * page_size), context.create(page_size)
    monkeypatch.setattr(owned, "lib", Library())
    range_.map(pages, 0)
    monkeypatch.undo()
    pages = None
    assert context.stats().created == 0


def test_a_handler_asks_for_the_default_context():
    """A signal's handler that runs while its thread makes the default context gets one, the same, and does not hang."""
    python(
        """
        import signal
        import pyvmem
        from pyvmem import core

        real, seen = core.Context, []

        def make(*arguments):
            core.Context = real
            signal.raise_signal(signal.SIGALRM)
            return real(*arguments)

        signal.signal(signal.SIGALRM, lambda *arguments: seen.append(pyvmem.core.default_context("host")))
        core.Context = make
        context = pyvmem.core.default_context("host")
        assert seen == [context] and pyvmem.core.default_context("host") is context
        """
    )
