"""Decides which of the models that share a pool sleeps, wakes or waits. There is no daemon.

Each engine looks at what all of them publish, and decides by `decide` for itself alone. All engines decide by the same
rules, so at most one acts at a time. Nothing is remembered: an order to drain is what the rules say now. It lapses when
its asker has been served, has given up, or has died.

This module is pure: it reads no control page, asks about no process and calls nothing. Begin with `decide`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from pyvmem.engine.control import State

PATIENCE = 0.02  # seconds between the weights that go for a model that wakes, and the next ones
HUNGRY = 1.0  # and for an awake model whose requests lack memory, or while what sleeping models give suffices
OVERDUE = 8  # slices after which a model that waits goes before every priority
REST = 3  # slices that a model which sleeps with its requests leaves to busy ones, unless a new request comes


class Action(enum.Enum):
    """The next act of a model."""

    NOTHING = "nothing"
    WAKE = "wake"  # try to take memory
    CLOSE = "close"  # let no further request begin
    OPEN = "open"  # let them begin again
    SLEEP = "sleep"
    FREEZE = "freeze"  # sleep with its requests, which go on when it wakes


@dataclass(frozen=True)
class Model:
    """The published state of a model. Times are in seconds of one clock.

    Attributes
    ----------
    name : str
        Orders models that are equal otherwise.
    priority : int
    running, queued : int
        Requests that the engine has, and that wait for it to wake.
    since : float
        When the first of those that wait came.
    used, changed : float
        When a request last ended, and when the model last woke or fell asleep.
    lacks : int
        Bytes that it lacked when it last tried to wake; 0: none, or it has not tried.
    lacking : float
        Since when it lacks some.
    starved : float
        Since when it is awake and its requests cannot go on, as memory for their KV cache is lacking; 0: they can.
    alive : bool
        Its server and its engine have shown signs of life lately.
    gives : int
        Bytes of its weights on the device that others can have while it sleeps.
    """

    name: str
    state: State
    priority: int = 0
    running: int = 0
    queued: int = 0
    since: float = 0.0
    used: float = 0.0
    changed: float = 0.0
    lacks: int = 0
    lacking: float = 0.0
    starved: float = 0.0
    alive: bool = True
    gives: int = 0

    @property
    def is_waiting(self) -> bool:
        """It sleeps, and requests wait for it, in its server or frozen in its engine."""
        return self.queued + self.running > 0 and self.state in (State.ASLEEP, State.WAKING)

    @property
    def is_asking(self) -> bool:
        """It needs memory of others: to wake, or to go on."""
        return self.alive and (self.is_waiting or (self.starved > 0 and self.state == State.AWAKE))

    @property
    def asked(self) -> float:
        """Since when. A model that sleeps with its requests has had its turn, and waits since then."""
        if not self.is_waiting:
            return self.starved
        slept = max(self.starved, self.changed) if self.running else self.since
        return min(self.since, slept) if self.queued else slept

    @property
    def is_idle(self) -> bool:
        """It can sleep now: no request runs, and none may begin."""
        return not self.running and (not self.queued or self.state == State.CLOSING)


def next_to_wake(models: Sequence[Model], now: float, slice: float) -> Model | None:
    """The model whose turn it is to wake or to go on: what becomes free is for it.

    The highest priority comes first, then the longest wait. One that has waited for `OVERDUE` slices goes before all. A
    model that sleeps with its requests rests for `REST` slices while all others that are awake are busy and of no lower
    priority. A new request for it ends the rest, and so do sleeping models that give what it lacks. Without the rest,
    switches would take the time in which new requests wait for their first token. Engines of one server wait equally
    long: one that lacks memory stands for them. If all sleep and the first cannot have what it lacks, as rows of
    sleeping requests hold it, each tries for a slice in turn, so that these go on.
    """
    sleeping = [m for m in models if m.alive and m.state in (State.ASLEEP, State.WAKING)]
    awake = [m for m in models if m.alive and m.state in (State.AWAKE, State.CLOSING)]

    def rests(m: Model) -> bool:
        if not awake or m.queued or not m.is_waiting or now - m.changed >= REST * slice:
            return False
        given = sum(other.gives for other in sleeping if other is not m)
        return not (0 < m.lacks <= given or any(other.is_idle or other.priority < m.priority for other in awake))

    def turn(m: Model) -> tuple[bool, int, float, bool, str]:
        overdue = now - m.asked > OVERDUE * slice
        return not overdue, 0 if overdue else -m.priority, m.asked, not m.lacks, m.name

    order = sorted((m for m in models if m.is_asking and not rests(m)), key=turn)
    if not order:
        return None
    if awake:
        return order[0]
    given = sum(m.gives for m in sleeping if m is not order[0])
    return order[int(now / slice) % len(order) if order[0].lacks > given else 0]


def next_to_sleep(models: Sequence[Model], now: float, slice: float) -> Model | None:
    """The model whose weights go next, or which drains so that they can; None if nobody has to, or nobody can.

    Idle models go first: of the lowest priority, then the longest idle. A busy one follows when it has been awake for
    its slice, which is longer by one for each step of priority above the asker's. Of several, the one with the fewest
    requests goes, as most new ones come to the others. One that drains already goes on. A model that wakes says what it
    lacks once spare memory cannot be that, and the first one gives at once. For an awake model that is starved, others
    give later, as what it lacks may be on its way. So may the memory of models that sleep: the next one waits after
    each, and longer if theirs suffices.
    """
    asker = next_to_wake(models, now, slice)
    if asker is None:
        return None
    wakes = asker.state in (State.ASLEEP, State.WAKING)
    asleep = [m for m in models if m.state == State.ASLEEP and m is not asker]
    since, patience = asker.lacking if wakes else asker.starved, HUNGRY
    if wakes and sum(m.gives for m in asleep if m.alive) < asker.lacks:
        since, patience = -PATIENCE, PATIENCE
    since = max([since, *(m.changed for m in asleep)])
    if (wakes and not asker.lacks) or now - since < patience:
        return None
    others = [m for m in models if m.alive and m.state in (State.AWAKE, State.CLOSING) and m is not asker]
    idle = [m for m in others if m.is_idle]
    if idle:
        return min(idle, key=lambda m: (m.state != State.CLOSING, m.priority, m.used, m.name))
    if not wakes and now - asker.starved < slice:
        return None
    if not others and not wakes and any(m.alive and m.running for m in asleep):
        return asker  # what it lacks is held by requests of theirs, which go on first
    busy = [m for m in others if now - m.changed >= slice * (1 + max(0, m.priority - asker.priority))]
    return min(busy, key=lambda m: (m.state != State.CLOSING, m.priority, m.running, m.changed, m.name), default=None)


def weights_suffice(models: Sequence[Model], me: Model, now: float, slice: float) -> bool:
    """Return whether the weights that models give would wake the asker or let it go on, without the KV of `me`."""
    asker = next_to_wake(models, now, slice)
    if asker is None or not me.gives:
        return False
    if asker.state not in (State.ASLEEP, State.WAKING):
        return True  # how much it lacks is not known
    given = (State.ASLEEP, State.AWAKE, State.CLOSING)
    return sum(m.gives for m in models if m.alive and m is not asker and m.state in given) >= asker.lacks


def decide(models: Sequence[Model], me: Model, now: float, slice: float, idle: float = 0.0) -> Action:
    """Decide what `me`, one of `models`, does now.

    Parameters
    ----------
    models : sequence of Model
        All that share memory with it, itself included.
    now : float
    slice : float
        Seconds that a model which others wait for may serve before it sleeps with its requests, or drains.
    idle : float
        Seconds without a request after which it sleeps by itself; 0: never.
    """
    if me.state == State.ASLEEP and me.is_waiting:
        return Action.WAKE if next_to_wake(models, now, slice) is me else Action.NOTHING
    if me.state not in (State.AWAKE, State.CLOSING):
        return Action.NOTHING
    if next_to_sleep(models, now, slice) is me:
        if me.is_idle:
            return Action.SLEEP
        if (me.starved and now - me.starved >= slice) or weights_suffice(models, me, now, slice):
            return Action.FREEZE
        return Action.NOTHING if me.state == State.CLOSING else Action.CLOSE
    if me.state == State.CLOSING:
        return Action.OPEN
    return Action.SLEEP if me.is_idle and idle and now - me.used >= idle else Action.NOTHING
