"""The rules by which models of one pool take turns, by random histories of a world that obeys them.

SPDX-License-Identifier: MIT
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyvmem.engine.control import State
from pyvmem.sleep.turns import HUNGRY, OVERDUE, PATIENCE, REST, Action, Model, decide, next_to_sleep, next_to_wake

SLICE = 2.0
TICK = 0.05


class Server:
    """One model: its requests, and whether it is stopped or dead.

    copies : seconds after its first sleep in which its weights are copied to the host, and cannot be taken yet; 0: they
        have been copied before.
    """

    def __init__(self, name, size, priority, idle, copies=0.0):
        self.name, self.size, self.priority, self.idle, self.copies = name, size, priority, idle, copies
        self.state, self.held, self.copied = State.ASLEEP, 0, 0.0
        # Requests that wait in the server and in the engine: (came, seconds, units of KV); that run: (end, units).
        self.queue, self.inside, self.runs = [], [], []
        self.used = self.changed = self.lacking = self.starved = 0.0
        self.lacks = 0
        self.stopped = self.dead = False
        self.last = None  # what a dead one had published
        self.served = []  # seconds that each request waited

    def publish(self, now):
        gives = self.held if not self.copies or 0 < self.copied <= now else 0
        return self.last or Model(
            self.name, self.state, self.priority, len(self.runs) + len(self.inside), len(self.queue),
            self.queue[0][0] if self.queue else 0.0, self.used, self.changed, self.lacks, self.lacking,
            self.starved, not self.stopped, gives)  # fmt: skip


class World:
    """A pool of `size` units. What is free is taken by whoever tries, as in a real one."""

    def __init__(self, size, servers):
        self.size, self.servers, self.now = size, servers, 100.0
        self.closed_for_nobody = 0

    @property
    def free(self):
        return self.size - sum(s.held + sum(kv for _, kv in s.runs) for s in self.servers)

    def step(self, order):
        """All act once, in this order; each sees what the others have published until then."""
        self.now += TICK
        models = {s.name: s.publish(self.now) for s in self.servers}
        for s in (self.servers[i % len(self.servers)] for i in order):
            if not (s.stopped or s.dead):
                self.act(s, models)
                models[s.name] = s.publish(self.now)
        assert self.free >= 0

    def act(self, s, models):
        if s.state == State.ASLEEP:  # its requests do not go on
            s.runs = [(end + TICK, kv) for end, kv in s.runs]
        s.used = max([s.used, *(end for end, _ in s.runs if end <= self.now)])
        s.runs = [(end, kv) for end, kv in s.runs if end > self.now]
        models[s.name] = s.publish(self.now)
        todo = decide(list(models.values()), models[s.name], self.now, SLICE, s.idle)
        if todo is Action.WAKE:
            self.take_parked(s, s.size - s.held)
            missing = s.size - s.held - self.free
            if missing <= 0:
                s.held, s.state, s.changed, s.used, s.lacks = s.size, State.AWAKE, self.now, self.now, 0
            else:
                s.lacking, s.lacks = s.lacking if s.lacks else self.now, missing
        elif todo is Action.CLOSE:
            s.state = State.CLOSING
        elif todo is Action.OPEN:
            s.state = State.AWAKE
        elif todo in (Action.SLEEP, Action.FREEZE):
            if todo is Action.SLEEP:
                assert not s.runs and not s.inside
                assert not s.queue or s.state == State.CLOSING  # whoever comes to an awake model is served first
            s.state, s.changed = State.ASLEEP, self.now
            s.copied = s.copied or self.now + s.copies
        if not s.queue and not s.inside and not s.runs:
            s.lacks = 0
        if s.state == State.AWAKE:
            s.inside += s.queue
            s.queue.clear()
        if s.state in (State.AWAKE, State.CLOSING):
            self.begin(s)
            s.starved = (s.starved or self.now) if s.inside and not s.runs else 0.0
        else:
            s.starved = (s.starved or self.now) if s.inside or s.runs else 0.0

    def take_parked(self, s, need):
        """Parked weights are the pool's: those of the sleeping ones go at once, if there is a copy."""
        for other in self.servers:
            parked = other.state == State.ASLEEP and other.copied <= self.now
            if other is not s and parked and not other.stopped and self.free < need:
                other.held = 0

    def begin(self, s):
        """Requests begin in turn, as far as there is memory for their KV cache."""
        while s.inside:
            came, seconds, kv = s.inside[0]
            self.take_parked(s, kv)
            if self.free < kv:
                return
            s.inside.pop(0)
            s.runs.append((self.now + seconds, kv))
            s.served.append(self.now - came)

    def ask(self, i, seconds, kv=0):
        s = self.servers[i % len(self.servers)]
        if not s.dead:
            s.queue.append((self.now, seconds, min(kv, self.size - s.size)))

    def die(self, i):
        s = self.servers[i % len(self.servers)]
        s.last = replace(s.publish(self.now), alive=False)
        s.dead, s.held, s.runs, s.queue, s.inside = True, 0, [], [], []


