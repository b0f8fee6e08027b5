"""Two servers of a model, one of which stands by: who answers, who takes over, and what is left. The servers are small
programs that bind, wait and listen as vLLM's does (standby_server.py).

SPDX-License-Identifier: MIT
"""

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pyvmem.tools.pair import LATE, SOON, Pair

from conftest import until

HERE = Path(__file__).parent


class Running:
    """A pair, and what its servers have noted."""

    def __init__(self, folder, **environ):
        self._notes = folder / "notes"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        server = [sys.executable, str(HERE / "standby_server.py"), str(self._notes)]
        command = [sys.executable, "-m", "pyvmem.tools.pair", "127.0.0.1", str(self.port), *server]
        self.process = subprocess.Popen(command, env={**os.environ, **environ})

    def notes(self, what):
        """Who has done it, in this order, with their engines."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [(int(pid), int(engine)) for pid, did, engine in map(str.split, lines) if did == what]

    def ask(self):
        """Who answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/")
        return int(connection.getresponse().read())

    def stands_by(self, n=1):
        """The latest of n servers that have stood by."""
        return until(lambda: len(found := self.notes("asleep")) >= n and found[-1])

    def serves(self, n=1):
        return until(lambda: len(found := self.notes("serves")) >= n and found[-1])


@pytest.fixture
def pair(tmp_path):
    started = []

    def start(**environ):
        started.append(Running(tmp_path, **environ))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        for pid, engine in one.notes("serves") + one.notes("asleep"):
            until(lambda: not alive(pid))  # with the process that keeps them
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_the_second_server_takes_the_port_of_one_that_was_killed(pair):
    one = pair()
    first, second = one.serves()[0], one.stands_by()[0]
    assert {one.ask() for _ in range(5)} == {first}
    os.kill(first, signal.SIGKILL)
    assert until(lambda: answered(one)) == second  # no connection is refused meanwhile
    third = one.stands_by(2)[0]
    os.kill(second, signal.SIGKILL)
    assert until(lambda: answered(one)) == third


def answered(one):
    """Who answers; None if the connection was one of the server that was killed."""
    try:
        return one.ask()
    except ConnectionRefusedError:
        raise
    except (ConnectionError, http.client.HTTPException):
        return None


def test_a_server_ends_with_its_engine_and_leaves_no_process(pair):
    one = pair()
    (first, engine), (second, other) = one.serves(), one.stands_by()
    os.kill(engine, signal.SIGKILL)
    until(lambda: not alive(first))
    assert until(lambda: answered(one)) == second
    os.kill(second, signal.SIGKILL)  # the server alone: its engine ends with it
    until(lambda: not alive(other))
    until(lambda: answered(one))


def test_both_end_with_the_process_that_keeps_them(pair):
    one = pair()
    found = *one.serves(), *one.stands_by()
    one.process.terminate()
    assert one.process.wait(60) == 0
    assert not any(map(alive, found))


def test_a_server_that_cannot_start_ends_the_pair(pair):
    one = pair(STANDBY_FAILS="7")
    assert one.process.wait(60) == 7
    assert not one.notes("serves")


def test_a_request_waits_until_a_server_is_there_again_if_both_were_killed(pair):
    one = pair()
    first, second = one.serves()[0], one.stands_by()[0]
    for pid in (first, second):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(first) and not alive(second))
    assert one.ask() not in (first, second)


def test_they_are_killed_at_any_time(pair):
    """VMEM_TEST_ITERATIONS kills: no connection is refused, and each request is answered at last."""
    draw, one = random.Random(int(os.environ.get("VMEM_TEST_SEED", "1"))), pair()
    one.serves()
    for n in range(int(os.environ.get("VMEM_TEST_ITERATIONS", "2"))):
        one.stands_by(n + 1)
        (first, engine), asks = one.serves(), random.Random(n).randrange(3)
        for _ in range(asks):
            assert until(lambda: answered(one))
        os.kill(draw.choice((first, engine)), signal.SIGKILL)
        assert until(lambda: answered(one) not in (None, first))
        one.serves(n + 2)


class Fake:
    """A server of `Pair`'s that was started at a time."""

    made = 0

    def __init__(self):
        Fake.made += 1
        self.pid, self.started, self.serves, self.words = Fake.made, False, False, []

    def tell(self, word):
        self.words.append(word)
        self.serves = word == b"g"

    def ended(self, status):
        pass


def test_a_server_that_ends_at_once_is_started_again_later_and_later():
    now = [100.0]
    pair = Pair(Fake, lambda: now[0])
    pair.servers[0].started = True
    pair.look()
    waits = []
    for _ in range(9):
        assert len(pair.servers) == 2
        pair.ended(pair.servers[-1].pid, 1)
        waits.append(pair.look())
        now[0] += waits[-1]
        pair.look()
    assert waits[0] == 2 * SOON and waits[-1] == LATE and waits == sorted(waits)
    pair.servers[1].started = True
    pair.look()
    pair.ended(pair.servers[1].pid, -9)
    assert pair.look() > 1000 and len(pair.servers) == 2  # it had started: the next one starts at once
    for server in list(pair.servers):
        pair.ended(server.pid, -9)
    assert not pair.done  # both are started again
