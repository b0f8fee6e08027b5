"""Three engines on vMem on one GPU under bursts that alternate and overlap (``python -m benchmarks vllm --bursts``).

Each engine gets its workload's requests in `ROUNDS` bursts: within a burst, requests arrive as a Poisson process. In
even rounds the engines' bursts follow each other; in odd rounds they come together. Within a burst, requests arrive at
a part of the rate that one engine serves alone (--part), so that memory, not the GPU, makes them wait. The same
arrivals meet four settings:

- alone: each engine by itself, with all the KV memory of --kv-memory;
- room: the three at once, each with as much of its own, so that they share the GPU, but memory is never short;
- thirds: the three in static thirds of --kv-memory;
- pool: the three in one pool of it, which lend each other what they do not need.

So alone to room is what sharing the GPU costs, and room to pool is what sharing memory costs. A request waits from its
arrival, wherever it waits. Engines join a pool when they start, so those of the last setting are others.

SPDX-License-Identifier: MIT
"""

import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.vllm import SETTINGS, Engine, Engines

NAMES = ("first on vMem", "second on vMem", "third on vMem")
TITLES = dict(alone="alone", room="room for all", thirds="static thirds", pool="a pool")
ROUNDS = 6
PART = 0.5  # of the rate that one engine serves alone, unless --part says another
AHEAD = 1.0  # seconds between the order and the first arrival
BURSTS = (("alternate", True), ("overlap", False))


def arrivals(n: int, engine: int, burst: float, seed: int) -> list[float]:
    """When each of `n` requests arrives at engine number `engine`, in seconds from the start, in order.

    burst: the seconds of a burst. Rounds are three bursts long, so that bursts of three engines fit one after another.
    """
    rng = np.random.default_rng((seed, engine))
    found: list[float] = []
    for round, count in enumerate(np.diff(np.linspace(0, n, ROUNDS + 1).astype(int))):
        begin = 3 * burst * round + (burst * engine if round % 2 == 0 else 0.0)
        gaps = rng.exponential(burst / max(int(count), 1), int(count))
        found += (begin + np.cumsum(gaps)).tolist()
    return sorted(found)


