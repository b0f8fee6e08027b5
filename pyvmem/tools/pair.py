"""Keeps two servers of a model: one serves a port, and one stands by, asleep, and takes the port when the first dies.

    python -m pyvmem.tools.pair HOST PORT COMMAND...

``pyvmem models`` starts it for a model with ``standby = true``. COMMAND starts a server that listens at a port of its
own choice, with `pyvmem.sleep.standby` in it. The second one starts when the first serves. One that ends is started
again. If the first one ever ends before it serves, so does this process, with its status: the log has the reason.

The port is this process's, bound once, so that a connection that comes while one server takes over from the other is
not refused. By SIGTERM, both servers end, and then it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from pyvmem.sleep.standby import SERVE, STAND_BY

VARIABLE = "VMEM_VLLM_STANDBY"  # descriptors: of the port, and of the way to this process
SOON, LATE = 1.0, 60.0  # seconds before a server is started again that ended before it was ready, at first and at most

# Becomes the command, and ends by SIGTERM with the process of this number.
BECOME = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
os.execvp(sys.argv[2], sys.argv[2:]) if os.getppid() == int(sys.argv[1]) else None"""


class Server:
    """One of the two. It is started by its constructor."""

    def __init__(self, command: Sequence[str], listener: socket.socket) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            fds = listener.fileno(), theirs.fileno()
            environ = {**os.environ, VARIABLE: ",".join(map(str, fds))}
            begin = [sys.executable, "-c", BECOME, str(os.getpid()), *command]
            self._process = subprocess.Popen(begin, env=environ, pass_fds=fds, start_new_session=True)
        self.pid = self._process.pid
        self.started = self.serves = self.heard = self._ordered = False

    def hear(self) -> None:
        """It has said that it has started, or that it never will."""
        with contextlib.suppress(OSError):
            self.started = bool(self.sock.recv(1))
        self.heard = True

    def tell(self, word: bytes) -> None:
        """Have it serve, or stand by."""
        if word == SERVE or not self._ordered:
            with contextlib.suppress(OSError):  # it has just ended
                self.sock.send(word)
        self._ordered, self.serves = True, word == SERVE

    def ended(self, status: int) -> None:
        """Its process has ended: so does what it has left behind."""
        self._process.returncode = status
        self.sock.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Pair:
    """Both.

    Parameters
    ----------
    start : callable
        Starts a server.
    clock : callable
        Seconds.
    """

    def __init__(self, start: Callable[[], Server], clock: Callable[[], float] = time.monotonic) -> None:
        self._start, self._clock = start, clock
        self.servers: list[Server] = [start()]
        self._served = self._stops = False
        self._wait, self._next = SOON, 0.0  # how long to wait before the next start, and when that is
        self.status = 0

    @property
    def done(self) -> bool:
        return self._stops and not self.servers

    def stop(self) -> None:
        """Have both end."""
        self._stops = True
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGTERM)

    def ended(self, pid: int, status: int) -> None:
        """A process has ended, perhaps a server."""
        for server in [s for s in self.servers if s.pid == pid]:
            self.servers.remove(server)
            server.ended(status)
            if not self._served and not self._stops:
                self.status = status if status >= 0 else 128 - status
                self.stop()
            self._wait = SOON if server.started else min(2 * self._wait, LATE)
            self._next = self._clock() + (0 if server.started else self._wait)

    def look(self) -> float:
        """Do what is to be done; returns the seconds until the next look."""
        ready = [s for s in self.servers if s.started]
        if ready and not any(s.serves for s in ready):
            ready[0].tell(SERVE)
            self._served = True
        for server in ready:
            if not server.serves:
                server.tell(STAND_BY)
        if self._served and not self._stops and len(self.servers) < 2:
            if (left := self._next - self._clock()) > 0:
                return left
            self.servers.append(self._start())
        return 3600


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to the port, and at which nobody listens yet."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


def main(arguments: Sequence[str]) -> int:
    """Keep a pair until SIGTERM; returns the exit status."""
    host, port, *command = arguments
    listener = bound(host, int(port))
    here, signals = socket.socketpair()
    for end in (here, signals):
        end.setblocking(False)
    signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    pair = Pair(lambda: Server(command, listener))
    while not pair.done:
        seconds = pair.look()
        socks = {s.sock: s for s in pair.servers if not s.heard}
        for sock in select.select([here, *socks], [], [], seconds)[0]:
            if sock is not here:
                socks[sock].hear()
            elif {signal.SIGTERM, signal.SIGINT} & set(here.recv(4096)):
                pair.stop()
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:  # also those that nobody else waits for
                pair.ended(found[0], os.waitstatus_to_exitcode(found[1]))
    return pair.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
