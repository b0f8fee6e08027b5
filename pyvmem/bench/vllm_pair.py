"""Two engines on vMem on one GPU, loaded by turns (``pyvmem bench vllm --pair``).

Each engine may use all the KV memory of --kv-memory while the other is idle. For comparison, one engine runs alone with
all of it (the whole GPU), and with half of it (as each of two static engines would).

SPDX-License-Identifier: MIT
"""

from typing import Any

from pyvmem.bench.vllm import Engine, Engines

FIRST, SECOND = "first on vMem", "second on vMem"


class Pair(Engines):
    """Both engines, and the records of their runs."""

    def start(self, log: Any) -> dict[str, Engine]:
        return {name: Engine(self._args, True, log) for name in (FIRST, SECOND)}

    def measure(self, loads: dict[str, Any], track: Any = iter) -> None:
        """Run each workload with the whole GPU, in static halves, and by turns."""
        for name in track(list(loads)):
            self._measure(name, loads[name])

    def _measure(self, name: str, load: Any) -> None:
        whole = self._args.kv_memory
        seed = load.get("seed", 0)
        found: dict[str, list[float]] = {"the whole GPU": [], "half": [], "by turns": []}
        for turn in range(self._args.turns + 1):
            for how, limit, engines in (
                ("the whole GPU", whole, (FIRST,)),
                ("half", whole // 2, (FIRST,)),
                ("by turns", whole, (SECOND, FIRST)),
            ):
                for each in self.engines.values():
                    each.ask(dict(limit=limit))
                for engine in engines:
                    seed += 1
                    answer = self.engines[engine].ask(dict(load, seed=seed, tokens=False))
                    self._keep(engine=engine, load=name, how=how, turn=turn, **answer)
                    if turn:  # the first warms up
                        found[how].append(answer["output"] / answer["seconds"])
        for how, rates in found.items():
            self._add("vLLM on vMem", f"{name}: output with {how}" if how != "by turns" else f"{name}: output by turns",
                      "tokens/s", rates)  # fmt: skip
