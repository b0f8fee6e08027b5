"""Which requests of a scheduler of vLLM's wait for blocks.

SPDX-License-Identifier: MIT
"""

import itertools
from typing import Any

MOST = 64  # requests that are looked at


def waiting(scheduler: Any) -> list[Any]:
    """The first requests that vLLM may begin or go on with, in the order in which it looks at them.

    Requests that wait for something else, such as a grammar or a session's next input, need no blocks yet. Sessions
    whose next input has come wait in a queue of their own, as they hold blocks. Until 0.30, requests that vLLM has once
    skipped were there, too. An engine that its user has paused begins none that holds no blocks.
    """
    held = getattr(scheduler, "kv_holding_waiting", None) or getattr(scheduler, "skipped_waiting", None) or ()
    new = () if getattr(scheduler, "pause_state", None) else scheduler.waiting or ()
    if not held and not new:
        return []
    ready = (r for r in itertools.chain(held, new) if not r.status.name.startswith("WAITING_FOR_"))
    return list(itertools.islice(ready, MOST))


def stopped(scheduler: Any) -> bool:
    """Whether no request goes on, because the engine's user has paused it."""
    return getattr(scheduler, "pause_state", 0) > 1
