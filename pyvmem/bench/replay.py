"""Every request of a trace, committed row by row as it grows.

This is the KV cache of a serving engine with continuous batching, without the model. Requests take slots in the order
of the trace. A prompt is committed whole when it enters. Then every iteration adds one row to each running request, in
one call for all requests. A finished request's memory is released. The tensors are those of the vAttention
paper (Prabhu et al., ASPLOS 2025, section 5.1): K and V of each layer, slots x longest request x row.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from pyvmem.bench import argtypes, benchmark
from pyvmem.bench.traces import read_trace, synthetic_trace
from pyvmem.core import MIB

if TYPE_CHECKING:
    from pyvmem.bench.records import Record, Samples
    from pyvmem.bench.session import Session
    from pyvmem.bench.traces import Trace
    from pyvmem.core import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("replay")
    whole = argtypes.whole(1)
    argtypes.trace(group)
    group.add_argument("--slots", type=whole, default=64, metavar="B", help="concurrent requests (64)")
    group.add_argument("--layers", type=whole, default=1, metavar="N", help="layers; each has a K and a V tensor (1)")
    group.add_argument(
        "--row-bytes",
        type=whole,
        default=2048,
        metavar="BYTES",
        help="of a token's K or V in a layer (2048: Llama-3-8B)",
    )


class Cache:
    """The virtual tensors, and the backed pages of each slot in every tensor (`pages`)."""

    def __init__(
        self, context: Context, page_size: int, slots: int, tensors: int, row_bytes: int, longest: int
    ) -> None:
        stride = -(-longest * row_bytes // (2 * MIB)) * 2 * MIB
        self.context = context
        self.page_size = page_size
        self.row_bytes = row_bytes
        self.tensors = [context.reserve(slots * stride) for _ in range(tensors)]
        bases = np.array([t.addr for t in self.tensors], np.uint64)
        self._slots = np.arange(slots, dtype=np.uint64) * np.uint64(stride) + bases[:, None]  # [tensor, slot]
        self._pages = np.zeros(slots, np.int64)

    def grow(self, lengths: Any) -> Any:
        """Back rows [0, lengths[s]) of every slot s. Returns the nanoseconds it took, 0 if no page was missing."""
        need = -(-lengths * self.row_bytes // self.page_size)
        slots = np.flatnonzero(need > self._pages)
        if not slots.size:
            return 0
        have = self._pages[slots]
        addrs = self._slots[:, slots] + (have * self.page_size).astype(np.uint64)
        sizes = np.broadcast_to((need[slots] - have) * self.page_size, addrs.shape)
        start = perf_counter_ns()
        self.context.commit(addrs, sizes, self.page_size)
        took = perf_counter_ns() - start
        self._pages[slots] = need[slots]
        return took

    def drop(self, slots: Any) -> Any:
        """Release the slots' memory. Returns the nanoseconds it took."""
        addrs = self._slots[:, slots]
        sizes = np.broadcast_to(self._pages[slots] * self.page_size, addrs.shape)
        start = perf_counter_ns()
        self.context.decommit(addrs, sizes)
        took = perf_counter_ns() - start
        self._pages[slots] = 0
        return took

    def close(self) -> None:
        """Free the tensors."""
        for tensor in self.tensors:
            tensor.close()


def replay(cache: Any, trace: Trace, slots: int, advance: Callable[[int], object] = lambda n: None) -> Any:
    """Run a trace through a cache. Returns a dict of measurements (nanoseconds, bytes, fractions)."""
    context, tensors = cache.context, len(cache.tensors)
    length, total = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    seen: dict[str, Any] = {"commit": [], "release": [], "resident": [], "waste": []}
    started, start = 0, perf_counter_ns()
    while True:
        length[total > 0] += 1
        free = np.flatnonzero(total == 0)[: len(trace) - started]
        if free.size:
            entering = slice(started, started + free.size)
            length[free] = trace.prompt[entering]
            total[free] = trace.prompt[entering] + trace.output[entering]
            started += free.size
        if not total.any():
            break
        took = cache.grow(length)
        if took:
            seen["commit"].append(took)
        resident = context.stats().mapped
        seen["resident"].append(resident)
        seen["waste"].append(1 - int(length.sum()) * cache.row_bytes * tensors / resident)
        done = np.flatnonzero((total > 0) & (length >= total))
        if done.size:
            seen["release"].append(cache.drop(done))
            length[done] = total[done] = 0
            advance(done.size)
    seen["wall"] = perf_counter_ns() - start
    return seen


@benchmark("replay", "a trace's requests committed row by row as they grow", arguments=arguments, order=30)
def run(session: Session) -> list[Record]:
    """Replay the trace once for each page size."""
    args = session.args
    trace = read_trace(args.trace) if args.trace else synthetic_trace(1000)
    limit = args.requests or (300 if session.quick else None)
    trace = trace.head(limit) if limit else trace
    longest = int((trace.prompt + trace.output).max())
    tensors = 2 * args.layers
    records = []
    with session.context() as context:
        for page_size in session.page_sizes(context):
            before = context.stats()
            cache = Cache(context, page_size, args.slots, tensors, args.row_bytes, longest)
            with session.progress(f"{len(trace)} requests, pages of {page_size >> 10} KiB", len(trace)) as advance:
                seen = replay(cache, trace, args.slots, advance)
            after = context.stats()
            cache.close()
            context.trim()

            def add(metric: str, unit: str, samples: Samples, page_size: int | None = page_size) -> None:
                records.append(session.record(samples, context, metric, unit, page_size=page_size))

            add("requests", "count", len(trace))
            add("iterations", "count", len(seen["resident"]))
            add("time of all commits and releases", "s", (sum(seen["commit"]) + sum(seen["release"])) / 1e9)
            add("commit, an iteration that needs pages", "us", np.array(seen["commit"]) / 1e3)
            add("release, an iteration that ends requests", "us", np.array(seen["release"]) / 1e3)
            add("pages mapped", "count", after.map_ops - before.map_ops)
            add("pages to a run", "count", (after.map_ops - before.map_ops) / (after.map_runs - before.map_runs))
            add("peak memory", "MiB", max(seen["resident"]) / MIB)
            add("memory", "MiB", np.array(seen["resident"]) / MIB)
            add("waste", "% of memory", 100 * np.array(seen["waste"]))
            add("whole run, this program included", "s", seen["wall"] / 1e9)
        static = args.slots * longest * args.row_bytes * tensors
        records.append(session.record(static / MIB, context, "memory if every slot had the longest request's", "MiB"))
    return records
