"""A server that stands by: its model is loaded and asleep, and it takes the port of another one that has died.

`pyvmem.tools.pair` keeps two servers of a model, and the port: a socket that both inherit. A server that has started
tells it, and waits. It may serve at once, or is to stand by until the other one has died. Then it listens at the pair's
socket, in place of its own, at which nobody listens yet. Connections that come meanwhile wait in the kernel.

One whose engine has died ends at once, as its requests are lost, and the other one can serve. `serve` calls it; begin
with `Standby.wait`. It calls nothing.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

STARTED, SERVE, STAND_BY = b"r", b"g", b"s"  # what a server says to the pair's process, and what that answers
LOOK = 0.05  # seconds between looks whether the engine lives
EXITING = 0x4  # PF_EXITING of the kernel: set long before a process that has a GPU's memory is gone


class Standby:
    """A server's side of its pair.

    Parameters
    ----------
    port, pair : int
        Descriptors of the socket that is bound to the port, and of the one to the pair's process.

    Attributes
    ----------
    port : int
        The pair's, once this server has it; 0 until then.
    """

    def __init__(self, port: int, pair: int) -> None:
        self._listener, self._pair = socket.socket(fileno=port), socket.socket(fileno=pair)
        for sock in (self._listener, self._pair):
            sock.setblocking(False)
            sock.set_inheritable(False)
        self.port = 0

    async def wait(self, sleep: Callable[[], Awaitable[None]]) -> None:
        """Return when this server may serve; then its own socket is the pair's.

        sleep : puts the model to sleep, until which it is not ready to stand by.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._pair, STARTED)
        while (word := await loop.sock_recv(self._pair, 1)) != SERVE:
            if not word:
                raise ConnectionError("the process that keeps this pair of servers has ended")
            await sleep()
        found = list(_unused(self._listener))
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} sockets of this server are bound to a port and not listened at, not one")
        os.dup2(self._listener.fileno(), found[0], inheritable=False)
        self.port = self._listener.getsockname()[1]

    async def end_with(self, engines: Callable[[], list[int]], log: logging.Logger) -> None:
        """End this process when one of the engine's has. engines : their numbers."""
        while not (ended := [pid for pid in engines() if is_ending(pid)]):
            await asyncio.sleep(LOOK)
        log.error("vMem: process %d of the engine has ended, and so does its server: the other one of the pair serves",
                  ended[0])  # fmt: skip
        os._exit(1)


def is_ending(pid: int) -> bool:
    """Return whether a process ends, or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in b"ZX" or bool(int(fields[6]) & EXITING)


def _unused(pair: socket.socket) -> Iterator[int]:
    """Descriptors of TCP sockets that are bound to another port than the pair's, and at which nobody listens."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family != pair.family or sock.type != socket.SOCK_STREAM:
                    continue
                bound = sock.getsockname()[1] not in (0, pair.getsockname()[1])
                if bound and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    try:
                        sock.getpeername()
                    except OSError:
                        yield fd
