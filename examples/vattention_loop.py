"""The calls of microsoft/vattention on a KVCache, and the loop of its demo.

That extension has one cache per process, and functions. An engine that was written for it takes `VAttention()` in the
place of the module: names, arguments and order stay. What a request is differs, and is translated: there, a
request lives as long as its length is not 0; here, from `alloc` to `free`.

    python examples/vattention_loop.py                      # on CPU memory
    python examples/vattention_loop.py --device cuda

SPDX-License-Identifier: MIT
"""

import argparse
import random

import torch

from pyvmem import KVCache


class VAttention:
    """The module's functions as methods."""

    def init_kvcache(
        self, layers, kv_heads, head_dim, batch, max_tokens, device, dtype, page_size=None, megacache=False, **options
    ):
        """K of all layers, then V of all layers: virtual tensors, [batch, max_tokens, kv_heads, head_dim].

        With `megacache` the layers share a tensor. page_size: bytes; None takes the smallest.
        """
        options = {"device": device, "page_size": page_size or None, "lazy": True, **options}
        layout = "token-major" if megacache else "separate"
        least = 4 * layers << 21  # until reserve_physical_pages says how much
        self.kv = KVCache.for_model(
            layers, kv_heads, head_dim, batch, max_tokens, least, dtype=dtype, layout=layout, **options
        )
        self.layers = layers
        self.live = set()  # ids of requests
        return [*self.kv.keys, *self.kv.values]

    def reserve_physical_pages(self, bytes):
        """The memory that the cache may take; returns pages."""
        self.kv.set_budget(bytes)
        return self.kv.stats().budget_pages

    def num_free_kvblocks(self):
        """Blocks of one page in each tensor that requests can still have."""
        return self.kv.stats().free_pages // len(self.kv.tensors)

    def alloc_new_batch_idx(self, tokens):
        """An id for a request of `tokens` tokens, or -1: no id is free."""
        slot = self.kv.alloc(tokens)
        if slot is None:
            return -1
        self.live.add(slot)
        return slot

    def free_batch_idx(self, id):
        """End a request. Its pages are kept until they are needed elsewhere. The model's kernels may still run."""
        self.live.discard(id)
        self.kv.free(id, after=self.kv.last_step)

    def step(self, lengths, eager_reclaim=False):
        """Back the rows of the coming iteration. The caller has waited for the kernels of the last one."""
        self.kv.retire()
        self._step(lengths)
        if eager_reclaim:
            self.kv.retire(self.kv.last_step - 1)  # not this step's, which are yet to come
            self.kv.reclaim()

    def step_async(self, lengths):
        """The same while the kernels of the last iteration may run; the next rows are backed in the background."""
        self.kv.retire(self.kv.last_step - 1)
        self._step(lengths)

    def _step(self, lengths):
        for id, tokens in enumerate(lengths):
            if id in self.live and not tokens:  # there, this ends a request; here, it would pause, and keep its pages
                self.free_batch_idx(id)
            elif id not in self.live and tokens:  # an id that the caller has chosen
                self.live.add(self.kv.alloc(tokens, slot=id))
        if not self.kv.step(lengths):
            raise MemoryError(f"{self.kv.shortage.missing_pages} pages are missing; nothing has changed")

    def set_deferred_reclamation(self, deferred):
        """Keep pages of ended requests until they are needed, or not. False gives back what is kept now."""
        if not deferred:
            self.kv.reclaim()

    def cleanup(self):
        """Free everything. The caller has waited for the kernels."""
        self.kv.close()


def demo(vattention, tensors, batch, iterations, first=200, wait=lambda: None, asynchronous=False):
    """Half of the ids are taken; every third iteration a request comes and one goes. Returns the lengths at the end."""
    draw, lengths = random.Random(1), [0] * batch
    for id in draw.sample(range(batch), batch // 2):
        lengths[id] = first
    for i in range(iterations):
        if asynchronous:
            vattention.step_async(lengths)
        else:
            wait()
            vattention.step(lengths, True)
        for id, tokens in enumerate(lengths):  # the model's part
            for tensor in tensors:
                tensor[id, :tokens] = 1
        if i % 3 == 0:
            lengths[draw.choice([id for id in range(batch) if not lengths[id]])] = first
            lengths[draw.choice([id for id in range(batch) if lengths[id]])] = 0
        lengths = [tokens + 1 if tokens else 0 for tokens in lengths]
    wait()
    return lengths


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--iterations", type=int, default=300)
    args = parser.parse_args()
    gpu = args.device != "cpu"
    for asynchronous in (False, True):
        vattention = VAttention()
        tensors = vattention.init_kvcache(
            4, 4, 64, 16, 2048, 0, torch.float16, 64 << 10 if not gpu else None, backend=None if gpu else "host"
        )
        vattention.reserve_physical_pages(64 << 20)
        wait = torch.cuda.synchronize if gpu else lambda: None
        lengths = demo(vattention, tensors, 16, args.iterations, wait=wait, asynchronous=asynchronous)
        stats, running = vattention.kv.stats(), sum(tokens > 0 for tokens in lengths)
        print(
            f"{'step_async' if asynchronous else 'step'}: {stats.steps} iterations, {running} requests run, "
            f"{stats.active_slots} slots are taken, {stats.held_pages} pages held, "
            f"{vattention.num_free_kvblocks()} blocks free"
        )
        vattention.cleanup()


if __name__ == "__main__":
    main()
