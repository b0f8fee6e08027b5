"""How blocks share pages: `pyvmem.engine.packing`, which needs no engine.

SPDX-License-Identifier: MIT
"""

import random

import pytest

from pyvmem.engine.packing import PagePacking


@pytest.mark.parametrize("block, span", [(64, 2048), (100, 2048), (576, 2048), (2048, 2048), (3000, 2048), (64, 0)])
def test_blocks_that_are_out_come_back_where_pages_are_first(block, span):
    r = random.Random(block)
    for total in (1, 3, 50, 173):
        blocks, inside = PagePacking(total, block, span), set()
        for _ in range(150):
            there = {0} | {blocks.page_of(i) for i in inside}
            if r.random() < 0.5:
                n, pages = r.randrange(0, 50), r.choice([0, 1, 3, total])
                free = [i for i in range(1, total + 1) if i not in inside and blocks.page_of(i) in there]
                taken = blocks.take(n, pages)
                fresh = [i for i in taken if i not in free]
                assert len(set(taken)) == len(taken) and not inside & set(taken)
                assert taken[: len(free)] == free[:n] and fresh == sorted(fresh)
                assert len({blocks.page_of(i) for i in fresh}) <= pages
                assert len(taken) == min(n, total - len(inside)) or pages < total
                inside.update(taken)
            else:
                gone = r.sample(sorted(inside), r.randrange(len(inside) + 1))
                blocks.put(gone)
                inside.difference_update(gone)
            there = [blocks.page_of(i) for i in inside]
            assert set(blocks) == set(range(1, total + 1)) - inside and len(blocks) == total - len(inside)
            assert blocks.pages_in_use == len(set(there) - {0})
            assert blocks.at_hand == sum(blocks.page_of(i) in {0, *there} for i in blocks)
            assert all(blocks.inside(p) == there.count(p) + (p == 0) for p in set(there))


def backed(packing):
    return sorted(set(range(1, len(packing._is_out))) - set(packing))


def test_without_shared_pages_every_block_is_a_page():
    packing = PagePacking(10, 64, 0)
    assert packing.take(4, 10) == [1, 2, 3, 4] and packing.pages_in_use == 4 and not packing.shared
    assert packing.freeing([2, 3]) == [2, 3] and packing.blocks_in(200) == 3 and packing.in_pages(200) == 192


def test_blocks_whose_page_holds_others_free_nothing():
    packing = PagePacking(40, 512, 2048)  # four blocks in a page
    packing.take(11, 10)
    assert backed(packing) == list(range(1, 12)) and packing.pages_in_use == 2
    assert packing.freeing([4, 5, 6, 8, 9, 10, 11]) == [8, 9, 10, 11]
    assert packing.freeing([1, 2, 3]) == []  # the page of block 0 stays
    packing.put([8, 9, 10])
    assert packing.freeing([11]) == [11] and packing.pages_in_use == 2
    assert packing.blocks_in(2048) == packing.at_hand + 4 == 7


def test_the_fewest_pages_are_those_of_scattered_blocks_in_use():
    packing = PagePacking(40, 512, 2048)
    packing.take(27, 40)
    assert packing.pages_in_use == 6
    in_use = {4, 8, 12, 16}
    free = set(backed(packing)) - in_use
    assert packing.fewest_pages(4, free) == 4  # each lies in a page of its own
    assert packing.fewest_pages(4, set(backed(packing)) - {4, 5, 6, 7}) == 1
    assert packing.fewest_pages(20, free) == 5


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_below_a_corrected_limit_keeps_it(seed):
    """Blocks that reach into other pages: each block of one page holds a half more."""
    r = random.Random(seed)
    packing, limit = PagePacking(200, 1000, 1000), 1000 * r.randrange(20, 150)
    packing.take(200, 200)

    def held():
        return packing.pages_in_use * 1500

    for _ in range(30):
        packing.forget(limit)
        packing.measure(held(), limit)
        most = packing.in_pages(limit - packing.limit_correction) // 1000
        if packing.pages_in_use > most:
            packing.put(backed(packing)[most:])
    assert held() <= limit and held() >= limit - 3000  # and no more is given up than is needed
    packing.forget(limit + 1)
    assert packing.limit_correction == packing.page_overhead == 0
