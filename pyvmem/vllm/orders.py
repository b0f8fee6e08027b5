"""Messages from a vLLM scheduler to its workers: vMem's orders, which go with each step, and the blocks in use.

vLLM's offloading connector copies blocks to host memory and back. When a request ends, vLLM frees its blocks, and only
the next step names the store that reads them. vLLM waits for a store only if it hands one of its blocks out again. So
blocks that leave keep their memory until every store that can name them is known, and every copy that names them has
ended (`Copies`).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pyvmem.vllm import connectors


class PrefixOrders(NamedTuple):
    """What a step says of prefixes that are saved (`prefixes`)."""

    resets: int  # of the prefix cache so far
    taken: Sequence[int]  # blocks that vLLM has handed out since the step before: what they had must not be saved
    # Blocks that hold a prefix once the step has been computed: (block, place in the file, tokens, hash, hash of the
    # block before it).
    saves: Sequence[tuple[int, int, int, bytes, bytes]]


class StepOrders(NamedTuple):
    """Orders of one step. They travel as attribute `vmem` of vLLM's SchedulerOutput."""

    step: int  # its number
    position: int  # of the ring's end when it was scheduled. Workers carry these records out before the step
    gone: Sequence[int] = ()  # blocks to unback
    ahead: Sequence[list[int]] = ()  # blocks to back in the background, a list for each order
    order: int = 0  # the number of the first of these orders
    prefixes: PrefixOrders | None = None  # what to save, if prefixes outlive the engine


def named_blocks(output: Any) -> list[int]:
    """Every block that a step writes, or reads for the first time. `output` is vLLM's SchedulerOutput."""
    found: list[int] = []
    for request in output.scheduled_new_reqs:
        for ids in request.block_ids:
            found += ids
    for groups in filter(None, output.scheduled_cached_reqs.new_block_ids):  # None: no new blocks
        for ids in groups:
            found += ids
    for ids in _copies(output).values():
        found += ids
    found += output.new_block_ids_to_zero or ()
    for copy in output.kv_cache_block_copies or ():
        found += [copy.src_block_id, copy.dst_block_id]
    return found


def _parts(metadata: Any) -> Iterator[Any]:
    """What each connector says with a step or its end, within what a MultiConnector says; nothing for None."""
    if metadata is not None:
        parts = getattr(metadata, "metadata", None)
        if parts is None:
            yield metadata
        for part in parts or ():
            yield from _parts(part)


def _copies(output: Any) -> dict[int, list[int]]:
    """{number of a copy of the OffloadingConnector: its blocks} of a step."""
    found: dict[int, list[int]] = {}
    for message in _parts(getattr(output, "kv_connector_metadata", None)):
        if hasattr(message, "store_jobs"):
            found |= {number: job.src_spec.block_ids.tolist() for number, job in message.store_jobs.items()}
            found |= {number: job.dst_spec.block_ids.tolist() for number, job in message.load_jobs.items()}
    return found


def submit_stores() -> None:
    """In a worker, submit the stores that wait for the next step, which may not come for a long time."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    for connector in connectors.flat(get_kv_transfer_group()) if has_kv_transfer_group() else ():
        if type(connector).__name__ == connectors.OFFLOADING:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

            connector.handle_preemptions(OffloadingConnectorMetadata({}, {}))


class Copies:
    """Copies in flight of a vLLM scheduler that has an OffloadingConnector.

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
    connector : OffloadingConnector
    workers : int
        Number of workers, each of which carries out its part of a copy.
    """

    def __init__(self, scheduler: Any, connector: Any, workers: int) -> None:
        self._scheduler, self._connector, self._workers = scheduler, connector, workers
        self._jobs: dict[int, list[int]] = {}  # blocks by the number of a copy
        self._missing: dict[int, int] = {}  # workers that have not finished a copy, by its number
        self._used: collections.Counter[int] = collections.Counter()  # number of copies of each block
        self._gone: set[int] = set()  # blocks that left since the connector last named copies

    def begin(self) -> None:
        """Before a step is scheduled, tell the connector that blocks which left no longer belong to their requests.

        The connector lists the blocks of each request, and keeps those that a window has passed on its list.
        """
        self._connector.connector_scheduler._current_batch_allocated_block_ids |= self._gone
        self._gone.clear()

    def scheduled(self, output: Any) -> None:
        """Count the copies that a scheduled step names."""
        for number, ids in _copies(output).items():
            self._jobs[number], self._missing[number] = ids, self._workers
            self._used.update(ids)

    def answered(self, answer: Any) -> None:
        """Count the copies that workers have finished by the end of a step. answer: vLLM's ModelRunnerOutput."""
        for message in _parts(getattr(answer.kv_connector_output, "kv_connector_worker_meta", None)):
            for number, workers in getattr(message, "completed_jobs", {}).items():
                self._missing[number] -= workers
                if not self._missing[number]:
                    del self._missing[number]
                    self._used -= collections.Counter(self._jobs.pop(number))

    def part(self, leaving: Iterable[int]) -> tuple[list[int], list[int]]:
        """Divide blocks that leave: (those that may lose their memory now, those that may not yet)."""
        if self._scheduler.finished_req_ids:  # the connector has not said yet which blocks of these it stores
            return [], list(leaving)
        parts: tuple[list[int], list[int]] = [], []
        for i in leaving:
            parts[i in self._used].append(i)
        self._gone.update(parts[0])
        return parts
