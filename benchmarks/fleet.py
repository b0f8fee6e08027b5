"""A simulation of many models on several GPUs: what a router gains that knows what a request costs at each replica.

    python -m benchmarks.fleet --trace azure_llm_2023_conv.csv

No GPU and no server is used. Requests arrive as the trace says, for models whose popularity falls by Zipf's law. Each
GPU has a pool, whose models sleep and wake by vMem's own rules (`pyvmem.sleep.turns`). Weights come back at --copy; a
model computes its requests together, and the models of a GPU that compute share it equally. Pools are chosen by
`pyvmem models FILE check` (`pyvmem.tools.models_place`). Routers look at the servers once a second.

Ways: ``alone``, each GPU has one model, the most popular ones, and requests for the others fail; ``one``, each model
has one server; ``round-robin`` and ``cost``, the --popular ones have --replicas, chosen in turn or by
`pyvmem.sleep.routing.expected_wait`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from benchmarks.argfiles import input_file
from benchmarks.traces import read_trace, synthetic_trace
from pyvmem.engine.control import State
from pyvmem.sleep import routing, turns
from pyvmem.sleep.turns import Action
from pyvmem.tools import argtypes, models_place
from pyvmem.tools.models_file import File, Model, Pool

GIB = 1 << 30
WAYS = ("alone", "one", "round-robin", "cost")
# GiB of weights, seconds of a step, tokens a second of a prompt, and bytes of a token's rows: about those of models of
# 8, 14 and 32 billion parameters in bfloat16 on an H100.
KINDS = ((15.0, 0.010, 20_000.0, 131072), (28.0, 0.016, 11_000.0, 163840), (62.0, 0.032, 5_000.0, 262144))
TICK = 0.05  # seconds between looks of models of which one waits; vMem's is 0.02
LOOK = 1.0  # seconds between looks of a router
SLICE, QUEUE, BEGIN = 8.0, 60.0, 0.02  # seconds; a slice is several wakes; BEGIN: of a wake, besides the copy
LEAST = GIB  # bytes of KV cache with which a model can wake


@dataclass(eq=False)
class Request:
    """Work is in seconds of a GPU to itself."""

    model: int
    came: float
    prompt: float
    work: float
    bytes: int
    done: float = 0.0
    first: float = 0.0
    failed: bool = False


@dataclass(eq=False)
class Server:
    """A model on a GPU."""

    name: str
    weights: int
    state: State = State.ASLEEP
    held: int = 0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    used: float = 0.0
    changed: float = 0.0
    lacks: int = 0
    lacking: float = 0.0
    starved: float = 0.0
    ready: float = 0.0  # when the copy of a wake ends
    seen: tuple[float, int] = (0.0, 0)  # what the router knows: seconds to wait, and requests

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def published(self) -> turns.Model:
        awake = self.state in (State.AWAKE, State.CLOSING)
        begun = len(self.running) + (len(self.waiting) if awake and self.starved else 0)
        since = min((r.came for r in self.waiting), default=0.0)
        return turns.Model(
            self.name, self.state, priority=0, running=begun, queued=len(self.waiting), since=since, used=self.used,
            changed=self.changed, lacks=self.lacks, lacking=self.lacking, starved=self.starved, alive=True,
            gives=self.held,
        )  # fmt: skip


class Gpu:
    """A pool and its servers."""

    def __init__(self, size: int, copy: float, servers: Sequence[Server]) -> None:
        self.size, self.copy, self.servers, self.now = size, copy, servers, 0.0

    def _computes(self, server: Server) -> bool:
        return bool(server.running) and server.state in (State.AWAKE, State.CLOSING)

    def advance(self, now: float) -> None:
        """Compute until then; no request ends before."""
        share = max(sum(map(self._computes, self.servers)), 1)
        for server in filter(self._computes, self.servers):
            for r in server.running:
                before, r.done = r.done, r.done + (now - self.now) / share
                if before < r.prompt <= r.done + 1e-9:
                    r.first = self.now + (r.prompt - before) * share
            ended = [r for r in server.running if r.done >= r.work - 1e-9]
            if ended:
                server.running = [r for r in server.running if r not in ended]
                server.used = now
        self.now = now
        self._look()

    def next(self) -> float:
        """When something happens here by itself."""
        share = max(sum(map(self._computes, self.servers)), 1)
        times = [self.now + (r.work - r.done) * share + 1e-9
                 for s in self.servers if self._computes(s) for r in s.running]  # fmt: skip
        if any(s.waiting or s.state == State.WAKING or (s.running and not self._computes(s)) for s in self.servers):
            times.append(self.now + TICK)
        return min(times, default=float("inf"))

    def _kept(self, server: Server, idle: bool) -> int:
        """Bytes that a server gives to nobody at once; idle: idle ones sleep for it."""
        rows = sum(r.bytes for r in server.running)
        if server.state == State.ASLEEP or (idle and not server.requests):
            return rows
        return server.weights + max(rows, LEAST)

    def room(self, server: Server, idle: bool = False) -> int:
        """Bytes that it could have, besides what it keeps for its requests."""
        return self.size - sum(self._kept(s, idle) for s in self.servers if s is not server)

    def _take(self, server: Server) -> None:
        """Have sleeping servers give weights until all fits."""
        over = sum(s.held + sum(r.bytes for r in s.running) for s in self.servers) - self.size
        for other in sorted(self.servers, key=lambda s: s.used):
            if other is not server and other.state == State.ASLEEP and over > 0:
                given = min(other.held, over)
                other.held, over = other.held - given, over - given

    def _look(self) -> None:
        now = self.now
        for s in self.servers:
            for r in [r for r in s.waiting if now - r.came > QUEUE]:
                r.failed = True
                s.waiting.remove(r)
            if s.state == State.WAKING and now >= s.ready:
                s.state, s.changed, s.lacks, s.used = State.AWAKE, now, 0, now
            if s.state == State.AWAKE:
                self._begin(s)
        if not any(s.waiting or s.state == State.CLOSING or (s.running and s.state == State.ASLEEP)
                   for s in self.servers):  # fmt: skip
            return
        for s in self.servers:
            models = [other.published() for other in self.servers]
            self._do(s, turns.decide(models, models[self.servers.index(s)], now, SLICE, 0.0))

    def _begin(self, s: Server) -> None:
        """Begin the requests for whose rows there is memory."""
        rows = sum(r.bytes for r in s.running)
        while s.waiting and rows + s.waiting[0].bytes + s.weights <= self.room(s):
            rows += s.waiting[0].bytes
            s.running.append(s.waiting.pop(0))
            self._take(s)
        s.starved = (s.starved or self.now) if s.waiting and not s.running else 0.0

    def _do(self, s: Server, action: Action) -> None:
        if action is Action.WAKE:
            needs = s.weights + max(sum(r.bytes for r in s.running), LEAST)
            s.lacks = max(needs - self.room(s), 0)
            s.lacking = (s.lacking or self.now) if s.lacks else 0.0
            if not s.lacks:
                s.state, s.ready = State.WAKING, self.now + BEGIN + (s.weights - s.held) / self.copy
                s.held = s.weights
                self._take(s)
        elif action in (Action.SLEEP, Action.FREEZE):
            s.state, s.changed, s.starved = State.ASLEEP, self.now, 0.0
        elif action is Action.CLOSE:
            s.state = State.CLOSING
        elif action is Action.OPEN:
            s.state = State.AWAKE

    def look_of_router(self) -> None:
        """What each server says of its wait, as the router sees it."""
        models = [s.published() for s in self.servers]
        for i, s in enumerate(self.servers):
            lacks = s.weights + LEAST - self.room(s, True)
            wait = routing.expected_wait(s.state, [*models[:i], *models[i + 1 :]], s.weights - s.held, lacks,
                                         slice=SLICE, rate=self.copy)  # fmt: skip
            s.seen = (wait, s.requests)


def placed(args: argparse.Namespace, rates: Sequence[float], replicas: Sequence[int]) -> list[list[int]]:
    """The GPUs of each model: first one for each, then the others, as `pyvmem models FILE check` proposes them."""
    chosen: list[list[int]] = [[] for _ in rates]
    pools = [Pool(str(i), int(args.size)) for i in range(args.gpus)]
    for number in range(max(replicas)):
        for m in np.argsort([-rate for rate in rates], kind="stable").tolist():
            if number >= replicas[m]:
                continue
            free = tuple(pool for pool in pools if int(pool.name) not in chosen[m])
            there = [Model(f"{i} {g}", "", (str(g),), weights=_weights(i), rate=rates[i] / replicas[i])
                     for i, gpus in enumerate(chosen) for g in gpus if g not in chosen[m]]  # fmt: skip
            new = Model("new", "", weights=_weights(m), rate=rates[m] / replicas[m])
            chosen[m].append(int(models_place.propose(File(free, (*there, new), SLICE))["new"].name))
    return chosen


def _weights(model: int) -> int:
    return int(KINDS[model % len(KINDS)][0] * GIB)


def requests_of(args: argparse.Namespace) -> list[Request]:
    """The trace's requests as they arrive, each for a model."""
    trace = read_trace(args.trace) if args.trace else synthetic_trace(20_000)
    draw = np.random.default_rng(args.seed)
    came = np.cumsum(draw.exponential(1.0, len(trace)))
    if args.trace:
        with open(args.trace, encoding="utf-8-sig", newline="") as file:
            stamps = [row["TIMESTAMP"][:26] for row in csv.DictReader(file) if "TIMESTAMP" in row]
        if len(stamps) == len(trace):
            came = np.array([datetime.fromisoformat(stamp).timestamp() for stamp in stamps])
    came = (came - came[0]) * (len(trace) / args.rate) / max(came[-1] - came[0], 1e-9)
    popular = 1.0 / np.arange(1, args.models + 1) ** args.zipf
    models = draw.choice(args.models, len(trace), p=popular / popular.sum())
    found = []
    for m, at, prompt, output in zip(models.tolist(), came.tolist(), trace.prompt.tolist(), trace.output.tolist()):
        _, step, speed, token = KINDS[m % len(KINDS)]
        work = prompt / speed + step
        found.append(Request(m, at, work, work + (output - 1) * step, (prompt + output) * token))
    return [r for r in found if r.came < args.duration]


