"""Pages behind numbered blocks: what each call of `pyvmem.blocks.Blocks` does, and what it refuses.

SPDX-License-Identifier: MIT
"""

import contextlib
import copy
import gc
import os
import threading

import numpy as np
import pytest

from pyvmem import Context, InvalidArgument, KVPool, OutOfMemory, VmemError
from pyvmem.blocks import BOARD_WORDS, BlockRange, Blocks

from conftest import until


@pytest.fixture
def make(context):
    """Make Blocks of two layers of a page each, of 16 blocks."""
    page = min(context.page_sizes)
    space = context.reserve(64 * page)

    def build(**options):
        return Blocks(space, [BlockRange(0, page, page, layers=2, layer_stride=16 * page)], 16, **options)

    build.space, build.page = space, page
    return build


def test_back_and_unback(make):
    blocks = make()
    assert blocks.back([3, 5, 3]) == 2
    assert blocks.back(np.array([3, 5], np.int64)) == 0
    assert make.space.resident_bytes == 4 * make.page
    assert blocks.backed().tolist() == [3, 5]
    blocks.unback(5)
    blocks.flush()
    assert blocks.backed().tolist() == [3]
    assert make.space.backed() == [(3 * make.page, make.page), (19 * make.page, make.page)]
    stats = blocks.stats()
    assert (stats.held, stats.most_held, stats.backed, stats.blocks) == (2 * make.page, 4 * make.page, 1, 16)
    assert stats.unmapped_pages == 2
    blocks.close()
    assert make.space.resident_bytes == 0


def test_orders_are_answered_on_the_board(make):
    board = np.zeros(BOARD_WORDS, np.uint64)
    blocks = make(budget=6 * make.page, board=board)
    assert [blocks.order(ids) for ids in ([0, 1], [2, 3], [3])] == [1, 2, 3]
    blocks.flush()
    assert board[:7].tolist() == [3, 1, 6 * make.page, 6 * make.page, 3, 0, 6 * make.page]
    assert board[8 + 1 : 8 + 4].tolist() == [2, 5, 6]
    with pytest.raises(OutOfMemory, match="2 pages more exceed the budget of 6"):
        blocks.back(7)
    assert blocks.back(7, over=True) == 1
    assert blocks.back(range(16), over=True) == 12
    del blocks
    gc.collect()
    assert board[2] == 0
    assert make.space.resident_bytes == 0


def test_fences(make):
    blocks = make()
    blocks.back([1, 2])
    first, second = blocks.fence(), blocks.fence()
    blocks.unback(1, after=first)
    blocks.unback(2, after=second)
    blocks.flush()
    assert blocks.states([0, 1, 2]).tolist() == [0, 2, 2]
    assert blocks.back(2) == 0
    blocks.passed(second)
    blocks.flush()
    assert blocks.states([1, 2]).tolist() == [0, 1]
    blocks.unback(2, after=blocks.record())
    while blocks.states(2)[0]:
        blocks.flush()


