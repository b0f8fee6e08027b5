"""Reserve, create, map, unmap, release, free: what each does to addresses, memory and data.

SPDX-License-Identifier: MIT
"""

import errno

import numpy as np
import paper
import pytest

import pyvmem
from pyvmem._ffi import lib
from pyvmem.core import MAP_OP
from pyvmem.owned import commit_flags

KIB, MIB = 1 << 10, 1 << 20


def test_a_reservation_costs_no_memory(context):
    before = context.stats()
    with context.reserve(64 << 30):
        after = context.stats()
        assert after.reserved - before.reserved == 64 << 30
        assert after.created == before.created
        assert after.overhead - before.overhead < 128 * MIB
    assert context.stats().reserved == before.reserved


def test_what_is_written_is_read_back(context, page_size):
    range_ = context.reserve(8 * page_size)
    range_.map(context.create(page_size, 8))
    data = np.random.default_rng(1).bytes(8 * page_size)
    context.write(range_.addr, data)
    assert context.read(range_.addr, len(data)) == data


def test_zero_clears_memory_used_before(context, page_size):
    range_ = context.reserve(4 * page_size)
    for _ in range(5):
        pages = context.create(page_size, 4, zero=True)
        range_.map(pages)
        assert not any(context.read(range_.addr, 4 * page_size))
        context.fill(range_.addr, 0xA5, 4 * page_size)
        pages.close()
    range_.close()


def test_a_commit_clears_memory_that_stayed_here(context, page_size):
    context.prealloc(4 * page_size)  # so that nothing returns to the system, which would clear it
    range_ = context.reserve(4 * page_size)
    addr = range_.addr
    for _ in range(3):
        assert context.commit(addr, 4 * page_size, page_size, zero=True) == 4 * page_size
        assert not any(context.read(addr, 4 * page_size))
        context.fill(addr, 0xA5, 4 * page_size)
        assert context.decommit(addr, 4 * page_size) == 4 * page_size


def test_nothing_takes_the_place_of_a_page_unasked(context, page_size):
    range_ = context.reserve(4 * page_size)
    addrs = range_.addr + page_size * np.arange(4, dtype=np.uint64)
    first, second = context.create(page_size, 4), context.create(page_size, 4)
    context.map(addrs, first)
    with pytest.raises(pyvmem.VmemError) as raised:
        context.map(addrs, second)
    assert raised.value.errno == errno.EEXIST
    assert [context.query(addr)[0] for addr in addrs] == first.handles.tolist()
    for take, pages in (
        (lambda: context.map(addrs, second, replace=True), second),
        (lambda: range_.map(first, replace=True), first),
        (lambda: range_.map(second, page_size * np.arange(4), replace=True), second),
    ):
        take()
        assert [context.query(addr)[0] for addr in addrs] == pages.handles.tolist()
    context.map(range_.addr, int(first.handles[0]), replace=True)
    assert context.query(range_.addr)[0] == first.handles[0]


def test_one_page_at_two_addresses_is_one_memory(context, page_size):
    range_ = context.reserve(4 * page_size)
    page = context.create(page_size)
    range_.map(page, 0)
    range_.map(page, 2 * page_size)
    context.write(range_.addr + 5, b"seen twice")
    assert context.read(range_.addr + 2 * page_size + 5, 10) == b"seen twice"
    assert context.page_info(page.handles[0]).mappings == 2
    assert context.stats().mapped == 2 * page_size
    assert context.stats().created == page_size


def test_query_names_the_page_and_the_offset(context, page_size):
    range_ = context.reserve(2 * page_size)
    page = context.create(page_size)
    range_.map(page, page_size)
    assert context.query(range_.addr + page_size + 4096) == (page.handles[0], 4096)
    assert context.query(range_.addr) == (0, 0)


def test_a_failed_batch_changes_nothing_and_names_the_element(context, page_size):
    range_ = context.reserve(8 * page_size)
    pages = context.create(page_size, 8)
    ops = np.empty(8, MAP_OP)
    ops["addr"] = range_.addr + np.arange(8) * page_size
    ops["page"] = pages.handles
    ops["addr"][5] = range_.addr + 8 * page_size
    before = context.stats()
    with pytest.raises(pyvmem.InvalidArgument) as caught:
        context.map(ops["addr"], ops["page"])
    assert caught.value.index == 5
    assert context.stats() == before
    assert all(context.query(a) == (0, 0) for a in ops["addr"][:5])
    ops["addr"][5] = range_.addr + 5 * page_size
    context.map(ops["addr"], ops["page"])
    before = context.stats()
    for call in (lambda: context.unmap([*ops["addr"][:2], range_.addr + 8 * page_size], page_size),
                 lambda: context.release([*pages.handles[:2], 77, *pages.handles[2:]])):  # fmt: skip
        with pytest.raises(pyvmem.InvalidArgument) as caught:
            call()
        assert caught.value.index == 2
        assert context.stats() == before


