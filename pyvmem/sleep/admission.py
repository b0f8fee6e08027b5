"""Admission: which requests of one process of a server may begin, which wait until the model is awake, how long.

`serve` calls it for each request, and `leader` hears of them by what it publishes in the control pages. Begin with
`Admission.enter`. It calls `pages` alone.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import Any

from pyvmem._clock import now_us
from pyvmem.engine import control
from pyvmem.engine.control import State
from pyvmem.engine.http import Receive
from pyvmem.sleep.pages import ServerPages


class Order(enum.IntEnum):
    """An order of an operator's, as S_ORDER has it."""

    NONE, SLEEP, WAKE, DRAIN = range(4)


class Client:
    """A client's messages, kept while nobody reads them, so that its end is noticed.

    Attributes
    ----------
    gone : bool
        It waits for no answer any more.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive, self.gone = receive, False
        self._kept: list[dict[str, Any]] = []
        self._reads: asyncio.Future[dict[str, Any]] | None = None

    async def listen(self) -> None:
        """Return when the client is gone."""
        while not self.gone:
            if self._reads is None:
                self._reads = asyncio.ensure_future(self._receive())
            message = await asyncio.shield(self._reads)
            self._reads = None
            self._kept.append(message)
            self.gone = message["type"] in ("http.disconnect", "websocket.disconnect")

    async def stop(self, listens: asyncio.Future[None]) -> None:
        """End `listen`; nothing is lost."""
        listens.cancel()
        await asyncio.gather(listens, return_exceptions=True)

    async def __call__(self) -> dict[str, Any]:
        if self._kept:
            return self._kept.pop(0)
        if self._reads is not None:
            reads, self._reads = self._reads, None
            return await reads
        message: dict[str, Any] = await self._receive()
        return message


class Admission:
    """The requests of one process of a server.

    Parameters
    ----------
    pages : ServerPages
    patience : float
        Seconds that a request waits for its model, or for memory.
    ends : callable
        Returns whether the server is about to end, and lets nobody wait.

    Attributes
    ----------
    news : asyncio.Event
        Set when the leader is to look at once.
    """

    def __init__(self, pages: ServerPages, patience: float, ends: Callable[[], bool]) -> None:
        self._pages, self._patience, self._ends = pages, patience, ends
        self._running = self._unserved = 0
        self._waiting: dict[Client, int] = {}  # when each request came that waits
        self._early: dict[Client, int] = {}  # and each that the engine has, but has not been awake for
        self._silent: dict[Client, int] = {}  # and each stream that the engine has, and that has sent nothing
        self._used, self._order = now_us(), Order.NONE
        self._changed, self.news = asyncio.Event(), asyncio.Event()

    def publish(self) -> None:
        """Write this process's words of the control pages."""
        if self._pages.is_awake():
            self._early.clear()
            waits = self._waiting
        else:  # they have had no turn, so they count with those that wait, too
            waits = self._silent | self._early | self._waiting
        since = min(waits.values(), default=0)
        for slot in self._pages.slots():
            slot[control.S_RUNNING], slot[control.S_QUEUED] = self._running, len(waits)
            slot[control.S_UNSERVED] = self._unserved
            slot[control.S_SINCE], slot[control.S_USED_AT], slot[control.S_ORDER] = since, self._used, self._order

    def wake_waiters(self) -> None:
        """The model's state has changed: those who wait look again."""
        self.publish()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- requests --------------------------------------------------------------------------------------------

    async def enter(self, client: Client, early: bool = False) -> bool:
        """Wait until a request may begin, and count it. False: it may not, or its client is gone.

        early: whether the engine queues it while it wakes. If it fails to wake, the request waits there.
        """
        end, came = time.monotonic() + self._patience, now_us()
        try:
            while True:
                self._running += 1
                self.publish()  # before the look, so that whoever closes sees it
                if self._pages.is_open():
                    return True
                if early and self._pages.admits():
                    self._early[client] = came
                    return True
                self._running -= 1
                self._waiting[client] = came
                self.publish()
                self.news.set()  # it need not wait for the next look
                drained = self._pages.mine[0][control.DRAINED]
                if drained or self._ends() or not await self._is_changed(client, end):
                    return False
        finally:
            self._waiting.pop(client, None)
            self.publish()

    def leave(self, client: Client) -> None:
        """A request that has entered has ended."""
        self._running -= 1
        self._early.pop(client, None)
        self.model_used()
        if not self._pages.is_open():  # who closes waits for it
            self.news.set()

    def model_used(self) -> None:
        """The model is not idle since now."""
        self._used = now_us()
        self.publish()

    def refuse(self) -> None:
        """Count a request that is not served."""
        self._unserved += 1
        self.publish()

    def set_silent(self, client: Client, since: int | None) -> None:
        """Note since when a client's stream has been there that has sent nothing; None: it has, or has ended."""
        if since is None:
            self._silent.pop(client, None)
        else:
            self._silent[client] = since

    def is_in_vain(self, came: int, stream: bool, waited: int) -> bool:
        """Return whether a request that has sent nothing has waited too long for memory.

        came, waited : microseconds, when it came, and how long it has waited for its model.

        One that answers as a whole may be half done if it began before its model fell asleep, which had memory until
        then: it goes on at the wake.
        """
        if not self._pages.mine:
            return False
        page = self._pages.mine[0]
        starved = page[control.STARVING]
        goes_on = not stream and came + waited <= page[control.CHANGED_AT] <= starved and not self._pages.is_awake()
        if not starved or goes_on:
            return False
        return now_us() - max(starved - waited, came) > 1e6 * self._patience

    async def _is_changed(self, client: Client, end: float) -> bool:
        """Wait until the model's state may have changed. False: the time is over, or the client is gone."""
        changed, listens = asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(client.listen())
        left = max(end - time.monotonic(), 0)
        await asyncio.wait((changed, listens), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        await client.stop(listens)
        return left > 0 and not client.gone

    # ---- orders ----------------------------------------------------------------------------------------------

    @property
    def has_order(self) -> bool:
        """True while an order is being carried out."""
        return self._order != Order.NONE

    async def carry_out(self, order: Order, client: Client) -> bool:
        """Have the leader carry out an operator's order, which ends with this call; return whether it has in time."""
        end = time.monotonic() + self._patience
        try:
            self._order = order
            if order == Order.WAKE:
                self._waiting[client] = now_us()
            self.publish()
            self.news.set()
            while not (done := self._is_carried_out(order)):
                if not await self._is_changed(client, end):
                    break
            return done
        finally:
            self._waiting.pop(client, None)
            self._order = Order.NONE
            self.publish()

    def _is_carried_out(self, order: Order) -> bool:
        page = self._pages.mine[0]
        if order == Order.DRAIN:
            return page[control.DRAINED] == 1 and not page[control.RUNNING]
        return self._pages.is_open() if order == Order.WAKE else page[control.STATE] == State.ASLEEP
