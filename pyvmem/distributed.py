"""Tensor parallelism: one KV cache on every rank, and ranks that always make the same decisions.

Every rank makes the same calls in the same order. All ranks choose equal slots, because a manager with ``same_slots``
chooses them by the sequence of calls alone. The ranks agree on whether a step is possible before they map anything, so
the rank with the least memory limits all of them. The agreement is one all-reduce of `torch.distributed` over the
process group's backend (gloo, NCCL). Run under ``torchrun``.

SPDX-License-Identifier: MIT
"""

import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np
import torch
import torch.distributed as dist

from pyvmem._checks import uint
from pyvmem.errors import OutOfMemory, _error
from pyvmem.kv_admission import Request
from pyvmem.kv import KVCache, Lengths, Prefix

# Attributes and calls that each rank answers for itself, because no decision depends on them.
_LOCAL = frozenset(
    (
        "alloc_reqid closed context drop_prefix expect flat groups keys last_step layout max_tokens metrics_json "
        "metrics_prometheus options page_size reclaim retire set_watermark shortage slot slots specs stats step_maps "
        "tensors tokens values wait"
    ).split()
)

_OTHER = 1 << 20  # reported by a rank whose call raised an exception without an errno


def _decisive(cache: KVCache) -> tuple[Any, ...]:
    """What determines the choice of slots and the answers, besides the budget."""
    options = cache.options
    tensors = [(Fraction(cache.page_size, spec.row_bytes), spec.window, spec.max_tokens) for spec in cache.specs]
    return (
        cache.slots, cache.max_tokens, cache.tile_rows, options.steps_in_flight, options.defer, options.eager_tokens,
        tensors,
    )  # fmt: skip


def _sum_of(lengths: Any) -> int:
    """A checksum that detects different lengths on different ranks."""
    try:
        return zlib.crc32(np.asarray(lengths, np.int64).tobytes())
    except (OverflowError, TypeError, ValueError):
        return 0  # the call itself reports what is wrong with them