EVENTS = st.lists(st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 5),
              st.tuples(st.sampled_from([0.02, 0.3, 3.0]), st.sampled_from([0, 1, 4, 12]))),
    st.tuples(st.just("pass"), st.integers(1, 60), st.randoms(use_true_random=False)),
    st.tuples(st.just("stop"), st.integers(0, 5), st.none()),
    st.tuples(st.just("go on"), st.integers(0, 5), st.none()),
    st.tuples(st.just("die"), st.integers(0, 5), st.none()),
), max_size=60)  # fmt: skip
WORLDS = st.tuples(
    st.lists(
        st.tuples(st.integers(1, 10), st.integers(0, 3), st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 5.0])),
        min_size=2,
        max_size=5,
    ),
    st.integers(0, 12),
)


def world_of(shape):
    models, beyond = shape
    servers = [Server(f"m{i}", *about) for i, about in enumerate(models)]
    return World(max(s.size for s in servers) + beyond, servers)


def play(world, events):
    for kind, i, what in events:
        n = len(world.servers)
        if kind == "ask":
            world.ask(i, *what)
        elif kind == "pass":
            for _ in range(i):
                order = list(range(n))
                what.shuffle(order)
                world.step(order)
        elif kind == "die":
            world.die(i)
        else:
            world.servers[i % n].stopped = kind == "stop"


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(WORLDS, EVENTS)
def test_every_request_of_a_living_model_is_served(shape, events):
    """No starvation and no deadlock: whatever happened, all are served in the time of some slices each."""
    world = world_of(shape)
    play(world, events)
    for s in world.servers:
        s.stopped = False
    living = [s for s in world.servers if not s.dead]
    for s in living:
        world.ask(world.servers.index(s), 0.3, 12)
    steps = int((OVERDUE + 4 * len(world.servers) + 8) * (SLICE + 1) / TICK)
    for _ in range(steps):
        world.step(range(len(world.servers)))
        if not any(s.queue or s.inside or s.runs for s in living):
            break
    assert not [s.name for s in living if s.queue or s.inside or s.runs]
    for _ in range(int(8 / TICK)):  # nobody asks: no order outlives its asker
        world.step(range(len(world.servers)))
    assert all(s.state in (State.AWAKE, State.ASLEEP) for s in living)
    assert all(s.state == State.ASLEEP for s in living if s.idle)


@settings(max_examples=200, deadline=None)
@given(WORLDS, st.integers(0, 4), st.integers(0, 4))
def test_a_model_that_always_has_requests_starves_nobody(shape, busy, other):
    """Whatever its priority, and although it never becomes idle."""
    world = world_of(shape)
    n = len(world.servers)
    busy, other = busy % n, other % n
    if busy == other:
        return
    world.ask(busy, 1.0)
    for _ in range(int(2 / TICK)):
        world.step(range(n))
    world.ask(other, 0.1)
    waiting = world.servers[other]
    for _ in range(int((OVERDUE + 12) * SLICE / TICK)):
        world.ask(busy, 1.0)
        world.step(range(n))
        if not waiting.queue:
            return
    pytest.fail(f"{waiting.name} waited {world.now - waiting.queue[0][0]:.0f} s")


@settings(max_examples=200, deadline=None)
@given(WORLDS, EVENTS)
def test_an_order_to_drain_ends_with_its_asker(shape, events):
    world = world_of(shape)
    play(world, events)
    for i, s in enumerate(world.servers):
        if s.state in (State.ASLEEP, State.WAKING):
            world.die(i)
    for _ in range(3):
        world.step(range(len(world.servers)))
    assert all(s.state != State.CLOSING for s in world.servers if not s.dead and not s.stopped)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["dies", "stops", "gives up"]))
