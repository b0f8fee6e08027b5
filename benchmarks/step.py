"""The cost of a step to the server: decode with and without a background thread, and prefill by allocation strategy.

On a GPU, the attention of every layer runs meanwhile (Triton's kernel over the cache), and the step for an iteration
is called while the previous iteration is still running. On the host, a pause takes the place of attention. Figures 9
and 10 of the vAttention paper are the same two experiments.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks import native
from benchmarks.kv_load import MODELS, Attention, Server, memory_for, model_options
from benchmarks.registry import benchmark
from benchmarks.traces import Trace
from pyvmem._ffi import ffi
from pyvmem.core import MIB
from pyvmem.errors import VmemError
from pyvmem.tools import argtypes

if TYPE_CHECKING:
    from benchmarks.kv_load import Model
    from benchmarks.records import Record, Samples
    from benchmarks.session import Session
    from pyvmem.core import Context
    from pyvmem.kv.cache import KVCache


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("step")
    model_options(group, "requests in a decode batch (256)")
    group.add_argument("--iterations", type=argtypes.whole(1), metavar="N", help="decode iterations (5000)")
    group.add_argument(
        "--pause-us",
        type=argtypes.whole(0),
        default=2000,
        metavar="US",
        help="microseconds of an iteration without a GPU (2000)",
    )


@dataclass(frozen=True)
class Load:
    """A decode batch of `slots` requests, whose lengths are drawn from ranges of tokens: least, most + 1.

    generous: of the cache's `Spare`. iterations: at most; None for no limit.
    """

    name: str
    slots: int
    prompts: tuple[int, int]
    output: tuple[int, int]
    generous: bool = True
    iterations: int | None = None


class Decode(Server):
    """A full batch in decode. Requests that reach their length are replaced outside the measured steps."""

    def __init__(self, cache: KVCache, attention: Any, load: Load, iterations: int, pause_us: float) -> None:
        rng = np.random.default_rng(1)
        n = load.slots * (2 + iterations // load.output[0])
        super().__init__(cache, Trace(load.name, rng.integers(*load.prompts, n), rng.integers(*load.output, n)))
        self.attention = attention
        self.pause = pause_us / 1e6
        self.prefill_pages = 0  # pages mapped by steps that are not measured
        self.fill()
        # Requests start at random progress.
        self.goal -= rng.integers(0, np.maximum(self.goal - self.lengths, 1))
        cache.wait()

    def fill(self) -> None:
        """Replace the requests that have ended, so that the batch is full."""
        if (self.lengths < self.goal).all():
            return
        if self.attention:
            self.attention.wait(everything=True)
        self.retire()
        mapped = self.cache.stats().step_mapped_pages
        for slot in self.admit():
            if self.attention:
                self.attention.prefill(slot, int(self.lengths[slot]))
        self.prefill_pages += self.cache.stats().step_mapped_pages - mapped
        if self.active < self.cache.slots:
            raise MemoryError(f"no memory for a batch of {self.cache.slots}: {self.cache.shortage}")

    def run(self, iterations: int, advance: Callable[[int], object] = lambda n: None) -> Any:
        """(nanoseconds of each decode step, nanoseconds from step to step)."""
        steps, whole = np.zeros(iterations, np.int64), np.zeros(iterations, np.int64)
        gc.collect()
        gc.disable()  # collection pauses are not part of a step
        try:
            for i in range(iterations):
                self.fill()
                begin = perf_counter_ns()
                self.lengths += 1
                if self.attention:
                    self.attention.wait()
                start = perf_counter_ns()
                ready = self.cache.step(self.lengths)
                steps[i] = perf_counter_ns() - start
                if not ready:
                    raise MemoryError(f"{self.cache.shortage.missing_pages} pages are missing in iteration {i}")
                if self.attention:
                    self.attention.run(self.lengths)
                else:
                    time.sleep(self.pause)
                whole[i] = perf_counter_ns() - begin
                advance(1)
            if self.attention:
                self.attention.wait(everything=True)
        finally:
            gc.enable()
        return steps, whole


def decode(
    session: Session,
    context: Context,
    model: Model,
    layers: int,
    page_size: int,
    load: Load,
    iterations: int,
    name: str,
    *,
    overlap: bool,
) -> list[Record]:
    """Records of one decode run."""
    from pyvmem.kv.cache import KVCache, Spare

    gpu = "gpu" in context.info().capabilities
    longest = -(-(load.prompts[1] + load.output[1]) // 1024) * 1024
    need = load.slots * (longest * model.row_bytes() + 4 * MIB) * 2 * layers
    budget = min(memory_for(context, 0.85), need)
    records = []
    with KVCache.for_model(
        layers, model.kv_heads, model.head_dim, slots=load.slots, max_tokens=longest,
        budget=budget, context=context, page_size=page_size, lazy=not gpu, name=None,
        spare=Spare(overlap=overlap, generous=load.generous),
    ) as cache:  # fmt: skip
        attention = Attention(cache, model) if gpu else None
        run = Decode(cache, attention, load, iterations, session.args.pause_us)
        before, prefill_before = cache.stats(), run.prefill_pages
        with session.progress(name, iterations) as advance:
            steps, whole = run.run(iterations, advance)
        after = cache.stats()
        inside = after.step_mapped_pages - before.step_mapped_pages - (run.prefill_pages - prefill_before)
        native = native_step(cache, run.lengths)
        python = python_step(cache, run.lengths)
        del attention, run.attention

    def add(metric: str, unit: str, samples: Samples) -> None:
        records.append(session.record(samples, context, f"{metric}, {name}", unit, page_size=page_size))

    add("decode step", "us", steps / 1e3)
    add("longest decode step", "us", steps.max() / 1e3)
    add("decode steps over 1 ms", "count", int((steps > 1_000_000).sum()))
    add("iteration", "ms", whole / 1e6)
    add("pages mapped inside steps", "count", inside)
    add("pages mapped in the background", "count", after.ahead_mapped_pages - before.ahead_mapped_pages)
    add("step without work, native", "us", native)
    for kind, samples in python.items():
        add(f"step without work, Python, {kind}", "us", samples)
    return records


def native_step(cache: KVCache, lengths: npt.NDArray[np.int32], n: int = 2000) -> Any:
    """Microseconds of vmem_kv_step from C with everything backed already, n or a few more."""
    cache.wait()
    samples: list[Any] = []
    # No step goes beyond the current lengths, up to which the rows are backed. The first of each round only goes back.
    steps = min(int(lengths.min()) - 1, n + 1)
    while len(samples) < n:
        again = (lengths - steps).astype(np.int32)
        taken = np.zeros(steps, np.uint64)
        raw = ffi.from_buffer("int32_t[]", again)
        native.call("kv_steps", cache._use(), raw, cache.slots, steps, ffi.from_buffer("uint64_t[]", taken))
        samples += (taken[1:] / 1e3).tolist()
    return np.array(samples)


def python_step(cache: KVCache, lengths: npt.NDArray[np.int32], n: int = 2000) -> Any:
    """Microseconds of `KVCache.step` with everything backed already, by the type of the lengths."""
    import torch

    kinds = {
        "list": lengths.tolist(),
        "numpy": lengths,
        "torch": torch.from_numpy(lengths.copy()),
    }
    found = {}
    for kind, value in kinds.items():
        samples = np.zeros(n)
        for i in range(n):
            start = perf_counter_ns()
            cache.step(value)
            samples[i] = perf_counter_ns() - start
        found[kind] = samples / 1e3
    return found


def prefill(
    session: Session, context: Context, model: Model, layers: int, page_size: int, tokens: int, repeats: int
) -> list[Record]:
    """Records of the time to back one prompt, by allocation strategy (Figure 10)."""
    from pyvmem.kv.cache import KVCache, Spare

    strategies: dict[str, dict[str, Any]] = {
        "synchronous": {"spare": Spare(overlap=False, defer=False, eager=False)},
        "deferred reclamation": {"spare": Spare(overlap=False, eager=False)},
        "eager": {"spare": Spare(defer=False, eager_tokens=tokens)},
    }
    records = []
    budget = 4 * (tokens * model.row_bytes() // (2 * MIB) + 2) * 2 * MIB * 2 * layers
    budget = min(budget, memory_for(context, 0.85))
    for name, options in strategies.items():
        with KVCache.for_model(
            layers, model.kv_heads, model.head_dim, slots=4, max_tokens=tokens, budget=budget,
            context=context, page_size=page_size, name=None, **options,
        ) as cache:  # fmt: skip
            samples = []
            for i in range(repeats + 1):
                cache.wait()
                slot = cache.alloc(tokens)
                assert slot is not None
                lengths = np.zeros(4, np.int32)
                lengths[slot] = tokens
                start = perf_counter_ns()
                if not cache.step(lengths):
                    raise MemoryError(
                        f"{cache.shortage.missing_pages} pages are missing for a prompt of {tokens} tokens"
                    )
                samples.append(perf_counter_ns() - start)
                cache.free(slot)
        metric = f"prompt of {tokens} tokens backed, {layers} layer{'s' * (layers > 1)}, {name}"
        records.append(session.record(np.array(samples[1:]) / 1e6, context, metric, "ms", page_size=page_size))
    return records


@benchmark("step", "time of a KV-cache step, in decode and prefill", arguments=arguments, order=40)
def run(session: Session) -> list[Record]:
    """Decode with and without overlap, and prefill, by page size."""
    args = session.args
    model = MODELS[args.model]
    records = []
    with session.context() as context:
        gpu = "gpu" in context.info().capabilities
        layers = args.kv_layers or (model.layers if gpu else 1)
        iterations = args.iterations or (300 if session.quick else 5000)
        for page_size in session.page_sizes(context):
            try:
                times = 5 if session.quick else 20
                records += prefill(session, context, model, layers, page_size, tokens=16384, repeats=times)
            except VmemError as error:
                print(f"step: no prefill of 16384 tokens with pages of {page_size} bytes: {error}", file=sys.stderr)
        # Lengths of a conversation.
        loads = [Load(f"B={args.kv_slots}, {layers} layer{'s' * (layers > 1)}", args.kv_slots, (64, 1500), (256, 1024))]
        if not session.quick:
            # Maps ahead only what the next iteration needs, as in the paper.
            name = f"B=32, 4K-8K, {layers} layers, one page at a time"
            loads.append(Load(name, 32, (4096, 8192), (2500, 2501), generous=False, iterations=2500))
        sizes = session.page_sizes(context)
        for page_size in sizes if args.page_size else sorted({sizes[0], sizes[-1]}):
            for overlap in (True, False):
                how = "overlap" if overlap else "no overlap"
                n = iterations if overlap else max(iterations // 5, 100)  # every iteration maps pages, so fewer do
                for load in loads:
                    name = f"{load.name}, {how}"
                    most = min(n, load.iterations or n)
                    records += decode(session, context, model, layers, page_size, load=load, iterations=most,
                                      name=name, overlap=overlap)  # fmt: skip
    return records