def run(args: argparse.Namespace, way: str) -> dict[str, Any]:
    """Simulate one way; returns what it found."""
    requests = requests_of(args)
    counts = np.bincount([r.model for r in requests], minlength=args.models) / args.duration
    popular = 1.0 / np.arange(1, args.models + 1) ** args.zipf
    rates = [1.0] * args.models if args.unknown else (counts.sum() * popular / popular.sum()).tolist()
    many = args.replicas if way in ("round-robin", "cost") else 1
    replicas = [many if m < args.popular else 1 for m in range(args.models)]
    where = [[m] if m < args.gpus else [] for m in range(args.models)]
    if way != "alone":
        where = placed(args, rates, replicas)
    on: dict[int, list[Server]] = defaultdict(list)
    of: list[list[tuple[Gpu, Server]]] = [[] for _ in range(args.models)]
    gpus = [Gpu(int(args.size), args.copy * GIB, on[g]) for g in range(args.gpus)]
    for m, chosen in enumerate(where):
        for g in chosen:
            on[g].append(Server(f"{m}@{g}", _weights(m)))
            of[m].append((gpus[g], on[g][-1]))
    turn = [itertools.count() for _ in range(args.models)]
    due: list[tuple[float, int, int]] = []
    version = [0] * args.gpus
    looked = -LOOK

    def plan(g: int) -> None:
        version[g] += 1
        heapq.heappush(due, (gpus[g].next(), g, version[g]))

    def until(end: float) -> None:
        while due and due[0][0] <= end:
            at, g, number = heapq.heappop(due)
            if number == version[g]:
                gpus[g].advance(at)
                plan(g)

    for r in requests:
        until(r.came)
        if r.came >= looked + LOOK:
            looked = r.came
            for gpu in gpus:
                gpu.look_of_router()
        if not of[r.model]:
            r.failed = True
            continue
        gpu, server = of[r.model][next(turn[r.model]) % len(of[r.model])]
        if way == "cost":
            gpu, server = min(of[r.model], key=lambda s: s[1].seen)
        server.seen = (server.seen[0], server.seen[1] + 1)
        gpu.advance(r.came)
        server.waiting.append(r)
        gpu.advance(r.came)
        plan(gpus.index(gpu))
    until(requests[-1].came + 10 * QUEUE)
    first = [r.first - r.came for r in requests if r.first and not r.failed]
    p50, p99 = np.percentile(first, (50, 99)).tolist()
    unfinished = sum(not r.first and not r.failed for r in requests)
    return dict(way=way, requests=len(requests), failed=sum(r.failed for r in requests), unfinished=unfinished,
                p50=round(p50, 3), p99=round(p99, 3), within_2s=sum(f <= 2.0 for f in first))  # fmt: skip


