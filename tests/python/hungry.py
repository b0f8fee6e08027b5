"""A hungry neighbour: a member of a pool that asks for every page of it, and says how many it could not get.

SPDX-License-Identifier: MIT
"""

import torch

from pyvmem import KVCache, TensorSpec


class Neighbour:
    """A cache of one request, each of whose tokens takes a page."""

    def __init__(self, pool, page, context=None, backend="host"):
        self.pool, self.page = pool, page
        most = pool.budget // page
        # A member of the same context takes memory over without the device, and one of another context does not.
        place = {"context": context} if context else {"backend": backend}
        self.cache = KVCache([TensorSpec("row", (page,), torch.uint8)], 1, most, pool.budget, pool=pool,
                             name="neighbour", page_size=page, **place)  # fmt: skip
        self.cache.alloc()

    def misses(self, others=0):
        """Ask for the whole pool but `others` bytes; return how many pages of that nobody gave."""
        want = (self.pool.budget - others) // self.page
        while not self.cache.step([want]):
            if not self.cache.shortage.coming_pages or self.pool.wait(self.cache, 60) == "refused":
                return self.cache.shortage.missing_pages
        return 0

    def close(self):
        self.cache.close()
