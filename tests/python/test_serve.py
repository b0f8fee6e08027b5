"""The server of a model that sleeps, over an engine that is only a control page: who waits, and what is published.

SPDX-License-Identifier: MIT
"""

import asyncio
import json
import os
import random
import socket
import time
import types

import pytest

from pyvmem.engine import control
from pyvmem.engine.control import Sleeps, State
from pyvmem.sleep import leader, pages, serve, standby, turns
from pyvmem.sleep.bell import ring
from pyvmem.sleep.standby import Standby
from pyvmem.vllm import plugin

SLICE = 0.1
QUEUED = "/v1/completions"  # while the engine wakes, it only queues requests for this path


class Engine(serve.Serve):
    """`Serve` with an engine that sleeps and wakes at once, or lacks memory."""

    def __init__(self, app, queue="60"):  # seconds, which end only a test that hangs
        self._chosen = plugin.settings(dict(
            VMEM_VLLM="1", VMEM_VLLM_POOL="p", VMEM_VLLM_POOL_SIZE="1G", VMEM_VLLM_WEIGHTS="1", VMEM_VLLM_SLEEP="keep",
            VMEM_VLLM_SLICE=str(SLICE), VMEM_VLLM_QUEUE=queue))  # fmt: skip
        super().__init__(app)
        self.queues = lambda state, path: path == QUEUED
        self.page = page_of("mine", "chat")
        self.calls, self.lacks = [], 0

    def settings(self):
        return self._chosen

    async def sleep(self, state, freeze):
        self.calls.append("freeze" if freeze else "sleep")
        self.page[control.ASLEEP] = 1

    async def wake(self, state):
        self.calls.append("wake")
        if self.lacks:
            self.page[control.SHORT] = self.lacks
            self.page[control.ASLEEP] = Sleeps.LACKS
            await asyncio.sleep(0.02)
            raise MemoryError("no memory")
        self.page[control.ASLEEP] = 0


def page_of(name, model):
    page = control.open_page(name, 0)
    control.claim(page, model, 8001)
    page[control.RANKS_USED] = 1
    page[control.POOL] = page[control.POOL_OF] = 7
    return page


async def live(engine, other):
    """Both models show signs of life, however long a test takes: else none of them has a turn."""
    while True:
        for page, word in ((engine, control.BEAT), (other, control.BEAT), (other, control.SERVER_BEAT)):
            page[word] += 1
        await asyncio.sleep(0.02)


class Other:
    """Another model of the pool."""

    def __init__(self):
        self.page = page_of("other", "other")
        self.page[control.PID] = 1  # of no server here
        self.page[control.STATE] = State.AWAKE


class App:
    """Answers a request when it may."""

    def __init__(self):
        self.may, self.sent, self.leaves = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may.set(), self.leaves.set()

    async def __call__(self, scope, receive, send):
        await self.may.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        self.sent.set()
        await self.leaves.wait()


async def messages(engine, path, method="POST", headers=()):
    """The messages of an answer."""
    sent = []

    async def receive():
        if not sent:
            sent.append(1)
            return {"type": "http.request", "body": b"{}"}
        await asyncio.sleep(3600)

    answers = []

    async def send(message):
        answers.append(message)

    scope = dict(type="http", method=method, path=path, headers=headers, app=types.SimpleNamespace(state=None))
    await engine(scope, receive, send)
    return answers


async def ask(engine, path="/v1/completions", method="POST", headers=()):
    """Status and headers of an answer."""
    begins = (await messages(engine, path, method, headers))[0]
    return begins["status"], dict(begins["headers"])


async def answered(engine, path="/v1/completions"):
    """Ask until the answer is no refusal: what takes longer than a short queue is asked for again."""
    end = time.monotonic() + 30
    while (status := (await ask(engine, path))[0]) != 200:
        assert time.monotonic() < end, (path, status, engine.calls[-9:], State(engine.page[control.STATE]))


def now():
    """In microseconds, as control pages have it."""
    return time.monotonic_ns() // 1000


async def until(what, engine):
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, (engine.calls, State(engine.page[control.STATE]))
        await asyncio.sleep(0.005)


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Runs a history with an engine and another model of its pool."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(turns, "HUNGRY", 0.05)

    def play(history, **options):
        async def run():
            app = App()
            engine, other = Engine(app, **options), Other()
            beats = asyncio.create_task(live(engine.page, other.page))
            assert (await ask(engine, "/vmem/state", "GET"))[0] == 200
            await history(engine, app, other.page)
            beats.cancel()
            engine._task.cancel()

        asyncio.run(run())

    return play


def test_a_request_wakes_its_model_and_all_is_counted(played):
    async def history(engine, app, other):
        before = engine.page[control.CHANGED_AT]
        assert (await ask(engine, "/vmem/sleep"))[0] == 200
        slept = engine.page[control.CHANGED_AT]
        answers = await asyncio.gather(*(ask(engine) for _ in range(5)))
        assert [status for status, _ in answers] == [200] * 5
        assert engine.calls == ["sleep", "wake"]  # once for all
        page = engine.page
        assert before < slept < page[control.CHANGED_AT]
        assert (page[control.SLEEPS], page[control.WAKES], page[control.UNSERVED]) == (1, 1, 0)
        assert page[control.WAKING] > 0

    played(history)


