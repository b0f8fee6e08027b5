"""What a KV connector does with the blocks of a vLLM scheduler, beside its steps.

A request whose prefix a connector loads while steps run holds its blocks before it begins, and vLLM cannot preempt it.
So when memory leaves, such requests could hold all there is, and none of them begin. Once their blocks are loaded, they
give them up here as vLLM does if a load has failed, and load or compute them again.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyvmem.vllm import connectors
from pyvmem.vllm.orders import Copies

_LOADS = "WAITING_FOR_REMOTE_KVS"


class Transfers:
    """The transfers of a scheduler's connector. Without a connector, there are none.

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
    workers : int
        Number of workers, each of which carries out its part of a transfer.
    """

    def __init__(self, scheduler: Any, workers: int) -> None:
        self._scheduler = scheduler
        self.present = scheduler.connector is not None
        found = {type(c).__name__: c for c in connectors.flat(scheduler.connector)}
        offloading = found.get(connectors.OFFLOADING)
        self.copies = Copies(scheduler, offloading, workers) if offloading is not None else None
        # Whether a request may begin with a part of its prompt.
        self.parts = found.keys().isdisjoint(connectors.WHOLE_PROMPTS)
        self._next: Any = None  # the request whose whole prompt the connector looks up in the next step
        self._loads = ""  # a request that did not begin with a part of its prompt, as its prefix is loaded at once

    # ---- around a step -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a step is scheduled."""
        if self.copies is not None:
            self.copies.begin()

    def scheduled(self, output: Any) -> None:
        """Take note of a scheduled step. output: vLLM's SchedulerOutput."""
        if self.copies is not None:
            self.copies.scheduled(output)

    def answered(self, answer: Any) -> None:
        """Take note of the end of a step. answer: vLLM's ModelRunnerOutput."""
        if self.copies is not None:
            self.copies.answered(answer)

    def part(self, leaving: list[int]) -> tuple[list[int], list[int]]:
        """Divide blocks that leave, as `Copies.part`."""
        return (leaving, []) if self.copies is None else self.copies.part(leaving)

    # ---- requests that begin -----------------------------------------------------------------------------------

    def loads_next(self, wait: Sequence[Any]) -> bool:
        """Return whether the first waiting request needs all of its blocks at once, as its prefix is loaded.

        wait : the waiting requests, if none runs. The connector looks up a whole prompt in each attempt to begin it, so
            there is none in vain.
        """
        self._next = wait[0] if self.present and wait else None
        return self._next is not None and self._next.request_id == self._loads

    def in_vain(self, parts: bool, whole: bool, lacks: Callable[[Any], bool]) -> bool:
        """Return whether a step would look up a prompt that cannot begin in it.

        parts : whether it may begin with a part. whole: whether vLLM begins requests only if all their blocks are free.
        lacks : says so of a request.
        """
        first = self._next
        if first is None or parts or not (whole or first.request_id == self._loads):
            return False
        return lacks(first) and not any(map(self._is_loaded, self._holders()))  # which begin before it

    def did_not_begin(self, wait: Iterable[Any]) -> None:
        """No request began in a step although a part of the first one could have."""
        self._loads = next((r.request_id for r in wait), "")

    # ---- requests that hold blocks before they begin -----------------------------------------------------------

    def _holders(self) -> list[Any]:
        """The requests that wait with blocks that were loaded, are being loaded, or could not be loaded."""
        if not self.present:
            return []
        scheduler = self._scheduler
        held = getattr(scheduler, "kv_holding_waiting", None) or getattr(scheduler, "skipped_waiting", None) or ()
        failed = scheduler.failed_recving_kv_req_ids
        return [r for r in held if (r.num_computed_tokens or r.request_id in failed) and not r.resumable]

    def _is_loaded(self, request: Any) -> bool:
        loads = request.status.name == _LOADS
        return not loads or request.request_id in self._scheduler.finished_recving_kv_req_ids

    def is_loading(self) -> bool:
        """Return whether blocks are being loaded, or are read after their request has ended."""
        scheduler = self._scheduler
        return self.present and (
            not all(map(self._is_loaded, self._holders()))
            or len(scheduler.requests) > sum(scheduler.get_request_counts())
            or scheduler.connector.has_pending_push_work()
        )

    def give_up(self, first: int = 0) -> None:
        """Free the blocks of loaded requests that have not begun. first: the first of them that gives up its own."""
        scheduler = self._scheduler
        for request in reversed([r for r in self._holders() if self._is_loaded(r)][first:]):
            if request.status.name == _LOADS:
                scheduler.finished_recving_kv_req_ids.discard(request.request_id)
                scheduler.failed_recving_kv_req_ids.discard(request.request_id)
                request.status = type(request.status)["PREEMPTED" if request.num_preemptions else "WAITING"]
            scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            scheduler._inflight_prefills.discard(request)

    def unblock(self, lacks: Callable[[Any], bool]) -> None:
        """If the first loaded request lacks blocks, and none runs that could give some up, others give up theirs.

        lacks : says so of a request.
        """
        loaded = [r for r in self._holders() if self._is_loaded(r)]
        if len(loaded) > 1 and lacks(loaded[0]):
            self.give_up(len(loaded) - 1)