def test_a_model_that_drains_opens_when_its_asker_is_gone(size, high, low, end):
    """However it goes, and requests that came meanwhile begin."""
    world = World(10, [Server("busy", 10, high, 0.0, copies=1e9), Server("asks", size, low, 0.0)])
    busy, asker = world.servers
    world.ask(0, 100.0)
    world.step((0, 1))
    world.ask(1, 0.3)
    for _ in range(int((OVERDUE + 8) * SLICE / TICK)):
        world.step((0, 1))
        if busy.state == State.CLOSING:
            break
    assert busy.state == State.CLOSING
    world.ask(0, 0.3)
    world.step((0, 1))
    assert busy.queue  # it waits: the model drains
    if end == "dies":
        world.die(1)
    elif end == "stops":
        asker.stopped = True
    else:
        asker.queue.clear()
    for _ in range(2):
        world.step((0, 1))
    assert busy.state == State.AWAKE and not busy.queue and len(busy.runs) == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_long_answers_of_others_delay_nobody_for_more_than_a_slice_each(n, seats, asked):
    """Whose answers are long sleeps with them, and goes on in its turn: nobody waits until they end."""
    seats = min(seats, n)
    world = World(10 * seats, [Server(f"m{i}", 10, 0, 0.0) for i in range(n)])
    for i in asked:
        world.ask(i, 20.0)
        for _ in range(20):
            world.step(range(n))
    for _ in range(int(len(asked) * 20 * (n + 1) / seats / TICK)):
        world.step(range(n))
    assert not any(s.runs or s.queue or s.inside for s in world.servers)
    assert max(w for s in world.servers for w in s.served) <= n * (SLICE + HUNGRY)


def awake(name, **more):
    return Model(name, State.AWAKE, used=10.0, changed=10.0, **more)


ASKER = Model("asker", State.ASLEEP, queued=1, since=50.0, lacks=5, lacking=60.0 - PATIENCE)


def test_spare_memory_comes_before_weights():
    """Who wakes says nothing while spare memory may be what it lacks, and somebody sleeps once it does."""
    assert next_to_sleep([replace(ASKER, lacks=0), awake("a")], 60.0, SLICE) is None
    assert next_to_sleep([replace(ASKER, lacking=60.0), awake("a")], 60.0, SLICE).name == "a"


def test_idle_weights_go_by_priority_and_then_the_longest_idle():
    a, b, c = awake("a", priority=1), replace(awake("b"), used=12.0), replace(awake("c"), used=11.0)
    models = [ASKER, a, b, c]
    assert next_to_sleep(models, 60.0, SLICE) is c
    assert decide(models, c, 60.0, SLICE) is Action.SLEEP
    assert decide(models, b, 60.0, SLICE) is Action.NOTHING
    assert next_to_sleep([ASKER, a], 60.0, SLICE) is a


def test_who_gives_waits_for_what_another_one_gave_just_now():
    slept = Model("slept", State.ASLEEP, changed=60.0)
    assert next_to_sleep([ASKER, slept, awake("a")], 60.0 + PATIENCE / 2, SLICE) is None
    assert next_to_sleep([ASKER, slept, awake("a")], 60.0 + PATIENCE, SLICE).name == "a"
    starved = awake("starved", running=1, starved=50.0)
    assert next_to_sleep([starved, slept, awake("a")], 60.0 + HUNGRY / 2, SLICE) is None
    assert next_to_sleep([starved, slept, awake("a")], 60.0 + HUNGRY, SLICE).name == "a"


def test_a_busy_model_drains_after_its_slice_and_a_higher_one_after_more():
    low, high = awake("low", running=1), awake("high", running=1, priority=2)
    late = replace(ASKER, since=10.0, lacking=10.0)
    assert next_to_sleep([late, high], 10.0 + 2.9 * SLICE, SLICE) is None
    assert next_to_sleep([late, high], 10.0 + 3 * SLICE, SLICE) is high
    assert next_to_sleep([late, low, high], 10.0 + SLICE, SLICE) is low
    closing = replace(low, state=State.CLOSING, queued=2)
    assert decide([late, closing], closing, 20.0, SLICE) is Action.NOTHING
    done = replace(closing, running=0)
    assert decide([late, done], done, 20.0, SLICE) is Action.SLEEP
    assert decide([replace(late, queued=0), closing], closing, 20.0, SLICE) is Action.OPEN


def test_of_busy_models_the_one_with_the_fewest_requests_gives():
    late = replace(ASKER, since=10.0, lacking=10.0)
    many, few = awake("many", running=3), replace(awake("few", running=1), changed=11.0)
    assert next_to_sleep([late, many, few], 11.0 + SLICE, SLICE) is few
    assert next_to_sleep([late, many, few], 10.0 + SLICE, SLICE) is many  # the other one has its slice
    assert next_to_sleep([late, many, replace(few, priority=1)], 60.0, SLICE) is many


