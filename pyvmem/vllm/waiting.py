"""Which requests of a scheduler of vLLM's wait for blocks, how many each of them takes, and how long a step may wait.

SPDX-License-Identifier: MIT
"""

import bisect
import collections
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST = 64  # requests that are looked at
FRESH = 0.05  # seconds after which a request is looked up anew,
SHARE = 20  # which takes one part in so many of the time at most
REMEMBERED = 4 * MOST


def waiting(scheduler: Any) -> list[Any]:
    """The first requests that vLLM may begin or go on with, in the order in which it looks at them.

    Requests that wait for something else, such as a grammar or a session's next input, need no blocks yet. Sessions
    whose next input has come wait in a queue of their own, as they hold blocks. Until 0.30, requests that vLLM has once
    skipped were there, too. An engine that its user has paused begins none that holds no blocks.
    """
    held = getattr(scheduler, "kv_holding_waiting", None) or getattr(scheduler, "skipped_waiting", None) or ()
    new = () if getattr(scheduler, "pause_state", None) else scheduler.waiting or ()
    if not held and not new:
        return []
    ready = (r for r in itertools.chain(held, new) if not r.status.name.startswith("WAITING_FOR_"))
    return list(itertools.islice(ready, MOST))


def paused(scheduler: Any) -> bool:
    """Return whether no request begins, because the engine's user has paused it."""
    return getattr(scheduler, "pause_state", 0) > 0


def stopped(scheduler: Any) -> bool:
    """Return whether no request goes on, because the engine's user has paused it."""
    return getattr(scheduler, "pause_state", 0) > 1


class Wants(NamedTuple):
    """The blocks that a waiting request takes when it begins.

    Attributes
    ----------
    computed : int
        Tokens whose rows are there: of its own, or in the prefix cache.
    found : tuple of int
        Blocks of each group that it holds or that vLLM finds, those before a window included.
    rest : int
        Blocks for its other known tokens.
    cached : int
        Of the blocks that vLLM finds, those that no request uses: they leave the queue of free blocks with it.
    """

    computed: int
    found: tuple[int, ...]
    rest: int
    cached: int


