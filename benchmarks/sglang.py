"""SGLang and SGLang on vMem in turns: engines in separate processes with the same settings and random weights.

    python -m benchmarks.sglang --azure azure_llm_2023_conv.csv --json sglang.json

All engines stay up, and each workload runs on one after the other, so that changes of the machine over time affect all.
Prompts are token numbers, decoding is greedy, and the cache is flushed after each turn. Every turn is a line of the
output and an entry of the JSON file, with what the engine on vMem then holds and caches. Workloads: ``azure``
(conversations of a trace, all at once), ``decode`` (32 requests of 6,000 tokens: milliseconds of a decode step) and
``rate`` (requests that arrive at a rate).

The weights of all engines must fit the GPU beside the KV memory of SGLang's own and of one on vMem. Two engines of
llama-3-8b with 204,800 tokens take 82 GiB; 80 GB are enough for two of llama-3-8b:24.

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
    "on vMem": dict(VMEM_SGLANG="1"),
}
DECODE, DECODE_PROMPT, DECODE_TOKENS = 32, 6000, 200
LOADS = ("azure", "decode", "rate")
LONGEST, PAGE, RATE = 8192, 64, 32  # tokens of a request and of a page, and requests a second of the last workload
Job = tuple[float, list[int], int]  # seconds after the start, prompt, tokens to make


def workloads(args: argparse.Namespace) -> Iterator[tuple[str, list[Job]]]:
    """(name, jobs) of the workloads that were chosen."""
    rng = random.Random(0)

    def prompt(n: int) -> list[int]:
        return [rng.randrange(100, 30000) for _ in range(n)]

    if args.azure and "azure" in args.load:
        trace = read_trace(args.azure)
        fit = [(int(p), int(n)) for p, n in zip(trace.prompt, trace.output) if p + n < LONGEST]
        yield f"azure {args.requests}", [(0.0, prompt(p), n) for p, n in fit[: args.requests]]
    if "decode" in args.load:
        room = min(LONGEST - 8, args.kv_tokens // DECODE - 2 * PAGE)  # they run at the same time
        decode = min(DECODE_PROMPT, room - DECODE_TOKENS)
        yield f"decode {DECODE} x {decode}", [(0.0, prompt(decode), DECODE_TOKENS) for _ in range(DECODE)]
    if "rate" in args.load:
        at, jobs = 0.0, []
        for _ in range(args.requests):
            jobs.append((at, prompt(rng.randrange(64, 1024)), rng.randrange(16, 256)))
            at += rng.expovariate(RATE)
        yield f"rate {RATE}", jobs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, whole = parser.add_argument, argtypes.whole(1)
    add("--model", type=model_name, default="llama-3-8b", metavar="SHAPE[:LAYERS]", help=", ".join(SHAPES))
    add("--azure", type=argtypes.input_file, metavar="FILE", help="the Azure conversation trace")
    add("--load", action="append", choices=LOADS, help="a workload; may be repeated (all of them)")
    add("--requests", type=whole, default=512, metavar="N", help="of azure and rate (512)")
    add("--turns", type=whole, default=3, metavar="N", help="of each engine and workload (3)")
    add("--kv-tokens", type=whole, default=204800, metavar="N", help="KV memory of each (204800)")
    add("--json", type=argtypes.output_file, metavar="FILE", help="write every turn")
    args = parser.parse_args()
    args.load = args.load or LOADS
    if args.kv_tokens // DECODE < DECODE_TOKENS + 2 * PAGE + 16:
        parser.error("--kv-tokens is too small for the decode workload")
    return args


def _start(args: argparse.Namespace, folder: str, options: dict[str, Any]) -> dict[str, Child]:
    """The engines, by name. Those on vMem start first: SGLang measures what memory is free, and its own takes it."""
    engines: dict[str, Child] = {}
    for on_vmem in (True, False):
        begun = [name for name in ENGINES if (ENGINES[name]["VMEM_SGLANG"] == "1") is on_vmem]
        engines.update({name: Child("benchmarks.sglang_engine", [folder, options], ENGINES[name]) for name in begun})
        for name in begun:
            if (there := engines[name].answer()["kv_tokens"]) < args.kv_tokens:
                raise SystemExit(f"{name} has KV memory for {there} tokens, not {args.kv_tokens}: choose "
                                 "fewer --kv-tokens or a --model with fewer layers")  # fmt: skip
    return {name: engines[name] for name in ENGINES}


def main(args: argparse.Namespace) -> None:
    """Start the engines, and run each workload on one after the other."""
    options: dict[str, Any] = dict(load_format="dummy", page_size=PAGE, max_total_tokens=args.kv_tokens,
                                   context_length=LONGEST, random_seed=1, log_level="warning",
                                   mem_fraction_static=0.9)  # fmt: skip
    turns: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, args.model, 131072)
        engines = _start(args, folder, options)
        for name, jobs in workloads(args):
            own: list[list[int]] | None = None
            # Compiles and warms up; the others do so in their first turn, which is left out.
            first = next(iter(engines.values()))
            first.ask(jobs[:16])
            first.ask([])
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
    """The medians of each engine beside those of the first, with the least and the greatest value."""
    first = turns[0]["engine"]
    keys = ("tokens_per_second", "step_ms", "ttft_p50", "ttft_p99")
    for engine in dict.fromkeys(t["engine"] for t in turns):
        told = []
        for key in keys:
            own, values = ([t[key] for t in turns if t["engine"] == which and t[key]] for which in (first, engine))
            if own and values:
                middle = statistics.median(values)
                told.append(f"{key} {middle:.4g} ({middle / statistics.median(own):.3f}x, {min(values):.4g} to "
                            f"{max(values):.4g})")  # fmt: skip
        print(f"== {name}: {engine}: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main(parse())
