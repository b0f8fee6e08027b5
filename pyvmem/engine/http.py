"""Limits over HTTP: ASGI middleware for the server of an engine.

``GET /vmem/limit`` tells what the engines of this server hold, a JSON object for each data-parallel rank.
``POST /vmem/limit`` sets what its JSON object names (`control.change`; with ``rank``, on one of them), and answers the
same. ``GET /vmem/metrics`` has the metrics of this server, however many API servers it runs.

All paths ask for the server's key if it has one. A page in a browser reaches none of them, even where there is no key:
a foreign ``Origin`` is refused, a POST must be JSON, and without a key the server must be called by an address, by a
name without a dot, or by this machine's name, as no page of a stranger's is.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyvmem.engine import control
from pyvmem.engine.metrics import engines, text

PATH, METRICS = "/vmem/limit", "/vmem/metrics"
MOST_BODY = 1 << 16  # bytes
FORMS = {"text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""}  # kinds that any page can send

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


def listens(port: int) -> bool:
    """Return whether this process listens at a port. Under Ray, an engine's server names the default one in vain."""
    try:
        own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")}
        tables = [path.read_text() for path in Path("/proc/self/net").glob("tcp*") if path.name in ("tcp", "tcp6")]
    except OSError:
        tables = []
    sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
    at_port = [f"socket:[{s[9]}]" for s in sockets if s[3] == "0A" and int(s[1].rpartition(":")[2], 16) == port]
    return not tables or not own.isdisjoint(at_port)  # without the tables, nothing is known


# ---- who may ask ----------------------------------------------------------------------------------------------------


def _values(scope: Scope, name: bytes) -> list[str]:
    """What a request's headers of this name say."""
    return [value.decode("latin-1") for key, value in scope.get("headers", ()) if key.lower() == name]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def has_key(scope: Scope, keys: Sequence[str]) -> bool:
    """Return whether a request has one of these keys. No keys: everybody may ask."""
    given = _values(scope, b"authorization")
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    try:
        digest = _digest(token.encode("latin-1").decode())
    except UnicodeDecodeError:
        digest = b""
    found = any([secrets.compare_digest(digest, _digest(key)) for key in keys])  # each, so that the time tells nothing
    return not keys or (scheme.lower() == "bearer" and found)


def _is_near(host: str) -> bool:
    """Return whether a name that a browser used for this server can be no stranger's that leads here."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost") or name == socket.gethostname().lower()
    return True


def _is_foreign(scope: Scope, has_keys: bool) -> bool:
    """Return whether a page of another server may have sent a request by its reader's browser."""
    hosts = [host.lower() for host in _values(scope, b"host")]
    origins = [origin.lower().partition("://")[2] for origin in _values(scope, b"origin")]
    return (len(hosts) > 1 or any([origin] != hosts for origin in origins)
            or (not has_keys and not all(map(_is_near, hosts))))  # fmt: skip


def refusal(scope: Scope, keys: Sequence[str], methods: str, body: bool = True) -> tuple[int, str] | None:
    """The status and the reason with which a request for a path of vMem's is refused; None: it may pass.

    keys : the server's. methods : those of the path, with commas. body : a POST has one, which must be JSON.
    """
    if not has_key(scope, keys):
        return 401, "Unauthorized"
    if _is_foreign(scope, bool(keys)):
        return 403, ("Forbidden: call the server by its address, by a name without a dot or by this machine's name, "
                     "and from no page of another server; or start it with a key")  # fmt: skip
    if scope["method"] not in methods.split(", "):
        return 405, f"{scope['path']} takes {methods.replace(', ', ' and ')}"
    kinds = [kind.partition(";")[0].strip().lower() for kind in _values(scope, b"content-type")]
    if scope["method"] == "POST" and (kinds != ["application/json"] if body else FORMS.intersection(kinds)):
        return 415, "the body must be JSON, with Content-Type: application/json"
    return None


async def answer(send: Send, status: int, body: bytes, kind: bytes, more: Mapping[bytes, bytes] = {}) -> None:
    """Send a whole answer. kind: its content type; more: further headers."""
    headers = [(b"content-type", kind), *more.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, why: tuple[int, str], methods: str) -> None:
    """Answer a request that `refusal` refuses."""
    more = {b"allow": methods.encode()} if why[0] == 405 else {}
    await answer(send, why[0], json.dumps({"error": why[1]}).encode(), b"application/json", more)


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

    def keys(self, state: Any) -> Sequence[str]:
        """The keys of which a request must have one; none: it needs no key. state: the application's; None: unknown."""
        return ()

    def _keys_of(self, scope: Scope) -> Sequence[str]:
        return [key for key in self.keys(getattr(scope.get("app"), "state", None)) if key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path not in (PATH, METRICS):
            await self._app(scope, receive, send)
            return
        methods = "GET" if path == METRICS else "GET, POST"
        if why := refusal(scope, self._keys_of(scope), methods):
            await refuse(send, why, methods)
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
        content = content or {"engines": [asdict(engine) for engine, _ in engines(self.server())]}
        await answer(send, status, json.dumps(content).encode(), b"application/json")
