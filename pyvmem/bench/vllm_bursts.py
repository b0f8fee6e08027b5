"""Three engines on vMem on one GPU under bursts that alternate and overlap (``pyvmem bench vllm --bursts``).

Each engine gets its workload's requests in `ROUNDS` bursts: within a burst, requests arrive as a Poisson process. In
even rounds the engines' bursts follow each other; in odd rounds they come together. Within a burst, requests arrive at
half of the rate that one engine serves alone, so that memory, not the GPU, makes them wait. The same arrivals meet
three settings: each engine alone with all the KV memory of --kv-memory, the three in static thirds of it, and the
three in one pool, which lend each other what they do not need. A request waits from its arrival, wherever it waits.

SPDX-License-Identifier: MIT
"""

import os
import time
from typing import Any

import numpy as np

from pyvmem.bench.vllm import Engine, Engines

NAMES = ("first on vMem", "second on vMem", "third on vMem")
ROUNDS = 6
PART = 0.5  # of the rate that one engine serves alone
AHEAD = 1.0  # seconds between the order and the first arrival


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
        pool = dict(VMEM_VLLM_POOL=f"bench-{os.getpid()}", VMEM_VLLM_POOL_SIZE=str(self._args.kv_memory))
        return {name: Engine(self._args, True, log, pool, share=0.3) for name in NAMES}

    def measure(self, loads: dict[str, Any], track: Any = iter) -> None:
        """Run each workload alone, in static thirds and in the pool, turn after turn, after a warm-up."""
        for name in track(list(loads)):
            self._measure(name, loads[name])

    def _measure(self, name: str, load: Any) -> None:
        whole, rate = self._args.kv_memory, self._rate(load)
        burst = load["batch"] / ROUNDS / (PART * rate)
        settings = (("alone", whole, 1), ("static thirds", whole // 3, 3), ("a pool", whole, 3))
        found: dict[str, list[Any]] = {how: [] for how, *_ in settings}
        for turn in range(self._args.turns):
            for k, (how, limit, together) in enumerate(settings):
                for engine in self.engines.values():
                    engine.ask(dict(limit=limit))
                for first in range(0, len(NAMES), together):
                    some = range(first, first + together)
                    seed = load.get("seed", 0) + 1000 * turn
                    when = {i: arrivals(load["batch"], i, burst, seed) for i in some}
                    answers = self._together(load, when, seed + 100 * k)  # the prefix cache has no prompt yet
                    for i, answer in answers.items():
                        answer["alternate"] = [t // (3 * burst) % 2 == 0 for t in when[i]]
                        self._keep(engine=NAMES[i], load=name, how=how, turn=turn, burst=burst, **answer)
                        found[how].append(answer)
        for how, answers_of in found.items():
            self._note(f"{name}, {how}", answers_of)

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

    def _note(self, what: str, answers: list[Any]) -> None:
        engine = "vLLM on vMem"
        for rounds, wanted in (("alternate", True), ("overlap", False)):
            some = [1e3 * x for a in answers for x, of in zip(a["ttft"], a["alternate"]) if of is wanted]
            self._add(engine, f"{what}, bursts that {rounds}: time to first token", "ms", some)
        gaps = [1e3 * gap for a in answers for of in a["gaps"] for gap in of]
        self._add(engine, f"{what}: time between tokens", "ms", gaps)
        self._add(engine, f"{what}: output", "tokens/s", [a["output"] / a["seconds"] for a in answers])
        self._add(engine, f"{what}: preemptions", "", [a["preemptions"] for a in answers])
