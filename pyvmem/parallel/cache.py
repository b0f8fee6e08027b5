"""Tensor parallelism: one KV cache on every rank, and ranks that always make the same decisions.

Every rank makes the same calls in the same order. All ranks choose equal slots, because a manager with ``same_slots``
chooses them by the sequence of calls alone. The ranks agree on whether a step is possible before they map anything, so
the rank with the least memory limits all of them. The agreement is one all-reduce of `torch.distributed` over the
process group's backend (gloo, NCCL). It holds for the next steps too: a step that every rank knows will fit needs none.
Run under ``torchrun``.

SPDX-License-Identifier: MIT
"""

import errno
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pyvmem._checks import elements, shown, uint
from pyvmem._ffi import lib
from pyvmem.errors import OutOfMemory, _error
from pyvmem.kv.arguments import Request
from pyvmem.kv.cache import KVCache, Lengths, name_what_is_gone
from pyvmem.kv.types import NO_SHORTAGE, Run, Shortage
from pyvmem.parallel.local import LocalCalls
from pyvmem.parallel.pledge import Pledge

if TYPE_CHECKING:
    from pyvmem.parallel.hashes import TensorParallelBlockHashes

_RANKS = 1 << 12  # at most; the agreement packs a rank beside the pages that it lacks
_NEVER = 1 << 62  # the step of a shortage that no kernel's end makes good
_REASONS = (None, "budget", "device", "mappings", "slots")
_OTHER = 1 << 20  # reported by a rank whose call raised an exception without an errno


def _decisive(cache: KVCache) -> tuple[Any, ...]:
    """What determines the choice of slots and the answers, besides the budget."""
    options = cache.options
    tensors = [(Fraction(cache.page_size, spec.row_bytes), spec.window, spec.max_tokens) for spec in cache.specs]
    return (
        cache.slots, cache.max_tokens, cache.tile_rows, options.steps_in_flight, options.spare.defer,
        options.spare.eager_tokens, tensors,
    )  # fmt: skip


def _sum_of(lengths: Any) -> int:
    """A checksum that detects different lengths on different ranks."""
    try:
        return zlib.crc32(np.asarray(lengths, np.int64).tobytes())
    except (OverflowError, TypeError, ValueError):
        return 0  # the call itself reports what is wrong with them