def test_a_server_that_stands_by_says_that_it_has_started_when_it_may_serve(played):
    async def history(engine, app, other):
        ours, theirs = socket.socketpair()
        pair, own = socket.create_server(("127.0.0.1", 0)), socket.socket()
        own.bind(("127.0.0.1", 0))
        engine.standby, sent = Standby(os.dup(pair.fileno()), theirs.detach()), []

        async def started(scope, receive, send):
            await send({"type": "lifespan.startup.complete"})

        async def send(message):
            sent.append(message["type"])

        engine._app = started
        begins = asyncio.create_task(engine(dict(type="lifespan", app=types.SimpleNamespace(state=None)), None, send))
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        assert await loop.sock_recv(ours, 9) == standby.STARTED
        await loop.sock_sendall(ours, standby.STAND_BY)
        await until(lambda: engine.page[control.STATE] == State.ASLEEP, engine)
        assert engine.calls == ["sleep"] and not sent and not engine.standby.port
        await loop.sock_sendall(ours, standby.SERVE)
        await begins
        assert sent == ["lifespan.startup.complete"] and engine.standby.port == pair.getsockname()[1]
        assert own.getsockname() == pair.getsockname()  # the server listens at its own socket, which is the pair's now
        engine._app = app
        assert (await ask(engine))[0] == 200 and engine.calls == ["sleep", "wake"]
        engine._ends.cancel()
        ours.close(), pair.close(), own.close()

    played(history)


def test_what_a_request_costs_here_is_published_for_routers(played):
    async def history(engine, app, other):
        page = engine.page
        page[control.POOL_BYTES], page[control.WEIGHTS], page[control.WEIGHTS_HELD] = 20 << 30, 12 << 30, 4 << 30
        await ask(engine, "/vmem/sleep")
        await until(lambda: page[control.WAIT] == 500_000, engine)  # the copy of 8 GiB at 16 GiB/s
        assert page[control.ROOM] == 20 << 30
        other[control.WEIGHTS_HELD], other[control.RUNNING] = 16 << 30, 1
        await until(lambda: page[control.WAIT] == 500_000 + SLICE * 1e6, engine)  # and a turn of the other
        assert page[control.ROOM] == 4 << 30
        assert (await ask(engine))[0] == 200
        assert page[control.WAIT] == 0  # with the answer, not with the next look
        assert (await ask(engine, "/vmem/drain"))[0] == 200
        assert page[control.WAIT] == 10**12
        (_, body) = await messages(engine, "/vmem/state", "GET")
        assert json.loads(body["body"])["wait"] == 1e6
        assert (await ask(engine, "/vmem/wake"))[0] == 200
        assert page[control.WAIT] == 0
        for path in ("/vmem/sleep", "/vmem/drain"):
            assert (await ask(engine, path))[0] == 200
        assert page[control.WAIT] == 10**12  # also where it waited for its weights before

    played(history)


@pytest.mark.parametrize("lacks", [0, 4096])
def test_an_order_to_wake_is_no_request_that_waits(played, lacks):
    async def history(engine, app, other):
        await ask(engine, "/vmem/sleep")
        engine.lacks = lacks
        begins, body = await messages(engine, "/vmem/wake")
        told = json.loads(body["body"])
        assert (begins["status"], told["queued"], told["running"]) == (503 if lacks else 200, 0, 0)

    played(history, queue="0.2" if lacks else "60")


def test_a_request_ends_with_its_last_byte_not_with_its_application(played):
    """SGLang's application stays for two seconds after a stream, and its model would not sleep so long."""

    async def history(engine, app, other):
        app.leaves.clear()
        asked = asyncio.create_task(ask(engine))
        await app.sent.wait()
        assert (await ask(engine, "/vmem/sleep"))[0] == 200
        assert engine.page[control.RUNNING] == 0 and not asked.done()
        app.leaves.set()
        assert (await asked)[0] == 200
        assert (await ask(engine))[0] == 200
        assert engine.calls == ["sleep", "wake"] and engine.page[control.UNSERVED] == 0

    played(history, queue="5")


def test_no_order_and_no_request_waits_for_a_look(played, monkeypatch):
    """Each is begun and answered at once: looks, which are hours apart here, are for what other processes do."""
    monkeypatch.setattr(leader, "TICK", 3600)

    async def orders(engine, app):
        for path in ("sleep", "wake", "drain", "wake", "sleep"):
            assert (await ask(engine, f"/vmem/{path}"))[0] == 200, path
        assert (await ask(engine))[0] == 200  # wakes it
        app.may.clear()
        runs = asyncio.create_task(ask(engine))
        await until(lambda: engine.page.server(0)[control.S_RUNNING], engine)
        sleeps = asyncio.create_task(ask(engine, "/vmem/sleep"))
        await until(lambda: engine.page[control.STATE] == State.CLOSING, engine)
        app.may.set()
        assert [(await t)[0] for t in (runs, sleeps)] == [200, 200]
        assert engine.calls == ["sleep", "wake", "sleep", "wake", "sleep"]

    async def history(engine, app, other):
        await asyncio.wait_for(orders(engine, app), 30)

    played(history)


