"""The paper's calls under their own names: Table 3 on a KV cache, with its answers. Table 2 is in test_map.

SPDX-License-Identifier: MIT
"""

import paper


def test_table_3_answers_0_and_minus_1():
    pages = 4  # one for each tensor
    with paper.init(2, 2, 64, 2, 4096, pages * 65536, backend="host", page_size=65536, name=None) as cache:
        first = paper.alloc_reqid(cache, 10)
        assert sorted((first, paper.alloc_reqid(cache))) == [0, 1] and paper.alloc_reqid(cache) == -1
        lengths = [0, 0]
        lengths[first] = 10
        assert paper.step(cache, lengths) == 0
        lengths[first] = 4096
        assert paper.step(cache, lengths) == -1 and cache.shortage.missing_pages > 0
        paper.free_reqid(cache, first)
        cache.retire()
        assert paper.alloc_reqid(cache) == first
        assert paper.step(cache, [0, 0]) == 0 and cache.stats().active_slots == 2
