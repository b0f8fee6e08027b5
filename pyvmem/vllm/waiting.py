"""Requests of a vLLM scheduler that wait for blocks: how many each takes, and how long a step may wait for them.

SPDX-License-Identifier: MIT
"""

import bisect
import collections
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyvmem.engine.prompts import Prompts

MOST = 64  # most requests that are examined
FRESH = 0.05  # seconds for which a look-up is valid
SHARE = 20  # looking requests up again takes at most one part in so many of the time
REMEMBERED = 4 * MOST  # most look-ups that are kept


def waiting(scheduler: Any) -> list[Any]:
    """The first waiting requests that vLLM may begin or resume, in the order in which it considers them.

    Requests that wait for something else, such as a grammar or a session's next input, need no blocks yet. Sessions
    whose next input has come hold blocks, and wait in a queue of their own. In vLLM 0.30, requests that were skipped
    once wait there, too. While the user has paused the engine, only requests that hold blocks go on.
    """
    held = getattr(scheduler, "kv_holding_waiting", None) or getattr(scheduler, "skipped_waiting", None) or ()
    new = () if getattr(scheduler, "pause_state", None) else scheduler.waiting or ()
    if not held and not new:
        return []
    ready = (r for r in itertools.chain(held, new) if _may_begin(r.status))
    return list(itertools.islice(ready, MOST))


@functools.cache
def _may_begin(status: Any) -> bool:
    return not status.name.startswith("WAITING_FOR_")


def paused(scheduler: Any) -> bool:
    """Return whether no request begins, because the user has paused the engine."""
    return getattr(scheduler, "pause_state", 0) > 0


def stopped(scheduler: Any) -> bool:
    """Return whether no request goes on, because the user has paused the engine."""
    return getattr(scheduler, "pause_state", 0) > 1