def test_refused_arguments(make):
    blocks, page = make(), make.page
    for call, error, text in [
        (lambda: blocks.back(16), InvalidArgument, r"ids\[0\]: block 16 is out of range: there are 16 blocks"),
        (lambda: blocks.back(-1), InvalidArgument, "ids -1 must not be negative"),
        (lambda: blocks.back("x"), TypeError, "ids must be an integer"),
        (lambda: blocks.back(1, over=2), TypeError, "over must be True or False"),
        (lambda: blocks.unback(1, after=1), InvalidArgument, "fence 1: these blocks have made none"),
        (lambda: blocks.unback(1, after=make().fence()), InvalidArgument, "these blocks have made none"),
        (lambda: blocks.passed(0), InvalidArgument, "fence 0"),
        (lambda: blocks.record("x"), TypeError, "stream must be an integer"),
        (lambda: blocks.record(np.array([1, 2])), TypeError, "stream must be an integer"),
        (lambda: blocks.join(3), TypeError, "pool must be a KVPool, not 3"),
        (lambda: blocks.join(make()), TypeError, "pool must be a KVPool, not <pyvmem.blocks.Blocks"),
        (lambda: blocks.join(KVPool(page), name=3), TypeError, "name must be a string, not 3"),
        (lambda: Blocks(3, [], 1), TypeError, "space must be a Reservation"),
        (lambda: Blocks(make.space, [], 1), InvalidArgument, "ranges must have at least one element"),
        (lambda: Blocks(make.space, [3], 1), TypeError, "ranges must be of BlockRange"),
        (lambda: Blocks(make.space, [BlockRange(64 * page, 1, 1)], 1), InvalidArgument, r"ranges\[0\].offset"),
        (lambda: Blocks(make.space, [BlockRange(0, page, page)], 65), InvalidArgument, r"ranges\[0\]"),
        (lambda: Blocks(make.space, [BlockRange(0, page, page)], 0), InvalidArgument, "blocks 0 is not between 1 and"),
        (lambda: make(page_size=12345), InvalidArgument, "page_size 12345"),
        (lambda: make(board=b"1234"), TypeError, "board must be a writable"),
        (lambda: make(board=np.zeros(8, np.uint64)), InvalidArgument, "board has 8 words of 8 bytes"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert blocks.back([]) == 0
    blocks.close()
    blocks.close()
    assert blocks.closed
    with pytest.raises(ValueError, match="the blocks object is closed"):
        blocks.back(1)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(blocks)


def test_the_reservation_stays_until_the_blocks_end(make):
    blocks = make()
    blocks.back([1])
    make.space.close()
    assert blocks.back([2]) == 1
    blocks.close()


def test_closing_the_context_closes_the_blocks():
    with Context("host") as context:
        blocks = Blocks(context.reserve(1 << 20), [BlockRange(0, 1 << 16, 1 << 16)], 16)
        blocks.back([1])
    assert blocks.closed


def test_a_tensor_over_the_blocks():
    torch = pytest.importorskip("torch")
    from pyvmem import virtual_empty

    v = virtual_empty((32, 24 << 10), torch.uint8, "cpu")  # blocks of 24 KiB, in pages of 64 KiB
    blocks = Blocks(v, [BlockRange(0, 24 << 10, 24 << 10)], 32)
    blocks.back([0, 2, 31])
    for i in (0, 2, 31):
        v.tensor[i] = i
    blocks.unback([0])
    blocks.flush()
    assert all((v.tensor[i] == i).all() for i in (2, 31))
    assert v.resident_bytes == 3 << 16  # pages 0 and 1 for block 2, page 11 for block 31
    tensor = v.tensor
    del v
    gc.collect()
    assert (tensor[2] == 2).all()
    blocks.close()


def test_threads_close_and_call(context):
    page = min(context.page_sizes)
    space = context.reserve(64 * page)
    for _ in range(20):
        blocks = Blocks(space, [BlockRange(0, page, page)], 64)
        start = threading.Barrier(3)

        def work(first, blocks=blocks, start=start):
            start.wait()
            try:
                while True:
                    blocks.back(range(first, first + 16))
                    blocks.unback(range(first, first + 16))
            except ValueError:
                pass

        threads = [threading.Thread(target=work, args=(n,)) for n in (0, 8)]
        for thread in threads:
            thread.start()
        start.wait()
        blocks.flush()
        blocks.close()
        for thread in threads:
            thread.join()
        del blocks
        assert space.resident_bytes == 0


def test_a_forked_child_cannot_use_them():
    with Context("host") as context:
        blocks = Blocks(context.reserve(1 << 20), [BlockRange(0, 1 << 16, 1 << 16)], 16)
        blocks.back([1])
        pid = os.fork()
        if not pid:
            try:
                blocks.back([2])
            except VmemError:
                blocks.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert blocks.backed().tolist() == [1]


# ---- pools ----------------------------------------------------------------------------------------------------------

SHRINK_TO = 7  # on the board


@pytest.fixture
def two(context):
    """Two members, of 40 blocks of a page, of a pool of 32 pages."""
    page = min(context.page_sizes)
    pool, made = KVPool(32 * page), []
    for name in ("a", "b"):
        board = np.zeros(BOARD_WORDS, np.uint64)
        blocks = Blocks(context.reserve(40 * page), [BlockRange(0, page, page)], 40, board=board)
        blocks.join(pool, name=name, min=4 * page)
        blocks.board, blocks.page = board, page
        made.append(blocks)
    yield made
    for blocks in made:
        blocks.close()
    assert pool.free == pool.budget
    pool.close()


def test_members_take_what_is_free_and_no_more(two):
    a, b = two
    assert a.back(range(20)) == 20
    assert b.back(range(12)) == 12
    with pytest.raises(OutOfMemory, match="exceed the budget"):
        b.back([12])
    a.unback(range(10))
    a.flush()
    until(lambda: b.ask(8 * b.page) == 0)  # the unused budget comes without an offer
    assert b.back(range(12, 20)) == 8
    with pytest.raises(InvalidArgument, match="member of a pool already"):
        a.join(KVPool(32 * a.page))

    def asked():
        with contextlib.suppress(OutOfMemory):  # an answer from before the offer
            b.ask(6 * b.page)
        return 0 < a.board[SHRINK_TO] < 10 * a.page

    a.offer(4 * a.page)
    until(asked)


def test_blocks_in_no_pool_refuse_its_calls(make):
    blocks = make()
    for call in (lambda: blocks.ask(1), lambda: blocks.offer(1), lambda: blocks.set_share(0, 0)):
        with pytest.raises(InvalidArgument, match="in no pool"):
            call()
