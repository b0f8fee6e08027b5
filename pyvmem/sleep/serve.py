"""A model that sleeps while nobody uses it and wakes when a request comes: ASGI middleware in its own server.

Requests are held while the model sleeps. The first wakes it, once for all. An engine that queues requests gets them
once all memory is claimed, and reads them while the weights are copied. Those that run are counted until their last
byte. When the model has been idle, it sleeps. If another one of its pool needs the memory (`turns`), it sleeps with its
requests, which go on when it wakes. Or it drains: no further request begins until the last has ended. A request that
waits too long for its model or its first token gets status 503 with Retry-After.

``GET /vmem/state`` tells what the model does. ``POST /vmem/sleep``, ``/vmem/wake`` and ``/vmem/drain`` order it, and
answer when that is done. An order ends with its request, but a drained model refuses requests until it is woken.
``/vmem/limit`` and ``/vmem/metrics`` are those of `http.Limits`. All ask for the server's key if it has one.

This file is the HTTP of it, and what an engine's plugin adds. Begin with `Serve.__call__`. It asks `admission` whether
a request may begin. Several processes may serve one engine. Each publishes its requests in the control page (`pages`),
and the first that lives acts (`leader`).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from pyvmem._clock import now_us
from pyvmem.engine import control, http
from pyvmem.engine.http import Receive, Scope, Send
from pyvmem.engine.settings import Settings
from pyvmem.sleep.admission import Admission, Client, Order
from pyvmem.sleep.leader import Leader
from pyvmem.sleep.pages import ServerPages
from pyvmem.sleep.standby import Standby

LOOK = 1.0  # seconds between looks whether a request waits in vain
RETRY_AFTER = 5  # seconds
ORDERS = {"/vmem/sleep": Order.SLEEP, "/vmem/wake": Order.WAKE, "/vmem/drain": Order.DRAIN}


class Serve(http.Limits):
    """ASGI middleware. An engine's plugin says how its model sleeps and wakes, and which keys its server has."""

    free: tuple[str, ...] = ()  # how paths begin whose POST needs no model, or wakes or pauses it itself

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        settings = self.settings()
        self.host: Any = None  # the application's state
        self.pages = ServerPages(self.server, self.number(), lambda: self.about(self.host))
        self.admission = Admission(self.pages, settings.queue, lambda: self.ends())
        self.leader = Leader(self.pages, self.admission, self, settings)
        self.standby = Standby(*settings.standby) if settings.standby else None
        self._task: asyncio.Task[None] | None = None
        self._ends: asyncio.Task[None] | None = None

    # ---- what a plugin says ----------------------------------------------------------------------------------

    def settings(self) -> Settings:
        raise NotImplementedError

    def number(self) -> int:
        """The number of this process among the server's, from 0 on."""
        return 0

    def needs(self, method: str, path: str) -> bool:
        """Return whether a request needs the model to be awake."""
        return method == "POST" and not path.startswith(self.free)

    def queues(self, state: Any, path: str) -> bool:
        """Return whether the engine only queues a POST for this path while it wakes, and if it sleeps on after all."""
        return False

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
        """If there is no memory, the model sleeps as before: the pages say so, or it raises."""
        raise NotImplementedError

    async def sleep_again(self, state: Any) -> None:
        """Return when those engines sleep that have woken although another one could not."""
        await self.sleep(state, True)

    # ---- requests --------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._task is None and "app" in scope:
            self.host = scope["app"].state
            self._task = asyncio.create_task(self.leader.run())
        kind = scope["type"]
        if kind == "lifespan" and self.standby is not None:
            try:
                await self._app(scope, receive, self._held(send, self.standby))
            finally:  # the server ends, and then its engine
                if self._ends is not None:
                    self._ends.cancel()
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")) if kind in ("http", "websocket") else ""
        if kind == "http" and path.startswith("/vmem/"):
            await self._answer_for_vmem(path, scope, receive, send)
            return
        needs = self.needs(scope["method"], path) if kind == "http" else kind == "websocket"
        if not needs or not self.pages.find() or not self.will_answer(scope):
            await self._app(scope, receive, send)
            return
        client, came = Client(receive), now_us()
        if not await self.admission.enter(client, kind == "http" and self.queues(self.host, path)):
            if not client.gone:
                await self._refuse(kind, send)
            return
        running = True

        def end() -> None:
            nonlocal running
            if running:
                running = False
                self.admission.leave(client)

        try:
            if kind == "websocket":
                await self._app(scope, client, send)
            elif not await self._answer(scope, client, send, end, now_us() - came):
                await self._refuse(kind, send)
        finally:
            end()

    def _held(self, send: Send, standby: Standby) -> Send:
        """The server listens when its application says that it has started: it says so when it may serve."""

        async def tell(message: dict[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                log = self.settings().logger
                ends = standby.end_with(lambda: [p[control.PID] for p in self.pages.mine if p[control.PID]], log)
                self._ends = asyncio.create_task(ends)
                await standby.wait(self._fall_asleep)
            await send(message)

        return tell

    async def _fall_asleep(self) -> None:
        """Return when the model sleeps. No request comes meanwhile."""
        over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await over.wait()
            return {"type": "http.disconnect"}

        client = Client(receive)
        try:
            while not (self.pages.find() and await self.admission.carry_out(Order.SLEEP, client)):
                await asyncio.sleep(LOOK / 10)
        finally:
            over.set()

    async def _answer(self, scope: Scope, client: Client, send: Send, end: Callable[[], None], waited: int) -> bool:
        """Have the application answer. False: memory for it did not come in time, and nothing was sent.

        waited: microseconds that the request has waited for its model, which count against the same time.

        A stream's headers wait for its first bytes, so that it can be refused until then. The request ends with its
        last byte: SGLang's application still waits for two seconds then.
        """
        began, starts, sent = now_us(), [], False

        async def tell(message: dict[str, Any]) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                starts.append(message)
                self.admission.set_silent(client, began)
                return
            self.admission.set_silent(client, None)
            while starts:
                await send(starts.pop())
            sent = True
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                end()

        answers = asyncio.ensure_future(self._app(scope, client, tell))
        try:
            while not (sent or answers.done()):
                await asyncio.wait([answers], timeout=LOOK)
                if not sent and self.admission.is_in_vain(began - waited, bool(starts), waited):
                    return False
            await answers
            while starts:  # an answer without a body
                await send(starts.pop())
            return True
        finally:
            self.admission.set_silent(client, None)
            if not answers.done():
                answers.cancel()
                await asyncio.wait([answers])

    async def _refuse(self, kind: str, send: Send) -> None:
        self.admission.refuse()
        if kind == "websocket":
            await send({"type": "websocket.close", "code": 1013})
            return
        model = self.pages.state()
        state, lacks = model["state"], model["lacks"]
        why = "is stopped" if self.ends() else "is drained" if state == "drained" \
            else f"lacks {lacks} bytes to wake" if lacks \
            else "lacks memory for its KV cache" if state == "awake" else "did not wake in time"  # fmt: skip
        error = {"message": f"the model {why}: try again later", "type": "service_unavailable", "code": 503}
        await _json(send, 503, {"error": error})

    # ---- /vmem -----------------------------------------------------------------------------------------------

    async def _answer_for_vmem(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        methods = "POST" if path in ORDERS else "GET"
        if path in (http.PATH, http.METRICS):
            await super().__call__(scope, receive, send)
        elif why := http.refusal(scope, self._keys_of(scope), methods, body=False):
            await http.refuse(send, why, methods)
        elif not self.pages.find():
            await _json(send, 409, {"error": f"no engine of this server is on vMem: {self.hint}"})
        elif path == "/vmem/state":
            await _json(send, 200, self.pages.state())
        elif path in ORDERS:
            await self._carry_out(ORDERS[path], receive, send)
        else:
            await _json(send, 404, {"error": f"{path}: vMem has /vmem/state, sleep, wake, drain, limit and metrics"})

    async def _carry_out(self, order: Order, receive: Receive, send: Send) -> None:
        """Carry out an operator's order; it ends with this request."""
        if self.admission.has_order:
            await _json(send, 409, {"error": "another order is being carried out"})
            return
        client = Client(receive)
        done = await self.admission.carry_out(order, client)
        if not client.gone:
            await _json(send, 200 if done else 503, self.pages.state())


async def _json(send: Send, status: int, content: dict[str, Any]) -> None:
    more = {b"retry-after": str(RETRY_AFTER).encode()} if status == 503 else {}
    await http.answer(send, status, json.dumps(content).encode(), b"application/json", more)
