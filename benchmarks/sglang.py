"""SGLang and SGLang on vMem in turns: engines in separate processes with the same settings and random weights.

    python -m benchmarks.sglang --azure azure_llm_2023_conv.csv --json sglang.json

All engines stay up, and each workload runs on one after the other, so that changes of the machine over time affect all.
Prompts are token numbers, decoding is greedy, and the cache is flushed before each turn. Every turn is a line of the
output and an entry of the JSON file. Workloads: ``azure`` (conversations of a trace, all at once), ``decode`` (32
requests of 6,000 tokens: milliseconds of a decode step), ``rate`` (requests that arrive at a rate) and ``idle`` (what
an idle engine holds, and what it caches).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import Child
from benchmarks.vllm_engine import SHAPES, model_name, write_config
from pyvmem.bench import argtypes
from pyvmem.bench.traces import read_trace

ENGINES = {
    "SGLang": dict(VMEM_SGLANG="0"),
    "on vMem": dict(VMEM_SGLANG="1", VMEM_SGLANG_LAYOUT="layers"),
    "on vMem, by tokens": dict(VMEM_SGLANG="1", VMEM_SGLANG_LAYOUT="tokens"),
}
DECODE, DECODE_PROMPT, DECODE_TOKENS = 32, 6000, 200
Job = tuple[float, list[int], int]  # seconds after the start, prompt, tokens to make


def workloads(args: argparse.Namespace) -> Iterator[tuple[str, list[Job]]]:
    """(name, jobs) of the workloads that were chosen."""
    rng = random.Random(args.seed)

    def prompt(n: int) -> list[int]:
        return [rng.randrange(100, 30000) for _ in range(n)]

    if args.azure:
        trace = read_trace(args.azure)
        fit = [(int(p), int(n)) for p, n in zip(trace.prompt, trace.output) if p + n < args.max_len]
        yield f"azure {args.requests}", [(0.0, prompt(p), n) for p, n in fit[: args.requests]]
    decode = min(DECODE_PROMPT, args.max_len - DECODE_TOKENS - 8)
    yield f"decode {DECODE} x {decode}", [(0.0, prompt(decode), DECODE_TOKENS) for _ in range(DECODE)]
    at, jobs = 0.0, []
    for _ in range(args.requests):
        jobs.append((at, prompt(rng.randrange(64, 1024)), rng.randrange(16, 256)))
        at += rng.expovariate(args.rate)
    yield f"rate {args.rate:g}", jobs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = argtypes.whole(1)
    parser.add_argument(
        "--model", type=model_name, default="llama-3-8b", metavar="SHAPE[:LAYERS]", help=", ".join(SHAPES)
    )
    parser.add_argument("--engine", action="append", choices=ENGINES, help="repeat for more (default: all)")
    parser.add_argument("--azure", type=argtypes.input_file, metavar="FILE", help="the Azure conversation trace")
    parser.add_argument("--requests", type=whole, default=512, metavar="N", help="of azure and rate (512)")
    parser.add_argument("--rate", type=argtypes.positive, default=32.0, metavar="N", help="requests a second (32)")
    parser.add_argument("--turns", type=whole, default=3, metavar="N", help="of each engine and workload (3)")
    parser.add_argument("--kv-tokens", type=whole, default=131072, metavar="N", help="KV memory of each (131072)")
    parser.add_argument("--max-len", type=whole, default=8192, metavar="N", help="greatest length of a request (8192)")
    parser.add_argument("--page-size", type=whole, default=64, metavar="N", help="as in SGLang (64)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="another of sgl.Engine's")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=argtypes.output_file, metavar="FILE", help="write every turn")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Start the engines, and run each workload on one after the other."""
    options: dict[str, Any] = dict(load_format="dummy", page_size=args.page_size, max_total_tokens=args.kv_tokens,
                                   context_length=args.max_len, random_seed=1, log_level="warning",
                                   mem_fraction_static=0.9)  # fmt: skip
    for option in args.option:
        name, _, value = option.partition("=")
        options[name] = json.loads(value)
    turns: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, args.model, 131072)
        engines = {
            name: Child("benchmarks.sglang_engine", [folder, options], ENGINES[name]) for name in args.engine or ENGINES
        }
        for engine in engines.values():
            engine.answer()
        for name, jobs in workloads(args):
            own: list[list[int]] | None = None
            # Compiles and warms up; the others do so in their first turn, which is left out.
            next(iter(engines.values())).ask(jobs[:16])
            for turn in range(args.turns + 1):
                for which, engine in engines.items():
                    told = engine.ask(jobs)
                    tokens = told.pop("tokens")
                    own = own or tokens
                    told.update(turn=turn, engine=which, workload=name, requests=len(jobs),
                                equal=sum(a == b for a, b in zip(own, tokens)), **engine.ask([]))  # fmt: skip
                    turns.append(told)
                    print(json.dumps(told), flush=True)
                    if args.json:
                        Path(args.json).write_text(json.dumps(turns, indent=1))
            _summary(name, [t for t in turns if t["workload"] == name and t["turn"]])
        for engine in engines.values():
            engine.close()


def _summary(name: str, turns: list[dict[str, Any]]) -> None:
    """The medians of each engine beside those of the first."""
    first = turns[0]["engine"]
    keys = ("tokens_per_second", "step_ms", "ttft_p50", "ttft_p99")
    medians = {
        engine: {k: statistics.median(t[k] or 0 for t in turns if t["engine"] == engine) for k in keys}
        for engine in dict.fromkeys(t["engine"] for t in turns)
    }
    for engine, found in medians.items():
        beside = ", ".join(f"{k} {v:.4g} ({v / (medians[first][k] or 1):.3f}x)" for k, v in found.items() if v)
        print(f"== {name}: {engine}: {beside}", flush=True)


if __name__ == "__main__":
    main(parse())
