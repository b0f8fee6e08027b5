"""The orders that a scheduler of vLLM's sends its workers with each step, and the blocks that the step names.

vLLM's offloading connector copies blocks to host memory or from there. vLLM frees the blocks of a request when it ends,
and names the store that reads them with the step after that. It waits for a store only if it hands one of its blocks
out again. So blocks that leave keep their memory until every store that can name them is known, and every copy that
names them has ended (`Copies`).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

AHEAD = 64  # tokens of a running request whose pages slots map ahead, or up to twice as many


class StepOrders(NamedTuple):
    """Travels as attribute `vmem` of vLLM's SchedulerOutput.

    Attributes
    ----------
    step : int
        The step's number.
    position : int
        The ring's end when the step was scheduled: its records are carried out before the step.
    gone : sequence of int
        Blocks that the scheduler gives up.
    ahead : sequence of lists of int
        Blocks to be backed in the background, one order after the other.
    order : int
        The number of the first of these orders.
    evicted : sequence of int
        Backed blocks whose contents vLLM has forgotten.
    coming : sequence of (str, int, int)
        In slots, the requests that begin next: name, tokens, and how many of these are cached.
    """

    step: int
    position: int
    gone: Sequence[int] = ()
    ahead: Sequence[list[int]] = ()
    order: int = 0
    evicted: Sequence[int] = ()
    coming: Sequence[tuple[str, int, int]] = ()


def named_blocks(output: Any) -> list[int]:
    """Every block that a step writes or newly reads. `output` is vLLM's SchedulerOutput."""
    found: list[int] = []
    for request in output.scheduled_new_reqs:
        for ids in request.block_ids:
            found += ids
    for groups in filter(None, output.scheduled_cached_reqs.new_block_ids):  # None: no new blocks
        for ids in groups:
            found += ids
    found += copied_blocks(output)
    found += output.new_block_ids_to_zero or ()
    for copy in output.kv_cache_block_copies or ():
        found += [copy.src_block_id, copy.dst_block_id]
    return found


def copied_blocks(output: Any) -> list[int]:
    """The blocks that the copies of a step read or write. output: vLLM's SchedulerOutput."""
    return [i for ids in _copies(output).values() for i in ids]


def _copies(output: Any) -> dict[int, list[int]]:
    """{number of a copy: its blocks} of a step."""
    told = getattr(output, "kv_connector_metadata", None)
    if told is None:
        return {}
    stores = {number: job.src_spec.block_ids.tolist() for number, job in told.store_jobs.items()}
    return stores | {number: job.dst_spec.block_ids.tolist() for number, job in told.load_jobs.items()}


def submit_stores() -> None:
    """In a worker, give the device the stores that wait for the next step. It may be long in coming."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

        get_kv_transfer_group().handle_preemptions(OffloadingConnectorMetadata({}, {}))


class Copies:
    """The copies in flight of a scheduler of vLLM's with an OffloadingConnector.

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
    workers : int
        Those that carry out each copy.
    """

    def __init__(self, scheduler: Any, workers: int) -> None:
        self._scheduler, self._workers = scheduler, workers
        self._jobs: dict[int, list[int]] = {}
        self._missing: dict[int, int] = {}  # workers that have not carried out a copy
        self._used: collections.Counter[int] = collections.Counter()  # copies of each block
        self._gone: set[int] = set()  # since the connector last named copies

    def begin(self) -> None:
        """A step is about to be scheduled. For the connector, blocks that left are in other hands now.

        Else it would still count a block on its list that a window has left behind as one of the request's.
        """
        self._scheduler.connector.connector_scheduler._current_batch_allocated_block_ids |= self._gone
        self._gone.clear()

    def scheduled(self, output: Any) -> None:
        """A step was scheduled, and names copies."""
        for number, ids in _copies(output).items():
            self._jobs[number], self._missing[number] = ids, self._workers
            self._used.update(ids)

    def answered(self, answer: Any) -> None:
        """A step has ended. answer: vLLM's ModelRunnerOutput."""
        told = getattr(answer.kv_connector_output, "kv_connector_worker_meta", None)
        for number, workers in (told.completed_jobs if told is not None else {}).items():
            self._missing[number] -= workers
            if not self._missing[number]:
                del self._missing[number]
                self._used -= collections.Counter(self._jobs.pop(number))

    def part(self, leaving: Iterable[int]) -> tuple[list[int], list[int]]:
        """Of blocks that leave, (those that may lose their memory now, those that may not yet)."""
        if self._scheduler.finished_req_ids:  # the connector stores what these have when it is next asked
            return [], list(leaving)
        parts: tuple[list[int], list[int]] = [], []
        for i in leaving:
            parts[i in self._used].append(i)
        self._gone.update(parts[0])
        return parts
