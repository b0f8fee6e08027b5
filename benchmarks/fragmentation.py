"""The memory that pages waste, and the requests that fit with smaller pages.

It has three parts. The first computes and measures the tokens per page and the worst waste of a request (Table 8 of the
vAttention paper). The second measures the waste of a running batch, and the third finds the largest batch under a
budget (Figure 12). All use the real KV-cache manager with real pages, without a model.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kv_load import MODELS, Server, memory_for, model_options
from benchmarks.registry import benchmark
from benchmarks.traces import read_trace, synthetic_trace, trace_arguments
from pyvmem.core import KIB, MIB
from pyvmem.errors import VmemError
from pyvmem.tools import argtypes

if TYPE_CHECKING:
    from benchmarks.kv_load import Model
    from benchmarks.records import Record, Samples
    from benchmarks.session import Session
    from benchmarks.traces import Trace
    from pyvmem.core import Context
    from pyvmem.kv.cache import KVCache


# (model, workers, page size in KiB): tokens per page, and worst waste of a request in MB, from the paper.
TABLE_8 = {
    ("Yi-6B", 1): ((64, 128, 256, 2048), (4, 8, 16, 128)),
    ("Yi-6B", 2): ((128, 256, 512, 4096), (8, 16, 32, 256)),
    ("Llama-3-8B", 1): ((32, 64, 128, 1024), (4, 8, 16, 128)),
    ("Llama-3-8B", 2): ((64, 128, 256, 2048), (8, 16, 32, 256)),
    ("Yi-34B", 1): ((32, 64, 128, 1024), (7.5, 15, 30, 240)),
    ("Yi-34B", 2): ((64, 128, 256, 2048), (15, 30, 60, 480)),
}
TABLE_8_PAGES = (64 * KIB, 128 * KIB, 256 * KIB, 2 * MIB)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("fragmentation")
    trace_arguments(group)
    model_options(group, "concurrent requests, for the waste (256)")
    group.add_argument(
        "--kv-budget",
        type=argtypes.whole(1),
        metavar="MIB",
        help="budget for the largest batch (1024 a layer, 32768 at most)",
    )


def table_8(model: Model, workers: int, page_size: int) -> Any:
    """(tokens per page, worst waste of a request in bytes over all workers), as in the paper's section 7.1."""
    return page_size // model.row_bytes(workers), 2 * model.layers * page_size * workers


def measure_table_8(context: Context, model: Model, workers: int, page_size: int) -> Any:
    """The same, measured in a cache of one worker: when a second page is mapped, and how much memory that takes."""
    from pyvmem.kv.cache import KVCache, Spare

    tokens = page_size // model.row_bytes(workers)
    budget = 2 * model.layers * 2 * page_size
    with KVCache.for_model(
        model.layers, model.kv_heads // workers, model.head_dim, slots=1, max_tokens=2 * tokens,
        budget=budget, context=context, page_size=page_size, spare=Spare(overlap=False, generous=False), lazy=True,
        name=None,
    ) as cache:  # fmt: skip
        slot = 0
        cache.alloc(slot=slot)
        low, high = 1, 2 * tokens  # search for the longest request that needs one page per tensor
        while low < high:
            middle = (low + high + 1) // 2
            cache.step([middle])
            one_page = cache.slot(slot).needed_pages == 2 * model.layers
            cache.truncate(slot, 0)
            cache.reclaim()
            low, high = (middle, high) if one_page else (low, middle - 1)
        cache.step([low])
        before = cache.stats().held_pages
        cache.step([low + 1])
        return low, (cache.stats().held_pages - before) * page_size * workers


def run_table_8(session: Session, context: Context, page_sizes: Sequence[int]) -> list[Record]:
    """Records of Table 8."""
    records = []
    for (name, workers), (paper_tokens, paper_waste) in TABLE_8.items():
        model = MODELS[name]
        for page_size, tokens, waste in zip(TABLE_8_PAGES, paper_tokens, paper_waste):
            ways = {"computed": table_8(model, workers, page_size)}
            if page_size in page_sizes and not (session.quick and page_size == 2 * MIB):
                ways["measured"] = measure_table_8(context, model, workers, page_size)
            for how, (found_tokens, found_waste) in ways.items():
                for metric, unit, value, known in (
                    ("tokens in a page", "tokens", found_tokens, tokens),
                    ("worst waste of a request", "MiB", found_waste / MIB, waste),
                ):
                    metric = f"{metric}, {name} TP-{workers}, {how}"
                    records.append(session.record(value, context, metric, unit, page_size=page_size, paper=known))
    return records


WAYS: dict[str, dict[str, bool]] = {
    "nothing kept": {"defer": False, "eager": False, "generous": False},
    "default": {},
}


@dataclass(frozen=True)
class Load:
    """The requests of a trace on a cache of `layers` layers of a model. shape: the model and its layers as text."""

    session: Session
    context: Context
    page_size: int
    model: Model
    layers: int
    trace: Trace
    shape: str

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return int((self.trace.prompt + self.trace.output).max())

    def cache(self, slots: int, budget: int, **options: Any) -> KVCache:
        """A cache for it."""
        from pyvmem.kv.cache import KVCache

        return KVCache.for_model(
            self.layers, self.model.kv_heads, self.model.head_dim, slots=slots, max_tokens=self.longest,
            budget=budget, context=self.context, page_size=self.page_size, name=None, lazy=True, **options,
        )  # fmt: skip

    def record(self, samples: Samples, metric: str, unit: str, paper: float | None = None) -> Record:
        """A `Record` of it."""
        return self.session.record(samples, self.context, metric, unit, page_size=self.page_size, paper=paper)


