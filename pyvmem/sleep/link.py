"""An engine's side of the socket to the owner of common weights (`owner`), which it starts if there is none.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from pyvmem.errors import VmemError
from pyvmem.sleep.owner import FDS, MESSAGE, socket_of

START = 20.0  # seconds in which an owner must answer that was started


class Link:
    """Questions to the owner of a pool's common weights. Any thread may ask.

    Parameters
    ----------
    pool : str
        The pool's file.
    device : str
        The UUID of the device in hex; "" for the host.
    seconds : float
        How long an owner that this starts keeps weights which no engine has.
    """

    def __init__(self, pool: str, device: str, seconds: float) -> None:
        self._pool, self._device, self._seconds = pool, device, seconds
        self._sock: socket.socket | None = None
        self._lock = threading.RLock()
        self._started: subprocess.Popen[bytes] | None = None
        self.owner = 0  # its process

    def connect(self) -> None:
        """Connect to the owner, or start one. Raises VmemError if none answers."""
        end = time.monotonic() + START
        with self._lock:
            self.close()
            while self._sock is None:
                try:
                    self._open()
                except OSError as error:
                    if time.monotonic() >= end:
                        raise VmemError(errno.ETIMEDOUT, f"{socket_of(self._pool)}: no owner of common weights "
                                                         f"answers: {error}") from error  # fmt: skip
                    self._start()
                    time.sleep(0.02)

    def _open(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(START)
            sock.connect(socket_of(self._pool))
            self._sock = sock
            self.owner = self.ask("hello", device=self._device)[0]["pid"]
        except OSError:
            sock.close()
            self._sock = None
            raise

    def _start(self) -> None:
        """Start an owner. Of several that start at once, one stays."""
        if self._started is None or self._started.poll() is not None:
            command = [sys.executable, "-m", "pyvmem.sleep.owner", self._pool, str(self._seconds)]
            self._started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.DEVNULL, cwd="/", start_new_session=True)  # fmt: skip

    def ask(self, do: str, fds: list[int] | None = None, **more: Any) -> tuple[Any, list[int]]:
        """Ask the owner; returns its answer, and descriptors. Raises ConnectionError if it has gone."""
        with self._lock:
            if self._sock is None:
                raise ConnectionError("not connected")
            try:
                socket.send_fds(self._sock, [json.dumps({"do": do, **more}).encode()], fds or [])
                data, got, _, _ = socket.recv_fds(self._sock, MESSAGE, FDS, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                self.close()  # an answer that comes later would be taken for that to another question
                raise ConnectionError(str(error)) from error
            if not data:
                raise ConnectionError("the owner has gone")
            return json.loads(data), got

    @property
    def gone(self) -> bool:
        """True if the owner has ended since it last answered."""
        with self._lock:
            if self._sock is None:
                return True
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(0))  # it says nothing but answers

    def close(self) -> None:
        """Part from the owner, which then knows that this engine has nothing of it."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = None


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
