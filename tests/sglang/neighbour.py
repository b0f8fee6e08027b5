"""Another member of the pool of an engine that is driven step by step."""

import torch

import pyvmem
from pyvmem.blocks import BlockRange, Blocks


class Neighbour:
    """Another member of the pool, which takes what an engine gives that runs no step."""

    def __init__(self):
        from pyvmem.sglang import open_pool

        self.context, page = pyvmem.Context("host"), 64 << 10
        self.pool = open_pool(self.context)
        size = self.pool.budget
        self.tensor = pyvmem.VirtualTensor((size,), torch.int8, "cpu", page_size=page, zero=True, context=self.context)
        self.blocks = Blocks(self.tensor, [BlockRange(offset=0, stride=page, bytes=page)], size // page)
        self.blocks.join(self.pool, name="neighbour")
        self.page = page

    def try_to_take(self, size):
        """Return whether the pool gave so many bytes; then they were written."""
        try:
            if self.blocks.ask(size):
                return False
            self.blocks.back(range(size // self.page))
        except MemoryError:
            return False
        self.tensor.tensor[: size // self.page * self.page].fill_(7)
        return True

    def take(self, engine, size):
        """Take so many bytes while the engine runs no step."""
        for _ in range(3000):
            if self.try_to_take(size):
                return
            engine.step()
        raise AssertionError(f"the pool did not give {size} bytes")

    def give(self):
        self.blocks.unback(range(self.blocks.blocks))
        self.blocks.flush()
        self.blocks.ask(0)
        self.context.trim()