class TensorParallelKVCache(LocalCalls):
    """A `KVCache` of this rank that agrees with those of the other ranks.

    It has the calls of `KVCache`; `init_cache` takes the place of `for_model`. A call that may be refused is refused on
    every rank, and then changes nothing on any. The choice of slots needs no communication. Make every call here, not
    on `cache`.

    Parameters
    ----------
    cache : KVCache
        Created with ``same_slots=True``, and with equal options, slots, lengths and tokens per page on every rank.
        Budgets may differ.
    group : torch.distributed.ProcessGroup, optional
        The ranks that share a model; all ranks by default. With gloo, no agreement waits for a GPU. Its timeout bounds
        how long a rank waits for the others.

    Attributes
    ----------
    shortage : Shortage
        As in `KVCache`, and equal on every rank: `rank` is the rank of the group that lacks most, `reason` and
        `missing_pages` are its own, and `step` is the step for which all ranks together must wait. The other numbers
        are the largest of any rank, and 0 if slots are short.
    agreements : int
        All-reduces so far.

    Raises
    ------
    ValueError, TypeError
        The cache was created without ``same_slots``, or is not a KVCache.
    RuntimeError
        The ranks' caches differ, or the ranks make different calls. Or a rank has ended or does not answer: then every
        further call but `close` raises the same.
    """

    def __init__(self, cache: KVCache, group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, not {shown(cache)}")
        if not cache.same_slots:
            raise ValueError("cache must be created with same_slots=True: otherwise the ranks choose different slots")
        self.cache = cache
        self.group = group
        self.shortage = NO_SHORTAGE
        self.agreements = 0
        self._staged: dict[int, int] = {}  # as the ranks agreed on
        self._pledge = Pledge(cache)
        self._past = 0  # a checksum of what was called without a question since the last agreement
        self._runs: dict[int, int] = {}  # the ranks' number of each run, by this rank's
        self._shared = 0  # runs that the ranks have shared
        self._evicts = False  # whether each rank may have evicted other runs
        self._broken: str | None = None
        self._hashes: TensorParallelBlockHashes | None = None
        self._rank = dist.get_rank(group)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._device = torch.device(device)
        self._vote(f"TensorParallelKVCache of {_decisive(cache)}", lambda: None)

    def _use(self) -> NoReturn:
        """Refuse `BlockHashes` and `KVPool`, which each rank would decide on by itself."""
        raise TypeError(
            "hashes and pools need a KVCache, not a TensorParallelKVCache, whose ranks would diverge "
            "(pyvmem.parallel.hashes has hashes for all ranks)"
        )

    def _vote(
        self,
        what: str,
        call: Callable[..., Any],
        *args: Any,
        number: Callable[[Any], int] | None = None,
        undo: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, int]:
        """Make a call on every rank, and agree on its result by one all-reduce.

        Returns the call's result and the largest `number` of the ranks' results, and sets `shortage`. If the call
        raised on a rank, or the ranks made different calls (`what`), it raises on every rank, after `undo` has undone
        it on the ranks where it succeeded.
        """
        if self._broken:
            raise RuntimeError(self._broken)
        try:
            return self._agree(what, call, args, number, undo)
        except Exception:
            raise
        except BaseException:  # such as Ctrl-C
            self._past = _OTHER  # the others may have made the call, and learn of it by the next agreement
            raise

    def _agree(
        self,
        what: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        number: Callable[[Any], int] | None,
        undo: Callable[[Any], Any] | None,
    ) -> tuple[Any, int]:
        error: Exception | None = None
        result = None
        self.cache.shortage = NO_SHORTAGE
        try:
            result = call(*args)
        except Exception as raised:  # any exception: the other ranks wait for this one's answer
            error = raised
        code = zlib.crc32(what.encode())
        number_of_error = 0 if error is None else getattr(error, "errno", None) or _OTHER
        mine = self.cache.shortage
        lacking = mine.missing_pages * len(_REASONS) + _REASONS.index(mine.reason)
        # With the lowest rank of those that lack most, or whose error has the largest number.
        failed, short = (n * _RANKS + _RANKS - 1 - self._rank for n in (number_of_error, lacking))
        value = number(result) if number and error is None else -(2**62)
        until = mine.step or _NEVER if mine.reason else 0
        words = (
            code, -code, self._past, -self._past, failed, value, short, until, mine.prefix_pages, mine.requests,
            mine.ending_pages, mine.watermark_pages,
        )  # fmt: skip
        most, least, past, least_past, failed, value, short, *others = self._most(what, words)
        calls = self._gathered(what, (what, self._past)) if most != -least or past != -least_past else []
        self._past = 0
        self.shortage = self._shortage(short, *others)
        number_of_error, by = failed // _RANKS, _RANKS - 1 - failed % _RANKS
        if error is None and (number_of_error or calls) and undo:
            self._undo(undo, result)
        if past != -least_past:
            parted = ", ".join(str(rank) for rank, (_, before) in enumerate(calls) if before != calls[0][1])
            self._broken = f"{what}: rank {parted} made other calls before than rank 0; they cannot agree any more"
            raise RuntimeError(self._broken) from error
        if error is not None:
            raise error
        if calls:
            made = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in enumerate(calls))
            raise RuntimeError(f"the ranks made different calls: {made}")
        if number_of_error == _OTHER:
            raise RuntimeError(f"{what} failed on rank {by}")
        if number_of_error:
            raise _error(number_of_error, f"{what} failed on rank {by}")
        return result, value

    @staticmethod
    def _shortage(short: int, step: int, prefix: int, requests: int, ending: int, watermark: int) -> Shortage:
        """The shortage that the ranks' largest numbers describe."""
        missing, reason = divmod(short // _RANKS, len(_REASONS))
        if not reason:
            return NO_SHORTAGE
        step = 0 if step == _NEVER else step
        return Shortage(
            _REASONS[reason], missing, prefix, requests, ending, watermark, step=step, rank=_RANKS - 1 - short % _RANKS
        )

    def _argument(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` makes of an argument. If it raises on this rank, the call raises on every rank."""
        try:
            return make()
        except Exception as raised:
            error = raised

        def fail() -> None:
            raise error

        return self._vote(what, fail)

    def _most(self, what: str, words: Sequence[int]) -> list[int]:
        """The largest of each of these numbers on the ranks, by one all-reduce."""
        numbers = torch.tensor(words, device=self._device)
        try:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
            most: list[int] = numbers.tolist()
        except Exception as lost:
            raise self._lost(what) from lost
        self.agreements += 1
        return most

    def _lost(self, what: str) -> RuntimeError:
        self._broken = f"{what}: a rank has ended, or did not answer in the time that the process group allows"
        return RuntimeError(self._broken)

    def _least(self, what: str, call: Callable[[], list[int]]) -> list[int]:
        """The least of each of the numbers that a call returns; `what` says how many they are."""
        numbers, least = self._vote(what, call, number=lambda numbers: -numbers[0])
        if len(numbers) == 1:
            return [-least]
        return [-number for number in self._most(what, [-number for number in numbers])]

    def _gather(self, what: str, call: Callable[[], Any]) -> list[Any]:
        """What a call returns on each rank."""
        result, _ = self._vote(what, call)
        return self._gathered(what, result)

    def _gathered(self, what: str, mine: Any) -> list[Any]:
        """An object of each rank."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        try:
            dist.all_gather_object(found, mine, group=self.group)
        except Exception as lost:
            raise self._lost(what) from lost
        return found

    def _undo(self, undo: Callable[[Any], Any], result: Any) -> None:
        try:
            undo(result)
        except Exception:
            self._past = _OTHER  # the others learn of it by the next agreement
            raise

    def _note(self, what: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Make a call that every rank answers alike, without asking the others; the next agreement compares it."""
        if self._broken:
            raise RuntimeError(self._broken)
        result: Any = "failed"
        try:
            result = call(*args, **named)
        finally:
            self._past = zlib.crc32(f"{what}: {result}".encode(), self._past)
        return result

    def _fits(self, what: str, check: Callable[..., Any], *args: Any) -> bool:
        """Whether a dry call of `KVCache` finds memory on every rank."""
        self._vote(what, partial(check, *args, dry=True))
        return not self.shortage.reason

    def _done(self, answer: bool) -> bool:
        """The result of a call that the ranks agreed on."""
        if not answer:
            raise OutOfMemory(errno.ENOMEM, f"on this rank only, although the ranks agreed: {self.cache.shortage}")
        return answer

    def room(self, slot: SupportsIndex | None = None) -> int:
        """How many tokens the slot (None: a new request) could have on the rank with the least free memory."""
        return -self._vote(f"room({slot})", self.cache.room, slot, number=lambda room: -room)[1]

    def fit(self, requests: Iterable[Request]) -> int:
        """As `KVCache.fit`, on the rank that can take fewest. Hashes count as far as every rank knows them."""
        found: list[Request] = self._argument("fit", lambda: elements("requests", requests))
        if self._hashes is not None:
            found = self._hashes.requests(found)
        what = f"fit({len(found)} requests)"
        return -self._vote(what, self.cache.fit, found, number=lambda fit: -fit)[1]

    def alloc(
        self, tokens: SupportsIndex = 0, *, slot: SupportsIndex | None = None, prefix_tokens: SupportsIndex = 0
    ) -> int | None:
        """As `KVCache.alloc`: the same slot on every rank."""
        call = self.cache.alloc
        chosen: int | None = self._note("alloc", call, tokens, slot=slot, prefix_tokens=prefix_tokens)
        # Which pages requests share with blocks that a rank has evicted, no other rank knows.
        self.shortage = replace(self.cache.shortage, prefix_pages=0, ending_pages=0)
        return chosen

    def free(self, slot: SupportsIndex, after: SupportsIndex | None = None) -> None:
        """As `KVCache.free`. `after` must be a step's number: events complete at different times on each rank."""
        fence = None if after is None else uint("after", after)
        self._note(f"free({slot}, {fence})", self.cache.free, slot, fence)
        self._ends(slot)

    def step(self, lengths: Lengths, *, dry: bool = False) -> bool:
        """As `KVCache.step`: True on every rank, or False on every rank, in which case nothing changed on any.

        A step asks the other ranks unless all of them know from an earlier one that it fits: they agree on 32
        further tokens for each request if every rank already holds the memory; otherwise on what the pages of the
        requests hold. They ask at least every 32 steps. Only then a rank takes over a budget that
        ``pyvmem top --limit`` requests.

        Raises
        ------
        OutOfMemory
            A device has less memory than its budget. Only with ``lazy``: otherwise memory is allocated at the start.
        """
        if dry:
            self._pledge.clear()  # a dry step takes over a budget that another process requested
            return self._fits(f"step({_sum_of(lengths)}, dry)", self.cache.step, lengths)
        numbers = self._numbers(lengths)
        if numbers is not None and self._pledge.covers(numbers):
            answer = self._take("step", numbers, self.cache.step, lengths)
        else:
            answer = self._ask_and_take("step", numbers, lengths, self.cache.step, lengths)
        if self._staged and numbers is not None and answer:
            self._staged = {slot: tokens for slot, tokens in self._staged.items() if not numbers[slot]}
        return answer

    def _numbers(self, lengths: Any) -> npt.NDArray[Any] | None:
        """The lengths as an array; None if they are none, which the call itself reports."""
        try:
            numbers = np.asarray(lengths)
        except (OverflowError, TypeError, ValueError):
            return None
        return numbers.astype(np.int64) if numbers.dtype.kind in "iu" and numbers.shape == (self.slots,) else None

    def _take(self, what: str, numbers: npt.NDArray[Any], call: Callable[..., bool], *args: Any) -> bool:
        """Make a step that is known to fit on every rank."""
        answer = self._done(self._note(f"{what}({_sum_of(numbers)})", call, *args))
        self.shortage = NO_SHORTAGE
        self._pledge.took(numbers)
        return answer

    def _ask_and_take(
        self, what: str, numbers: npt.NDArray[Any] | None, lengths: Any, call: Callable[..., bool], *args: Any
    ) -> bool:
        """Make a step if it fits on every rank, and agree on how far the next ones can go."""
        pledge = self._pledge

        def check() -> bool:
            return self.cache.step(lengths, dry=True) and numbers is not None and pledge.assured(numbers)

        ahead = self._vote(f"{what}({_sum_of(lengths)})", check, number=lambda assured: not assured)[1] == 0
        if self.shortage.reason:
            pledge.clear()
            return False
        answer = self._done(self._note(what, call, *args))
        if numbers is not None:
            pledge.agree(numbers, ahead)
        return answer

    def _ends(self, slot: SupportsIndex) -> None:
        """The slot has nothing staged, and cannot grow without a question."""
        self._staged.pop(int(slot), None)
        self._pledge.end(int(slot))

    def grow(self, slot: SupportsIndex, tokens: SupportsIndex) -> bool:
        """As `KVCache.grow`, on every rank or on none. Asks the other ranks as `step` does."""
        what = f"grow({slot}, {tokens})"
        at, length = self._argument(what, lambda: (uint("slot", slot, 32), uint("tokens", tokens, 32)))
        lengths = self._staged_lengths()
        if at < self.slots:
            lengths[at] = length
            if length and self._pledge.covers(lengths):
                self._done(self._note(what, self.cache.grow, at, length))
                self.shortage = NO_SHORTAGE
                self._staged[at] = length
                return True

        def undo(answer: bool) -> None:
            if answer:
                self.cache.grow(at, self._staged.get(at, 0))

        answer, _ = self._vote(what, self.cache.grow, at, length, undo=undo)
        if self.shortage.reason:
            undo(answer)
            return False
        self._staged[at] = length
        return True

    def _staged_lengths(self) -> npt.NDArray[Any]:
        lengths = np.zeros(self.slots, np.int64)
        for slot, tokens in self._staged.items():
            lengths[slot] = tokens
        return lengths

    def commit(self) -> bool:
        """As `KVCache.commit`, on every rank or on none: a budget may have changed since `grow`."""
        lengths = self._staged_lengths()
        if self._pledge.covers(lengths):
            answer = self._take("commit", lengths, self.cache.commit)
        else:
            answer = self._ask_and_take("commit", lengths, lengths, self.cache.commit)
        if answer:
            self._staged.clear()
        return answer

    def _names(self, runs: Iterable[Run]) -> str:
        """Runs by the numbers that they have on every rank."""
        return f"runs {[self._runs.get(run.id) for run in runs]}"

    def _agreed(self, what: str, look: Callable[[int], int], most: int) -> int | None:
        """The tokens, at most `most`, with which every rank can begin a request; None: memory is too short on one.

        look: how many a rank can begin with, given the most.
        """
        while True:
            asked = most
            most = -self._vote(f"{what}, {asked}", look, asked, number=lambda tokens: -tokens)[1]
            if not most or most == asked:
                return None if most and self.shortage.reason else most

    def share(self, slot: SupportsIndex, tokens: SupportsIndex, first: SupportsIndex = 0) -> Run:
        """As `KVCache.share`, on every rank or on none."""
        self._pledge.clear()
        run: Run = self._vote(
            f"share({slot}, {tokens}, {first})", self.cache.share, slot, tokens, first, undo=self.cache.drop
        )[0]
        self._shared += 1
        self._runs[run.id] = self._shared
        return run

    def attach(
        self,
        slot: SupportsIndex | None,
        runs: Run | Iterable[Run],
        most: SupportsIndex | None = None,
        *,
        dry: bool = False,
    ) -> int | None:
        """As `KVCache.attach`: with the tokens that every rank has, or None on every rank."""
        found: list[Run] = self._argument("attach", lambda: self.cache._runs_of(runs))
        numbers, tokens = self.cache._numbers_of(found), sum(run.tokens for run in found)
        if most is not None:
            tokens = min(tokens, self._argument("attach", lambda: uint("most", most, 32)))
        if not dry:
            self._pledge.clear()

        def look(most: int) -> int:
            return self.cache._attach(0, numbers, most, lib.VMEM_KV_DRY)[0]

        agreed = self._agreed(f"attach({slot}, {self._names(found)}{', dry' if dry else ''})", look, tokens)
        if agreed is None or dry:
            return agreed
        self._done(self.cache.attach(slot, found, agreed) == agreed)
        return agreed

    def drop(self, runs: Run | Iterable[Run]) -> None:
        """As `KVCache.drop`."""
        found = self.cache._runs_of(runs)
        self._note(f"drop({self._names(found)})", self.cache.drop, found)
        for run in found:
            self._runs.pop(run.id, None)

    def order(self, runs: Run | Iterable[Run], priority: SupportsIndex) -> None:
        """As `KVCache.order`. Each rank evicts by its own memory."""
        found = self.cache._runs_of(runs)
        self._pledge.clear()  # pages that could be evicted may no longer be
        self._evicts = True
        self._note(f"order({self._names(found)}, {priority})", self.cache.order, found, priority)

    def _new_hashes(self, tokens: int, max_tokens: int) -> "TensorParallelBlockHashes":
        """The block hashes of a `PrefixCache`."""
        from pyvmem.parallel.hashes import TensorParallelBlockHashes

        return TensorParallelBlockHashes(self, tokens, max_tokens)

    def swap_in(self, slot: SupportsIndex, *, dry: bool = False) -> bool:
        """As `KVCache.swap_in`, on every rank or on none."""
        if dry:
            return self._fits(f"swap_in({slot}, dry)", self.cache.swap_in, slot)
        self._pledge.clear()
        if not self._fits(f"swap_in({slot})", self.cache.swap_in, slot):
            return False
        return self._done(self.cache.swap_in(slot))

    def swap_out(
        self, slot: SupportsIndex, after: SupportsIndex | None = None, host: torch.Tensor | None = None
    ) -> None:
        """As `KVCache.swap_out`. If it fails on a rank, the others swap the request in again.

        `after` must be a step's number, because events complete at different times on each rank. `host` is each rank's
        own.
        """

        def call() -> None:
            self.cache.swap_out(slot, None if after is None else uint("after", after), host)

        def undo(_: None) -> None:
            self._done(self.cache.swap_in(slot))
            staged = self._staged.get(int(slot), 0)  # which a slot that is swapped out loses
            self._done(self.cache.grow(slot, staged))

        self._vote(f"swap_out({slot}, {after})", call, undo=undo)
        self._ends(slot)

    def truncate(
        self, slot: SupportsIndex, tokens: SupportsIndex, after: SupportsIndex | None = None, *, dry: bool = False
    ) -> bool:
        """As `KVCache.truncate`, on every rank or on none: False if one of them cannot copy a shared page.

        `after` must be a step's number, because events complete at different times on each rank.
        """
        what = f"truncate({slot}, {tokens}, {after}{', dry' if dry else ''})"

        def call(dry: bool) -> bool:
            return self.cache.truncate(slot, tokens, None if after is None else uint("after", after), dry=dry)

        if dry:
            return self._fits(what, call)
        self._pledge.clear()
        if not self._fits(what, call):
            return False
        if after is not None and self._evicts:
            self._agree_on_sharing(slot, tokens)
        self._done(self._vote(what, partial(call, dry=False))[0])
        self._staged.pop(int(slot), None)
        return True

    def _agree_on_sharing(self, slot: SupportsIndex, tokens: SupportsIndex) -> None:
        """Refuse a truncation that some ranks would refuse, because they hold runs that others have evicted."""

        def shared() -> list[int]:
            some = self.cache.slot(slot).shared_tokens > int(tokens)
            return [some, -some]

        least, most = self._least(f"truncate({slot}, {tokens})", shared)
        if least != -most:
            text = f"tokens {tokens}: rows from there on are shared on some ranks, and kernels may be in flight"
            raise _error(errno.EBUSY, text)

    def set_budget(self, bytes: SupportsIndex) -> None:
        """As `KVCache.set_budget`. Each rank may pass a different budget. If one rank fails, no budget changes."""
        self._pledge.clear()
        stats = self.cache.stats()
        before = stats.budget_pages * stats.page_size
        self._vote("set_budget", self.cache.set_budget, bytes, undo=lambda _: self.cache.set_budget(before))

    def reclaim(self, bytes: SupportsIndex | None = None, *, compact: bool = False) -> int:
        """As `KVCache.reclaim`, for this rank's cache; returns what this rank released."""
        self._pledge.clear()
        return self.cache.reclaim(bytes, compact=compact)

    def retire(self, step: SupportsIndex | None = None) -> None:
        """As `KVCache.retire`: on every rank the kernels must have ended."""
        self._note(f"retire({step})", self.cache.retire, step)

    def close(self, after: Any = None) -> None:
        """As `KVCache.close`, for this rank's cache."""
        self.cache.close(after)

    def __enter__(self) -> "TensorParallelKVCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


name_what_is_gone(TensorParallelKVCache)


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
