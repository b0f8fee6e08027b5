"""A step of TRL's GRPOTrainer on one GPU: on plain vLLM, with its sleep mode and without, and on vMem.

    python -m benchmarks.rl --out rl.jsonl            in an environment with vLLM, TRL and pyvmem

Each way trains by itself, in the order of what it tells: first steps at equal batch and their parts, then the greatest
batch before memory runs out. The model has made-up weights. Every run is a line of the file at once, so a benchmark
that is cut off keeps what it has. A table follows at the end. The first step of a run warms up, and does not count.

Ways: ``sleep``, vLLM's sleep mode of level 2; ``awake``, the engine keeps TRL's part of the device; ``vmem``, the
trainer and the KV cache share a pool; ``vmem-weights``, so do the engine's weights, which sleep while it trains.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks import some_of
from benchmarks.rl_trainer import write_model
from benchmarks.shapes import SHAPES, model_name
from pyvmem.tools import argtypes

WAYS = ("sleep", "vmem", "awake", "vmem-weights")
SLEEPS = ("sleep", "vmem-weights")
PARTS = ("step", "most")
SETTLED = 1.05  # where the search for the greatest batch ends: the next larger one is so little more


class Failed(RuntimeError):
    """A run ended without a result. The text is the end of what it printed."""


class Late(Failed):
    """A run had no result in time."""


class Bench:
    """One benchmark: its runs, and where they are written."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        self.args, self.model = args, model
        self.end: float = time.monotonic() + args.seconds
        self.lines: list[dict[str, Any]] = []

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, way: str, batch: int, steps: int, part: str) -> dict[str, Any]:
        """Train for some steps in a process of its own. Raises `Failed`."""
        args = self.args
        command = [sys.executable, "-m", "benchmarks.rl_trainer", str(self.model), "--whole", "--steps", str(steps),
                   "--batch", str(batch), "--group", str(min(args.group, batch)), "--prompt", str(args.prompt),
                   "--tokens", str(args.tokens), "--rate", "1e-6", "--utilization", str(args.utilization),
                   "--lora", str(args.lora)]  # fmt: skip
        environ = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", VMEM_VLLM="0")
        if way.startswith("vmem"):
            environ.update(VMEM_VLLM="1", VMEM_VLLM_POOL=uuid.uuid4().hex[:12], VMEM_VLLM_POOL_SIZE=str(args.pool))
            if way == "vmem-weights":
                environ["VMEM_VLLM_WEIGHTS"] = "1"
        begin = time.monotonic()
        try:
            told = subprocess.run([*command, *(["--sleep"] if way in SLEEPS else [])], env=environ, text=True,
                                  capture_output=True, timeout=max(min(args.timeout, self.left()), 1))  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Late(f"no result within {time.monotonic() - begin:.0f} s") from None
        found = [line[7:] for line in told.stdout.splitlines() if line.startswith("RESULT ")]
        seen = [json.loads(line[5:]) for line in told.stdout.splitlines() if line.startswith("STEP ")]
        line = dict(
            way=way, part=part, batch=batch, tokens=args.tokens, lora=args.lora, steps=seen[1:] or seen, ok=bool(found)
        )
        if found:
            result = json.loads(found[0])
            line.update(most=result["most"], weights=result["weights"][:12], vmem=result["vmem"],
                        completions=hashlib.sha256(repr(result["completions"]).encode()).hexdigest()[:12])  # fmt: skip
        else:
            line.update(why=told.stderr[-1500:])
        self.lines.append(line)
        print(json.dumps({k: v for k, v in line.items() if k not in ("steps", "why")}), flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if not found:
            raise Failed(line["why"])
        return line

    def greatest(self, way: str) -> int:
        """The greatest batch that two steps train on: doubled until memory runs out, and then halved in between.

        A run that has no result in time ends the search: it says nothing of memory.
        """
        fits, fails, batch = 0, 0, self.args.batch
        while self.left() > 60 and (not fails or (fails > fits + self.args.group and fails > SETTLED * fits)):
            try:
                self.run(way, batch, 2, "most")
                fits = batch
            except Late as error:
                print(f"{way}, batch {batch}: {error}", flush=True)
                break
            except Failed:
                fails = batch
            batch = 2 * fits if not fails else (fits + fails) // 2 // self.args.group * self.args.group
            if batch in (fits, 0):
                break
        return fits


def _table(lines: list[dict[str, Any]], most: dict[str, int]) -> str:
    """The runs side by side."""
    names = ("seconds", "generate", "weights", "switch")
    rows = [("way", "batch", *names, "GiB", "greatest batch", "tokens", "weights' hash")]
    for line in lines:
        if line["part"] == "step" and line["ok"]:
            each = [statistics.median(s.get(n, 0.0) for s in line["steps"]) for n in names]
            rows.append((line["way"], str(line["batch"]), *(f"{value:.3f}" for value in each),
                         f"{line['most'] / 2**30:.1f}", str(most.get(line["way"], "")), line["completions"],
                         line["weights"]))  # fmt: skip
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(n) for cell, n in zip(row, wide)) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=model_name, default="llama-3-8b:8", help="a shape (llama-3-8b:8)")
    parser.add_argument("--ways", type=some_of(WAYS), default=WAYS, help=",".join(WAYS))
    parser.add_argument("--part", choices=PARTS, action="append", help="only this")
    parser.add_argument("--batch", type=int, default=16, help="completions of a step (16)")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt (8)")
    parser.add_argument("--steps", type=int, default=6, help="the first one warms up (6)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens (256)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a completion (1024)")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter that is trained (0: all weights are)")
    parser.add_argument("--utilization", type=float, default=0.3, help="TRL's part of the device for vLLM (0.3)")
    parser.add_argument("--pool", type=argtypes.size, default=argtypes.size("48G"), help="bytes of vMem's pool (48G)")
    parser.add_argument("--seconds", type=float, default=1500, help="for all runs (1500)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds of one run (400)")
    parser.add_argument("--folder", help="where the model is written, and stays")
    parser.add_argument("--out", help="a file for the runs, as lines of JSON")
    args = parser.parse_args()
    name, _, layers = args.model.partition(":")
    config = dict(dict(model_type="llama", max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False,
                       bos_token_id=1, eos_token_id=2, pad_token_id=0), **SHAPES[name])  # fmt: skip
    config.update(dict(num_hidden_layers=int(layers)) if layers else {})
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(args.folder or temporary, args.model.replace(":", "-"))
        write_model(model, config)
        bench, most = Bench(args, model), {}
        for part in args.part or PARTS:
            for way in args.ways:
                if bench.left() < 60:
                    break
                try:
                    if part == "step":
                        bench.run(way, args.batch, args.steps, part)
                    else:
                        most[way] = bench.greatest(way)
                except Failed as error:
                    print(f"{way}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no result'}")
        print(_table(bench.lines, most))
    return 0 if bench.lines and all(line["ok"] or line["part"] == "most" for line in bench.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
