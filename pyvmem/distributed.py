"""Tensor parallelism: one KV cache on every rank, and ranks that always decide alike.

Every rank makes the same calls in the same order. Slots come out equal because a manager with ``same_slots`` chooses
them by the calls alone; whether a step is possible is agreed on before anything is mapped, so that a rank with less
memory holds all of them to what it can do. The agreement is one all-reduce of `torch.distributed`, over whatever
backend the process group has (gloo, NCCL). Run under ``torchrun``.

SPDX-License-Identifier: MIT
"""

import torch
import torch.distributed as dist

from pyvmem.errors import OutOfMemory
from pyvmem.kv import KVCache


class TensorParallelKVCache:
    """A `KVCache` of this rank that agrees with those of the other ranks.

    Parameters
    ----------
    cache : KVCache
        Made with ``same_slots=True``, with equal slots, lengths and tokens a page on every rank; budgets may differ.
    group : torch.distributed.ProcessGroup, optional
        The ranks that share a model; all by default.

    Attributes
    ----------
    missing_pages : int
        After a call that returned -1: of the rank that is short of most.
    """

    def __init__(self, cache, group=None):
        self.cache = cache
        self.group = group
        self.missing_pages = 0
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._word = torch.zeros(2, dtype=torch.int64, device=device)
        least, most = self._agree(cache.slots, cache.max_tokens), self._agree(-cache.slots, -cache.max_tokens)
        if least != [-n for n in most]:
            raise ValueError("the ranks' caches differ in slots or max_tokens")

    def _agree(self, *numbers):
        """The largest of every number over the ranks."""
        for i, number in enumerate(numbers):
            self._word[i] = number
        dist.all_reduce(self._word, op=dist.ReduceOp.MAX, group=self.group)
        return self._word[: len(numbers)].tolist()

    def alloc_reqid(self, tokens=0, slot=None, *, prefix_tokens=0):
        """As `KVCache.alloc_reqid`; the same slot on every rank, without communication."""
        return self.cache.alloc_reqid(tokens, slot, prefix_tokens=prefix_tokens)

    def free_reqid(self, slot):
        """As `KVCache.free_reqid`."""
        self.cache.free_reqid(slot)

    def room(self, slot=None):
        """How many tokens the slot (None: a new request) could have on the rank that has least free."""
        return -self._agree(-self.cache.room(slot))[0]

    def admit(self, tokens):
        """A slot for a request of `tokens` tokens if every rank has room for it, else -1."""
        return self.cache.alloc_reqid(tokens) if self.room() >= tokens else -1

    def step(self, lengths):
        """As `KVCache.step`: 0 on every rank, or -1 on every rank, and then nothing changed on any.

        Raises
        ------
        OutOfMemory
            A device has less memory than its budget says. Cannot happen without ``lazy``: the memory is taken at first.
        """
        self.cache.missing_pages = 0
        self.cache.check(lengths)
        self.missing_pages = self._agree(self.cache.missing_pages)[0]
        if self.missing_pages:
            return -1
        if self.cache.step(lengths):
            raise OutOfMemory(12, f"{self.cache.missing_pages} pages are missing on this rank, within its budget")
        return 0

    def swap_in(self, slot):
        """As `KVCache.swap_in`, agreed on like a step."""
        tokens = self.cache.slot(slot).tokens
        if self.room() < tokens:  # what a new request of that length would need
            return -1
        return self.cache.swap_in(slot)

    def swap_out(self, slot):
        """As `KVCache.swap_out`."""
        self.cache.swap_out(slot)


def init_cache(layers, kv_heads, head_dim, slots, max_tokens, budget, *, group=None, **options):
    """This rank's cache of a model whose `kv_heads` are split evenly over the ranks of the group.

    Returns a `TensorParallelKVCache`; other arguments as in `KVCache.for_model`.
    """
    world = dist.get_world_size(group)
    if kv_heads % world:
        raise ValueError(f"{kv_heads} KV heads do not divide among {world} ranks")
    heads = kv_heads // world
    cache = KVCache.for_model(layers, heads, head_dim, slots, max_tokens, budget, same_slots=True, **options)
    return TensorParallelKVCache(cache, group)
