"""The application of Ray Serve, without Ray: where its replicas go, what its router chooses, how a server ends.

SPDX-License-Identifier: MIT
"""

import asyncio
import importlib
import os
import select
import signal
import subprocess
import sys
import types

import pytest

pytest.importorskip("tomllib")

TABLE = {
    "pools": {"gpu0": {"size": "1G", "device": 0}, "gpu1": {"size": "1G", "device": 1}},
    "models": {"chat": {"path": "x", "pools": ["gpu0", "gpu1"], "queue": 0.2, "adapters": {"sql": "/y"}},
               "code": {"path": "x", "pools": ["gpu1"], "queue": 0.2}},
}  # fmt: skip


class Answer:
    def __init__(self, content, status=200, headers=None):
        self.content, self.status, self.headers = content, status, headers


@pytest.fixture
def ray_serve(monkeypatch):
    """The module, with stand-ins for what it imports."""
    serve = types.ModuleType("ray.serve")
    serve.deployment = lambda what, **options: types.SimpleNamespace(bind=lambda *args: (what, options, args))
    names = {"ray": dict(serve=serve), "aiohttp": {}, "starlette": {}, "starlette.requests": dict(Request=object),
             "starlette.responses": dict(JSONResponse=Answer, Response=Answer, StreamingResponse=Answer)}  # fmt: skip
    for name, content in names.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(content)
    monkeypatch.delitem(sys.modules, "pyvmem.ray_serve", raising=False)
    yield importlib.import_module("pyvmem.ray_serve")
    sys.modules.pop("pyvmem.ray_serve")


def test_each_server_of_the_file_is_a_deployment_at_its_pool(ray_serve):
    router, _, (table, servers) = ray_serve.build({"file": TABLE})
    assert router is ray_serve.Router and table == TABLE
    found = {options["name"]: options["ray_actor_options"]["resources"]
             for made in servers.values() for _, options, _ in made}  # fmt: skip
    assert {name: list(resources) for name, resources in found.items()} == {
        "chat@gpu0": ["vmem-gpu0"], "chat@gpu1": ["vmem-gpu1"], "code": ["vmem-gpu1"]}  # fmt: skip
    unplaced = {**TABLE, "models": {"chat": {"path": "x"}}}
    with pytest.raises(ValueError, match="models.chat.pools is missing"):
        ray_serve.build({"file": unplaced})


class Stream:
    """What a handle returns."""

    def __init__(self, parts):
        self.parts, self.cancelled = parts, False

    def __anext__(self):
        return anext(self.parts)

    def cancel(self):
        self.cancelled = True


class Server:
    """A handle: wait, or None if its replica is gone; status: of its answers, 0 if its process is gone; lost: whether
    the replica ends when a request comes, which Ray then holds back.
    """

    def __init__(self, wait, status=200, lost=False):
        self.wait, self.status, self.lost, self.asked, self.streams = wait, status, lost, [], []
        self.seconds = self.forward = self

    def options(self, **_):
        return self

    def remote(self, *args):
        if not args:
            return self._wait()
        self.streams.append(Stream(self._stream(args)))
        return self.streams[-1]

    async def _wait(self):
        return await asyncio.Future() if self.wait is None else self.wait

    async def _stream(self, args):
        self.asked.append(args)
        if self.lost:
            self.wait = None
            await asyncio.Future()
        yield None
        if isinstance(self.status, Exception):
            raise self.status
        yield self.status, {}


class Request:
    method, headers, query_params = "POST", {"Host": "h", "Authorization": "Bearer K"}, {}
    url = types.SimpleNamespace(path="/v1/completions", query="")

    def __init__(self, body):
        self._body = body

    async def body(self):
        return self._body


def ask(ray_serve, servers, body=b'{"model": "chat"}', times=1):
    async def run():
        router = ray_serve.Router(TABLE, {"chat": servers, "code": []})
        answers = [await router(Request(body)) for _ in range(times)]
        for task in router._tasks:
            task.cancel()
        return answers

    return asyncio.run(run())


@pytest.mark.parametrize("body", [b'{"model": "chat"}', b'{"model": "sql"}'])
def test_a_request_goes_where_it_waits_least(ray_serve, body):
    sleeps, awake = Server(2.5), Server(0.0)
    (answer,) = ask(ray_serve, [sleeps, awake], body)
    assert answer.status == 200 and not sleeps.asked
    ((method, path, headers, passed),) = awake.asked
    assert (method, path, headers, passed) == ("POST", "/v1/completions", {"Authorization": "Bearer K"}, body)


def test_a_server_that_is_gone_is_passed_by(ray_serve):
    ended, other = Server(0.0, status=0), Server(1.0)
    assert [a.status for a in ask(ray_serve, [ended, other], times=2)] == [200, 200]
    assert (len(ended.asked), len(other.asked)) == (1, 2)
    assert [a.status for a in ask(ray_serve, [Server(0.0, status=0)])] == [503]
    (answer,) = ask(ray_serve, [Server(None)])
    assert answer.status == 503 and answer.headers["Retry-After"]
    dies = Server(0.0, status=RuntimeError("the replica died"))
    assert [a.status for a in ask(ray_serve, [dies, other])] == [503] and len(dies.asked) == 1  # it may be the cause


def test_a_request_that_ray_holds_back_goes_to_another_server(ray_serve, monkeypatch):
    """The node of the first one is gone, and the router has just heard of it."""
    monkeypatch.setattr(ray_serve, "SILENT", 0.5)
    monkeypatch.setattr(ray_serve, "LOOK", 0.02)
    lost, other = Server(0.0, lost=True), Server(1.0)
    assert [a.status for a in ask(ray_serve, [lost, other])] == [200]
    assert lost.streams[0].cancelled and not other.streams[0].cancelled  # Ray is not to send it when a replica is there


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"model": {"a": 1}}', b'{"model": "nobody"}', b"\xff", b"[" * 9999]
)
def test_what_names_no_model_is_refused(ray_serve, body):
    assert [a.status for a in ask(ray_serve, [Server(0.0)], body)] == [404]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_ends_with_its_replica(ray_serve, when):
    """Also if the replica has ended before the server's process asked to follow it."""
    parent = "'1'" if when == "before" else "str(os.getpid())"
    program = (f"import os, subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', sys.argv[1], {parent}, "
               "'sleep', '600'])\nprint(child.pid, flush=True)\nsys.stdin.read()")  # fmt: skip
    replica = subprocess.Popen([sys.executable, "-c", program, ray_serve.BECOME], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)  # fmt: skip
    with replica:
        server = os.pidfd_open(int(replica.stdout.readline()))
        if when == "after":
            replica.kill()
        poll = select.poll()
        poll.register(server, 1)
        assert poll.poll(30_000)
        replica.kill()
    os.close(server)
    assert signal.SIGTERM == 15  # as BECOME has it