class TensorParallelKVCache:
    """A `KVCache` of this rank that agrees with those of the other ranks.

    It has the calls of `KVCache`. A call that may be refused is refused on every rank, and then changes nothing on any.
    The choice of slots needs no communication.

    Parameters
    ----------
    cache : KVCache
        Created with ``same_slots=True``, and with equal options, slots, lengths and tokens per page on every rank.
        Budgets may differ.
    group : torch.distributed.ProcessGroup, optional
        The ranks that share a model; all ranks by default.

    Attributes
    ----------
    missing_pages : int
        After a call that returned -1: the pages missing on the rank that lacks most.

    Raises
    ------
    ValueError
        The cache was created without ``same_slots``.
    RuntimeError
        The ranks' caches differ, or the ranks make different calls.
    """

    def __init__(self, cache: KVCache, group: dist.ProcessGroup | None = None) -> None:
        if not cache.same_slots:
            raise ValueError("cache must be created with same_slots=True: otherwise the ranks choose different slots")
        self.cache = cache
        self.group = group
        self.missing_pages = 0
        self._staged: dict[int, int] = {}  # as the ranks agreed on
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._device = torch.device(device)
        self._vote(f"TensorParallelKVCache of {_decisive(cache)}", lambda: None)

    def __getattr__(self, name: str) -> Any:
        if name in _LOCAL:
            return getattr(self.cache, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _vote(
        self,
        what: str,
        call: Callable[..., Any],
        *args: Any,
        number: Callable[[Any], int] | None = None,
        undo: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, int]:
        """Make a call on every rank, and agree on its result by one all-reduce.

        Returns the call's result and the largest `number` of the ranks' results. `missing_pages` becomes the largest of
        the ranks'. If the call raised on a rank, or the ranks made different calls (`what`), it raises on every rank,
        after `undo` has undone it on the ranks where it succeeded.
        """
        error: Exception | None = None
        result = None
        self.cache.missing_pages = 0
        try:
            result = call(*args)
        except Exception as raised:  # any exception: the other ranks wait for this one's answer
            error = raised
        code = zlib.crc32(what.encode())
        failed = 0 if error is None else getattr(error, "errno", None) or _OTHER
        value = number(result) if number and error is None else -(2**62)
        words = torch.tensor((code, -code, failed, self.cache.missing_pages, value), device=self._device)
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.group)
        most, least, failed, self.missing_pages, value = words.tolist()
        if error is None and (failed or most != -least) and undo:
            undo(result)
        if error is not None:
            raise error
        if most != -least:
            raise RuntimeError(f"this rank called {what}, and another rank made a different call")
        if failed == _OTHER:
            raise RuntimeError(f"{what} failed on another rank")
        if failed:
            raise _error(failed, f"{what} failed on another rank")
        return result, value

    def _fits(self, what: str, check: Callable[..., Any], *args: Any) -> bool:
        """Whether a check of `KVCache` finds memory on every rank."""
        self._vote(what, check, *args)
        return not self.missing_pages

    def _done(self, answer: int) -> int:
        """The result of a call that the ranks agreed on."""
        if answer:
            raise OutOfMemory(12, f"{self.cache.missing_pages} pages are missing on this rank, within its budget")
        return answer

    def room(self, slot: SupportsIndex | None = None) -> int:
        """How many tokens the slot (None: a new request) could have on the rank with the least free memory."""
        return -self._vote(f"room({slot})", self.cache.room, slot, number=lambda room: -room)[1]

    def fit(self, requests: Sequence[Request]) -> int:
        """As `KVCache.fit`, on the rank that can take fewest."""
        what = f"fit({len(requests)} requests)"
        return -self._vote(what, self.cache.fit, requests, number=lambda fit: -fit)[1]

    def admit(self, tokens: int) -> int:
        """A slot for a request of `tokens` tokens if every rank has room for it, else -1."""
        return self.cache.alloc_reqid(tokens) if self.room() >= tokens else -1

    def free_reqid(self, slot: SupportsIndex, after: SupportsIndex | None = None) -> None:
        """As `KVCache.free_reqid`. `after` must be a step's number: events complete at different times on each rank."""
        self.cache.free_reqid(slot, None if after is None else uint("after", after))
        self._staged.pop(int(slot), None)

    def check(self, lengths: Lengths) -> int:
        """What `step` would return now, without doing anything."""
        return 0 if self._fits(f"check({_sum_of(lengths)})", self.cache.check, lengths) else -1

    def step(self, lengths: Lengths) -> int:
        """As `KVCache.step`: 0 on every rank, or -1 on every rank, in which case nothing changed on any.

        Raises
        ------
        OutOfMemory
            A device has less memory than its budget. Only with ``lazy``: otherwise memory is allocated at the start.
        """
        if not self._fits(f"step({_sum_of(lengths)})", self.cache.check, lengths):
            return -1
        return self._done(self.cache.step(lengths))

    def grow(self, slot: SupportsIndex, tokens: SupportsIndex) -> int:
        """As `KVCache.grow`, on every rank or on none."""

        def undo(answer: int) -> None:
            if not answer:
                self.cache.grow(slot, self._staged.get(int(slot), 0))

        answer, _ = self._vote(f"grow({slot}, {tokens})", self.cache.grow, slot, tokens, undo=undo)
        if self.missing_pages:
            undo(answer)
            return -1
        self._staged[int(slot)] = int(tokens)
        return 0

    def commit(self) -> int:
        """As `KVCache.commit`, on every rank or on none: a budget may have changed since `grow`."""
        lengths = [self._staged.get(slot, 0) for slot in range(self.cache.slots)]
        if not self._fits(f"commit({_sum_of(lengths)})", self.cache.check, lengths):
            return -1
        answer = self._done(self.cache.commit())
        self._staged.clear()
        return answer

    def check_attach(self, prefix: Prefix, tokens: SupportsIndex | None = None) -> int:
        """As `KVCache.check_attach`, for all ranks."""
        return 0 if self._fits(f"check_attach(..., {tokens})", self.cache.check_attach, prefix, tokens) else -1

    def attach_prefix(self, prefix: Prefix, slot: SupportsIndex, tokens: SupportsIndex | None = None) -> int:
        """As `KVCache.attach_prefix`, on every rank or on none."""
        what = f"attach_prefix(..., {slot}, {tokens})"
        if not self._fits(what, self.cache.check_attach, prefix, tokens):
            return -1
        return self._done(self.cache.attach_prefix(prefix, slot, tokens))

    def save_prefix(self, slot: SupportsIndex, tokens: SupportsIndex) -> Prefix:
        """As `KVCache.save_prefix`. Only what every rank has can be attached."""
        prefix, min_tokens = self._vote(
            f"save_prefix({slot}, {tokens})", self.cache.save_prefix, slot, tokens,
            number=lambda prefix: prefix.min_tokens, undo=self.cache.drop_prefix,
        )  # fmt: skip
        return Prefix(prefix.id, prefix.tokens, min_tokens)

    def prefix_pages(self, prefix: Prefix) -> tuple[int, int]:
        """As `KVCache.prefix_pages`, of the rank that has the fewest."""
        call = self.cache.prefix_pages
        fewest = self._vote("prefix_pages", call, prefix, number=lambda pages: -(pages[0] << 31 | pages[1]))[1]
        return -fewest >> 31, -fewest & (1 << 31) - 1

    def check_swap_in(self, slot: SupportsIndex) -> int:
        """As `KVCache.check_swap_in`, for all ranks."""
        return 0 if self._fits(f"check_swap_in({slot})", self.cache.check_swap_in, slot) else -1

    def swap_in(self, slot: SupportsIndex) -> int:
        """As `KVCache.swap_in`, on every rank or on none."""
        if not self._fits(f"swap_in({slot})", self.cache.check_swap_in, slot):
            return -1
        return self._done(self.cache.swap_in(slot))

    def swap_out(self, slot: SupportsIndex) -> None:
        """As `KVCache.swap_out`. If it fails on a rank, the others swap the request in again."""
        self._vote(f"swap_out({slot})", self.cache.swap_out, slot, undo=lambda _: self.cache.swap_in(slot))
        self._staged.pop(int(slot), None)

    def check_truncate(self, slot: SupportsIndex, tokens: SupportsIndex) -> int:
        """As `KVCache.check_truncate`, for all ranks."""
        return 0 if self._fits(f"check_truncate({slot}, {tokens})", self.cache.check_truncate, slot, tokens) else -1

    def truncate(self, slot: SupportsIndex, tokens: SupportsIndex, after: SupportsIndex | None = None) -> None:
        """As `KVCache.truncate`. Raises `OutOfMemory` on every rank if one of them cannot copy a shared page.

        `after` must be a step's number, because events complete at different times on each rank.
        """
        if self.check_truncate(slot, tokens):
            raise OutOfMemory(12, f"{self.missing_pages} pages are missing on a rank, to copy shared pages")

        def call() -> None:
            self.cache.truncate(slot, tokens, None if after is None else uint("after", after))

        self._vote(f"truncate({slot}, {tokens}, {after})", call)
        self._staged.pop(int(slot), None)

    def set_budget(self, bytes: SupportsIndex) -> None:
        """As `KVCache.set_budget`. Each rank may pass a different budget. If one rank fails, no budget changes."""
        stats = self.cache.stats()
        before = stats.budget_pages * stats.page_size
        self._vote("set_budget", self.cache.set_budget, bytes, undo=lambda _: self.cache.set_budget(before))

    def close(self) -> None:
        """As `KVCache.close`, for this rank's cache."""
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

    Returns a `TensorParallelKVCache`. The other arguments are those of `KVCache.for_model`.
    """
    world = dist.get_world_size(group)
    if kv_heads % world:
        raise ValueError(f"kv_heads {kv_heads} must be a multiple of the {world} ranks")
    heads = kv_heads // world
    options["same_slots"] = True
    cache = KVCache.for_model(layers, heads, head_dim, slots, max_tokens, budget, **options)
    return TensorParallelKVCache(cache, group)
