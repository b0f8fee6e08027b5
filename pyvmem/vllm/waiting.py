"""Which requests of a scheduler of vLLM's wait for blocks.

SPDX-License-Identifier: MIT
"""

import itertools
from typing import Any

MOST = 64  # requests that are looked at


def waiting(scheduler: Any) -> list[Any]:
    """The first requests that vLLM may begin or go on with, in the order in which it looks at them.

    Sessions whose next input has come wait in a queue of their own, as they hold blocks. Until 0.30, requests that vLLM
    has once skipped were there, too. Sessions that wait for input need no blocks.
    """
    held = getattr(scheduler, "kv_holding_waiting", None) or getattr(scheduler, "skipped_waiting", None)
    if not held:
        return list(itertools.islice(scheduler.waiting, MOST)) if scheduler.waiting else []
    ready = (request for request in held if request.status.name != "WAITING_FOR_STREAMING_REQ")
    return list(itertools.islice(itertools.chain(ready, scheduler.waiting), MOST))