def waste_records(load: Load) -> list[Record]:
    """Records of the waste of a running batch that has memory to spare, by what the cache keeps beyond what it needs.

    waste: the share of the backed bytes without a token's rows. What cannot be taken back: the same without pages that
    are kept for the next request or mapped ahead of need.
    """
    from pyvmem.kv.cache import Spare

    slots, page_size, records = load.session.args.kv_slots, load.page_size, []
    per_request = 2 * load.layers * (-(-load.longest * load.model.row_bytes() // page_size) + 1) * page_size
    budget = min(memory_for(load.context, 0.9), slots * per_request)
    for how, spare in WAYS.items():
        found = []
        with (
            load.session.progress(f"waste, {how}, pages of {page_size >> 10} KiB", len(load.trace)) as advance,
            load.cache(slots, budget, spare=Spare(**spare)) as cache,
        ):
            server = Server(cache, load.trace)
            while server.queue or server.active:
                server.admit()
                server.decode()
                if server.active == slots:  # the batch is full
                    cache.wait()
                    stats = cache.stats()
                    backed, needed = stats.held_pages * page_size, stats.needed_pages * page_size
                    found.append((1 - stats.live_bytes / backed, 1 - stats.live_bytes / needed, backed))
                advance(server.retire())
        if not found:
            continue
        seen, name = np.array(found), f"B={slots}, {load.shape}, {how}"
        records += [
            load.record(seen[:, 0] * 100, f"waste, {name}", "% of backed"),
            load.record(seen[:, 2] / MIB, f"backed, {name}", "MiB"),
            load.record(seen[:, 1] * 100, f"waste that cannot be taken back, {name}", "% of needed"),
        ]
    return records


def batch_records(load: Load, budget: int) -> tuple[Any, list[Record]]:
    """(batch sizes, records) of a server that admits every request that fits into the budget."""
    mean = float((load.trace.prompt + load.trace.output / 2).mean())
    slots = min(2048, int(4 * budget / (mean * load.model.row_bytes() * 2 * load.layers)) + 8)
    found = []
    with (
        load.session.progress(f"largest batch, pages of {load.page_size >> 10} KiB", len(load.trace)) as advance,
        load.cache(slots, budget) as cache,
    ):
        server = Server(cache, load.trace)
        while server.queue:  # the batch shrinks once all requests have been admitted
            server.admit()
            server.decode()
            found.append(server.active)
            advance(server.retire())
            if not server.active and not server.admit():
                raise ValueError(f"the budget of {budget} bytes is too small for request {server.queue[-1]}")
    sizes, name = np.array(found), f"{load.shape}, {budget // MIB} MiB"
    return sizes, [
        load.record(sizes.max(), f"largest batch, {name}", "requests", _paper_batch(load.model.name, load.page_size)),
        load.record(sizes, f"batch, {name}", "requests"),
        load.record(server.preempted, f"preemptions, {name}", "count"),
    ]


@benchmark("fragmentation", "memory that pages waste, and the batches that fit", arguments=arguments,
           order=50)  # fmt: skip
def run(session: Session) -> list[Record]:
    """Table 8, the waste of a running batch, and the largest batch, by page size."""
    args = session.args
    model = MODELS[args.model]
    trace = read_trace(args.trace) if args.trace else synthetic_trace(2000)
    limit = args.requests or (600 if session.quick else 4000)
    trace = trace.head(min(limit, len(trace)))
    records = []
    with session.context() as context:
        gpu = "gpu" in context.info().capabilities
        # All layers grow alike: a part of them wastes as much of its memory, and a part of the budget holds as many.
        layers = args.kv_layers or ((4 if session.quick else model.layers) if gpu else 1)
        budget = (args.kv_budget or 1024 * min(layers, 32)) * MIB
        records += run_table_8(session, context, session.page_sizes(context))
        places = [(context, size) for size in session.page_sizes(context)]
        beside = None
        if gpu and context.backend != "cuda" and not args.page_size and not session.quick:
            try:
                beside = session.context("cuda")  # CUDA's own calls, at 2 MiB
            except VmemError:
                beside = None
        places += [(beside, 2 * MIB)] if beside else []
        shape = f"{args.model}, {layers} layer{'s' * (layers > 1)}" if layers != model.layers else args.model
        batches = {}
        for where, page_size in places:
            load = Load(session, where, page_size=page_size, model=model, layers=layers, trace=trace, shape=shape)
            records += waste_records(load)
            batches[where.backend, page_size], found = batch_records(load, budget)
            records += found
        large = batches.get((context.backend, 2 * MIB))
        if large is not None:
            for (backend, page_size), sizes in batches.items():
                of_large, metric = sizes.max() / large.max(), "largest batch / that of 2 MiB pages"
                records.append(session.record(of_large, context, metric, "x", page_size=page_size, backend=backend))
        if beside:
            beside.close()
    return records


# Section 6.4.4 of the paper; its dynamic trace (OpenChat, 7 requests a second) on other GPUs.
PAPER_BATCH = {"Yi-6B": (240, 187), "Llama-3-8B": (258, 203), "Yi-34B": (68, 56)}


def _paper_batch(model: str, page_size: int) -> float | None:
    small, large = PAPER_BATCH[model]
    return {64 * KIB: small, 2 * MIB: large}.get(page_size)
