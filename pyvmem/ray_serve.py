"""An application of Ray Serve: the servers of ``pyvmem models``, each a process of a replica, behind one port.

``pyvmem models FILE render ray-serve`` prints the configuration that names `build`. Each server of the file is a
deployment with one replica, on the node that has its pool's resource. The replica starts the server's process, which
ends with it. `Router` sends a request to the server of its model that is awake or wakes soonest.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pyvmem.tools.models_file import File, made
from pyvmem.tools.pair import BECOME

SHARE = 0.001  # of a pool's resource, which says on which node it is and limits nothing
LOOK = 1.0  # seconds between looks at a server
SILENT = 5.0  # seconds without an answer after which a server is down
END = 60.0  # seconds that a server has to end
MANY = 100_000  # requests at a time: the servers queue them
OWN = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}  # headers of a connection


def build(args: Mapping[str, Any]) -> Any:
    """The application of a file of models. args: its contents are in ``file``. Raises ValueError naming the key."""
    file = made(args["file"])
    file.check_placed()
    servers: dict[str, list[Any]] = {m.name: [] for m in file.models}
    for r in file.replicas:
        deployment = serve.deployment(
            Server, name=r.name, num_replicas=1, max_ongoing_requests=MANY, health_check_period_s=2,
            graceful_shutdown_timeout_s=END,
            ray_actor_options={"num_cpus": 0, "resources": {f"vmem-{r.pool.name}": SHARE}},
        )  # fmt: skip
        servers[r.model.name].append(deployment.bind(args["file"], r.name))
    router = serve.deployment(Router, max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0})
    return router.bind(args["file"], servers)


class Server:
    """A replica: the process of one server of the file, and requests for it."""

    async def __init__(self, table: Mapping[str, Any], name: str) -> None:  # type: ignore[misc]
        file: File = made(table)
        (replica,) = file.of(name)
        self._name, self._url = name, f"http://127.0.0.1:{replica.port}"
        self._headers = {"Authorization": f"Bearer {replica.model.key}"} if replica.model.key else {}
        # Ray hides all GPUs of a replica that asks it for none.
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SERVE_", "CUDA_VISIBLE_"))}
        await self._until_free(replica.port)
        command = [sys.executable, "-c", BECOME, str(os.getpid()), *file.command(replica, here=True)]
        self._process = subprocess.Popen(command, env={**environ, **file.environment(replica)}, start_new_session=True)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        while not await self._is_ready():
            self.check_health()
            await asyncio.sleep(0.2)

    async def _until_free(self, port: int) -> None:
        """Return when an earlier replica's server has ended, or after `END` seconds."""
        end = time.monotonic() + END
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.socket() as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(("127.0.0.1", port))
                return
            await asyncio.sleep(0.2)

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self._session.get(f"{self._url}/health") as answer:
                return bool(answer.status == 200)
        return False

    def check_health(self) -> None:
        """Raises RuntimeError if the server has ended: Serve then starts another replica."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._name}: the server ended with status {self._process.returncode}")

    async def seconds(self) -> float:
        """The seconds that a request which comes now is expected to wait for the model."""
        async with self._session.get(f"{self._url}/vmem/state", headers=self._headers) as answer:
            return float((await answer.json())["wait"])

    async def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> AsyncIterator[Any]:
        """Yield None at once, then the status and the headers of the server's answer, then its bytes.

        Status 0: the server takes no requests.
        """
        yield None
        try:
            async with self._session.request(method, self._url + path, headers=headers, data=body) as answer:
                yield answer.status, _passed_on(answer.headers)
                async for part in answer.content.iter_any():
                    yield part
        except aiohttp.ClientConnectorError:
            yield 0, {}

    def __del__(self) -> None:
        if process := getattr(self, "_process", None):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END / 2)


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OWN}


class _Known:
    """What the router knows of a server."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.wait, self.running, self.heard = handle, math.inf, 0, -math.inf

    @property
    def silent(self) -> float:
        """Seconds since it last answered."""
        return time.monotonic() - self.heard

    def ended(self) -> None:
        """A request has ended."""
        self.running -= 1

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # its replica starts again
                self.wait = await asyncio.wait_for(self.handle.seconds.remote(), SILENT)
                self.heard = time.monotonic()
            await asyncio.sleep(LOOK)


class Router:
    """The deployment to which requests come: the models of the file, by name."""

    def __init__(self, table: Mapping[str, Any], servers: Mapping[str, list[Any]]) -> None:
        models = made(table).models
        self._models = {name: m for m in models for name in m.names}
        self._servers = {name: [_Known(handle) for handle in handles] for name, handles in servers.items()}
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(s.watch()) for known in self._servers.values() for s in known]
        if request.url.path == "/v1/models" and request.method == "GET":
            return JSONResponse({"object": "list", "data": [{"id": n, "object": "model"} for n in self._models]})
        body = await request.body()
        name = request.query_params.get("model")
        if not name:
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                name = json.loads(body).get("model")
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            return _error(404, f"the models are {', '.join(self._models)}")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        end = time.monotonic() + model.queue
        while server := await self._choose(model.name, end):
            asked = request.method, path, _passed_on(request.headers), body
            stream = server.handle.options(stream=True).forward.remote(*asked)
            server.running += 1
            weakref.finalize(stream, server.ended)
            try:
                head = await self._head(stream, server, model.queue)
            except Exception:
                return _error(503, "the model's server ended: try again later")
            if head is not None:
                return StreamingResponse(stream, *head)
            server.heard = -math.inf  # it has not seen the request
            stream.cancel()
        return _error(503, "no server of the model runs: try again later")

    async def _choose(self, model: str, end: float) -> _Known | None:
        """The server with the shortest wait, then the fewest requests; None if none answers until then."""
        while not (up := [s for s in self._servers[model] if s.silent < SILENT]) and time.monotonic() < end:
            await asyncio.sleep(LOOK / 10)
        return min(up, key=lambda s: (s.wait, s.running), default=None)

    async def _head(self, stream: Any, server: _Known, seconds: float) -> tuple[int, dict[str, str]] | None:
        """The status and the headers of a server's answer; None if the request has not come there.

        Raises `TimeoutError` if the server has the request and is silent for so long: its node may be gone.
        """
        try:
            await self._next(stream, server, SILENT)
        except Exception:  # Ray holds it back while there is no replica
            return None
        found: tuple[int, dict[str, str]] = await self._next(stream, server, SILENT + seconds)
        return found if found[0] else None

    async def _next(self, stream: Any, server: _Known, seconds: float) -> Any:
        """What comes next. Raises `TimeoutError` if the server is silent for so long."""
        following = asyncio.ensure_future(anext(stream))
        try:
            while not following.done():
                await asyncio.wait([following], timeout=LOOK)
                if not following.done() and server.silent > seconds:
                    raise TimeoutError
            return await following
        finally:
            following.cancel()


def _error(status: int, message: str) -> Response:
    more = {"Retry-After": "5"} if status == 503 else {}
    return JSONResponse({"error": {"message": message, "code": status}}, status, more)