def _gone(found: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether one of these blocks no longer has the contents of this hash."""
    for block, block_hash in found:  # faster than `any`
        if block.block_hash != block_hash:
            return True
    return False


class Wants(NamedTuple):
    """The tokens and blocks that a waiting request has and needs when it begins.

    Attributes
    ----------
    computed : int
        Tokens whose rows exist: the request's own, or in the prefix cache.
    found : tuple of int
        Blocks of each group that the request holds or vLLM will find in the cache, those before a window included.
    rest : int
        Blocks for its other known tokens.
    cached : int
        Of the blocks found, those that no request uses. They leave the free queue when the request begins.
    """

    computed: int
    found: tuple[int, ...]
    rest: int
    cached: int


class Lookup:
    """Counts the blocks of waiting requests, as vLLM will when it begins them.

    A look-up reads each block of a prompt's prefix (0.3 us each), so its result is kept. It is repeated if one of the
    last blocks has been evicted, and after a while, because other requests may have cached more. Look-ups do not change
    vLLM's statistics, its events or its order of eviction.

    Parameters
    ----------
    manager : vllm.v1.core.kv_cache_manager.KVCacheManager
    sizes : sequence of int
        Tokens of a block in each group.
    plain : bool
        True if the model has one group, of full attention, and neither drafts nor a connector, which may hold later
        blocks of a prefix when earlier ones are evicted. A block's hash covers all blocks before it, so a prefix is
        cached up to one block and not beyond. The look-up then bisects instead of reading each block.
    """

    def __init__(self, manager: Any, sizes: Sequence[int], plain: bool = False) -> None:
        self._plain = plain
        self._manager, self._coordinator, self._sizes = manager, manager.coordinator, sizes
        self._nothing: tuple[list[Any], ...] = tuple([] for _ in sizes)
        # By request: its tokens then, the time, the blocks found that leave first and their hashes, the result.
        self._known: dict[str, tuple[int, float, list[tuple[Any, Any]], Wants]] = {}
        self._next = 0.0  # time before which no look-up is repeated

    def __call__(self, request: Any) -> Wants:
        """Count the blocks of a waiting request."""
        tokens, known = request.num_tokens, self._known.get(request.request_id)
        if request.num_computed_tokens:  # it holds blocks already
            return self._held(tokens, request.num_computed_tokens)
        begin = time.monotonic()
        if known is not None and known[0] == tokens:
            if begin < self._next or not (begin > known[1] + FRESH or _gone(known[2])):
                return known[3]
        last, wants = self._look_up(request, tokens)
        self._known[request.request_id] = tokens, begin, last, wants
        if known is not None:
            self._next = begin + SHARE * (time.monotonic() - begin)
        elif len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return wants

    def behind(self, prompts: Prompts, request: Any, done: int) -> int:
        """Count the tokens that a request finds computed, `done` or more, once those of `prompts` are, and add it."""
        pool = self._manager.block_pool
        size = pool.hash_block_size
        first = -(-done // size)
        there = prompts.add(request.block_hashes, first)
        if there == first or not self._manager.prefix_cache_lookup_enabled(request):
            return done
        return int(min(there, (request.num_tokens - 1) // size) * size)

    def with_more(self, wants: Wants, request: Any, computed: int) -> Wants:
        """What a request wants that finds so many tokens computed."""
        found = tuple(max(n, computed // size) for n, size in zip(wants.found, self._sizes))
        rest = sum(max(-(-request.num_tokens // size) - n, 0) for n, size in zip(found, self._sizes))
        return Wants(computed, found, min(wants.rest, rest), wants.cached)

    def found(self, wait: Sequence[Any]) -> set[int]:
        """The blocks of each request's prefix in the cache that vLLM evicts first, as far as they are known."""
        known = (self._known.get(request.request_id) for request in wait)
        return {block.block_id for one in known if one is not None for block, _ in one[2]}

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
        # vLLM counts windows and Mamba states by what they keep. In some steps, it says "not now" by a huge number.
        rest = self._coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id, num_tokens=tokens, new_computed_blocks=blocks, num_encoder_tokens=0,
            total_computed_tokens=computed, num_local_computed_tokens=computed, num_tokens_main_model=tokens,
            apply_admission_cap=True) - cached  # fmt: skip
        most = sum(max(-(-tokens // size) - n, 0) + 1 for size, n in zip(self._sizes, found))
        # Blocks that a window passes are freed in their order, and those of a request that ends from its last one on.
        there = ([block for block in ids if not block.is_null] for ids in blocks)
        last = [(block, block.block_hash) for ids in there for block in {id(b): b for b in ids[:1] + ids[-1:]}.values()]
        return last, Wants(computed, found, min(rest, most), cached)


class Pace:
    """Estimates how long the device still computes the prompts of steps in flight, by the least time of similar steps.

    Until then, a step that waits for blocks delays nothing. So it may wait for more of them and take a larger part of a
    prompt, because small parts use a device badly. Times are in seconds, on one clock.

    Parameters
    ----------
    least : int
        Fewest tokens of a step that counts. Smaller steps end too soon to be measured.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._flight: collections.deque[tuple[int, int, float]] = collections.deque()  # (step, tokens, when it began)
        self._ended = 0.0  # when the last step ended
        self._best: dict[int, float] = {}  # seconds for a token, by the number of bits of a step's tokens

    def begin(self, step: int, tokens: int, now: float) -> None:
        """Note a scheduled step."""
        self._flight.append((step, tokens, now))

    def end(self, step: int, now: float) -> None:
        """Note that a step, and with it those before, has ended."""
        while self._flight and self._flight[0][0] <= step:
            number, tokens, began = self._flight.popleft()
            if number == step and tokens >= self._least:
                # If answers are read late, the times are too long, so the least one counts.
                size, taken = tokens.bit_length(), (now - max(began, self._ended)) / tokens
                self._best[size] = min(self._best.get(size, taken), taken)
        self._ended = now

    def left(self, now: float) -> float:
        """Seconds for which the device will compute at least; 0 if unknown."""
        end = self._ended
        for _, tokens, began in self._flight:
            size = tokens.bit_length()
            pace = self._best.get(size, min(self._best.values(), default=0.0)) if tokens >= self._least else 0.0
            end = max(end, began) + tokens * pace
        return max(end - now, 0.0) if self._flight else 0.0
