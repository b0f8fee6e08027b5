"""Tensor parallelism: one KV cache on every rank, and ranks that always decide alike.

Every rank makes the same calls in the same order. Slots come out equal because a manager with ``same_slots`` chooses
them by the calls alone; whether a step is possible is agreed on before anything is mapped, so that a rank with less
memory holds all of them to what it can do. The agreement is one all-reduce of `torch.distributed`, over whatever
backend the process group has (gloo, NCCL). Run under ``torchrun``.

SPDX-License-Identifier: MIT
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.kv import KVCache, Lengths, Prefix

# What every rank answers for itself: nothing is decided by it.
_LOCAL = frozenset(
    "alloc_reqid context flat free_reqid drop_prefix keys last_step layout max_tokens metrics_json "
    "metrics_prometheus page_size reclaim retire shortage slot slots specs stats tensors values wait".split()
)


class TensorParallelKVCache:
    """A `KVCache` of this rank that agrees with those of the other ranks.

    Its calls are those of `KVCache`. What may be refused is refused on every rank, and has then changed nothing on any;
    slots come out equal without communication.

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

    Raises
    ------
    ValueError
        The cache was made without ``same_slots``, or the ranks' caches differ.
    """

    def __init__(self, cache: KVCache, group: dist.ProcessGroup | None = None) -> None:
        if not cache.same_slots:
            raise ValueError("the cache must be made with same_slots=True: else the ranks choose different slots")
        self.cache = cache
        self.group = group
        self.missing_pages = 0
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._word = torch.zeros(2, dtype=torch.int64, device=device)
        least, most = self._agree(cache.slots, cache.max_tokens), self._agree(-cache.slots, -cache.max_tokens)
        if least != [-n for n in most]:
            raise ValueError("the ranks' caches differ in slots or max_tokens")

    def __getattr__(self, name: str) -> Any:
        if name in _LOCAL:
            return getattr(self.cache, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _agree(self, *numbers: int) -> list[int]:
        """The largest of every number over the ranks."""
        for i, number in enumerate(numbers):
            self._word[i] = number
        dist.all_reduce(self._word, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in self._word[: len(numbers)]]

    def _fits(self, check: Callable[..., Any], *args: Any) -> bool:
        """Whether a check of `KVCache` finds memory on every rank."""
        self.cache.missing_pages = 0
        check(*args)
        self.missing_pages = self._agree(self.cache.missing_pages)[0]
        return not self.missing_pages

    def _done(self, answer: int) -> int:
        """The answer of a call that was agreed on."""
        if answer:
            raise OutOfMemory(12, f"{self.cache.missing_pages} pages are missing on this rank, within its budget")
        return answer

    def _together(self, call: Callable[..., Any], *args: Any, undo: Callable[[Any], Any] | None = None) -> Any:
        """Make a call that can fail on one rank; it raises on every rank if it does."""
        error = result = None
        try:
            result = call(*args)
        except VmemError as raised:
            error = raised
        worst = self._agree(error.errno if error else 0)[0]
        if worst and not error:
            if undo:
                undo(result)
            error = VmemError(worst, "the call failed on another rank")
        if error:
            raise error
        return result

    def room(self, slot: SupportsIndex | None = None) -> int:
        """How many tokens the slot (None: a new request) could have on the rank that has least free."""
        return -self._agree(-self.cache.room(slot))[0]

    def admit(self, tokens: int) -> int:
        """A slot for a request of `tokens` tokens if every rank has room for it, else -1."""
        return self.cache.alloc_reqid(tokens) if self.room() >= tokens else -1

    def check(self, lengths: Lengths) -> int:
        """What `step` would return now, without doing anything."""
        return 0 if self._fits(self.cache.check, lengths) else -1

    def step(self, lengths: Lengths) -> int:
        """As `KVCache.step`: 0 on every rank, or -1 on every rank, and then nothing changed on any.

        Raises
        ------
        OutOfMemory
            A device has less memory than its budget says. Cannot happen without ``lazy``: the memory is taken at first.
        """
        return self._done(self.cache.step(lengths)) if self._fits(self.cache.check, lengths) else -1

    def grow(self, slot: SupportsIndex, tokens: SupportsIndex) -> int:
        """As `KVCache.grow`, agreed on."""
        self.cache.missing_pages = 0
        answer = self.cache.grow(slot, tokens)
        self.missing_pages = self._agree(self.cache.missing_pages)[0]
        if self.missing_pages and not answer:
            self.cache.grow(slot, 0)
        return -1 if self.missing_pages else 0

    def commit(self) -> int:
        """As `KVCache.commit`. What all ranks staged was agreed on."""
        return self._done(self.cache.commit())

    def check_attach(self, prefix: Prefix, tokens: SupportsIndex | None = None) -> int:
        """As `KVCache.check_attach`, agreed on."""
        return 0 if self._fits(self.cache.check_attach, prefix, tokens) else -1

    def attach_prefix(self, prefix: Prefix, slot: SupportsIndex, tokens: SupportsIndex | None = None) -> int:
        """As `KVCache.attach_prefix`, agreed on like a step."""
        if not self._fits(self.cache.check_attach, prefix, tokens):
            return -1
        return self._done(self.cache.attach_prefix(prefix, slot, tokens))

    def save_prefix(self, slot: SupportsIndex, tokens: SupportsIndex) -> Prefix:
        """As `KVCache.save_prefix`. What can be attached is what every rank has."""
        prefix = self._together(self.cache.save_prefix, slot, tokens, undo=self.cache.drop_prefix)
        return Prefix(prefix.id, prefix.tokens, self._agree(prefix.min_tokens)[0])

    def prefix_pages(self, prefix: Prefix) -> tuple[int, int]:
        """As `KVCache.prefix_pages`, on the rank that has fewest."""
        pages, own = self.cache.prefix_pages(prefix)
        pages, own = self._agree(-pages, -own)
        return -pages, -own

    def check_swap_in(self, slot: int) -> int:
        """As `KVCache.check_swap_in`, agreed on."""
        return 0 if self._fits(self.cache.check_swap_in, slot) else -1

    def swap_in(self, slot: int) -> int:
        """As `KVCache.swap_in`, agreed on like a step."""
        return self._done(self.cache.swap_in(slot)) if self._fits(self.cache.check_swap_in, slot) else -1

    def swap_out(self, slot: SupportsIndex) -> None:
        """As `KVCache.swap_out`."""
        self._together(self.cache.swap_out, slot)

    def check_truncate(self, slot: SupportsIndex, tokens: SupportsIndex) -> int:
        """As `KVCache.check_truncate`, agreed on."""
        self.cache.missing_pages = 0
        self._together(self.cache.check_truncate, slot, tokens)
        self.missing_pages = self._agree(self.cache.missing_pages)[0]
        return -1 if self.missing_pages else 0

    def truncate(self, slot: SupportsIndex, tokens: SupportsIndex, after: Any = None) -> None:
        """As `KVCache.truncate`, agreed on; raises `OutOfMemory` on every rank where one cannot copy a shared page."""
        if self.check_truncate(slot, tokens):
            raise OutOfMemory(12, f"{self.missing_pages} pages are missing on a rank, to copy shared ones")
        self._together(self.cache.truncate, slot, tokens, after)

    def set_budget(self, bytes: SupportsIndex) -> None:
        """As `KVCache.set_budget`, of this rank: each may give another number."""
        self._together(self.cache.set_budget, bytes)

    def close(self) -> None:
        """As `KVCache.close`, of this rank."""
        self.cache.close()

    def __enter__(self) -> "TensorParallelKVCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def init_cache(
    layers: int,
    kv_heads: int,
    head_dim: int,
    slots: int,
    max_tokens: int,
    budget: int,
    *,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> TensorParallelKVCache:
    """This rank's cache of a model whose `kv_heads` are split evenly over the ranks of the group.

    Returns a `TensorParallelKVCache`; other arguments as in `KVCache.for_model`.
    """
    world = dist.get_world_size(group)
    if kv_heads % world:
        raise ValueError(f"{kv_heads} KV heads do not divide among {world} ranks")
    heads = kv_heads // world
    options["same_slots"] = True
    cache = KVCache.for_model(layers, heads, head_dim, slots, max_tokens, budget, **options)
    return TensorParallelKVCache(cache, group)