def test_a_model_sleeps_for_another_that_rings_and_does_not_wait_for_a_look(played, monkeypatch):
    monkeypatch.setattr(leader, "TICK", 3600)

    async def history(engine, app, other):
        engine.page[control.GIVES] = 8
        other[control.STATE], other[control.QUEUED], other[control.SINCE] = State.WAKING, 1, now()
        other[control.LACKING], other[control.LACKS] = now(), 5
        await asyncio.sleep(0.05)  # were there looks as usual, it would sleep now
        assert engine.calls == []
        ring(other.path)
        await until(lambda: engine.calls == ["sleep"], engine)

    played(history)


def test_a_model_that_lacks_memory_rings_for_the_others(played):
    async def history(engine, app, other):
        await answered(engine, "/vmem/sleep")
        engine.lacks, rung = 5, os.lstat(engine.page.path).st_mtime_ns
        asks = asyncio.create_task(ask(engine))
        await until(lambda: engine.page[control.LACKS] and os.lstat(engine.page.path).st_mtime_ns > rung, engine)
        engine.lacks = 0
        assert (await asks)[0] == 200

    played(history)


def test_a_model_that_wakes_for_nobody_any_more_lacks_nothing_and_rings_for_nobody(played):
    async def history(engine, app, other):
        await answered(engine, "/vmem/sleep")
        may, rung = asyncio.Event(), []

        async def wake(state):
            engine.page[control.SHORT], engine.page[control.ASLEEP] = 5, Sleeps.LACKS
            await may.wait()
            engine.page[control.SHORT] = engine.page[control.ASLEEP] = 0

        engine.wake = wake
        asks = asyncio.create_task(ask(engine))
        await until(lambda: engine.page[control.LACKS], engine)
        asks.cancel()  # its client leaves
        await until(lambda: not engine.page[control.QUEUED] and not engine.page[control.LACKS], engine)
        beats = engine.page[control.SERVER_BEAT]
        while engine.page[control.SERVER_BEAT] < beats + 5:
            rung.append(os.lstat(engine.page.path).st_mtime_ns)
            await asyncio.sleep(0.001)
        assert len(set(rung)) == 1 and not engine.page[control.LACKS]
        may.set()
        await until(lambda: engine.page[control.STATE] == State.AWAKE, engine)

    played(history)


def test_who_waits_in_vain_is_refused_and_counted(played):
    async def history(engine, app, other):
        await answered(engine, "/vmem/sleep")
        engine.lacks = 5
        answers = await asyncio.gather(*(ask(engine) for _ in range(3)))
        assert [status for status, _ in answers] == [503] * 3
        assert all(int(headers[b"retry-after"]) > 0 for _, headers in answers)
        await until(lambda: engine.page[control.UNSERVED] == 3, engine)
        engine.lacks = 0
        await answered(engine)

    played(history, queue="0.3")


def test_the_time_before_the_model_woke_counts(played):
    """A request waits for its model and then for memory, for `queue` in all."""

    async def history(engine, app, other):
        engine.page[control.STARVING] = 1_000_000
        waits = int(0.9e6 * 60)
        assert not engine.admission.is_in_vain(now(), True, 0)
        assert not engine.admission.is_in_vain(now() - waits, True, waits)
        waits = int(1.1e6 * 60)
        assert engine.admission.is_in_vain(now() - waits, True, waits)
        engine.page[control.STARVING] = now() - 10_000_000
        assert not engine.admission.is_in_vain(now() - 15_000_000, True, 5_000_000)
        assert engine.admission.is_in_vain(now() - 65_000_000, True, 55_000_000)  # 55 s for the model, 10 s for memory

    played(history)


def starve(engine, app, other):
    """A request of this model that cannot go on, while the other model lacks memory, too, and came first."""
    app.may.clear()
    other[control.RUNNING], other[control.STARVING] = 1, max(now() - 10_000_000, 1)
    request = asyncio.create_task(ask(engine))
    engine.page[control.STARVED] = 1
    return request


def test_a_starved_model_sleeps_with_its_requests_and_they_go_on(played):
    async def history(engine, app, other):
        request = starve(engine, app, other)
        await until(lambda: engine.calls == ["freeze"], engine)
        await until(lambda: engine.page[control.STATE] == State.ASLEEP, engine)
        assert not request.done() and engine.page[control.RUNNING] == 1
        engine.lacks = 5
        other[control.RUNNING] = other[control.STARVING] = 0  # it has been served, and stays awake
        page = engine.page
        await until(lambda: page[control.LACKS] == 5 and now() - page[control.LACKING] > 300_000, engine)
        engine.lacks = 0
        await until(lambda: engine.page[control.STATE] == State.AWAKE, engine)
        assert engine.calls[-1] == "wake"
        app.may.set()
        assert (await request)[0] == 200

    played(history)


