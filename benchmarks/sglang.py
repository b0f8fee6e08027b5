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
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine import SHAPES
from pyvmem.bench import argtypes
from pyvmem.bench.traces import read_trace

ENGINES = {
    "SGLang": dict(VMEM_SGLANG="0"),
    "on vMem": dict(VMEM_SGLANG="1", VMEM_SGLANG_LAYOUT="layers"),
    "on vMem, by tokens": dict(VMEM_SGLANG="1", VMEM_SGLANG_LAYOUT="tokens"),
}
DECODE, DECODE_PROMPT, DECODE_TOKENS = 32, 6000, 200
Job = tuple[float, list[int], int]  # seconds after the start, prompt, tokens to make


# ---- the engine's process ------------------------------------------------------------------------------------------


class Client:
    """One engine of SGLang's in this process."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(model_path=path, skip_tokenizer_init=True, **options)
        self._loop = asyncio.get_event_loop()

    async def _one(self, job: Job, begin: float) -> tuple[list[int], list[float]]:
        after, prompt, n = job
        await asyncio.sleep(max(begin + after - time.monotonic(), 0))
        asked = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        made: list[int] = []
        times = [time.monotonic()]
        async for part in await self._engine.async_generate(input_ids=prompt, sampling_params=asked, stream=True):
            made = part["output_ids"] if len(part["output_ids"]) > len(made) else made + part["output_ids"]
            times.append(time.monotonic())
        return made, times

    async def _all(self, jobs: list[Job]) -> list[tuple[list[int], list[float]]]:
        begin = time.monotonic()
        return await asyncio.gather(*(self._one(job, begin) for job in jobs))

    def run(self, jobs: list[Job]) -> dict[str, Any]:
        """Seconds, tokens a second, times to the first token, milliseconds of a decode step, and the tokens."""
        self._loop.run_until_complete(self._engine.tokenizer_manager.flush_cache())
        begin = time.monotonic()
        ended = self._loop.run_until_complete(self._all(jobs))
        seconds = time.monotonic() - begin
        first = sorted(times[1] - times[0] for _, times in ended)
        last_first, end = max(times[1] for _, times in ended), min(times[-1] for _, times in ended)
        steps = min(sum(t > last_first for t in times) for _, times in ended)
        return dict(
            seconds=seconds, tokens_per_second=sum(n for _, _, n in jobs) / seconds,
            ttft_p50=statistics.median(first), ttft_p99=first[int(0.99 * (len(first) - 1))],
            step_ms=1e3 * (end - last_first) / steps if steps > 1 else None, tokens=[made for made, _ in ended],
        )  # fmt: skip

    def idle(self) -> dict[str, Any]:
        """What the engine holds and caches after a second without requests; nothing without vMem."""
        from pyvmem.engine import control

        time.sleep(1.5)
        mine = [e for e, _ in control.engines() if self._is_mine(e.pid)]
        return dict(backed=mine[0].backed, cached=mine[0].cached) if mine else {}

    @staticmethod
    def _is_mine(pid: int) -> bool:
        from pyvmem.engine.metrics import started_by

        return started_by(pid, os.getpid())


def child(read: int, write: int) -> None:
    """Carry out the parent's orders, JSON lines."""
    with os.fdopen(read) as orders, os.fdopen(write, "w") as answers:
        path, options = json.loads(orders.readline())
        client = Client(path, options)
        answers.write("{}\n")
        answers.flush()
        for line in orders:
            jobs = json.loads(line)
            answers.write(json.dumps(client.run(jobs) if jobs else client.idle()) + "\n")
            answers.flush()
        client._engine.shutdown()


# ---- the parent -----------------------------------------------------------------------------------------------------


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, path: str, options: dict[str, Any]) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sglang", "--child", str(theirs[0]), str(ours[1])],
            env={**os.environ, **ENGINES[name]}, pass_fds=(theirs[0], ours[1]),
        )  # fmt: skip
        os.close(theirs[0])
        os.close(ours[1])
        self._orders, self._answers = os.fdopen(theirs[1], "w"), os.fdopen(ours[0])
        self._ask([path, options])

    def _ask(self, order: Any) -> dict[str, Any]:
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"{self.name}: the engine's process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, jobs: list[Job]) -> dict[str, Any]:
        """The results of a workload; of what an idle engine holds, if there are no jobs."""
        return self._ask(jobs)

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


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


def make_model(folder: Path, shape: str) -> str:
    """A folder with a model's configuration, whose weights are random."""
    name, _, layers = shape.partition(":")
    config = dict(SHAPES[name], max_position_embeddings=131072, torch_dtype="bfloat16")
    config.setdefault("model_type", "llama")
    config.setdefault("architectures", ["LlamaForCausalLM"])
    config.setdefault("rms_norm_eps", 1e-5)
    config.setdefault("hidden_act", "silu")
    if layers:
        config["num_hidden_layers"] = int(layers)
    (folder / "config.json").write_text(json.dumps(dict(config, tie_word_embeddings=False, bos_token_id=1,
                                                        eos_token_id=2)))  # fmt: skip
    return str(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = argtypes.whole(1)
    parser.add_argument("--model", default="llama-3-8b", metavar="SHAPE[:LAYERS]", help=", ".join(SHAPES))
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
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
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
        path = make_model(Path(folder), args.model)
        engines = [Engine(name, path, options) for name in args.engine or ENGINES]
        for name, jobs in workloads(args):
            own: list[list[int]] | None = None
            engines[0].run(jobs[:16])  # compiles and warms up; the others do so in their first turn, which is left out
            for turn in range(args.turns + 1):
                for engine in engines:
                    told = engine.run(jobs)
                    tokens = told.pop("tokens")
                    own = own or tokens
                    told.update(turn=turn, engine=engine.name, workload=name, requests=len(jobs),
                                equal=sum(a == b for a, b in zip(own, tokens)), **engine.run([]))  # fmt: skip
                    turns.append(told)
                    print(json.dumps(told), flush=True)
                    if args.json:
                        Path(args.json).write_text(json.dumps(turns, indent=1))
            _summary(name, [t for t in turns if t["workload"] == name and t["turn"]])
        for engine in engines:
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
    arguments = parse()
    if arguments.child:
        child(*arguments.child)
    else:
        main(arguments)
