"""Engines in separate processes with the same settings, which take the same workloads in turns.

All engines stay up. Each workload runs on one after the other, so that changes of the machine over time affect all, and
every second turn runs them in the reverse order. The others are idle meanwhile. Prompts are token numbers, and decoding
is greedy.

The speed of a CPU on a shared machine may change by a third within seconds, and a load that waits for the CPU with it.
A load that begins with an empty prefix cache is therefore the same in each turn. If all turns of an engine have equally
many steps, the sum of each step's fastest time is recorded, too.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import Child
from benchmarks.argfiles import output_file
from benchmarks.records import Record
from benchmarks.traces import read_trace
from pyvmem.tools import argtypes

GIB = 1 << 30


def arguments(group: Any) -> None:
    """Add the arguments of a benchmark of engines in turns."""
    whole = argtypes.whole(1)
    group.add_argument("--turns", type=whole, default=3, metavar="N", help="turns of each engine and workload (3)")
    text = "one in N of the requests warms up (1: all of them)"
    group.add_argument("--warm-up", type=whole, default=1, metavar="N", help=text)
    group.add_argument("--raw", type=output_file, metavar="FILE", help="write every turn as JSON")


def requests_of(load: Mapping[str, Any]) -> list[tuple[list[int], int]]:
    """[(prompt tokens, output tokens)] of a workload, the same in every engine."""
    rng = np.random.default_rng(load.get("seed", 0))
    vocabulary = load.get("vocabulary", 30000)

    def tokens(n: int) -> list[int]:
        made: list[int] = rng.integers(10, vocabulary, int(n)).tolist()
        return made

    kind, longest = load["kind"], load.get("longest", 8192)
    if kind == "fixed":
        return [(tokens(load["prompt"]), load["output"]) for _ in range(load["batch"])]
    if kind == "ramp":  # prompts of every length
        return [(tokens(load["prompt"] + load["step"] * i), load["output"]) for i in range(load["batch"])]
    if kind == "hot":  # some prompts share a prefix
        prefixes = [tokens(load["prefix"]) for _ in range(load["prefixes"])]
        made = []
        for _ in range(load["batch"]):
            hot = rng.random() < load["ratio"]
            low, high = load["cold"]
            prompt = prefixes[rng.integers(len(prefixes))] + tokens(load["suffix"]) if hot else \
                tokens(rng.integers(low, high + 1))  # fmt: skip
            made.append((prompt, int(rng.integers(load["output"][0], load["output"][1] + 1))))
        return made
    trace = read_trace(load["path"]).head(load["batch"])
    most = load.get("most_output", 1000)
    prompts, outputs = (np.clip(n, 1, m).tolist() for n, m in ((trace.prompt, longest - most), (trace.output, most)))
    return [(tokens(prompt), output) for prompt, output in zip(prompts, outputs)]


@dataclass
class Request:
    """The tokens of a request, and when they came, in seconds of one clock."""

    arrived: float = math.nan
    at: list[float] = field(default_factory=list)  # when each of its tokens came
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # prompt tokens from the prefix cache

    @property
    def first(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.at[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next, each by itself: a mean would hide stalls."""
        return [b - a for a, b in itertools.pairwise(self.at)]


def decode_step(made: list[Request]) -> list[float]:
    """The median of the milliseconds from a token to the next while every request decodes; empty if they never do."""
    first, last = max(r.at[0] for r in made), min(r.at[-1] for r in made)
    gaps = [b - a for r in made for a, b in itertools.pairwise(r.at) if first <= a and b <= last]
    return [1e3 * float(np.median(gaps))] if gaps else []


def step_times(made: list[Request]) -> list[float]:
    """The milliseconds of each step, which ends when its tokens come."""
    ends = sorted({at for r in made for at in r.at})
    begin = min(r.arrived for r in made)
    return [round(1e3 * (b - a), 3) for a, b in itertools.pairwise([begin, *ends])]


def results(load: Mapping[str, Any], made: list[Request], seconds: float) -> dict[str, Any]:
    """An engine's answer about a workload. `figures` has what becomes a record: {metric: (unit, values)}."""
    figures = {
        "output": ("tokens/s", [sum(len(r.tokens) for r in made) / seconds]),
        "time to first token": ("ms", [round(1e3 * r.first, 3) for r in made]),
        "time between tokens": ("ms", [round(1e3 * gap, 3) for r in made for gap in r.gaps]),
        "prompt tokens from the prefix cache": ("", [sum(r.cached for r in made)]),
    }
    if load.get("decode"):
        figures["decode step"] = "ms", decode_step(made)
    return dict(seconds=seconds, figures=figures, steps=step_times(made),
                tokens=[r.tokens for r in made] if load.get("tokens") else None)  # fmt: skip