def main() -> int:
    """Run the chosen ways, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", action="append", choices=WAYS, help="all, unless some are named")
    parser.add_argument("--trace", type=input_file, help="lengths and times of requests; otherwise made up")
    parser.add_argument("--gpus", type=argtypes.whole(1, 1000), default=8)
    parser.add_argument("--models", type=argtypes.whole(1, 10000), default=24)
    parser.add_argument("--replicas", type=argtypes.whole(1, 1000), default=2, help="of each popular model (2)")
    parser.add_argument("--popular", type=argtypes.whole(0), default=6, help="how many models have replicas (6)")
    parser.add_argument("--size", type=argtypes.size, default=72 * GIB, help="of each pool (72G)")
    parser.add_argument("--copy", type=argtypes.positive, default=20.0, help="GiB a second of weights that return (20)")
    parser.add_argument("--rate", type=argtypes.positive, default=5.0, help="requests a second (5)")
    parser.add_argument("--zipf", type=argtypes.positive, default=1.0, help="exponent of the models' popularity (1)")
    parser.add_argument("--unknown", action="store_true", help="choose pools without knowing the models' rates")
    parser.add_argument("--duration", type=argtypes.seconds, default=600.0, help="seconds of the trace (600)")
    parser.add_argument("--seed", type=argtypes.whole(0), default=0)
    args = parser.parse_args()
    for way in args.way or WAYS:
        print(json.dumps(run(args, way)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
