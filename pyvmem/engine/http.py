"""Limits over HTTP: ASGI middleware for the server of an engine.

``GET /vmem/limit`` tells what the engines of this server hold, a JSON object for each data-parallel rank.
``POST /vmem/limit`` sets what its JSON object names (`control.change`; with ``rank``, on one of them), and answers the
same. ``GET /vmem/metrics`` has the metrics of this server, however many API servers it runs. No key is asked
for, so do not let strangers reach these paths.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from pyvmem.engine import control
from pyvmem.engine.metrics import engines, text

PATH, METRICS = "/vmem/limit", "/vmem/metrics"
MOST_BODY = 1 << 16  # bytes

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def _change(body: bytes, mine: list[tuple[control.Engine, control.Page]], hint: str) -> None:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise ValueError("the body must be a JSON object")
    rank = asked.pop("rank", None)
    if not mine:
        raise ValueError(f"no engine of this server is on vMem: {hint}")
    chosen = [page for engine, page in mine if rank is None or (type(rank) is int and engine.rank == rank)]
    if not chosen:
        raise ValueError(f"rank {json.dumps(rank)[:40]} is not here: GET {PATH} lists the engines")
    control.change(*chosen, **asked)


async def answer(send: Send, status: int, body: bytes, kind: bytes) -> None:
    """Send a whole answer. kind: its content type."""
    headers = [(b"content-type", kind)] + ([(b"allow", b"GET, POST")] if status == 405 else [])
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Limits:
    """ASGI middleware that serves `PATH` and `METRICS`, and passes everything else on. An engine's plugin extends it.

    Attributes
    ----------
    prefix : str
        How the metrics' names begin.
    hint : str
        Advice for a user whose server has no engine on vMem.
    """

    prefix, hint = "", ""

    @staticmethod
    def server() -> int:
        """The process that serves, which the engines are started by."""
        return os.getpid()

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path not in (PATH, METRICS):
            await self._app(scope, receive, send)
            return
        if path == METRICS:
            await answer(send, 200, text(self.prefix, self.server), b"text/plain; version=0.0.4; charset=utf-8")
            return
        status: int = 200
        content: dict[str, Any] = {}
        if scope["method"] == "POST":
            body, more = b"", True
            while more and len(body) <= MOST_BODY:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return  # what came may be a part
                body, more = body + message.get("body", b""), message.get("more_body", False)
            try:
                if len(body) > MOST_BODY:
                    raise ValueError(f"the body may have {MOST_BODY} bytes")
                _change(body, engines(self.server()), self.hint)
            except (ValueError, TypeError) as error:
                status, content = 400, {"error": str(error)}
        elif scope["method"] != "GET":
            status, content = 405, {"error": f"{PATH} takes GET and POST"}
        content = content or {"engines": [asdict(engine) for engine, _ in engines(self.server())]}
        await answer(send, status, json.dumps(content).encode(), b"application/json")