def test_a_model_that_sleeps_with_its_requests_rests_while_others_are_busy():
    """New requests are served first, and fewer switches leave more time for all."""
    frozen = Model("frozen", State.ASLEEP, running=1, changed=50.0, starved=50.0, lacks=5)
    busy, early, late = awake("busy", running=1), 50.0 + SLICE, 50.0 + REST * SLICE
    new = replace(ASKER, since=51.0)
    assert next_to_wake([frozen, busy], early, SLICE) is None
    assert next_to_wake([frozen, busy, new], early, SLICE) is new
    assert next_to_wake([frozen, busy, new], late, SLICE) is frozen
    assert next_to_wake([replace(frozen, queued=1, since=51.5), busy, new], early, SLICE).name == "frozen"
    assert next_to_wake([frozen, busy, awake("idle")], early, SLICE) is frozen
    assert next_to_wake([frozen], early, SLICE) is frozen
    assert next_to_wake([replace(frozen, priority=1), busy], early, SLICE).name == "frozen"
    assert next_to_wake([frozen, busy, Model("asleep", State.ASLEEP, gives=5)], early, SLICE) is frozen
    assert next_to_wake([frozen, busy, Model("asleep", State.ASLEEP, gives=4)], early, SLICE) is None


def test_a_busy_model_sleeps_with_its_requests_if_that_suffices():
    """It does not if others cannot have enough of its weights: then its requests end before."""
    late = replace(ASKER, since=10.0, lacking=10.0)
    busy = awake("busy", running=1, gives=4)
    asleep = Model("asleep", State.ASLEEP, gives=1)
    assert decide([late, busy, asleep], busy, 10.0 + SLICE / 2, SLICE) is Action.NOTHING
    assert decide([late, busy, asleep], busy, 10.0 + SLICE, SLICE) is Action.FREEZE
    assert decide([late, busy], busy, 10.0 + SLICE, SLICE) is Action.CLOSE
    closing = replace(busy, state=State.CLOSING, gives=5)  # its copy is complete now
    assert decide([late, closing], closing, 20.0, SLICE) is Action.FREEZE


def test_nobody_gives_while_what_sleeping_models_give_suffices():
    asleep = Model("asleep", State.ASLEEP, changed=59.0, gives=5)
    assert next_to_sleep([ASKER, asleep, awake("a")], 60.0, SLICE) is None
    new = replace(ASKER, lacking=60.0)
    assert next_to_sleep([new, replace(asleep, changed=0.0), awake("a")], 60.0 + HUNGRY / 2, SLICE) is None
    assert next_to_sleep([replace(ASKER, lacks=6), asleep, awake("a")], 60.0, SLICE).name == "a"
    assert next_to_sleep([ASKER, asleep, awake("a")], 60.0 + HUNGRY, SLICE).name == "a"  # it does not come


def test_who_wakes_first():
    old = replace(ASKER, name="old", since=40.0)
    high = replace(ASKER, name="high", priority=1)
    assert next_to_wake([ASKER, old], 60.0, 10.0) is old
    assert next_to_wake([old, high], 60.0, 10.0) is high
    assert next_to_wake([replace(old, since=60.0 - OVERDUE * SLICE - 1), high], 60.0, SLICE).name == "old"
    assert next_to_wake([replace(old, alive=False), high], 60.0, SLICE) is high
    assert decide([old, ASKER], ASKER, 41.0, 10.0) is Action.NOTHING


def test_where_all_sleep_and_rows_hold_what_the_first_lacks_each_tries_in_turn():
    """The requests of those whose rows they are go on, and end."""
    frozen = Model("frozen", State.ASLEEP, running=1, changed=55.0, starved=55.0)
    models = [ASKER, frozen]
    assert {next_to_wake(models, 60.0 + turn * SLICE, SLICE).name for turn in range(2)} == {"asker", "frozen"}
    beside = [*models, awake("a")]
    assert all(next_to_wake(beside, now, SLICE) is ASKER for now in (60.0, 60.0 + SLICE))
    assert {next_to_wake([ASKER, replace(frozen, gives=5)], 60.0 + turn * SLICE, SLICE) for turn in range(2)} == {ASKER}


def test_of_a_servers_engines_one_that_lacks_memory_asks():
    one, two = replace(ASKER, name="engine 0", lacks=0), replace(ASKER, name="engine 1")
    assert next_to_wake([one, two], 60.0, SLICE) is two
    assert next_to_sleep([one, two, awake("a")], 60.0, SLICE).name == "a"


def test_a_hanging_model_takes_no_part():
    hangs = awake("h", alive=False)
    assert next_to_wake([replace(ASKER, name="h", since=1.0, alive=False), ASKER], 60.0, SLICE) is ASKER
    assert next_to_sleep([ASKER, hangs], 60.0, SLICE) is None