def test_commit_backs_only_what_is_unbacked(context, page_size):
    range_ = context.reserve(8 * page_size)
    assert context.commit(range_.addr + 2 * page_size, 2 * page_size, page_size) == 2 * page_size
    context.write(range_.addr + 2 * page_size, b"stays")
    assert context.commit(range_.addr, 8 * page_size, page_size) == 6 * page_size
    assert context.read(range_.addr + 2 * page_size, 5) == b"stays"
    assert context.commit(range_.addr, 8 * page_size, page_size) == 0
    assert context.decommit(range_.addr, 8 * page_size) == 8 * page_size
    assert context.stats().created == 0


def test_commit_of_fine_pages(context, page_size):
    range_ = context.reserve(16 * page_size)
    assert range_.commit(0, 8 * page_size, page_size, fine=True) == 8 * page_size
    assert context.commit(range_.addr, range_.length, page_size, zero=True, fine=True) == 8 * page_size
    context.unmap(range_.addr + 3 * page_size, page_size)
    assert range_.backed() == [(0, 3 * page_size), (4 * page_size, 12 * page_size)]
    for commit in range_.commit, lambda **fine: context.commit(range_.addr, page_size, page_size, **fine):
        with pytest.raises(TypeError, match="fine must be True or False"):
            commit(fine=1)
    assert commit_flags(True, False) == lib.VMEM_CREATE_ZERO
    assert commit_flags(False, True) == lib.VMEM_MAP_FINE  # what the library makes of it: tests/c/test_commit.c


def test_the_papers_calls(context):
    page_size = min(context.page_sizes)
    addr = paper.vMemReserve(context, 4 * page_size)
    pages = paper.vMemCreate(context, page_size, 3)
    paper.vMemMap(context, addr, pages[0])
    paper.vMemMapBatch(context, [addr + page_size, addr + 2 * page_size], pages[1:])
    assert context.stats().mapped == 3 * page_size
    paper.vMemUnmap(context, addr, page_size)
    paper.vMemUnmapBatch(context, [addr + page_size], [page_size])
    assert context.stats().mapped == page_size
    paper.vMemRelease(context, pages[0])
    paper.vMemReleaseBatch(context, pages[1:])
    paper.vMemFree(context, addr)
    stats = context.stats()
    assert (stats.reserved, stats.created, stats.mapped) == (0, 0, 0)


def test_copy_moves_data_between_reservations_and_host_memory(context, page_size):
    range_ = context.reserve(4 * page_size)
    range_.map(context.create(page_size, 4))
    data = np.arange(page_size, dtype=np.uint64).view(np.uint8)[:page_size].copy()
    context.copy(range_.addr, data.ctypes.data, page_size)
    context.copy([range_.addr + page_size, range_.addr + 3 * page_size], range_.addr, page_size)
    assert context.read(range_.addr + 3 * page_size, page_size) == data.tobytes()


def test_unbacked_addresses_are_read_through_the_backdrop_anywhere(context):
    """GPU backends establish the backdrop in blocks: reads far from any page need theirs first."""
    if "backdrop" not in context.capabilities:
        with pytest.raises(pyvmem.VmemError, match="backdrop"):
            context.reserve(2 * MIB, backdrop=True)
        return
    size = min(context.page_sizes)
    range_ = context.reserve(512 * MIB, backdrop=True)
    range_.commit(0, size)
    context.fill(range_.addr, 1, size)
    for offset in (size, 40 * MIB, 130 * MIB, 511 * MIB):
        assert context.read(range_.addr + offset, 4096) == bytes(4096)
    range_.backdrop(200 * MIB, 100 * MIB)
    for offset in (200 * MIB, 300 * MIB - 4096):
        assert context.read(range_.addr + offset, 4096) == bytes(4096)
    range_.backdrop()
    assert context.read(range_.addr + size - 1, 2) == b"\1\0"
    assert range_.resident_bytes == size
