"""Why a KV cache found too little memory, or no slot.

SPDX-License-Identifier: MIT
"""

from dataclasses import dataclass
from typing import Any

# reason, in the order of vmem_kv.h: (the shortage in words, the remedy besides ending requests)
_CAUSES = {
    "budget": ("the budget is used up", "raise the budget"),
    "device": ("the device has less memory than the budget", "free memory elsewhere"),
    "mappings": ("the process has all its mappings", "raise vm.max_map_count or use larger pages"),
    "slots": ("all slots are taken", "create the cache with more slots"),
}
# Why the other members of a pool give no more (vmem_kv_pool.h).
REASONS = (None, "at maximum", "at minimum", "in use", "no memory", "file damaged", "no answer")
# refusal: the remedy of a pool's member
_POOL_HELPS = {
    "at maximum": "raise its share's maximum",
    "at minimum": "use a pool with a larger budget, or lower the minimum of another member",
    "in use": "use a pool with a larger budget, or end requests of other members",
    "no memory": "free memory elsewhere",
    "file damaged": "restart the pool's processes",
    "no answer": "continue or end the process that does not answer",
}


@dataclass(frozen=True)
class Shortage:
    """Why a call found too little memory, or no slot.

    Attributes
    ----------
    reason : str or None
        "budget": end or swap out a request, drop prefixes, or raise the budget. "device": the budget allows more than
        the device has; free memory elsewhere, or end a request. "mappings": the host's ``vm.max_map_count``; raise it,
        use larger pages, or end a request. "slots": end a request. None: nothing was short.
    missing_pages : int
    prefix_pages : int
        Pages that dropping all prefixes would free.
    requests : int
        Requests that hold pages.
    ending_pages : int
        Pages of requests that end when the kernels in flight have ended; `KVCache.retire` ends them earlier.
    coming_pages : int
        Pages that the pool may still provide (`KVPool.wait`).
    step : int
        The first step whose kernels' end makes good what is missing: wait for it, `KVCache.retire` it, and call again.
        0: kernels in flight do not hold that much, so a request must give way.
    refusal : str or None
        Of a member of a pool: why the others give no more, as in `PoolMember.reason`.

    Notes
    -----
    ``str(shortage)`` is one line that says what is short and what would help.
    """

    reason: str | None
    missing_pages: int
    prefix_pages: int
    requests: int
    ending_pages: int = 0
    coming_pages: int = 0
    step: int = 0
    refusal: str | None = None

    @property
    def remedy(self) -> str:
        """The remedy besides ending requests and dropping prefixes."""
        return _POOL_HELPS.get(self.refusal or "") or _CAUSES[self.reason or "budget"][1]

    def __str__(self) -> str:
        if self.reason is None:
            return "nothing is short"
        if self.reason == "slots":
            return "all slots are taken: end a request"
        helps = []
        if self.coming_pages:
            helps.append(f"wait for the pool, which may give {self.coming_pages}")
        if self.ending_pages:
            helps.append(f"retire the steps of requests that end, which hold {self.ending_pages}")
        if self.prefix_pages:
            helps.append(f"drop prefixes, which hold {self.prefix_pages}")
        if self.requests:
            helps.append("end or swap out a request")
        helps.append(self.remedy)
        cause = _CAUSES[self.reason][0]
        if self.refusal:
            cause += f", and the pool gives no more ({self.refusal})"
        return f"{self.missing_pages} pages are missing: {cause}; {', or '.join(helps)}"


NO_SHORTAGE = Shortage(None, 0, 0, 0)


def shortage_of(raw: Any) -> Shortage:
    """The `Shortage` of a struct vmem_kv_shortage."""
    numbers = (raw.missing_pages, raw.prefix_pages, raw.requests, raw.ending_pages, raw.coming_pages, raw.step)
    return Shortage((None, *_CAUSES)[raw.reason], *numbers, refusal=REASONS[raw.refusal])
