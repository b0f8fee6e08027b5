"""transformers' ``generate()`` with VMemCache beside transformers' own caches: time and memory.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import sys
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import ROOT, some_of
from benchmarks.registry import benchmark
from benchmarks.shapes import SHAPES
from pyvmem.tools import argtypes

if TYPE_CHECKING:
    from benchmarks.records import Record, Samples
    from benchmarks.session import Session
    from pyvmem.core import Context

GIB = 1 << 30
CHUNK = 1024  # tokens of a long prompt that are computed at a time
# Name: (attention, kind of cache, decode steps as CUDA graphs, cuDNN's attention allowed).
CACHES = {
    "vmem": ("vmem", "VMemCache", False, True),
    "vmem-graphs": ("vmem", "VMemCache", True, True),
    "vmem-sdpa": ("sdpa", "VMemCache", False, True),
    "dynamic": ("sdpa", "DynamicCache", False, True),
    "dynamic-nocudnn": ("sdpa", "DynamicCache", False, False),
    "static": ("sdpa", "StaticCache", False, True),
    "static-nocudnn": ("sdpa", "StaticCache", False, False),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    add, whole = parser.add_argument_group("generate").add_argument, argtypes.whole
    add("--batch", type=whole(1), metavar="N", help="sequences (8; 2 on a CPU)")
    add("--prompt", type=whole(2), metavar="N", help="tokens of each prompt (8192; 64 on a CPU)")
    add("--new", type=whole(3), metavar="N", help="tokens to generate (48; 4 on a CPU)")
    add("--caches", type=some_of(CACHES), default=list(CACHES), metavar="LIST", help=f"some of {','.join(CACHES)}")
    add("--repeats", type=whole(1), default=3, metavar="N", help="runs of each cache, in turns (3)")


SMALL = dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=2)  # fmt: skip


def llama(device: Any, **shape: Any) -> Any:
    """A Llama model of this shape in bf16 with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **shape, max_position_embeddings=131072, pad_token_id=0, bos_token_id=1, eos_token_id=None, dtype=torch.bfloat16
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