class Bursts(Engines):
    """Three engines, and the records of their runs."""

    def start(self, log: Any) -> dict[str, Engine]:
        self._log = log
        self._chosen = [how for how in SETTINGS if how in (self._args.setting or SETTINGS)]
        self._rates: dict[str, float] = {}  # by workload
        self._pooled = self._chosen == ["pool"]
        return self._start()

    def _start(self) -> dict[str, Engine]:
        pool = dict(VMEM_VLLM_POOL=f"bench-{os.getpid()}", VMEM_VLLM_POOL_SIZE=str(self._args.kv_memory))
        more = pool if self._pooled else {}
        return {name: Engine(self._args, True, self._log, more, share=0.3) for name in NAMES}

    def measure(self, loads: dict[str, Any], track: Any = iter) -> None:
        """Run each workload in each setting, turn after turn, after a warm-up. Each run is printed as it ends."""
        found: dict[tuple[str, str], list[Any]] = {(name, how): [] for name in loads for how in self._chosen}
        warm: set[tuple[bool, str]] = set()
        for pooled, name, turn, how in track([
            (pooled, name, turn, how) for pooled in (False, True) for name in loads for turn in range(self._args.turns)
            for how in self._chosen if (how == "pool") is pooled
        ]):  # fmt: skip
            if pooled is not self._pooled:
                self.close()
                self._pooled = pooled
                self._open(self._start(), "start in a pool")
            if (pooled, name) not in warm:
                warm.add((pooled, name))
                rate = self._rate(loads[name])
                self._rates.setdefault(name, self._args.rate or rate)
            answers = self._run(name, loads[name], turn, how)
            found[name, how] += answers
            self._tell(f"{name}, {TITLES[how]}, turn {turn + 1} of {self._args.turns}", answers)
            before = len(self.records)
            self._note_all(loads, found)
            self._keep_records(self.records)
            del self.records[before:]
        self._note_all(loads, found)

    def _note_all(self, loads: dict[str, Any], found: dict[tuple[str, str], list[Any]]) -> None:
        for (name, how), of in found.items():
            if of:
                self._note(f"{name}, {TITLES[how]}", of)
        for name in loads:
            self._compare_pool(name, found.get((name, "room"), []), found.get((name, "pool"), []))

    def _run(self, name: str, load: Any, turn: int, how: str) -> list[Any]:
        """One run of a workload in one setting: an answer of each engine."""
        whole, rate = self._args.kv_memory, (self._args.part or PART) * self._rates[name]
        burst = load["batch"] / ROUNDS / rate
        for engine in self.engines.values():
            engine.ask(dict(limit=whole // 3 if how == "thirds" else whole))
        seed, found = load.get("seed", 0) + 1000 * turn, []
        for some in ([0], [1], [2]) if how == "alone" else ([0, 1, 2],):
            when = {i: arrivals(load["batch"], i, burst, seed) for i in some}
            # Seeds of the prompts differ, so that the prefix cache has none yet.
            answers = self._together(load, when, seed + 100 * SETTINGS.index(how))
            for i, answer in answers.items():
                answer["alternate"] = [t // (3 * burst) % 2 == 0 for t in when[i]]
                self._keep(engine=NAMES[i], load=name, how=TITLES[how], turn=turn, burst=burst, **answer)
                found.append(answer)
        return found

    def _rate(self, load: Any) -> float:
        """Requests a second that one engine serves alone, all given at once. It warms up."""
        for engine in self.engines.values():
            engine.ask(dict(limit=self._args.kv_memory))
            answer = engine.ask(dict(load, tokens=False))
        return float(load["batch"] / answer["seconds"])

    def _together(self, load: Any, when: dict[int, list[float]], seed: int) -> dict[int, Any]:
        begin = time.time() + AHEAD
        for i, times in when.items():
            self.engines[NAMES[i]].tell(dict(load, arrivals=times, begin=begin, seed=seed + 10 * i, tokens=False))
        return {i: self.engines[NAMES[i]].answer() for i in when}

    def _tell(self, what: str, answers: list[Any]) -> None:
        """Print one run, because a long benchmark may be cut off."""
        firsts = (f"{np.median(some):.0f} (p99 {np.percentile(some, 99):.0f}) in bursts that {rounds}"
                  for rounds, wanted in BURSTS if (some := _firsts(answers, wanted)))  # fmt: skip
        counts = {k: sum(a["kv"][k] for a in answers) for k in ("preempted", "refused", "waited")}
        print(f"{what}: time to first token, ms: {', '.join(firsts)}; {counts['preempted']} preempted, "
              f"{counts['refused']} orders refused, steps waited {1e3 * counts['waited']:.0f} ms for blocks",
              file=sys.stderr, flush=True)  # fmt: skip

    def _note(self, what: str, answers: list[Any]) -> None:
        engine = "vLLM on vMem"
        for rounds, wanted in BURSTS:
            self._add(engine, f"{what}, bursts that {rounds}: time to first token", "ms", _firsts(answers, wanted))
            self._add(engine, f"{what}, bursts that {rounds}: time in vLLM's queue", "ms",
                      _each(answers, "queued", wanted))  # fmt: skip
        gaps = [1e3 * gap for a in answers for of in a["gaps"] for gap in of]
        self._add(engine, f"{what}: time between tokens", "ms", gaps)
        self._add(engine, f"{what}: output", "tokens/s", [a["output"] / a["seconds"] for a in answers])
        self._add(engine, f"{what}: preemptions", "", [a["preemptions"] for a in answers])
        self._add(engine, f"{what}: orders refused", "", [a["kv"]["refused"] for a in answers])
        self._add(engine, f"{what}: steps' wait for blocks", "ms", [1e3 * a["kv"]["waited"] for a in answers])

    def _compare_pool(self, name: str, room: list[Any], pool: list[Any]) -> None:
        """Memory's part alone: the pool beside three engines that share the GPU, too, but have room."""
        for rounds, wanted in BURSTS:
            if (base := _firsts(room, wanted)) and (some := _firsts(pool, wanted)):
                for p in (50, 99):
                    self._add("vLLM on vMem", f"{name}, a pool, bursts that {rounds}: p{p} of time to first token, "
                              "over that with room for all", "x",
                              np.percentile(some, p) / np.percentile(base, p))  # fmt: skip


def _each(answers: list[Any], what: str, alternate: bool) -> list[float]:
    """Milliseconds of each request in the bursts that alternate, or in those that overlap."""
    return [1e3 * x for a in answers for x, of in zip(a[what], a["alternate"]) if of is alternate]


def _firsts(answers: list[Any], alternate: bool) -> list[float]:
    return _each(answers, "ttft", alternate)
