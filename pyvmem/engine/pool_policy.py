"""The policy among engines in one pool: which of them gets memory first, and which give way.

Engines that name the same pool lend each other memory by libvmem's pool (`pyvmem.KVPool`), whose members are the
workers' blocks. Each scheduler reads the control pages of the other engines, and publishes what it wants and offers on
its own. Its workers ask the pool for the one, and offer it the other. The engine's `BlockBudget` decides which blocks
leave.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import time

from pyvmem.engine import control

LOOK = 0.005  # seconds between looks at the other engines' pages
FIND = 1.0  # seconds between searches for engines
SPARE = 8  # at most one allowed block in so many is kept ready
HANGS = 1.0  # seconds without a sign of life after which nobody waits for an engine
PATIENCE, MOST_PATIENCE = 4.0, 64.0  # seconds that others wait for an engine which gets nothing: at first, and at most


def ready(low: int, allowed: int) -> int:
    """Blocks that an engine keeps ready: for two steps of `low` blocks, or a part of those that it may have."""
    return min(2 * low, allowed // SPARE)


class PoolPeers:
    """The other engines in the pool of one engine.

    One of the engines whose requests lack memory comes first. They are sorted by, in this order:

    1. the highest priority;
    2. running requests that lack memory, before waiting ones;
    3. requests that use less than the engine's share: the pool divided by the engines that have requests now, but at
       least the engine's minimum;
    4. the time at which the request came. Of running requests, the last one counts, which the engine would preempt.

    The first engine gets the memory of the others' requests as these end. If it gets nothing for PATIENCE, something
    else may hold the memory, or the requests take long. It then lets the others go first for twice as long, and waits
    twice as long the next time. Nobody waits for an engine that hangs.

    Attributes
    ----------
    alone : bool
        True if no other engine has a request that lacks memory.
    is_behind : bool
        True if another engine comes first, and this one has its minimum. This one then takes no more memory.
    is_full : bool
        True if no request may begin here: this engine has its share, and another that lacks memory has not; or the
        first engine runs at most one request, and so may need what all others have.
    is_yielding : bool
        True if requests here give way: the first engine has a higher priority, or lacks memory for running requests
        that all came before the last one here. So the oldest requests always go on, as within one engine.
    is_passing : bool
        True if this engine lets the others go first.
    surplus : int
        Bytes of a worker's blocks that the others offer beyond what they keep ready; 0 while one of them lacks memory.
    offers : int
        All bytes of a worker's blocks that the others offer.
    """

    def __init__(self, page: control.Page) -> None:
        self._page = page
        self._pages: list[control.Page] = []
        self._found = self._looked = 0.0
        self._beats: dict[tuple[str, int], tuple[int, float]] = {}  # (page, word): its last value, and since when
        self._share = 0  # the engine's share, in bytes of a worker's pool
        self._patience, self._had = PATIENCE, -1  # bytes at the last look; -1: there was none
        self._since = 0.0  # when this engine, coming first, last got memory; in the future: others go first until then
        self.alone, self.is_behind, self.is_full, self.is_yielding, self.is_passing = True, False, False, False, False
        self.surplus = self.offers = 0

    def look(self, last: int) -> None:
        """Read what the others publish, at most every `LOOK` seconds. last: when the last running request came."""
        now, page = time.monotonic(), self._page
        if not page[control.POOL]:
            return
        if now >= self._found + FIND:
            self._found = now
            own = page.pools()  # engines on other GPUs have nothing to lend
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
            lacks = sum(o[control.LACKS] for o in others if self._lives(o, now, control.SERVER_BEAT))
            # Models that wake come first, as far as the weights of those that sleep do not suffice for them.
            reserved = lacks > sum(o.gives for o in others if o.asleep and not o[control.LACKS])
            self.is_behind = (first is not page or reserved) and _bytes(page) >= page[control.MIN]
            less = any(o[control.PRIORITY] >= page[control.PRIORITY] and not self._has_share(o) for o in lack)
            beyond = _bytes(page) - page[control.BLOCK_BYTES] >= page[control.MIN]  # it has a block that it may give
            starves = first[control.STARVED] > 0
            self.is_full = (self.is_behind and beyond and starves) or (less and self._has_share(page))
            alone = first[control.GROWS] and first[control.STARVED]
            older = first[control.GROWS] and first[control.HEAD] < last and (alone or self._has_share(page))
            comes_first = (-first[control.PRIORITY], not older) < (-page[control.PRIORITY], True)
            self.is_yielding = self.is_behind and comes_first
            self._be_patient(first is page and page[control.HEAD] > 0, now)

    def _has_share(self, page: control.Page) -> bool:
        return page[control.USED] * page[control.BLOCK_BYTES] >= max(self._share, page[control.MIN])

    def _turn(self, page: control.Page) -> tuple[int, bool, bool, int, str]:
        """The sort key of engines that lack memory: see the class."""
        grows = page[control.GROWS]
        has_share = self._has_share(page) and not (grows and page[control.STARVED])
        return -page[control.PRIORITY], not grows, has_share, page[control.HEAD], str(page.path)

    def _lives(self, page: control.Page, now: float, word: int = control.BEAT) -> bool:
        beat, name = page[word], (str(page.path), word)
        if name not in self._beats or self._beats[name][0] != beat:
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
        self.is_passing = now < self._since


def _bytes(page: control.Page) -> int:
    """Bytes of the blocks of an engine that are backed."""
    return (page[control.USED] + page[control.CACHED] + page[control.SPARE]) * page[control.BLOCK_BYTES]