class Lookup:
    """Counts what waiting requests take, as vLLM will when it begins them.

    A lookup reads each block of a prompt's prefix (0.3 us), so what was found is remembered. It is looked up anew if
    one of the last blocks has been evicted, or after a while, as other requests may have cached more. Neither changes
    vLLM's statistics, its events or the order of eviction.

    Parameters
    ----------
    manager : vllm.v1.core.kv_cache_manager.KVCacheManager
    sizes : sequence of int
        Tokens of a block in each group.
    plain : bool
        The model has one group, of full attention, and no drafts: a prefix is cached up to one block and not beyond,
        since a block's hash covers all before it. The lookup then halves the prefix instead of reading each block.
    """

    def __init__(self, manager: Any, sizes: Sequence[int], plain: bool = False) -> None:
        self._plain = plain
        self._manager, self._coordinator, self._sizes = manager, manager.coordinator, sizes
        self._nothing: tuple[list[Any], ...] = tuple([] for _ in sizes)
        # Of each request: its tokens then, the time, the last blocks that were found with their hashes, the answer.
        self._known: dict[str, tuple[int, float, list[tuple[Any, Any]], Wants]] = {}
        self._next = 0.0  # no request is looked up anew before

    def __call__(self, request: Any) -> Wants:
        """Count what a waiting request takes."""
        tokens, known = request.num_tokens, self._known.get(request.request_id)
        if request.num_computed_tokens:  # it holds blocks already
            return self._held(tokens, request.num_computed_tokens)
        begin = time.monotonic()
        if known is not None and known[0] == tokens:
            old = begin > known[1] + FRESH or any(block.block_hash != told for block, told in known[2])
            if not old or begin < self._next:
                return known[3]
        last, wants = self._look_up(request, tokens)
        self._known[request.request_id] = tokens, begin, last, wants
        if known is not None:
            self._next = begin + SHARE * (time.monotonic() - begin)
        elif len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return wants

    def _held(self, tokens: int, done: int) -> Wants:
        found = tuple(-(-done // size) for size in self._sizes)
        rest = sum(max(-(-tokens // size) - n, 0) for size, n in zip(self._sizes, found))
        return Wants(done, found, rest, 0)

    def _halve(self, request: Any, tokens: int) -> tuple[list[tuple[Any, Any]], Wants]:
        size, hashes, pool = self._sizes[0], request.block_hashes, self._manager.block_pool

        def cached(i: int) -> Any:
            block = pool.get_cached_block(hashes[i], [0])
            return block and block[0]

        most = min(len(hashes), (tokens - 1) // size)
        found = bisect.bisect_left(range(most), True, key=lambda i: not cached(i))
        # Requests that share a prefix hold its first blocks.
        used = bisect.bisect_left(range(found), True, key=lambda i: cached(i).ref_cnt == 0)
        last = [(block, block.block_hash) for block in [cached(found - 1)]] if found else []
        return last, Wants(found * size, (found,), -(-tokens // size) - found, found - used)

    def _look_up(self, request: Any, tokens: int) -> tuple[list[tuple[Any, Any]], Wants]:
        if self._plain and self._manager.prefix_cache_lookup_enabled(request):
            return self._halve(request, tokens)
        blocks, computed = self._nothing, 0
        if self._manager.prefix_cache_lookup_enabled(request):
            blocks, computed, _ = self._coordinator.find_longest_cache_hit(request.block_hashes, tokens - 1)
            blocks = tuple(ids[: -(-computed // size)] for ids, size in zip(blocks, self._sizes))
        cached = sum(block.ref_cnt == 0 and not block.is_null for ids in blocks for block in ids)
        found = tuple(map(len, blocks))
        # It counts windows and states of Mamba by what they keep, and in some steps says "not now" by a huge number.
        rest = self._coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id, num_tokens=tokens, new_computed_blocks=blocks, num_encoder_tokens=0,
            total_computed_tokens=computed, num_local_computed_tokens=computed, num_tokens_main_model=tokens,
            apply_admission_cap=True) - cached  # fmt: skip
        most = sum(max(-(-tokens // size) - n, 0) + 1 for size, n in zip(self._sizes, found))
        last = [(ids[-1], ids[-1].block_hash) for ids in blocks if ids and not ids[-1].is_null]
        return last, Wants(computed, found, min(rest, most), cached)


class Pace:
    """How long a device still computes the prompts of the steps in flight, by the least time that steps of a size took.

    Until then, a step that waits for blocks delays nothing, so it may wait for more of them and take a larger part of a
    prompt: small parts use a device badly. Times are in seconds, on one clock.

    Parameters
    ----------
    least : int
        Tokens of a step that counts. Smaller ones end too soon.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._flight: collections.deque[tuple[int, int, float]] = collections.deque()  # (step, tokens, when it began)
        self._ended = 0.0  # the last step
        self._best: dict[int, float] = {}  # seconds for a token, by the number of bits of a step's tokens

    def begin(self, step: int, tokens: int, now: float) -> None:
        """A step was scheduled."""
        self._flight.append((step, tokens, now))

    def end(self, step: int, now: float) -> None:
        """The answer of a step has come, and those of the steps before it."""
        while self._flight and self._flight[0][0] <= step:
            number, tokens, began = self._flight.popleft()
            if number == step and tokens >= self._least:
                # Who reads answers late learns too long times, so the least counts.
                size, taken = tokens.bit_length(), (now - max(began, self._ended)) / tokens
                self._best[size] = min(self._best.get(size, taken), taken)
        self._ended = now

    def left(self, now: float) -> float:
        """Seconds for which the device computes at least; 0 if that is not known."""
        end = self._ended
        for _, tokens, began in self._flight:
            size = tokens.bit_length()
            pace = self._best.get(size, min(self._best.values(), default=0.0)) if tokens >= self._least else 0.0
            end = max(end, began) + tokens * pace
        return max(end - now, 0.0) if self._flight else 0.0