def test_a_request_whose_memory_never_comes_is_refused(played):
    """Its engine can run no request, and no other model can give: it is ended, unless it has sent something."""
    ended = []

    async def history(engine, app, other):
        other[control.PID] = 0
        answer = app.__class__.__call__

        async def call(self, scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["headers"]:
                await send({"type": "http.response.body", "body": b"1", "more_body": True})
            try:
                await self.may.wait()
            except asyncio.CancelledError:
                ended.append(1)
                raise
            await send({"type": "http.response.body", "body": b"2"})

        app.__class__.__call__ = call
        try:
            app.may.clear()
            stream = asyncio.create_task(ask(engine, headers=[(b"x", b"y")]))
            waits = asyncio.create_task(ask(engine))
            await until(lambda: engine.page[control.RUNNING] == 2, engine)
            engine.page[control.STARVED] = 1
            status, headers = await waits
            assert status == 503 and int(headers[b"retry-after"]) > 0 and ended == [1]
            await until(lambda: engine.page[control.UNSERVED] == 1 and engine.page[control.RUNNING] == 1, engine)
            assert not stream.done()
            app.may.set()
            assert (await stream)[0] == 200
        finally:
            app.__class__.__call__ = answer

    played(history, queue="0.3")


def test_a_request_that_is_half_done_is_held_while_its_model_sleeps(played):
    """Also for longer than one may wait for its first step: a stream that has sent nothing is refused then."""

    async def history(engine, app, other):
        call = app.__class__.__call__

        async def streams(self, scope, receive, send):
            if scope["headers"]:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await self.may.wait()
                await send({"type": "http.response.body", "body": b"1"})
            else:
                await call(self, scope, receive, send)

        app.__class__.__call__ = streams
        try:
            app.may.clear()
            half_done = asyncio.create_task(ask(engine))
            stream = asyncio.create_task(ask(engine, headers=[(b"x", b"y")]))
            await until(lambda: engine.page[control.RUNNING] == 2, engine)
            engine.lacks = 5
            other[control.RUNNING] = 1
            engine.page[control.GIVES] = 9
            other[control.STATE], other[control.QUEUED], other[control.SINCE] = State.ASLEEP, 1, 1
            other[control.LACKS], other[control.LACKING] = 5, 1
            await until(lambda: engine.calls[:1] == ["freeze"], engine)
            await until(lambda: engine.page[control.QUEUED] == 1, engine)  # the stream waits for its first token
            assert (await stream)[0] == 503
            await until(lambda: engine.page[control.UNSERVED] == 1 and not engine.page[control.QUEUED], engine)
            await asyncio.sleep(2 * pages.FIND)  # it looks again
            assert not half_done.done() and engine.page[control.RUNNING] == 1
            app.may.set()
            assert (await half_done)[0] == 200
        finally:
            app.__class__.__call__ = call

    played(history, queue="0.3")


def test_who_drains_a_frozen_model_waits_for_its_requests(played):
    async def history(engine, app, other):
        request = starve(engine, app, other)
        await until(lambda: engine.page[control.STATE] == State.ASLEEP, engine)
        drain = asyncio.create_task(ask(engine, "/vmem/drain"))
        other[control.RUNNING] = other[control.STARVING] = engine.page[control.STARVED] = 0
        await until(lambda: engine.page[control.DRAINED], engine)
        assert not drain.done()
        app.may.set()
        assert (await request)[0] == 200 and (await drain)[0] == 200
        assert (await ask(engine))[0] == 503

    played(history)


@pytest.mark.parametrize("runs", [False, True])
def test_a_drained_model_keeps_no_other_waiting(played, runs):
    """It sleeps for one that wakes, with its last request if that cannot go on, and goes on refusing others."""

    async def history(engine, app, other):
        request = None
        if runs:
            app.may.clear()
            request = asyncio.create_task(ask(engine))
            await until(lambda: engine.page[control.RUNNING] == 1, engine)
        drain = asyncio.create_task(ask(engine, "/vmem/drain"))
        await until(lambda: engine.page[control.DRAINED], engine)
        engine.page[control.STARVED] = runs
        engine.page[control.GIVES] = 9
        other[control.STATE], other[control.QUEUED], other[control.SINCE] = State.ASLEEP, 1, 1
        other[control.LACKS], other[control.LACKING] = 5, 1
        await until(lambda: engine.page[control.STATE] == State.ASLEEP, engine)
        assert engine.calls == ["freeze" if runs else "sleep"] and not (runs and drain.done())
        assert (await ask(engine))[0] == 503 and engine.page[control.STATE] == State.ASLEEP
        other[control.QUEUED] = other[control.LACKS] = engine.page[control.STARVED] = 0
        if runs:
            await until(lambda: engine.page[control.STATE] == State.AWAKE, engine)
            app.may.set()
            assert (await request)[0] == 200
        assert (await drain)[0] == 200 and (await ask(engine))[0] == 503
        assert (await ask(engine, "/vmem/wake"))[0] == 200 and (await ask(engine))[0] == 200

    played(history)


def test_a_server_that_ends_refuses_what_waits_for_its_model(played):
    async def history(engine, app, other):
        assert (await ask(engine, "/vmem/sleep"))[0] == 200
        engine.lacks, other[control.RUNNING] = 5, 1
        waits = asyncio.create_task(ask(engine))
        await until(lambda: engine.page[control.LACKS], engine)
        assert not waits.done()
        engine.ends = lambda: True
        assert (await waits)[0] == 503

    played(history)


def test_attempts_to_wake_in_vain_are_worth_one_line(played, caplog):
    async def history(engine, app, other):
        await answered(engine, "/vmem/sleep")
        lacks, woke = 5 << 20, engine.page[control.WOKE]

        async def wake(state):
            """The page says that memory is lacking, and no error does."""
            engine.calls.append("wake")
            engine.page[control.WOKE] = 2 * (engine.page[control.WOKE] // 2 + 1) + bool(lacks)
            engine.page[control.SHORT] = lacks
            engine.page[control.ASLEEP] = bool(lacks)

        engine.wake = wake
        asked = asyncio.create_task(ask(engine))
        await until(lambda: engine.page[control.WOKE] > woke + 6, engine)
        assert engine.page[control.LACKS] == lacks and not asked.done() and engine.page.asleep
        lacks = 0
        assert (await asked)[0] == 200

    with caplog.at_level("INFO"):
        played(history)
    said = [r for r in caplog.records if "lacks memory to wake" in r.getMessage()]
    assert len(said) == 1 and "5 MiB did not come" in said[0].getMessage() and not said[0].exc_info


def test_no_engine_of_a_server_stays_awake_while_another_lacks_memory(played, monkeypatch):
    monkeypatch.setattr(pages, "FIND", 0)  # data parallelism has an engine for each rank

    async def history(engine, app, other):
        second = page_of("minetoo", "chat")

        async def sleep(state, freeze):
            engine.calls.append("sleep")
            engine.page[control.ASLEEP] = second[control.ASLEEP] = 1

        async def wake(state):
            """The first engine wakes after the second has failed, as vLLM's client returns at the first failure."""
            engine.calls.append("wake")
            second[control.WOKE] = 2 * (second[control.WOKE] // 2 + 1) + bool(engine.lacks)
            if not engine.lacks:
                first(), second.cells.__setitem__(control.ASLEEP, 0)
                return
            second[control.SHORT] = engine.lacks
            asyncio.get_running_loop().call_later(0.05, first)
            raise MemoryError("no memory")

        def first():
            engine.page[control.WOKE] = 2 * (engine.page[control.WOKE] // 2 + 1)
            engine.page[control.ASLEEP] = 0

        engine.sleep, engine.wake = sleep, wake
        await answered(engine, "/vmem/sleep")
        assert second.asleep
        engine.lacks = 5
        assert (await ask(engine))[0] == 503
        await until(lambda: engine.page.asleep and not engine.leader.is_acting(), engine)
        assert engine.calls.count("sleep") == 1 + engine.calls.count("wake")
        engine.lacks = 0
        await answered(engine)
        assert not second.asleep and not engine.page.asleep

    played(history, queue="0.5")


def test_a_server_that_is_told_to_end_refuses_at_once_what_waits(played):
    """SGLang's looks every five seconds whether it is, and ends then if its engine has no request."""

    async def history(engine, app, other):
        never = asyncio.Event()
        engine.wake = lambda state: never.wait()  # an attempt that lasts, in which nothing changes
        assert (await ask(engine, "/vmem/sleep"))[0] == 200
        request = asyncio.create_task(ask(engine))
        await until(lambda: engine.page[control.STATE] == State.WAKING, engine)
        engine.ends = lambda: True
        await until(request.done, engine)
        assert (await request)[0] == 503

    played(history)


@pytest.mark.parametrize("part", [0, 1])
def test_a_sleep_that_fails_leaves_the_model_awake(played, part):
    """Its engine has paused before it failed, and a part of it may sleep: it goes on when it wakes."""

    async def history(engine, app, other):
        async def sleep(state, freeze):
            engine.calls.append("fails")
            app.may.clear()
            engine.page[control.ASLEEP] = part
            raise RuntimeError("the host has no memory for a copy")

        async def wake(state):
            await woken(state)
            app.may.set()

        woken, engine.sleep, engine.wake = engine.wake, sleep, wake
        assert (await ask(engine, "/vmem/sleep"))[0] == 503
        await until(lambda: engine.page[control.STATE] == State.AWAKE and not engine.leader.is_acting(), engine)
        assert engine.calls[:2] == ["fails", "wake"] and not engine.page.asleep
        assert (await ask(engine))[0] == 200

    played(history, queue="0.3")


def test_a_model_that_is_not_starved_is_not_frozen(played):
    async def history(engine, app, other):
        request = starve(engine, app, other)
        engine.page[control.STARVED] = 0
        await until(lambda: engine.page[control.STATE] == State.CLOSING, engine)
        app.may.set()
        assert (await request)[0] == 200
        await until(lambda: engine.calls == ["sleep"], engine)

    played(history)


def test_this_process_is_the_server_that_leads(played):
    async def history(engine, app, other):
        assert [s[control.S_PID] for s in engine.pages.servers()] == [os.getpid()]

    played(history)


# ---- requests that come while the weights are copied ---------------------------------------------------------------


class Wakes:
    """An engine's wake in the hands of a test, and an application that sends when its engine has woken."""

    def __init__(self, engine, app):
        self._engine, self.begun, self.attempts = engine, [], 0
        self._go: asyncio.Queue[str] = asyncio.Queue()
        engine.wake, engine._app = self, self.answer
        app.may.clear()
        self._may = app.may

    async def answer(self, scope, receive, send):
        self.begun.append(scope["path"])
        if scope["headers"]:  # a stream
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await self._may.wait()
        if not scope["headers"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def __call__(self, state):
        self.attempts += 1
        page, number = self._engine.page, 2 * (self._engine.page[control.WOKE] // 2 + 1)
        while (what := await self._go.get()) == "claim":
            page[control.ASLEEP] = Sleeps.CLAIMED
        page[control.SHORT], page[control.WOKE] = 5 * (what == "fail"), number + (what == "fail")
        page[control.ASLEEP] = Sleeps.LACKS if what == "fail" else 0

    def go(self, *what):
        for one in what:
            self._go.put_nowait(one)

    async def reach(self, state):
        await until(lambda: self._engine.page[control.STATE] == state and self._go.empty(), self._engine)

    async def counts(self, running, queued):
        page = self._engine.page
        await until(lambda: (page[control.RUNNING], page[control.QUEUED]) == (running, queued), self._engine)


async def looks(engine):
    """Return when the leader has looked again."""
    beat = engine.page[control.SERVER_BEAT]
    await until(lambda: engine.page[control.SERVER_BEAT] > beat + 1, engine)


def test_requests_come_to_an_engine_that_has_claimed_its_memory(played):
    async def history(engine, app, other):
        page, wakes = engine.page, Wakes(engine, app)
        await ask(engine, "/vmem/sleep")
        came = now()
        asked = [asyncio.create_task(ask(engine, path, headers=headers))
                 for path, headers in ((QUEUED, ()), (QUEUED, [(b"x", b"y")]), ("/pause", ()))]  # fmt: skip
        await wakes.reach(State.WAKING)
        await looks(engine)
        assert not wakes.begun
        wakes.go("claim")
        await until(lambda: len(wakes.begun) == 2, engine)
        asked.append(asyncio.create_task(ask(engine)))
        await wakes.counts(3, 4)  # they are in the engine, and wait
        assert wakes.begun == [QUEUED] * 3 and came <= page[control.SINCE] < came + 1_000_000
        assert not page[control.WAKING] and page[control.STATE] == State.WAKING
        app.may.set()
        wakes.go("wake")
        assert [(await one)[0] for one in asked] == [200] * 4
        assert wakes.attempts == 1 and (page[control.WAKES], page[control.UNSERVED]) == (1, 0)
        assert 0 < page[control.WAKING] <= now() - came
        await wakes.counts(0, 0)

    played(history)


def test_a_wake_that_fails_after_its_claim_is_tried_again_for_who_has_come(played, monkeypatch):
    """Its requests have had no turn, so it does not rest, and an earlier claim lets nobody in."""
    monkeypatch.setattr(turns, "REST", 1e9)

    async def history(engine, app, other):
        other[control.RUNNING] = 1
        page, wakes = engine.page, Wakes(engine, app)
        await ask(engine, "/vmem/sleep")
        asked = [asyncio.create_task(ask(engine))]
        wakes.go("claim")
        await until(lambda: wakes.begun, engine)
        wakes.go("fail")
        await until(lambda: wakes.attempts == 2, engine)
        asked.append(asyncio.create_task(ask(engine)))
        await wakes.counts(1, 2)
        await looks(engine)
        assert page[control.STATE] == State.WAKING and len(wakes.begun) == 1 and page[control.LACKS] == 5
        wakes.go("claim")
        await until(lambda: len(wakes.begun) == 2, engine)
        app.may.set()
        wakes.go("wake")
        assert [(await one)[0] for one in asked] == [200, 200]
        await ask(engine, "/vmem/sleep")
        app.may.clear()
        asked = asyncio.create_task(ask(engine))
        await wakes.reach(State.WAKING)
        await looks(engine)
        assert len(wakes.begun) == 2
        wakes.go("claim", "wake")
        app.may.set()
        assert (await asked)[0] == 200

    played(history)


@pytest.mark.parametrize("headers", [(), [(b"x", b"y")]])
def test_who_has_come_to_an_engine_that_does_not_wake_is_refused_in_time(played, headers):
    """Also if the model closed when it came: no part of its answer can be there."""

    async def history(engine, app, other):
        wakes = Wakes(engine, app)
        app.may.set()
        first = asyncio.create_task(ask(engine))
        assert (await first)[0] == 200
        engine.page[control.STATE] = State.CLOSING
        app.may.clear()
        engine.leader._act = asyncio.create_task(asyncio.sleep(3600))
        asked = asyncio.create_task(ask(engine, headers=headers))
        await until(lambda: engine.page[control.QUEUED] == 1, engine)
        engine.page[control.ASLEEP] = Sleeps.LACKS
        engine.leader._set_state(State.ASLEEP)
        engine.leader._act.cancel()
        wakes.go("claim")
        await until(lambda: len(wakes.begun) == 2, engine)
        wakes.go("fail")
        assert (await asyncio.wait_for(asked, 30))[0] == 503
        await wakes.counts(0, 0)
        assert engine.page[control.UNSERVED] == 1
        wakes.go("wake")
        await until(lambda: not engine.leader.is_acting(), engine)

    played(history, queue="0.3")


def test_a_client_that_goes_while_its_model_wakes_is_forgotten(played):
    async def history(engine, app, other):
        wakes, gone = Wakes(engine, app), asyncio.Event()
        await ask(engine, "/vmem/sleep")

        async def answer(scope, receive, send):
            wakes.begun.append(scope["path"])
            while (await receive())["type"] != "http.disconnect":
                pass

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        engine._app = answer
        scope = dict(type="http", method="POST", path=QUEUED, headers=(), app=types.SimpleNamespace(state=None))
        asked = asyncio.create_task(engine(scope, receive, None))
        wakes.go("claim")
        await until(lambda: wakes.begun, engine)
        await wakes.counts(1, 1)
        gone.set()
        await asked
        await wakes.counts(0, 0)
        wakes.go("wake")
        await wakes.reach(State.AWAKE)
        assert not engine.admission._early

    played(history)


@pytest.mark.parametrize("order", ["drain", "sleep"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_order_while_a_model_wakes_waits_for_who_has_come(played, order, fails):
    async def history(engine, app, other):
        page, wakes = engine.page, Wakes(engine, app)
        await ask(engine, "/vmem/sleep")
        asked = asyncio.create_task(ask(engine))
        wakes.go("claim")
        await until(lambda: wakes.begun, engine)
        ordered = asyncio.create_task(ask(engine, f"/vmem/{order}"))
        await until(lambda: page.server(0)[control.S_ORDER], engine)
        await looks(engine)
        if order == "drain":
            assert (await ask(engine))[0] == 503 and len(wakes.begun) == 1
        assert not ordered.done()
        if fails:
            wakes.go("fail")
            await until(lambda: wakes.attempts == 2, engine)
        wakes.go("claim", "wake")
        await until(lambda: page[control.STATE] in (State.AWAKE, State.CLOSING), engine)
        assert fails or not ordered.done()  # it had slept for a moment
        app.may.set()
        assert (await asked)[0] == 200 and (await ordered)[0] == 200
        assert page[control.DRAINED] == (order == "drain") and (fails or page.asleep == (order == "sleep"))

    played(history)


def test_every_process_of_a_server_lets_requests_in_and_counts_them(played):
    async def history(engine, app, other):
        page, wakes = engine.page, Wakes(engine, app)
        second = Engine(wakes.answer)
        second.number = second.pages._number = 1
        second.leader._lead = lambda servers: None  # it would take itself for the first: this is one process
        assert (await ask(second, "/vmem/state", "GET"))[0] == 200
        await ask(engine, "/vmem/sleep")
        asked = [asyncio.create_task(ask(each)) for each in (engine, second, second)]
        await wakes.reach(State.WAKING)
        wakes.go("claim")
        await wakes.counts(3, 3)
        assert len(wakes.begun) == 3
        wakes.go("wake")
        await wakes.counts(3, 0)
        other[control.RUNNING] = 1  # so that it rests once it sleeps
        await engine.leader._sleep(True)
        await looks(engine)
        assert page[control.STATE] == State.ASLEEP
        await wakes.counts(3, 0)  # they have had their turn
        wakes.go("claim", "wake")
        app.may.set()
        assert [(await one)[0] for one in asked] == [200] * 3
        second._task.cancel()

    played(history)


def test_engines_and_workers_have_all_claimed_before_requests_come(played, monkeypatch):
    monkeypatch.setattr(pages, "FIND", 0)

    async def history(engine, app, other):
        wakes, second = Wakes(engine, app), page_of("minetoo", "chat")
        engine.page[control.RANKS_USED] = 2
        await until(lambda: second[control.STATE] == State.AWAKE, engine)
        await ask(engine, "/vmem/sleep")
        rest = [(engine.page, control.ASLEEP + 1), (second, control.ASLEEP)]
        for page, word in rest:
            page[word] = Sleeps.LACKS
        asked = asyncio.create_task(ask(engine))
        wakes.go("claim")
        await wakes.reach(State.WAKING)
        for page, word in rest:
            await looks(engine)
            assert not wakes.begun
            page[word] = Sleeps.CLAIMED
        await until(lambda: wakes.begun, engine)
        for page, word in rest:
            page[word] = 0
        app.may.set()
        wakes.go("wake")
        assert (await asked)[0] == 200

    played(history)


def test_an_engine_that_wakes_by_its_own_ways_gets_requests_when_it_is_awake(played):
    async def history(engine, app, other):
        wakes = Wakes(engine, app)
        await ask(engine, "/vmem/sleep")
        engine.leader._choose = lambda order, running: turns.Action.NOTHING
        asked = asyncio.create_task(ask(engine))
        engine.page[control.ASLEEP] = Sleeps.CLAIMED
        await looks(engine)
        assert not wakes.begun
        engine.page[control.ASLEEP] = 0
        app.may.set()
        assert (await asked)[0] == 200 and not wakes.attempts

    played(history)


# ---- many at once ---------------------------------------------------------------------------------------------------


class Busy:
    """An application that takes its time, and an engine that fails as engines do; each notes what must not be."""

    def __init__(self, draw, engine):
        self.draw, self.engine, self.runs, self.wrong = draw, engine, 0, []
        self.paused = self.claimed = False  # claimed: since it fell asleep
        self._sleep, self._wake = engine.sleep, engine.wake
        engine._app, engine.sleep, engine.wake = self.answer, self.sleep, self.wake

    async def pause(self, most=0.03):
        if self.draw.random() < 0.7:
            await asyncio.sleep(self.draw.random() * most)

    def note(self, what, is_wrong):
        page = self.engine.page
        if is_wrong:
            self.wrong.append((what, State(page[control.STATE]).name, page[control.ASLEEP], self.runs))

    async def answer(self, scope, receive, send):
        # It was counted before, so that only a model which sleeps with its requests, or which claimed its memory and
        # failed, is asleep now.
        self.note("begins", self.engine.page[control.ASLEEP] and self.engine.calls[-1] != "freeze" and not self.claimed)
        self.runs += 1
        try:
            while self.paused:
                await self.pause()
            await self.pause()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.pause()
        finally:
            self.runs -= 1
        await send({"type": "http.response.body", "body": b"{}"})

    async def sleep(self, state, freeze):
        self.note("sleeps", not freeze and self.runs)
        self.paused = True  # engines go on when they wake
        await self.pause()
        if self.draw.random() < 0.1:
            raise RuntimeError("the engine does not answer")
        await self._sleep(state, freeze)
        self.claimed = False

    async def wake(self, state):
        await self.pause()
        if self.engine.page[control.ASLEEP]:  # else nothing can be lacking
            if self.draw.random() < 0.7:
                self.engine.page[control.ASLEEP], self.claimed = Sleeps.CLAIMED, True
                await self.pause()
            await self._wake(state)
        self.paused = False


async def client(draw, engine):
    """One request or order, whose client may go while it waits. Returns the status; None: it went."""
    path = draw.choice(
        ["/v1/completions"] * 4 + ["/vmem/sleep", "/vmem/sleep", "/vmem/wake", "/vmem/drain", "/vmem/state"]
    )
    leaves, sent, told = draw.random() * 0.1 if draw.random() < 0.3 else 3600, [], []

    async def receive():
        if not sent:
            sent.append(1)
            return {"type": "http.request", "body": b"{}"}
        await asyncio.sleep(leaves)
        return {"type": "http.disconnect"}

    async def send(message):
        told.append(message)

    method = "GET" if path == "/vmem/state" else "POST"
    scope = dict(type="http", method=method, path=path, headers=(), app=types.SimpleNamespace(state=None))
    await engine(scope, receive, send)
    return told[0]["status"] if told else None


def test_whatever_clients_and_operators_do_at_once_all_are_answered(played):
    """Orders of several clients, some of whom go; another model that asks; an engine that fails or lacks memory."""
    seed = random.randrange(1 << 32)
    draw, seconds = random.Random(seed), float(os.environ.get("VMEM_FUZZ_SECONDS", "1"))

    async def history(engine, app, other):
        busy, end = Busy(draw, engine), time.monotonic() + seconds
        engine.page[control.GIVES] = 9

        async def clients():
            while time.monotonic() < end:
                status = await client(draw, engine)
                busy.note(f"status {status}", status not in (None, 200, 409, 503))
                await busy.pause(0.05)

        async def world():
            while time.monotonic() < end:
                engine.lacks = draw.choice([0, 0, 5])
                asks = draw.random() < 0.4
                other[control.STATE] = State.ASLEEP if asks else State.AWAKE
                other[control.QUEUED], other[control.SINCE] = asks, now() * asks
                other[control.LACKS], other[control.LACKING] = 5 * asks, now() * asks
                await asyncio.sleep(draw.random() * 0.2)

        await asyncio.wait_for(asyncio.gather(world(), *(clients() for _ in range(8))), seconds + 30)
        engine.lacks, other[control.STATE], other[control.QUEUED], other[control.LACKS] = 0, State.AWAKE, 0, 0
        await asyncio.wait_for(answered(engine, "/vmem/wake"), 30)
        await asyncio.wait_for(answered(engine), 30)
        slot = engine.page.server(0)
        await until(lambda: not engine.page[control.RUNNING] and not engine.page[control.QUEUED], engine)
        assert (busy.runs, slot[control.S_RUNNING], slot[control.S_QUEUED], slot[control.S_ORDER]) == (0, 0, 0, 0)
        kept = engine.admission._waiting, engine.admission._silent, engine.admission._early
        assert not busy.wrong and not any(kept)

    try:
        played(history, queue="0.3")
    except BaseException as error:
        raise AssertionError(f"seed {seed}") from error
