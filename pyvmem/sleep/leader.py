"""The leader of a server: of its processes, the first that lives. It lets the model sleep and wake, as the rules say.

Each process has a `Leader`, which looks at the control pages now and then, and acts if it leads. Begin with
`Leader.run`. It calls `turns` for the rules, `pages`, `admission`, and the engine's plugin (`SleepingModel`).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable
from typing import Any, Protocol

from pyvmem._clock import now_us
from pyvmem.engine import control
from pyvmem.engine.control import Page, State
from pyvmem.engine.settings import Settings
from pyvmem.kv.view import view_folder
from pyvmem.sleep import routing, turns
from pyvmem.sleep.admission import Admission, Order
from pyvmem.sleep.bell import Bell, ring
from pyvmem.sleep.pages import ServerPages
from pyvmem.sleep.turns import Action, Model

MANY = 1 << 28  # bytes of weights whose copy tells how fast they come
TELL = 0.2  # seconds between what a model says of its wait
TICK, ACTS = 0.02, 0.005  # seconds between looks at the control pages, and while the model falls asleep or wakes
HANGS = 1.0  # seconds without a sign of life after which a model is not waited for
TRY = 2000  # milliseconds that one attempt to wake waits for memory
ANSWER = 15.0  # seconds in which every engine has tried, after the first has failed


class SleepingModel(Protocol):
    """How an engine's model sleeps and wakes; `serve.Serve` describes the functions.

    Attributes
    ----------
    host : Any
        The state of the application, which the functions are passed.
    """

    host: Any

    async def sleep(self, state: Any, freeze: bool) -> None: ...

    async def wake(self, state: Any) -> None: ...

    async def sleep_again(self, state: Any) -> None: ...

    def ends(self) -> bool: ...


class Leader:
    """What one process of a server does as its leader."""

    def __init__(self, pages: ServerPages, admission: Admission, model: SleepingModel, settings: Settings) -> None:
        self._pages, self._admission, self._model, self._settings = pages, admission, model, settings
        self._log = settings.logger
        self._lives: dict[str, tuple[tuple[int, int], float]] = {}  # the last beats of each engine, and when they came
        self._act: asyncio.Task[None] | None = None  # a sleep or a wake
        self._rate = routing.RATE  # how fast weights come
        self._published: tuple[tuple[State, int], float] = (State.NONE, 0), 0.0  # of what state the wait was, and when
        self._lacked = False  # whether the log has that the model lacks memory to wake

    async def run(self) -> None:
        """Look at the pages for ever."""
        with contextlib.closing(Bell(view_folder(), self._admission.news.set)):
            await self._run()

    async def _run(self) -> None:
        failure, seen = "", (0, 0, False, False, False)
        while True:
            acts = self.is_acting() or seen[0] == State.WAKING
            news = asyncio.ensure_future(self._admission.news.wait())
            try:  # until Python 3.11, asyncio.wait_for would lose a cancellation that comes with news
                await asyncio.wait([news], timeout=ACTS if acts else TICK)
            finally:
                news.cancel()
            self._admission.news.clear()
            try:
                if not self._pages.find():
                    continue
                page = self._pages.mine[0]
                now = (page[control.STATE], page[control.DRAINED], page[control.RUNNING] > 0, self._model.ends(),
                       self._pages.admits())  # fmt: skip
                if now != seen:
                    seen = now
                    self._admission.wake_waiters()
                servers = self._pages.servers()
                if servers and servers[0][control.S_PID] == os.getpid():
                    self._lead(servers)
            except Exception as error:
                if str(error) != failure:
                    failure = str(error)
                    self._log.exception("vMem: the task that lets the model sleep and wake failed, and continues")

    def is_alive(self) -> bool:
        """Return whether the engines and this process show signs of life."""
        return all(self._model_of(p).alive for p in self._pages.mine)

    def is_acting(self) -> bool:
        """Return whether the model falls asleep or wakes now."""
        return self._act is not None and not self._act.done()

    # ---- one look --------------------------------------------------------------------------------------------

    def _lead(self, servers: list[memoryview]) -> None:
        """Sum up what the processes of this server publish, and do what the rules say."""
        running = self._sum_up(servers)
        order = next((s[control.S_ORDER] for s in servers if s[control.S_ORDER]), int(Order.NONE))
        self._publish_hunger(running)
        if order in (Order.DRAIN, Order.WAKE):
            self._pages.publish(control.DRAINED, order == Order.DRAIN)
        self._publish_wait()
        if self.is_acting():
            if self._pages.mine[0][control.STATE] == State.WAKING:
                self._publish_lack()
        elif not self._follow_engine():
            self._begin(self._choose(order, running))

    def _sum_up(self, servers: list[memoryview]) -> int:
        """Publish what the processes add up to; return how many requests run."""
        running = sum(s[control.S_RUNNING] for s in servers)
        queued, unserved = (sum(s[word] for s in servers) for word in (control.S_QUEUED, control.S_UNSERVED))
        since = min((s[control.S_SINCE] for s in servers if s[control.S_QUEUED]), default=0)
        used = max(s[control.S_USED_AT] for s in servers)
        for page in self._pages.mine:
            page[control.RUNNING], page[control.QUEUED], page[control.SINCE] = running, queued, since
            awake = page[control.STATE] in (State.AWAKE, State.CLOSING)
            page[control.USED_AT] = max(used, page[control.CHANGED_AT] if awake else 0)
            page[control.SERVER_BEAT] += 1
            page[control.UNSERVED] = unserved
            if not queued and not running:
                page[control.LACKS] = 0
        return running

    def _publish_hunger(self, running: int) -> None:
        """Publish since when requests cannot go on, because memory for their rows is lacking or because they sleep."""
        page = self._pages.mine[0]
        asleep = page[control.STATE] in (State.ASLEEP, State.WAKING)
        starves = running > 0 and (asleep or any(p[control.STARVED] for p in self._pages.mine))
        self._pages.publish(control.STARVING, (page[control.STARVING] or now_us()) if starves else 0)

    def _publish_wait(self) -> None:
        """Publish how long a request that comes now would wait, a few times a second and when the state changes."""
        page, now = self._pages.mine[0], time.monotonic()
        state, drained = about = page.state, page[control.DRAINED]
        if about == self._published[0] and now < self._published[1] + TELL:
            return
        self._published, waits = (about, now), []
        others = [self._model_of(p) for p in self._pages.others]
        for p in self._pages.mine:
            missing, needs, room = routing.memory(p, self._pages.others)
            slice_, rate = self._settings.slice, self._rate
            waits.append(routing.expected_wait(state, others, missing, needs - room, slice=slice_, rate=rate))
            p[control.ROOM] = room
        self._pages.publish(control.WAIT, int(1e6 * (routing.CLOSED if drained else max(waits))))

    def _publish_lack(self) -> None:
        """Publish what the workers lack to wake."""
        for page in self._pages.mine:
            lacks = page.short if page[control.QUEUED] or page[control.RUNNING] else 0  # else nobody waits for it
            new = lacks and not page[control.LACKS]
            if new:
                page[control.LACKING] = now_us()
            page[control.LACKS] = lacks
            if new:
                ring(page.path)

    def _follow_engine(self) -> bool:
        """Note that the engine sleeps or wakes by its own ways; return whether it does."""
        state, asleep = self._pages.mine[0].state, self._pages.has_sleepers()
        if asleep == (state in (State.ASLEEP, State.WAKING)):
            return False
        if asleep and state not in (State.AWAKE, State.CLOSING):
            return False
        self._set_state(State.ASLEEP if asleep else State.AWAKE)
        return True

    def _choose(self, order: int, running: int) -> Action:
        page = self._pages.mine[0]
        state = page[control.STATE]
        if order == Order.SLEEP and state in (State.AWAKE, State.CLOSING):
            return Action.SLEEP if not running else Action.CLOSE if state == State.AWAKE else Action.NOTHING
        me = self._model_of(page)
        models = [me, *(self._model_of(p) for p in self._pages.others)]
        return turns.decide(models, me, now_us() / 1e6, self._settings.slice, self._settings.idle)

    def _begin(self, action: Action) -> None:
        if action is Action.CLOSE:
            self._set_state(State.CLOSING)
        elif action is Action.OPEN:
            self._set_state(State.AWAKE)
        elif action in (Action.SLEEP, Action.FREEZE):
            self._act = asyncio.create_task(self._guard(self._sleep(action is Action.FREEZE)))
        elif action is Action.WAKE:
            self._act = asyncio.create_task(self._guard(self._wake()))

    def _model_of(self, page: Page) -> Model:
        """What a page says of its model."""
        name = str(page.path)
        beats, now = (page[control.BEAT], page[control.SERVER_BEAT]), time.monotonic()
        last = self._lives.setdefault(name, (beats, now))
        fresh = all(a != b for a, b in zip(beats, last[0]))
        if fresh:
            self._lives[name] = beats, now
        return Model(
            name=name,
            state=page.state,
            priority=page[control.PRIORITY],
            running=page[control.RUNNING],
            queued=page[control.QUEUED],
            since=page[control.SINCE] / 1e6,
            used=page[control.USED_AT] / 1e6,
            changed=page[control.CHANGED_AT] / 1e6,
            lacks=page[control.LACKS],
            lacking=page[control.LACKING] / 1e6,
            starved=page[control.STARVING] / 1e6,
            alive=fresh or now - last[1] < HANGS,
            gives=page.gives,
        )

    # ---- sleep and wake --------------------------------------------------------------------------------------

    def _set_state(self, state: State) -> None:
        for page in self._pages.mine:
            if state == State.AWAKE and page[control.STATE] in (State.ASLEEP, State.WAKING):
                page[control.CHANGED_AT] = now_us()
                page[control.WAKES] += 1
                if page[control.SINCE]:
                    page[control.WAKING] += now_us() - page[control.SINCE]
            if state == State.ASLEEP and page[control.STATE] in (State.AWAKE, State.CLOSING):
                page[control.CHANGED_AT] = now_us()
                page[control.SLEEPS] += 1
            page[control.STATE] = state
        self._publish_wait()  # who is answered by this model finds it in the pages
        self._admission.wake_waiters()

    async def _guard(self, act: Awaitable[None]) -> None:
        try:
            await act
        except Exception as error:
            self._log.warning("vMem: the model could not fall asleep or wake: %s", str(error)[:500])
            self._set_state(State.ASLEEP if self._pages.has_sleepers() else State.AWAKE)

    async def _sleep(self, freeze: bool) -> None:
        """freeze: with the requests that it has."""
        self._set_state(State.CLOSING)
        if len(self._pages.servers()) > 1:
            await asyncio.sleep(2 * TICK)  # the other processes have seen it, or their requests are seen here
        if not freeze and any(s[control.S_RUNNING] for s in self._pages.servers()):
            return  # the rules decide again
        begin = time.monotonic()
        try:
            await self._model.sleep(self._model.host, freeze)
        except Exception:
            with contextlib.suppress(Exception):  # a part of it may sleep, or be paused
                await self._model.wake(self._model.host)
            raise
        self._set_state(State.ASLEEP)
        self._log.info("vMem: the model sleeps%s (%.0f ms)", " with its requests" if freeze else "",
                       1000 * (time.monotonic() - begin))  # fmt: skip

    async def _wake(self) -> None:
        page = self._pages.mine[0]
        begin, waits = time.monotonic(), now_us() - (page[control.SINCE] or page[control.STARVING] or now_us())
        missing = sum(routing.memory(p, ())[0] for p in self._pages.mine)
        self._set_state(State.WAKING)
        self._pages.publish(control.PATIENCE, TRY)
        if why := await self._try_to_wake():
            if not self._lacked:  # once for all attempts
                self._log.info("vMem: the model lacks memory to wake and tries until it comes: %s", why)
            self._lacked = True
            self._set_state(State.ASLEEP)
            return
        self._lacked = False
        if missing >= MANY:
            self._rate += (missing / (time.monotonic() - begin) - self._rate) / 4
        self._pages.publish(control.LACKS, 0)
        self._admission.model_used()
        self._set_state(State.AWAKE)
        self._log.info("vMem: the model wakes (%.0f ms after the request, %.0f ms of them for this)", waits / 1000 +
                       1000 * (time.monotonic() - begin), 1000 * (time.monotonic() - begin))  # fmt: skip

    async def _try_to_wake(self) -> str:
        """Return why the model cannot wake, or "". Then it sleeps as before, and the pages say what it lacks."""
        before, why = self._pages.attempts(), ""
        try:
            await self._model.wake(self._model.host)
            if self._pages.is_wake_in_vain():
                why = f"{max(p.short for p in self._pages.mine) >> 20} MiB did not come"
        except Exception as error:
            why = str(error)[:300]
        if why:
            self._publish_lack()
            if len(self._pages.mine) > 1:
                await self._wake_none(before)
        return why

    async def _wake_none(self, before: list[list[int]]) -> None:
        """Put the engines to sleep that woke although another one could not: none keeps memory while one waits."""
        end = time.monotonic() + ANSWER
        while time.monotonic() < end:
            now = self._pages.attempts()
            if all(new != old for a, b in zip(now, before) for new, old in zip(a, b)):
                break
            await asyncio.sleep(TICK)
        if any(not any(word & 1 for word in words) for words in self._pages.attempts()):
            await self._model.sleep_again(self._model.host)
