"""Attention over virtual tensors, over cudaMalloc's memory, and with paged kernels: the paper's evaluation.

Every figure and table of the vAttention paper that times attention has its grid here. The benchmark times the attention
of one layer (32 query and 8 KV heads of 128 in bfloat16, unless a table names a model) with CUDA graphs, in turns.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import some_of
from benchmarks.kv_load import MODELS
from benchmarks.registry import benchmark
from pyvmem.tools import argtypes
from pyvmem.tools.argtypes import size_text

if TYPE_CHECKING:
    from benchmarks.attention_runs import Point, Pool
    from benchmarks.records import Record
    from benchmarks.session import Session
    from pyvmem.core import Context


KIB = 1024
SPLITS = (0, 1, 2, 4, 8)
BLOCKS = (16, 32, 64, 128, 256)

FIGURES = {
    2: "prefill: paged over unpaged kernels of the same library",
    3: "decode: paged kernels by block size",
    4: "decode: tokens per second by batch size at 1K tokens",
    6: "prefill: tokens per second by context length",
    7: "decode: tokens per second by batch size at 16K tokens",
    11: "decode and prefill: pages of 64 KiB and 2 MiB, and cudaMalloc",
}
TABLES = {
    5: "prefill: attention of all layers at 64K to 192K tokens, three models",
    6: "decode: attention of all layers at 16K tokens, three models",
    9: "decode: FlashAttention paged with blocks of 16 and 256",
}
WORKERS = {"Yi-6B": 1, "Llama-3-8B": 2, "Yi-34B": 2}

# The paper's seconds of prefill attention (Table 5) and milliseconds of decode attention (Table 6), on A100s.
PAPER_5 = {
    "Yi-6B": {64: (7.0, 5.5, 6.0), 128: (30.3, 23.1, 25.4), 192: (70.0, 53.6, 58.3)},
    "Llama-3-8B": {64: (3.4, 2.7, 3.0), 128: (15.4, 11.6, 12.8), 192: (35.6, 26.9, 29.7)},
    "Yi-34B": {64: (13.2, 10.3, 11.2), 128: (56.9, 43.2, 46.7), 192: (131.8, 98.8, 104.7)},
}  # FA_Paged, FA_vAttention, FI_Paged
PAPER_6 = {
    "Yi-6B": {16: (11.5, 11.3, 15.2), 32: (25.5, 25.3, 25.4)},
    "Llama-3-8B": {16: (11.9, 11.8, 12.1), 32: (25.4, 25.3, 23.23)},
    "Yi-34B": {12: (17.4, 17.4, 24.1), 16: (21.7, 21.8, 28.8)},
}
COLUMNS = ("fa3 paged", "fa3 contiguous", "flashinfer paged")  # our columns beside the paper's


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("attention")
    for what, known in (("figure", FIGURES), ("table", TABLES)):
        names = "; ".join(f"{n}: {text}" for n, text in known.items())
        text = f"only these {what}s of the paper ({names})"
        group.add_argument(f"--{what}", type=some_of(known), metavar="N,N", help=text)
    text = "build of FlashAttention-3: the package fa3-fwd, or vLLM's, which also has paged kernels (fa3-fwd)"
    group.add_argument("--fa3", choices=("fa3-fwd", "vllm"), default="fa3-fwd", help=text)
    text = "stop before the next point after S seconds; the cheapest points come first"
    group.add_argument("--stop-after", type=argtypes.seconds, metavar="S", help=text)
    text = "bytes of K per kind of memory (4G; 256M if quick)"
    group.add_argument("--pool", type=argtypes.size, metavar="SIZE", help=text)
    text = "duration of a point's turns (0.3)"
    group.add_argument("--seconds", type=argtypes.seconds, default=0.3, metavar="S", help=text)


# ---- the grid -------------------------------------------------------------------------------------------------------


def grid(figures: Any, tables: Any, quick: bool) -> Any:
    """{point: set of the kinds of runs wanted there}; kinds: see `runs_at`."""
    from benchmarks.attention_runs import Point

    points: dict[Point, set[str]] = {}

    def want(phase: str, batch: Any, tokens: Any, kinds: Any, heads: Any = (32, 8)) -> None:
        points.setdefault(Point(phase, batch, tokens, *heads), set()).update(kinds)

    base = {"memories", "paged"}
    if quick:
        sizes, prompts = [(1, 1), (32, 1), (8, 8), (1, 32)], [1, 8]
    else:
        sizes = [(1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (128, 2), (1, 4), (8, 4), (64, 4), (1, 8), (8, 8),
                 (32, 8), (128, 8), (16, 16), (1, 32), (8, 32), (32, 32), (1, 64), (16, 64), (1, 128), (8, 128),
                 (1, 192), (4, 192)]  # fmt: skip
        prompts = [1, 2, 4, 8, 16, 32, 64, 128, 192]
    if 11 in figures:
        for batch, k in sizes:
            want("decode", batch, k * KIB, base | {"others"})
    if 4 in figures:
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            want("decode", batch, KIB, {"memories"})
    if 7 in figures:
        for batch in (1, 2, 4, 8, 16, 32, 64):
            want("decode", batch, 16 * KIB, base)
    if 3 in figures:
        for batch, k in (4, 8), (1, 16), (8, 16), (32, 16):
            want("decode", batch, k * KIB, {"memories", "blocks"})
    if 9 in tables:
        for batch in (1, 2, 4):
            want("decode", batch, 16 * KIB, base)
    if {2, 6, 11} & set(figures):
        for k in prompts:
            want("prefill", 1, k * KIB, base | {"others"})
    for name, workers in WORKERS.items():
        model = MODELS[name]
        heads = model.query_heads // workers, model.kv_heads // workers
        if 5 in tables:
            for k in PAPER_5[name]:
                want("prefill", 1, k * KIB, {"table"}, heads)
        if 6 in tables:
            for batch in PAPER_6[name]:
                want("decode", batch, 16 * KIB, {"table"}, heads)
    return points


def runs_at(point: Point, kinds: Any, pools: Any, have: Any) -> Any:
    """{(name, backend, page size): run} of the kinds wanted at a point, as far as installed."""
    from benchmarks import attention_runs as r

    decode = point.phase == "decode"
    splits = SPLITS if decode else (0,)
    plain, best = pools[-1], pools[0]
    runs = {}

    def add(run: Any) -> None:
        runs[run.name, run.pool.name] = run

    first = have["contiguous"][0]
    for pool in pools if "memories" in kinds else [best]:
        add(r.Contiguous(first, point, pool, splits if first == "fa3" else (0,)))
    if decode and have["triton"] and first != "triton":  # what `best` chooses at most points
        for pool in (best, plain) if "memories" in kinds else (best,):
            add(r.Contiguous("triton", point, pool))
    if first == "fa3" and decode and "others" in kinds:
        add(r.Contiguous(first, point, best, splits, wide=True))
    if "others" in kinds and (decode or point.tokens <= 64 * KIB):  # beyond, a second or more each
        for name in have["contiguous"][1:]:
            if not (decode and name == "triton"):
                add(r.Contiguous(name, point, best))
        if have["flashinfer"] and not decode:
            add(r.FlashInferPaged(point, plain, 16, backend="fa2"))
    if "others" in kinds and have["flashinfer"] and not decode:
        add(r.FlashInferRagged(point, best))
    blocks = BLOCKS if "blocks" in kinds else (16, 256) if kinds & {"paged", "table"} else ()
    for block in blocks:
        if have["fa3 paged"] and (block == 256 or kinds & {"paged", "blocks"}):
            add(r.FA3Paged(point, plain, block, splits))
        if have["flashinfer"] and (block == 16 or "blocks" in kinds):
            add(r.FlashInferPaged(point, plain, block))
        if have["triton"] and decode and ("blocks" in kinds or block == 16):
            add(r.TritonPaged(point, plain, block, splits))
    return runs


def installed(device: Any) -> Any:
    """The libraries and memories that this machine can measure."""
    from pyvmem.attention import fa3

    if device.type == "cpu":
        return {"contiguous": ["sdpa"], "flashinfer": False, "fa3 paged": False, "triton": False}
    there = fa3.build()
    have: dict[str, Any] = {name: importlib.util.find_spec(name) is not None for name in ("triton", "flashinfer")}
    kernels = {"fa3": there is not None, "triton": have["triton"]}
    have["contiguous"] = [name for name, here in kernels.items() if here] or ["sdpa"]
    have["fa3 paged"] = there is not None and "PAGEDKV" not in there.disabled
    build = there.name if there else "not installed"
    print(f"attention: FlashAttention-3 is {build}; paged: {have['fa3 paged']}; FlashInfer: {have['flashinfer']}",
          flush=True)  # fmt: skip
    return have


def hbm(pool: Pool, repeats: int = 20) -> Any:
    """Bytes per microsecond that a streaming kernel reads from cudaMalloc's memory."""
    import torch

    from benchmarks.triton_stream import stream

    x = pool.k.view(torch.float32)[: 1 << 28]
    out = torch.empty(len(x) // 4096, device=x.device)
    rates = np.zeros(repeats)
    for i in range(-1, repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream[(len(x) // 4096,)](x, out, BLOCK=4096)  # not timed; keeps the GPU busy while the next is launched
        start.record()
        for _ in range(4):
            stream[(len(x) // 4096,)](x, out, BLOCK=4096)
        end.record()
        end.synchronize()
        if i >= 0:
            rates[i] = 4 * x.nbytes / start.elapsed_time(end) / 1e3
    return rates


# ---- running --------------------------------------------------------------------------------------------------------


@benchmark(
    "attention", "attention on virtual tensors, on cudaMalloc's memory, and paged", arguments=arguments, order=50
)
def run(session: Session) -> list[Record]:
    """All figures and tables, or the selected ones."""
    import torch

    from benchmarks.attention_runs import Point, Pool, measure, prepare

    args = session.args
    figures, tables = args.figure, args.table
    if figures is None and tables is None:
        figures, tables = ([11], []) if session.quick else (list(FIGURES), list(TABLES))
    figures, tables = figures or [], tables or []
    if args.fa3 == "vllm":  # its build of FlashAttention-3, without the rest of vLLM's start
        try:
            importlib.import_module("vllm.vllm_flash_attn")
        except ImportError as error:
            raise ValueError(f"--fa3 vllm: {error}") from None
    records = []
    with session.context() as context:
        gpu = "gpu" in context.info().capabilities
        device = torch.device("cuda", context.info().device) if gpu else torch.device("cpu")
        quick = session.quick or not gpu
        # On a CPU, only the kinds of memory, at sizes that it can do.
        points = grid(figures, tables, quick) if gpu else {
            Point("decode", 1, KIB, 32, 8): {"memories"}, Point("prefill", 1, 128, 32, 8): {"memories"}}  # fmt: skip
        have = installed(device)
        most = max((p.bytes // 4 for p in points), default=0)
        elements = max(most, (args.pool or ((256 << 20 if quick else 4 << 30) if gpu else 8 << 20)) // 2)
        sizes = session.page_sizes(context)
        kinds: dict[str, Any] = {size_text(size): (context, size) for size in (sizes[0], sizes[-1])}
        kinds["cudaMalloc" if gpu else "malloc"] = ()
        pools = [Pool(name, elements, device, *rest) for name, rest in kinds.items()]
        try:
            records += _points(session, context, points, pools=pools, have=have, measure=measure, gpu=gpu)
            for batch, tokens in ((32, 8 * KIB), (256, 2 * KIB))[: 1 + gpu]:
                for how, samples in prepare(batch, tokens, 16, device, 20 if quick else 100).items():
                    records.append(session.record(samples, context, f"prepare B={batch} L={tokens}, {how}", "us"))
        finally:
            for pool in pools:
                pool.close()
    return records


def _ratios(session: Session, context: Context, point: Point, found: Any) -> list[Record]:
    """Ratios per turn: virtual over cudaMalloc's memory, and the best contiguous over the best paged kernel."""
    records = []
    samples = {key: value for key, (value, _) in found.items()}
    for (name, memory), value in samples.items():
        plain = samples.get((name, "cudaMalloc"), samples.get((name, "malloc")))
        size = next((s for s in context.page_sizes if size_text(s) == memory), None)
        if size and plain is not None:
            metric = f"{point}, {name}, of the same on plain memory"
            records.append(session.record(value / plain, context, metric, "ratio", page_size=size))
    smallest = size_text(min(context.page_sizes))
    ours = {key: v for key, v in samples.items() if key[0].endswith(" contiguous") and key[1] == smallest}
    paged = {key: v for key, v in samples.items() if " paged " in key[0]}
    if ours and paged:
        best, other = (min(group, key=lambda key: np.median(group[key])) for group in (ours, paged))
        metric = f"{point}, {best[0]}, of the best paged ({other[0]})"
        size = min(context.page_sizes)
        records.append(session.record(samples[best] / samples[other], context, metric, "ratio", page_size=size))
    return records


def _table(session: Session, context: Context, point: Point, found: Any) -> list[Record]:
    """Records of the paper's Tables 5 and 6 at a point: one layer's time, multiplied by the model's layers."""
    records = []
    for name, workers in WORKERS.items():
        model = MODELS[name]
        if (model.query_heads // workers, model.kv_heads // workers) != (point.query_heads, point.kv_heads):
            continue
        if point.phase == "prefill":
            number, paper, unit, scale = 5, PAPER_5[name].get(point.tokens // KIB), "s", 1e-6
        else:
            number, paper, unit, scale = 6, PAPER_6[name].get(point.batch), "ms", 1e-3
        if paper is None or (point.phase == "decode" and point.tokens != 16 * KIB):
            continue
        for column, value in zip(COLUMNS, paper):
            mine = {key: v for key, (v, _) in found.items() if key[0].startswith(column) and key[1] in
                    (size_text(min(context.page_sizes)), "cudaMalloc")}  # fmt: skip
            if column == "fa3 contiguous":
                mine = {key: v for key, v in mine.items() if key[1] != "cudaMalloc"}
            if mine:
                best = min(mine, key=lambda key: np.median(mine[key]))
                metric = f"Table {number}, {name}, {workers} GPU{'s' * (workers > 1)}, {point}, {best[0]}, all layers"
                where = {} if column == "fa3 contiguous" else {"backend": "cudaMalloc"}
                size = min(context.page_sizes) if column == "fa3 contiguous" else None
                records.append(session.record(mine[best] * model.layers * scale, context, metric, unit, page_size=size,
                                              paper=value, **where))  # fmt: skip
    return records


def _points(session: Session, context: Context, points: Any, pools: Any, have: Any, measure: Any, gpu: bool) -> Any:
    records, checked = [], set()
    rate = None
    if gpu and have["triton"]:
        rates = hbm(pools[-1])
        rate = float(np.median(rates))
        records.append(session.record(rates * 1e-3, context, "HBM read", "GB/s", backend="cudaMalloc"))
    order = sorted(points, key=lambda p: (p.phase, points[p] == {"table"}, p.batch * p.tokens))
    begin = monotonic()
    for number, point in enumerate(session.track(order, "attention")):
        if session.args.stop_after is not None and monotonic() - begin > session.args.stop_after:
            print(f"attention: stopped after {number} of {len(order)} points; next {point}", flush=True)
            break
        runs = runs_at(point, points[point], pools, have)
        for (name, _), one in runs.items():  # each kind of call is checked once, at a small point
            if (name, point.phase) not in checked and point.batch * point.tokens <= 32 * KIB:
                if point.phase == "decode" or point.tokens <= 2 * KIB:
                    one.check()
                    checked.add((name, point.phase))
        found = measure(runs, seconds=session.args.seconds)
        for (name, memory), (samples, split) in found.items():
            size = next((s for s in context.page_sizes if size_text(s) == memory), None)
            where = {"page_size": size} if size else {"backend": memory}
            records.append(session.record(samples, context, f"{point}, {name}", "us", **where))
            if len(runs[name, memory].splits) > 1:
                metric = f"{point}, {name}, splits"
                records.append(session.record(split, context, metric, "count", **where))
        if rate and point.phase == "decode":
            metric = f"{point}, HBM limit"
            records.append(session.record(point.bytes / rate, context, metric, "us", backend="cudaMalloc"))
        records += _ratios(session, context, point, found)
        records += _table(session, context, point, found)
        session.keep(records)
        del runs, one
    return records