class _Clock:
    """A stopping criterion that never stops, but records when each token was ready."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._wait = wait

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        self._wait()
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Bench:
    """Runs of ``generate()`` on one model."""

    def __init__(self, session: Session, context: Context) -> None:
        import torch

        import pyvmem.transformers  # noqa: F401  registers the attention

        self.session = session
        self.gpu = "gpu" in context.info().capabilities
        self.backend, self.size, self.brief = context.backend, (0, 0, 0), (128, 32) if self.gpu else (16, 4)
        self.device = torch.device("cuda", session.args.device) if self.gpu else torch.device("cpu")
        self.model = llama(self.device, **(SHAPES["llama-3-8b"] if self.gpu else SMALL))
        self.weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        takes = inspect.signature(self.model.forward).parameters
        self.named = "cache" if "cache" in takes else "past_key_values"  # renamed in transformers 5.24

    def wait(self) -> None:
        import torch

        if self.gpu:
            torch.cuda.synchronize(self.device)

    def cache(self, kind: str, batch: int, tokens: int) -> Any:
        from transformers import DynamicCache, StaticCache

        from pyvmem.transformers import VMemCache

        if kind == "VMemCache":
            return VMemCache(self.model, tokens, backend=self.backend, slots=batch, name=None)
        if kind == "DynamicCache":
            return DynamicCache(config=self.model.config)
        return StaticCache(config=self.model.config, max_cache_len=tokens)

    def run(
        self, name: str, batch: int, prompt: int, new: int, chunk: int, seed: int = 0
    ) -> tuple[float, Any, int, int]:
        """(seconds of prefill, seconds of each decode step, peak bytes besides the weights, bytes of pages)."""
        import torch
        from transformers import StoppingCriteriaList

        sys.path.append(str(ROOT / "examples"))
        from decode_graphs import DecodeGraphs

        attention, kind, graphs, cudnn = CACHES[name]
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        self.model.set_attn_implementation(attention)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, 250, (batch, prompt), generator=generator).to(self.device)
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        cache, clock = self.cache(kind, batch, prompt + new), _Clock(self.wait)
        options = {"prefill_chunk_size": chunk} if 0 < chunk < prompt else {}
        self.wait()
        start = perf_counter()
        with DecodeGraphs(self.model) if graphs else contextlib.nullcontext():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]), disable_compile=True, **{self.named: cache}, **options,
            )  # fmt: skip
        pages = 0
        if kind == "VMemCache":
            stats = cache.kv.stats()
            pages = stats.held_pages * stats.page_size
        del cache  # as a loop over prompts does: not closed
        most = torch.cuda.max_memory_allocated(self.device) - self.weights if self.gpu else 0
        steps = np.diff(clock.times)
        return clock.times[0] - start, steps, most + pages, pages


def _records(session: Session, context: Context, bench: Bench, long: Any, short: Any) -> list[Record]:
    """Records of the runs so far: {name: results of `Bench.run`} for long and for short prompts."""
    records = []
    batch, prompt, new = bench.size

    def note(samples: Samples, name: str, metric: str, unit: str) -> None:
        attention, kind, graphs, cudnn = CACHES[name]
        backend = f"{context.backend if kind == 'VMemCache' else kind}, {attention}"
        backend += ", graphs" * graphs + ", no cuDNN" * (not cudnn)
        records.append(session.record(samples, context, metric, unit, backend=backend))

    for runs_of, (tokens, few) in ((long, (prompt, new)), (short, bench.brief)):
        text = f"{batch} x {tokens} tokens"
        for name, runs in runs_of.items():
            if not runs:
                continue
            note([1e3 * r[0] for r in runs], name, f"prefill, {text}", "ms")
            note(np.concatenate([1e3 * r[1][1:] for r in runs]), name, f"decode step, {text}", "ms")
            if runs_of is short:
                note([1e3 * (r[0] + r[1].sum()) for r in runs], name, f"{text} and {few} new ones", "ms")
            if bench.gpu:
                note([r[2] / GIB for r in runs], name, f"most memory beside the weights, {text}", "GiB")
            if runs[0][3]:
                note([r[3] / GIB for r in runs], name, f"of it pages, {text}", "GiB")
    config = bench.model.config
    row = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    metric = f"rows of keys and values, {batch} x {prompt} tokens"
    records.append(session.record(batch * (prompt + new - 1) * row / GIB, context, metric, "GiB", backend="needed"))
    return records


@benchmark("generate", "transformers' generate() with VMemCache, DynamicCache and StaticCache", arguments=arguments)
def run(session: Session) -> list[Record]:
    """A batch of long prompts, then of short ones, with each cache in turns."""
    try:
        import transformers
    except ImportError:
        raise ModuleNotFoundError(
            "generate needs transformers: pip install transformers", name="transformers"
        ) from None
    import torch

    transformers.logging.set_verbosity_error()
    args = session.args
    with session.context() as context, torch.no_grad():
        bench = Bench(session, context)
        batch = args.batch or (8 if bench.gpu else 2)
        prompt = args.prompt or (8192 if bench.gpu else 64)
        new = args.new or (48 if bench.gpu else 4)
        brief, few = bench.brief
        bench.size = batch, prompt, new
        repeats = 1 if session.quick else args.repeats
        if not bench.gpu:  # no cuDNN and no CUDA graphs
            args.caches = [name for name in args.caches if name != "vmem-graphs" and not name.endswith("-nocudnn")]
        allowed = torch.backends.cuda.cudnn_sdp_enabled()
        long: dict[str, list[Any]] = {name: [] for name in args.caches}
        short: dict[str, list[Any]] = {name: [] for name in args.caches}
        for name in args.caches:  # a first call compiles and plans
            bench.run(name, batch, brief, 4, 0)
        order = [name for i in range(repeats) for name in args.caches[:: 1 if i % 2 == 0 else -1]]
        for name in session.track(order, "long prompts"):
            long[name].append(bench.run(name, batch, prompt, new, CHUNK))
            session.keep(_records(session, context, bench, long, short))
        for name in session.track(2 * order, "short prompts"):
            short[name].append(bench.run(name, batch, brief, few, 0))
            session.keep(_records(session, context, bench, long, short))
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        return _records(session, context, bench, long, short)
