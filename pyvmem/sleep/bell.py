"""A bell for the servers of all models: who rings it has the others look at the control pages now.

The pages are shared memory, which wakes nobody, and leaders look at them every 20 ms. A model that lacks memory to wake
would wait as long for another one to fall asleep. To ring is to touch the link of a page, of which inotify tells those
who watch its folder. Where it cannot, they look as they would.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_IN_ATTRIB = 4  # of <sys/inotify.h>
REST = 0.005  # seconds in which no second ring is heard: who rings without end costs the others little


def ring(page: Path | None) -> None:
    """Ring the bell. page: that of the caller's own engine; None if it is private."""
    if page is not None:
        with contextlib.suppress(OSError):
            os.utime(page, follow_symlinks=False)


class Bell:
    """Calls `heard` in the running loop, some time after somebody has rung.

    Parameters
    ----------
    folder : Path or None
        Of the pages; None if all are private.
    heard : callable
    """

    def __init__(self, folder: Path | None, heard: Callable[[], object]) -> None:
        self._loop, self._heard, self._fd = asyncio.get_running_loop(), heard, -1
        if folder is None:
            return
        libc = ctypes.CDLL(None)
        self._fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd >= 0 and libc.inotify_add_watch(self._fd, os.fsencode(folder), _IN_ATTRIB) < 0:
            self.close()
        self._listen()

    def _listen(self) -> None:
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            os.read(self._fd, 1 << 16)
        self._loop.remove_reader(self._fd)
        self._loop.call_later(REST, self._listen)
        self._heard()

    def close(self) -> None:
        """Hear nothing more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
        self._fd = -1