class Turns:
    """The engines, and the records of their runs.

    Parameters
    ----------
    bench : str
        Name of the benchmark.
    engines : {name: Child}
        The first is the one whose tokens are expected. Each has been started.
    args : argparse.Namespace
        With the values of `arguments`.
    device : str
        Name of the device.
    keep : callable
        Takes the records so far, after each turn.
    """

    def __init__(
        self,
        bench: str,
        engines: Mapping[str, Child],
        args: argparse.Namespace,
        device: str,
        keep: Callable[[list[Record]], None] = lambda _: None,
    ) -> None:
        self.engines, self._args, self._keep = engines, args, keep
        self._own = next(iter(engines))
        self._about: dict[str, Any] = dict(bench=bench, device=device, page_size=None)
        self._samples: dict[tuple[str, str, str], list[float]] = {}  # by engine, metric and unit
        self._raw: list[Any] = []  # of every turn

    @property
    def records(self) -> list[Record]:
        """The records of what was measured so far."""
        return [Record.of(samples, backend=engine, metric=metric, unit=unit, **self._about)
                for (engine, metric, unit), samples in self._samples.items() if samples]  # fmt: skip

    def note(self, engine: str, metric: str, unit: str, *values: float) -> None:
        """Add samples of a metric."""
        self._samples.setdefault((engine, metric, unit), []).extend(values)

    def write(self, **answer: Any) -> None:
        """Write an engine's answer where the user has asked for each of them."""
        self._raw.append(answer)
        if self._args.raw:
            with open(f"{self._args.raw}.part", "w", encoding="utf-8") as file:
                json.dump(self._raw, file)
            os.replace(f"{self._args.raw}.part", self._args.raw)  # whole, whenever the run is cut off

    def measure(self, loads: Mapping[str, Any], track: Any = iter) -> None:
        """Run all workloads `--turns` times on each engine, turn after turn. The first turn warms up.

        track: shows the progress of a list.
        """
        steps: dict[tuple[str, str], list[list[float]]] = {}
        for turn, name in track([(turn, name) for turn in range(self._args.turns + 1) for name in loads]):
            load = dict(loads[name], tokens=not turn)
            if not load.get("forget"):  # the prefix cache would have the prompts of the turn before
                load["seed"] = load.get("seed", 0) + 1000 * turn
            if not turn:
                load["batch"] = -(-load["batch"] // self._args.warm_up)
            order = list(self.engines)[:: -1 if turn % 2 else 1]
            asked = {engine: self.engines[engine].ask(load) for engine in order}
            answers = {engine: asked[engine] for engine in self.engines}
            if not turn:
                self._compare(name, load, {engine: answer.pop("tokens") for engine, answer in answers.items()})
            said = []
            for engine, answer in answers.items():
                self.write(engine=engine, load=name, turn=turn, **answer)
                for metric, (unit, values) in answer["figures"].items() if turn else ():
                    self.note(engine, f"{name}: {metric}", unit, *values)
                if turn and load.get("forget"):
                    steps.setdefault((engine, name), []).append(answer["steps"])
                first = ((metric, unit, values) for metric, (unit, values) in answer["figures"].items() if values)
                said.append(", ".join(f"{metric} {np.median(values):.4g} {unit}"
                                      for metric, unit, values in itertools.islice(first, 2)))  # fmt: skip
            print(f"{name}, turn {turn} of {self._args.turns}: "
                  f"{'; '.join(map(' '.join, zip(self.engines, said)))}", file=sys.stderr, flush=True)  # fmt: skip
            self._keep(self.records)
        for (engine, name), turns in steps.items():
            if len(set(map(len, turns))) == 1:
                seconds = sum(map(min, zip(*turns))) / 1e3
                self.note(engine, f"{name}: time of {len(turns[0])} steps, each its fastest", "s", seconds)
        if steps:
            self._keep(self.records)

    def _compare(self, name: str, load: Mapping[str, Any], tokens: dict[str, Any]) -> None:
        """Record how many tokens are the first engine's. If some are not, its own of another turn stand beside them."""
        own = tokens.pop(self._own)
        if any(found != own for found in tokens.values()):
            tokens[self._own] = self.engines[self._own].ask(dict(load, forget=True))["tokens"]
        for engine, found in tokens.items():
            same = sum(a == b for a, b in zip(own, found))
            alike = sum(x == y for a, b in zip(own, found) for x, y in zip(a, b))
            self.note(engine, f"{name}: requests with the tokens of {self._own}, of {len(own)}", "", same)
            self.note(engine, f"{name}: tokens, of {sum(map(len, own))}", "", alike)
