"""A model that sleeps while nobody uses it and wakes when a request comes: ASGI middleware in its own server.

Requests are held while the model sleeps. The first wakes it, once for all. Those that run are counted until their last
byte. When the model has been idle, it sleeps. If another one of its pool needs the memory (`turns`), it sleeps with its
requests, which go on when it wakes. Or it drains: no further request begins until the last has ended. A request that
waits too long for its model or its first token gets status 503 with Retry-After.

``GET /vmem/state`` tells what the model does. ``POST /vmem/sleep``, ``/vmem/wake`` and ``/vmem/drain`` order it, and
answer when that is done. An order ends with its request, but a drained model refuses requests until it is woken.
``/vmem/limit`` and ``/vmem/metrics`` are those of `http.Limits`. All ask for the server's key if it has one.

Several processes may serve one engine. Each publishes its requests in the control page, and the first that lives acts.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pyvmem.engine import control, http, metrics
from pyvmem.engine.control import Page, State
from pyvmem.engine.http import Receive, Scope, Send
from pyvmem.engine.settings import Settings
from pyvmem.kv.view import started
from pyvmem.sleep import turns
from pyvmem.sleep.turns import Action, Model

TICK = 0.02  # seconds between looks at the control pages
FIND = 1.0  # and between searches for engines
HANGS = 1.0  # seconds without a sign of life after which a model is not waited for
TRY = 2000  # milliseconds that one attempt to wake waits for memory
ANSWER = 15.0  # seconds in which every engine has tried, after the first has failed
RETRY_AFTER = 5  # seconds
NONE, SLEEP, WAKE, DRAIN = range(4)  # orders


def _now() -> int:
    return time.monotonic_ns() // 1000


class Serve(http.Limits):
    """ASGI middleware. An engine's plugin says how its model sleeps and wakes, and which keys its server has.

    Parameters
    ----------
    app : ASGI application

    Attributes
    ----------
    free : tuple of str
        How paths begin whose POST needs no model, or wakes or pauses it itself.
    """

    free: tuple[str, ...] = ()

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self._settings = self.settings()
        self._log = self._settings.logger
        self._number = self.number()
        self._pages: list[Page] = []
        self._others: list[Page] = []
        self._found = 0.0
        self._lives: dict[str, tuple[tuple[int, int], float]] = {}
        self._running = self._unserved = 0
        self._waiting: dict[object, int] = {}  # when each request came that waits
        self._fresh: dict[object, int] = {}  # when each stream came that the engine has, and that has sent nothing
        self._used = _now()
        self._moved, self._came = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._acts: asyncio.Task[None] | None = None
        self._order, self._lacked = NONE, False
        self._host: Any = None

    # ---- what a plugin says ----------------------------------------------------------------------------------

    def settings(self) -> Settings:
        raise NotImplementedError

    def number(self) -> int:
        """The number of this process among the server's, from 0 on."""
        return 0

    def needs(self, method: str, path: str) -> bool:
        """Return whether a request needs the model to be awake."""
        return method == "POST" and not path.startswith(self.free)

    def will_answer(self, scope: Scope) -> bool:
        """Return whether the server will not refuse a request for its key. A stranger's wakes no model."""
        return http.has_key(scope, self._keys_of(scope))

    def about(self, state: Any) -> tuple[str, int]:
        """The model's name, and the server's port."""
        return "", 0

    def ends(self) -> bool:
        """Return whether the server is about to end, and does not wait for requests that its engine does not have."""
        return False

    async def sleep(self, state: Any, freeze: bool) -> None:
        """Return when it sleeps. freeze: with the requests that it has, which go on when it wakes."""
        raise NotImplementedError

    async def wake(self, state: Any) -> None:
        """If there is no memory, the model sleeps as before: the pages say so (`is_in_vain`), or it raises."""
        raise NotImplementedError

    async def sleep_again(self, state: Any) -> None:
        """Return when those engines sleep that have woken although another one could not."""
        await self.sleep(state, True)

    # ---- requests --------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._task is None and "app" in scope:
            self._host = scope["app"].state
            self._task = asyncio.create_task(self._run())
        kind = scope["type"]
        path = scope["path"].removeprefix(scope.get("root_path", "")) if kind in ("http", "websocket") else ""
        if kind == "http" and path.startswith("/vmem/"):
            await self._own(path, scope, receive, send)
            return
        needs = self.needs(scope["method"], path) if kind == "http" else kind == "websocket"
        if not needs or not self._find() or not self.will_answer(scope):
            await self._app(scope, receive, send)
            return
        body, came = _Receive(receive), _now()
        if not await self._admit(body):
            if not body.gone:
                await self._refuse(kind, send)
            return
        self._publish()
        running = True

        def end() -> None:
            nonlocal running
            if running:
                running = False
                self._running -= 1
                self._used = _now()
                self._publish()
                if not self._open():  # who closes waits for it
                    self._came.set()

        try:
            if kind == "websocket":
                await self._app(scope, body, send)
            elif not await self._answer(scope, body, send, end, _now() - came):
                await self._refuse(kind, send)
        finally:
            end()

    async def _answer(self, scope: Scope, body: _Receive, send: Send, end: Callable[[], None], waited: int) -> bool:
        """Have the application answer. False: memory for it did not come in time, and nothing was sent.

        waited: microseconds that the request has waited for its model, which count against the same time.

        A stream's headers wait for its first bytes, so that it can be refused until then. The request ends with its
        last byte: SGLang's application still waits for two seconds then.
        """
        began, starts, sent, token = _now(), [], False, object()

        async def tell(message: dict[str, Any]) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                starts.append(message)
                self._fresh[token] = began
                return
            self._fresh.pop(token, None)
            while starts:
                await send(starts.pop())
            sent = True
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                end()

        answers = asyncio.ensure_future(self._app(scope, body, tell))
        try:
            while not (sent or answers.done()):
                await asyncio.wait([answers], timeout=FIND)
                if not sent and self._in_vain(began - waited, bool(starts), waited):
                    return False
            await answers
            while starts:  # an answer without a body
                await send(starts.pop())
            return True
        finally:
            self._fresh.pop(token, None)
            if not answers.done():
                answers.cancel()
                await asyncio.wait([answers])

    def _in_vain(self, came: int, stream: bool, waited: int) -> bool:
        """Return whether a request that has sent nothing has waited too long for memory.

        One that answers as a whole may be half done if its model went on until it fell asleep: it goes on at the wake.
        """
        starved = self._pages[0][control.STARVING] if self._pages else 0
        if not starved or (not stream and starved >= self._pages[0][control.CHANGED_AT] and not self._awake()):
            return False
        return _now() - max(starved - waited, came) > 1e6 * self._settings.queue

    def _alive(self) -> bool:
        """Return whether the engines and this process show signs of life."""
        return all(self._model(p).alive for p in self._pages)

    def _awake(self) -> bool:
        return all(p[control.STATE] == State.AWAKE for p in self._pages)

    def _open(self) -> bool:
        """Return whether requests may begin."""
        return self._awake() and not self._pages[0][control.DRAINED]

    async def _admit(self, body: _Receive) -> bool:
        """Wait until the request may begin, and count it. False: it may not, or its client is gone."""
        end, token = time.monotonic() + self._settings.queue, object()
        try:
            while True:
                self._running += 1
                self._publish()  # before the look, so that whoever closes sees it
                if self._open():
                    return True
                self._running -= 1
                self._waiting.setdefault(token, _now())
                self._publish()
                self._came.set()  # it need not wait for the next look
                if self._pages[0][control.DRAINED] or self.ends() or not await self._change(body, end):
                    return False
        finally:
            self._waiting.pop(token, None)
            self._publish()

    async def _change(self, body: _Receive, end: float) -> bool:
        """Wait until the model's state may have changed. False: the time is over, or the client is gone."""
        moved, listens = asyncio.ensure_future(self._moved.wait()), asyncio.ensure_future(body.listen())
        left = max(end - time.monotonic(), 0)
        await asyncio.wait((moved, listens), timeout=min(left, 1), return_when=asyncio.FIRST_COMPLETED)
        moved.cancel()
        await body.stop(listens)
        return left > 0 and not body.gone

    async def _refuse(self, kind: str, send: Send) -> None:
        self._unserved += 1
        self._publish()
        if kind == "websocket":
            await send({"type": "websocket.close", "code": 1013})
            return
        model = self._state()
        state, lacks = model["state"], model["lacks"]
        why = "is stopped" if self.ends() else "is drained" if state == "drained" \
            else f"lacks {lacks} bytes to wake" if lacks \
            else "lacks memory for its KV cache" if state == "awake" else "did not wake in time"  # fmt: skip
        error = {"message": f"the model {why}: try again later", "type": "service_unavailable", "code": 503}
        await _json(send, 503, {"error": error})

    # ---- /vmem -----------------------------------------------------------------------------------------------

    async def _own(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        orders = {"/vmem/sleep": SLEEP, "/vmem/wake": WAKE, "/vmem/drain": DRAIN}
        methods = "POST" if path in orders else "GET"
        if path in (http.PATH, http.METRICS):
            await super().__call__(scope, receive, send)
        elif why := http.refusal(scope, self._keys_of(scope), methods, body=False):
            await http.refuse(send, why, methods)
        elif not self._find():
            await _json(send, 409, {"error": f"no engine of this server is on vMem: {self.hint}"})
        elif path == "/vmem/state":
            await _json(send, 200, self._state())
        elif path in orders:
            await self._obey(orders[path], receive, send)
        else:
            await _json(send, 404, {"error": f"{path}: vMem has /vmem/state, sleep, wake, drain, limit and metrics"})

    async def _obey(self, order: int, receive: Receive, send: Send) -> None:
        """Carry out an operator's order; it ends with this request."""
        if self._order:
            await _json(send, 409, {"error": "another order is being carried out"})
            return
        body, end = _Receive(receive), time.monotonic() + self._settings.queue
        token = object()
        try:
            self._order = order
            if order == WAKE:
                self._waiting[token] = _now()
            self._publish()
            self._came.set()
            while not (done := self._obeyed(order)):
                if not await self._change(body, end):
                    break
        finally:
            self._waiting.pop(token, None)
            self._order = NONE
            self._publish()
        if not body.gone:
            await _json(send, 200 if done else 503, self._state())

    def _obeyed(self, order: int) -> bool:
        """Return whether an order has been carried out."""
        page = self._pages[0]
        if order == DRAIN:
            return page[control.DRAINED] == 1 and not page[control.RUNNING]
        return self._open() if order == WAKE else page[control.STATE] == State.ASLEEP

    def _state(self) -> dict[str, Any]:
        engines = [control.Engine.of("", 0, p) for p in self._pages]
        page = self._pages[0]
        names = ("model", "port", "state", "running", "queued", "lacks", "weights", "weights_held", "cached", "used")
        model = {name: getattr(engines[0], name) for name in names}
        # Now, and not at the last look: an order to wake counts as a request until it has ended.
        servers = self._servers(page)
        model["running"], model["queued"] = (sum(s[w] for s in servers) for w in (control.S_RUNNING, control.S_QUEUED))
        model["idle"] = 0.0 if model["running"] else round((_now() - page[control.USED_AT]) / 1e6, 3)
        return model

    # ---- the page --------------------------------------------------------------------------------------------

    def _find(self) -> bool:
        """Look now and then for engines of this server; return whether there are some."""
        now = time.monotonic()
        if now >= self._found + FIND:
            self._found = now
            mine = metrics.engines(self.server())
            new = [page for _, page in mine]
            found = [p.path for p in new] != [p.path for p in self._pages]
            name, port = self.about(self._host) if found or not all(p.port for p in new) else ("", 0)
            port = port if port and http.listens(port) else 0
            for page in new if port and not found else ():  # the server listens once its application has begun
                control.serves(page, name, port)
            if found:
                self._pages = new
                for page in new:
                    control.serves(page, name, port)
                    if not page[control.STATE]:
                        page[control.CHANGED_AT] = page[control.USED_AT] = _now()
                        page[control.STATE] = State.ASLEEP if page.asleep else State.AWAKE
                    slot = page.server(self._number)
                    slot[control.S_STARTED] = int(started("self") or 0)
                    slot[control.S_PID] = os.getpid()
            own = {p.path for p in self._pages}
            pools = {pool for p in self._pages for pool in p.pools() if pool}
            self._others = [p for _, p in control.engines() if p.path not in own and p[control.STATE]
                            and not pools.isdisjoint(p.pools())]  # fmt: skip
        return bool(self._pages)

    def _publish(self) -> None:
        waits = [*self._waiting.values(), *(() if self._awake() else self._fresh.values())]
        since = min(waits, default=0)
        for page in self._pages:
            slot = page.server(self._number)
            slot[control.S_RUNNING], slot[control.S_QUEUED] = self._running, len(waits)
            slot[control.S_UNSERVED] = self._unserved
            slot[control.S_SINCE], slot[control.S_USED_AT], slot[control.S_ORDER] = since, self._used, self._order

    def _servers(self, page: Page) -> list[memoryview]:
        """The processes that serve the engine and live."""
        slots = map(page.server, range(control.SERVERS))
        return [s for s in slots if s[control.S_PID]
                and started(str(s[control.S_PID])) == str(s[control.S_STARTED])]  # fmt: skip

    def _set(self, state: State) -> None:
        for page in self._pages:
            if state == State.AWAKE and page[control.STATE] in (State.ASLEEP, State.WAKING):
                page[control.CHANGED_AT] = _now()
                page[control.WAKES] += 1
                if page[control.SINCE]:
                    page[control.WAKING] += _now() - page[control.SINCE]
            if state == State.ASLEEP and page[control.STATE] in (State.AWAKE, State.CLOSING):
                page[control.CHANGED_AT] = _now()
                page[control.SLEEPS] += 1
            page[control.STATE] = state
        self._stir()

    def _stir(self) -> None:
        self._publish()
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    # ---- what it does ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failure, seen = "", (0, 0, False)
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # two classes until Python 3.11
                await asyncio.wait_for(self._came.wait(), TICK)
            self._came.clear()
            try:
                if not self._find():
                    continue
                page = self._pages[0]
                if (now := (page[control.STATE], page[control.DRAINED], page[control.RUNNING] > 0)) != seen:
                    seen = now
                    self._stir()
                servers = self._servers(page)
                if servers and servers[0][control.S_PID] == os.getpid():
                    self._lead(servers)
            except Exception as error:
                if str(error) != failure:
                    failure = str(error)
                    self._log.exception("vMem: the task that lets the model sleep and wake failed, and continues")

    def _lead(self, servers: list[memoryview]) -> None:
        """Sum up what the processes of this server publish, and do what the rules say."""
        running = sum(s[control.S_RUNNING] for s in servers)
        queued, unserved = (sum(s[word] for s in servers) for word in (control.S_QUEUED, control.S_UNSERVED))
        since = min((s[control.S_SINCE] for s in servers if s[control.S_QUEUED]), default=0)
        used = max(s[control.S_USED_AT] for s in servers)
        order = next((s[control.S_ORDER] for s in servers if s[control.S_ORDER]), NONE)
        for page in self._pages:
            page[control.RUNNING], page[control.QUEUED], page[control.SINCE] = running, queued, since
            awake = page[control.STATE] in (State.AWAKE, State.CLOSING)
            page[control.USED_AT] = max(used, page[control.CHANGED_AT] if awake else 0)
            page[control.SERVER_BEAT] += 1
            page[control.UNSERVED] = unserved
            if not queued and not running:
                page[control.LACKS] = 0
        self._see_hunger(running)
        if order in (DRAIN, WAKE):
            for page in self._pages:
                page[control.DRAINED] = order == DRAIN
        if self._acts is not None and not self._acts.done():
            if self._pages[0][control.STATE] == State.WAKING:
                self._lack()
            return
        page = self._pages[0]
        state, asleep = page.state, any(p.asleep for p in self._pages)
        if asleep and state in (State.AWAKE, State.CLOSING):  # by the engine's own ways
            self._set(State.ASLEEP)
            return
        if not asleep and state in (State.ASLEEP, State.WAKING):
            self._set(State.AWAKE)
            return
        if order == SLEEP and state in (State.AWAKE, State.CLOSING):
            action = Action.SLEEP if not running else Action.CLOSE if state == State.AWAKE else Action.NOTHING
        else:
            me = self._model(page)
            models = [me, *(self._model(p) for p in self._others)]
            action = turns.decide(models, me, _now() / 1e6, self._settings.slice, self._settings.idle)
        if action is Action.CLOSE:
            self._set(State.CLOSING)
        elif action is Action.OPEN:
            self._set(State.AWAKE)
        elif action in (Action.SLEEP, Action.FREEZE):
            freeze = action is Action.FREEZE
            self._acts = asyncio.create_task(self._go(lambda: self._to_sleep(freeze)))
        elif action is Action.WAKE:
            self._acts = asyncio.create_task(self._go(self._to_wake))

    def _see_hunger(self, running: int) -> None:
        """Publish since when requests cannot go on, because memory for their rows is lacking or because they sleep."""
        page = self._pages[0]
        asleep = page[control.STATE] in (State.ASLEEP, State.WAKING)
        starves = running > 0 and (asleep or any(p[control.STARVED] for p in self._pages))
        for p in self._pages:
            p[control.STARVING] = (page[control.STARVING] or _now()) if starves else 0

    def _lack(self) -> None:
        """Publish what the workers lack to wake."""
        for page in self._pages:
            lacks = page.short
            if lacks and not page[control.LACKS]:
                page[control.LACKING] = _now()
            page[control.LACKS] = lacks

    def _model(self, page: Page) -> Model:
        name = str(page.path)
        beats, now = (page[control.BEAT], page[control.SERVER_BEAT]), time.monotonic()
        last = self._lives.setdefault(name, (beats, now))
        fresh = all(a != b for a, b in zip(beats, last[0]))
        if fresh:
            self._lives[name] = beats, now
        return Model(name, page.state, page[control.PRIORITY],
                     page[control.RUNNING], page[control.QUEUED], page[control.SINCE] / 1e6,
                     page[control.USED_AT] / 1e6, page[control.CHANGED_AT] / 1e6, page[control.LACKS],
                     page[control.LACKING] / 1e6, page[control.STARVING] / 1e6,
                     fresh or now - last[1] < HANGS, page.gives)  # fmt: skip

    async def _go(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except Exception as error:
            self._log.warning("vMem: the model could not fall asleep or wake: %s", str(error)[:500])
            self._set(State.ASLEEP if any(p.asleep for p in self._pages) else State.AWAKE)

    async def _to_sleep(self, freeze: bool) -> None:
        self._set(State.CLOSING)
        if len(self._servers(self._pages[0])) > 1:
            await asyncio.sleep(2 * TICK)  # the other processes have seen it, or their requests are seen here
        if not freeze and any(s[control.S_RUNNING] for s in self._servers(self._pages[0])):
            return  # the rules decide again
        begin = time.monotonic()
        await self.sleep(self._host, freeze)
        self._set(State.ASLEEP)
        self._log.info("vMem: the model sleeps%s (%.0f ms)", " with its requests" if freeze else "",
                       1000 * (time.monotonic() - begin))  # fmt: skip

    async def _to_wake(self) -> None:
        page = self._pages[0]
        begin, waits = time.monotonic(), _now() - (page[control.SINCE] or page[control.STARVING] or _now())
        self._set(State.WAKING)
        for page in self._pages:
            page[control.PATIENCE] = TRY
        before, why = self._attempts(), ""
        try:
            await self.wake(self._host)
            if self.is_in_vain():
                why = f"{max(p.short for p in self._pages) >> 20} MiB did not come"
        except Exception as error:
            why = str(error)[:300]
        if why:
            if not self._lacked:  # once for all attempts
                self._log.info("vMem: the model lacks memory to wake and tries until it comes: %s", why)
            self._lacked = True
            self._lack()
            if len(self._pages) > 1:
                await self._wake_none(before)
            self._set(State.ASLEEP)
            return
        for page in self._pages:
            page[control.LACKS] = 0
        self._used, self._lacked = _now(), False
        self._set(State.AWAKE)
        self._log.info("vMem: the model wakes (%.0f ms after the request, %.0f ms of them for this)", waits / 1000 +
                       1000 * (time.monotonic() - begin), 1000 * (time.monotonic() - begin))  # fmt: skip

    def is_in_vain(self) -> bool:
        """Return whether a worker has found too little memory in its last attempt to wake."""
        return any(word & 1 for words in self._attempts() for word in words)

    def _attempts(self) -> list[list[int]]:
        """The workers' last answers of each engine to an attempt to wake: odd if it failed."""
        return [p.cells[control.WOKE : control.WOKE + p[control.RANKS_USED]].tolist() for p in self._pages]

    async def _wake_none(self, before: list[list[int]]) -> None:
        """Put the engines to sleep that woke although another one could not: none keeps memory while one waits."""
        end = time.monotonic() + ANSWER
        while time.monotonic() < end:
            now = self._attempts()
            if all(new != old for a, b in zip(now, before) for new, old in zip(a, b)):
                break
            await asyncio.sleep(TICK)
        if any(not any(word & 1 for word in words) for words in self._attempts()):
            await self.sleep_again(self._host)


class _Receive:
    """A client's messages, kept while nobody reads them, so that its end is noticed."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.gone = receive, False
        self._kept: list[dict[str, Any]] = []
        self._reads: asyncio.Future[dict[str, Any]] | None = None

    async def listen(self) -> None:
        """Return when the client is gone."""
        while not self.gone:
            if self._reads is None:
                self._reads = asyncio.ensure_future(self._receive())
            message = await asyncio.shield(self._reads)
            self._reads = None
            self._kept.append(message)
            self.gone = message["type"] in ("http.disconnect", "websocket.disconnect")

    async def stop(self, listens: asyncio.Future[None]) -> None:
        """End `listen`; nothing is lost."""
        listens.cancel()
        await asyncio.gather(listens, return_exceptions=True)

    async def __call__(self) -> dict[str, Any]:
        if self._kept:
            return self._kept.pop(0)
        if self._reads is not None:
            reads, self._reads = self._reads, None
            return await reads
        message: dict[str, Any] = await self._receive()
        return message


async def _json(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
