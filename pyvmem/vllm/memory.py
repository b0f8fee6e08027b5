"""Device memory of an engine beside its pages: made ahead and kept while requests run, given back otherwise.

Taking memory from the driver and giving it back makes calls to CUDA that the launches of kernels wait for, milliseconds
each. So a busy engine keeps what it had, and a thread makes more before it is needed. An idle one gives everything back
(`RequestSlots.tend`), and so does a busy one where other processes need it.

SPDX-License-Identifier: MIT
"""

import time

from pyvmem import Context
from pyvmem.errors import OutOfMemory

MARGIN = 256 << 20  # bytes of device memory left for other processes until the next look


class Memory:
    """What a context has and may have.

    Parameters
    ----------
    context : Context
    ahead : int
        Bytes to make before pages need them.
    """

    SECONDS = 5.0  # memory that was not needed for so long goes back

    def __init__(self, context: Context, ahead: int = 1 << 30) -> None:
        self._context = context
        self._ahead = ahead
        self._base = context.stats().overhead
        self._least: int | None = None  # unused bytes since _since
        self._since = 0.0

    def look(self, most: int, busy: bool) -> int:
        """Adjust what is kept. Returns the bytes that pages can have, as far as the device goes.

        Parameters
        ----------
        most : int
            Bytes that pages may have.
        busy : bool
            Whether requests run.
        """
        has = self._context.stats()
        free = self._context.info().memory_free
        unused = max(has.overhead - self._base, 0)
        if busy:
            self._keep(min(self._ahead, most - has.created), unused, free)
        else:
            self._least = None
        return has.created + has.overhead + max(free - MARGIN, 0)

    def _keep(self, ahead: int, unused: int, free: int) -> None:
        now = time.monotonic()
        if self._least is None:
            self._least, self._since = unused, now
        self._least = min(self._least, unused)
        long = now - self._since > self.SECONDS
        if unused and (free < 2 * MARGIN or (long and self._least > 2 * self._ahead)):
            self._context.trim()
            self._least = None
        elif ahead > 0 and free + unused > ahead + 4 * MARGIN:
            try:
                self._context.prealloc(ahead)  # and keeps what there is
            except OutOfMemory:  # another process was faster
                pass
        if long:
            self._least = None
