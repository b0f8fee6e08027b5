"""The order in which the engines of a pool get memory that their requests lack.

Engines that name the same pool lend each other memory by libvmem's pool (`pyvmem.KVPool`), whose
members are the workers' blocks. A worker asks for what the scheduler publishes as wanted, and offers what it publishes
as offered. Which blocks leave is the decision of the engine's `budget`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import time

from pyvmem.engine import control

LOOK = 0.005  # seconds between looks at the other engines' pages
FIND = 1.0  # and between searches for engines
SPARE = 8  # of the allowed blocks, this part at most is kept ready
HANGS = 1.0  # seconds without a sign of life after which an engine is not waited for
PATIENCE, MOST_PATIENCE = 4.0, 64.0  # seconds that others wait for an engine which gets nothing: at first, and at most


def ready(low: int, allowed: int) -> int:
    """Blocks that an engine keeps ready: for two steps of `low` blocks, or a part of those that it may have."""
    return min(2 * low, allowed // SPARE)


class PoolPeers:
    """The other engines in the pool of one engine.

    Of the engines whose requests lack memory, one comes first: that of the highest priority; then one whose running
    requests lack it; then one whose requests use less than its share, which is the pool divided by the engines that
    have requests now, but at least its minimum; then the one whose request came first. Of running requests, the last
    counts, which the engine would preempt.

    Requests of the others will end, and the first gets their memory. If it gets nothing for some time, it lets the
    others go first for twice as long, and then waits for twice as long as before: something else may hold the memory,
    or these requests take long. An engine that hangs is not waited for at all.

    Attributes
    ----------
    alone : bool
        No other engine has a request that lacks memory.
    behind : bool
        Another engine comes first, and this one has its minimum. Then it takes no more memory than it has.
    full : bool
        No request begins meanwhile: this engine has its share, and another that lacks memory has not; or the
        first runs at most one request and so may need what all others have.
    yields : bool
        The first has a higher priority, or lacks memory for running requests that all came before the last one
        here. So the oldest requests always go on, as within one engine.
    passes : bool
        This engine lets the others go first.
    surplus : int
        Bytes of a worker's blocks that the others offer beyond what they keep ready; 0 while one of them lacks memory.
    offers : int
        All bytes of a worker's blocks that the others offer.
    """

    def __init__(self, page: control.Page) -> None:
        self._page = page
        self._pages: list[control.Page] = []
        self._found = self._looked = 0.0
        self._beats: dict[tuple[str, int], tuple[int, float]] = {}  # of each engine the last, and since when
        self._share = 0  # bytes of a worker's pool
        self._patience, self._had = PATIENCE, -1  # -1: this engine had no bytes yet
        self._since = 0.0  # when this engine, which comes first, last got some; later than now: it lets others go first
        self.alone, self.behind, self.full, self.yields, self.passes = True, False, False, False, False
        self.surplus = self.offers = 0

    def look(self, last: int) -> None:
        """Read what the others publish, at most every `LOOK` seconds. last: when the last running request came."""
        now, page = time.monotonic(), self._page
        if not page[control.POOL]:
            return
        if now >= self._found + FIND:
            self._found = now
            own = page.pools()  # those of other GPUs have nothing to lend
            self._pages = [
                other for _, other in control.engines()
                if other[control.POOL] == page[control.POOL] and other.path != page.path
                and not set(other.pools()).isdisjoint(own)
            ]  # fmt: skip
        if now >= self._looked + LOOK:
            self._looked = now
            others = self._pages
            active = [o for o in others if o[control.USED] or o[control.HEAD]]
            self._share = page[control.POOL_BYTES] // (1 + len(active))
            self.alone = not any(o[control.HEAD] for o in others)
            self.offers = sum(o[control.OFFERED] * o[control.BLOCK_BYTES] for o in others)
            self.surplus = 0 if any(o[control.HEAD] or o[control.WANTED] for o in others) else sum(
                max(o[control.OFFERED] - ready(o[control.LOW], o[control.ALLOWED]), 0) * o[control.BLOCK_BYTES]
                for o in others
            )  # fmt: skip
            lack = [o for o in others if self._lives(o, now) and o[control.HEAD] > 0]
            first = min([page, *lack] if page[control.HEAD] > 0 else lack, key=self._turn, default=page)
            reserved = any(
                o[control.LACKS] and self._lives(o, now, control.SERVER_BEAT) for o in others
            )  # for a model that wakes
            self.behind = (first is not page or reserved) and _bytes(page) >= page[control.MIN]
            less = any(o[control.PRIORITY] >= page[control.PRIORITY] and not self._has_share(o) for o in lack)
            beyond = _bytes(page) - page[control.BLOCK_BYTES] >= page[control.MIN]  # it has a block that it may give
            self.full = (self.behind and beyond and first[control.STARVED] > 0) or (less and self._has_share(page))
            alone = first[control.GROWS] and first[control.STARVED]
            older = first[control.GROWS] and first[control.HEAD] < last and (alone or self._has_share(page))
            self.yields = self.behind and (-first[control.PRIORITY], not older) < (-page[control.PRIORITY], True)
            self._be_patient(first is page and page[control.HEAD] > 0, now)

    def _has_share(self, page: control.Page) -> bool:
        return page[control.USED] * page[control.BLOCK_BYTES] >= max(self._share, page[control.MIN])

    def _turn(self, page: control.Page) -> tuple[int, bool, bool, int, str]:
        """The key that sorts engines that lack memory."""
        grows = page[control.GROWS]
        has_share = self._has_share(page) and not (grows and page[control.STARVED])
        return -page[control.PRIORITY], not grows, has_share, page[control.HEAD], str(page.path)

    def _lives(self, page: control.Page, now: float, word: int = control.BEAT) -> bool:
        beat, name = page[word], (str(page.path), word)
        if self._beats.get(name, (-1, 0.0))[0] != beat:
            self._beats[name] = beat, now
        return now - self._beats[name][1] < HANGS

    def _be_patient(self, first: bool, now: float) -> None:
        """Decide whether to let the others go first. first: whether it is this engine's turn, and it lacks memory."""
        has = _bytes(self._page)
        if not self._page[control.HEAD]:
            self._patience = PATIENCE
        if now >= self._since:
            if not first or has > self._had:
                self._since = now
            elif now >= self._since + self._patience:
                self._since = now + 2 * self._patience
                self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._had = has
        self.passes = now < self._since


def _bytes(page: control.Page) -> int:
    """Bytes of the blocks of an engine that are backed."""
    return (page[control.USED] + page[control.CACHED] + page[control.SPARE]) * page[control.BLOCK_BYTES]
