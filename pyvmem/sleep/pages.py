"""The control pages that the server of a sleeping model reads and writes: those of its engines, and of other models.

Begin here for what is published where. `ServerPages` finds the pages and answers questions about them. `admission`
writes what one process of the server adds, and `leader` what its leader decides. It calls `pyvmem.engine` alone.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyvmem._clock import now_us, started
from pyvmem.engine import control, http, metrics
from pyvmem.engine.control import Page, State

FIND = 1.0  # seconds between searches for engines


class ServerPages:
    """The pages of a server's engines, and of the other models of their pools.

    Parameters
    ----------
    server : callable
        Returns the process that serves, which the engines are started by.
    number : int
        Of this process among the server's, from 0 on.
    about : callable
        Returns the model's name, and the server's port.
    """

    def __init__(self, server: Callable[[], int], number: int, about: Callable[[], tuple[str, int]]) -> None:
        self._server, self._number, self._about = server, number, about
        self.mine: list[Page] = []
        self.others: list[Page] = []
        self._found = 0.0

    def find(self) -> bool:
        """Look now and then for engines of this server; return whether there are some."""
        now = time.monotonic()
        if now >= self._found + FIND:
            self._found = now
            self._serve([page for _, page in metrics.engines(self._server())])
            own = {p.path for p in self.mine}
            pools = {pool for p in self.mine for pool in p.pools() if pool}
            self.others = [p for _, p in control.engines() if p.path not in own and p[control.STATE]
                           and not pools.isdisjoint(p.pools())]  # fmt: skip
        return bool(self.mine)

    def _serve(self, found: list[Page]) -> None:
        """Say in the pages of engines that are new that this process serves them, and at which port."""
        new = [p.path for p in found] != [p.path for p in self.mine]
        name, port = self._about() if new or not all(p.port for p in found) else ("", 0)
        port = port if port and http.listens(port) else 0  # it listens once its application has begun
        for page in found if new or port else ():
            control.serves(page, name, port)
        if not new:
            return
        self.mine = found
        for page in found:
            if not page[control.STATE]:
                page[control.CHANGED_AT] = page[control.USED_AT] = now_us()
                page[control.STATE] = State.ASLEEP if page.asleep else State.AWAKE
            slot = page.server(self._number)
            slot[control.S_STARTED] = int(started("self") or 0)
            slot[control.S_PID] = os.getpid()

    def slots(self) -> Iterator[memoryview]:
        """This process's words in each page."""
        return (page.server(self._number) for page in self.mine)

    def servers(self) -> list[memoryview]:
        """The words of the processes that serve the engines and live; the first leads."""
        slots = map(self.mine[0].server, range(control.SERVERS))
        return [s for s in slots if s[control.S_PID]
                and started(str(s[control.S_PID])) == str(s[control.S_STARTED])]  # fmt: skip

    def publish(self, word: int, value: int) -> None:
        """Write a word of each of this server's pages."""
        for page in self.mine:
            page[word] = value

    # ---- questions -------------------------------------------------------------------------------------------

    def is_awake(self) -> bool:
        return all(p[control.STATE] == State.AWAKE for p in self.mine)

    def is_open(self) -> bool:
        """Return whether requests may begin."""
        return self.is_awake() and not self.mine[0][control.DRAINED]

    def admits(self) -> bool:
        """Return whether requests may come to engines that queue them while they wake.

        It is so from the moment when all memory is claimed, while contents are copied.
        """
        wakes = all(p[control.STATE] == State.WAKING and p.claimed for p in self.mine)
        return self.is_open() or (wakes and not self.mine[0][control.DRAINED])

    def has_sleepers(self) -> bool:
        """Return whether a worker of an engine sleeps."""
        return any(p.asleep for p in self.mine)

    def attempts(self) -> list[list[int]]:
        """The workers' last answers of each engine to an attempt to wake: odd if it failed."""
        return [p.cells[control.WOKE : control.WOKE + p[control.RANKS_USED]].tolist() for p in self.mine]

    def is_wake_in_vain(self) -> bool:
        """Return whether a worker has found too little memory in its last attempt to wake."""
        return any(word & 1 for words in self.attempts() for word in words)

    def state(self) -> dict[str, Any]:
        """What the model does, as ``/vmem/state`` tells it."""
        page = self.mine[0]
        engine = control.Engine.of("", 0, page)
        names = ("model", "port", "state", "running", "queued", "lacks", "weights", "weights_held", "cached", "used",
                 "room", "wait")  # fmt: skip
        model = {name: getattr(engine, name) for name in names}
        # Now, and not at the last look: an order to wake counts as a request until it has ended.
        servers = self.servers()
        model["running"], model["queued"] = (sum(s[w] for s in servers) for w in (control.S_RUNNING, control.S_QUEUED))
        model["idle"] = 0.0 if model["running"] else round((now_us() - page[control.USED_AT]) / 1e6, 3)
        return model
