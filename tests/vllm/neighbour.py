"""Another member of a pool, which takes its memory from models that sleep; as a program, by lines: take BYTES, give."""

import sys
import time


class Neighbour:
    """Another member of the pool that the environment names."""

    def __init__(self):
        import pyvmem
        import torch
        from pyvmem.blocks import BlockRange, Blocks
        from pyvmem.vllm import open_pool, plugin

        size = plugin.settings().pool_size
        self.context = pyvmem.Context("host")
        self.pool = open_pool(self.context)
        page = 64 << 10
        self.tensor = pyvmem.VirtualTensor((size,), torch.int8, "cpu", page_size=page, zero=True, context=self.context)
        self.blocks = Blocks(self.tensor, [BlockRange(offset=0, stride=page, bytes=page)], size // page)
        self.blocks.join(self.pool, name="neighbour")

    def take(self, size):
        """Take so many bytes, as soon as the others give them."""
        end = time.monotonic() + 60
        n = size // (64 << 10)
        while True:
            try:
                if not self.blocks.ask(size):
                    return self.blocks.back(range(n))
            except MemoryError:
                pass
            assert time.monotonic() < end, f"the pool did not give {size} bytes"
            time.sleep(0.005)

    def give(self):
        self.blocks.unback(range(self.blocks.blocks))
        self.blocks.flush()
        self.blocks.ask(0)
        self.context.trim()


if __name__ == "__main__":
    neighbour = Neighbour()
    print("here", flush=True)
    for line in sys.stdin:
        what, _, size = line.partition(" ")
        neighbour.take(int(size)) if what == "take" else neighbour.give()
        print("done", flush=True)
