"""Unmodified vLLM and vLLM on vMem, in turns: engines in separate processes with the same settings.

All engines have the same KV memory and stay up. Each workload runs on one after the other, so that changes of the
machine over time affect all. The others are idle meanwhile. Weights are random unless --model names a real
model, prompts are token numbers, and decoding is greedy.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import Child
from benchmarks.vllm_engine import SHAPES, model_name
from pyvmem.bench import argtypes, benchmark
from pyvmem.bench.records import Record, Samples
from pyvmem.vllm.plugin import LAYOUTS

if TYPE_CHECKING:
    from pyvmem.bench.session import Session


OWN, ON_VMEM = "vLLM", "vLLM on vMem"
PROMPTS, PAUSES = (8000, 50000), (0.1, 0.5, 1, 5)  # of --load pauses: tokens, and seconds without a request


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group, whole = parser.add_argument_group("vllm"), argtypes.whole(1)
    add = group.add_argument
    text = f"{', '.join(SHAPES)}, with random weights and all or some layers, or a model's path (llama-3-8b)"
    add("--model", type=model_name, default="llama-3-8b", metavar="SHAPE[:LAYERS]|PATH", help=text)
    add("--kv-memory", type=argtypes.size, default=40 << 30, metavar="SIZE", help="KV memory of each engine (40G)")
    add("--max-model-len", type=whole, default=8192, metavar="L", help="as in vLLM (8192)")
    add("--max-num-seqs", type=whole, default=256, metavar="B", help="as in vLLM (256)")
    add("--turns", type=whole, default=3, metavar="N", help="turns of each engine and workload (3)")
    add("--prefix-caching", action="store_true", help="enable the prefix cache in both engines")
    add("--layout", choices=LAYOUTS, default="auto", help="VMEM_VLLM_LAYOUT of the engines on vMem (auto)")
    add("--eager", action="store_true", help="no CUDA graphs and no compilation, for a faster start")
    add("--warm-up", type=whole, default=1, metavar="N", help="one in N of the requests warms up (1: all of them)")
    add("--tensor-parallel", type=whole, default=1, metavar="N", help="GPUs per engine (1)")
    text = "one more engine, with these variables in its environment, such as slots:VMEM_VLLM=1,VMEM_VLLM_LAYOUT=slots"
    add("--beside", action="append", type=beside, default=[], metavar="NAME:VARIABLE=VALUE,...", help=text)
    text = "equal, azure (of --trace), decode, decode-short, cold, hot or idle, perhaps with a number of requests "
    text += "(azure:256), or pauses: first tokens after idle times; repeat for more (default: all but pauses)"
    add("--load", action="append", metavar="NAME", help=text)
    argtypes.trace(group)
    add("--raw", type=argtypes.output_file, metavar="FILE", help="write every turn as JSON")


def beside(text: str) -> tuple[str, dict[str, str]]:
    """A type of argument: another engine's name, and variables of its environment."""
    name, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    if not (name and colon and all(key and equals for key, equals, _ in pairs)) or name in (OWN, ON_VMEM):
        raise argparse.ArgumentTypeError(f"{text!r} must be a new name and variables, as in name:VARIABLE=value")
    return name, {key: value for key, _, value in pairs}


def loads(args: argparse.Namespace) -> Any:
    """The workloads by name: dictionaries for `benchmarks.vllm_engine`."""
    longest = args.max_model_len
    most = min(1000, longest // 8)
    n = args.requests or 512
    made = {
        "equal": dict(kind="ramp", batch=64, prompt=100, step=max(1, (longest - 300) // 80), output=64, tokens=True),
    }

    def decode(batch: int, prompt: int) -> Any:
        batch, prompt = min(batch, args.max_num_seqs), min(prompt, longest - 300)
        return dict(kind="fixed", batch=batch, prompt=prompt, output=200, decode=True)

    made["decode"] = decode(32, 6000)
    made["decode-short"] = decode(256, 900)
    if args.trace:
        made["azure"] = dict(kind="trace", path=args.trace, batch=n, longest=longest, most_output=most)
    made["cold"] = dict(kind="hot", batch=args.requests or 160, prefixes=1, prefix=1, suffix=1, ratio=0, seed=3,
                        cold=[longest // 8, 3 * longest // 8], output=[longest // 128, longest // 32])  # fmt: skip
    kvcached = dict(kind="hot", prefixes=16, prefix=128, suffix=64, ratio=0.3, cold=[192, 1024], output=[16, 256],
                    seed=1234)  # fmt: skip
    made["hot"] = dict(kvcached, batch=args.requests or 2500)
    made["hot-from-nothing"] = dict(made["hot"], forget=True)
    # kvcached's workload for the memory of an idle engine.
    made["idle"] = dict(kvcached, batch=args.requests or 2500, concurrency=96, reset=True)
    made["pauses"] = dict(kind="pauses", prompts=[n for n in PROMPTS if n < longest], pauses=PAUSES, batch=1, seed=11)
    hot = ("cold", "hot", "idle") if not args.prefix_caching else ()
    wanted = args.load or [name for name in made if name not in (*hot, "hot-from-nothing", "pauses")]
    found = {}
    for entry in wanted:
        name, _, number = entry.partition(":")
        if name not in made:
            raise ValueError(f"--load {name} must be one of {', '.join(made)} (azure needs --trace)")
        found[name] = dict(made[name], batch=argtypes.whole(1)(number)) if number else made[name]
    if "pauses" in found and not (args.prefix_caching and made["pauses"]["prompts"]):
        raise ValueError(f"--load pauses needs --prefix-caching, and a --max-model-len over {PROMPTS[0]}")
    return found


class Engine(Child):
    """An engine's process."""

    def __init__(self, args: argparse.Namespace, vmem: bool, log: Any, more: Mapping[str, str], share: float) -> None:
        """vmem: on vMem, or unmodified vLLM. more: variables of its environment. share: of the device's memory."""
        settings = dict(
            shape=args.model, max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=8192, enforce_eager=args.eager, enable_prefix_caching=args.prefix_caching,
            kv_cache_memory_bytes=args.kv_memory, gpu_memory_utilization=share,
            tensor_parallel_size=args.tensor_parallel,
        )  # fmt: skip
        variables = dict(VMEM_VLLM="1" if vmem else "0", VMEM_VLLM_LAYOUT=args.layout, VLLM_NO_USAGE_STATS="1",
                         HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")  # fmt: skip
        if args.tensor_parallel == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        super().__init__("benchmarks.vllm_engine", settings, {**variables, **more}, log)


class Engines:
    """The engines, and the records of their runs."""

    def __init__(
        self, args: argparse.Namespace, device: str, log: Any, keep: Callable[[list[Record]], None] = lambda _: None
    ) -> None:
        """keep: takes the records so far, after each turn."""
        self._args, self._keep_records, self._device = args, keep, device
        self.records: list[Record] = []
        self.raw: list[Any] = []  # of every turn
        more = dict(args.beside)
        share = 0.8 / (2 + len(more))
        self.engines = {name: Engine(args, name == ON_VMEM, log, more.get(name, {}), share)
                        for name in (OWN, ON_VMEM, *more)}  # fmt: skip
        for name, engine in self.engines.items():
            answer = engine.answer()
            self._add(name, "start", "s", answer["started"])
            self._keep(engine=name, load="start", **answer)

    def _add(self, engine: str, metric: str, unit: str, samples: Samples) -> None:
        if np.size(samples):
            self.records.append(Record.of(samples, bench="vllm", backend=engine, device=self._device, page_size=None,
                                          metric=metric, unit=unit))  # fmt: skip

    def _keep(self, **answer: Any) -> None:
        self.raw.append(answer)
        if self._args.raw:
            with open(f"{self._args.raw}.part", "w", encoding="utf-8") as file:
                json.dump(self.raw, file)
            os.replace(f"{self._args.raw}.part", self._args.raw)  # whole, whenever the run is cut off

    def measure(self, loads: dict[str, Any], track: Any = iter) -> None:
        """Run all workloads `turns` times on each engine, turn after turn, after a warm-up.

        track: shows the progress of a list.
        """
        found: dict[str, dict[str, list[Any]]] = {}
        for name, load in loads.items():
            if load.get("tokens"):
                for again in (0, 1):  # the second time the prompts are in the prefix cache
                    self._equal(name + (" again" if again else ""), load)
            else:
                found[name] = {engine: [] for engine in self.engines}
        for turn, name in track([(turn, name) for turn in range(self._args.turns + 1) for name in found]):
            # Each turn has its own seed; otherwise the prefix cache would have the prompts of the turn before.
            load = dict(loads[name], seed=loads[name].get("seed", 0) + 1000 * turn, tokens=not turn)
            if not turn:
                load["batch"] = -(-load["batch"] // self._args.warm_up)
            self.turn(name, load, turn, found[name])
            before = len(self.records)
            self._all_results(loads, found)
            self._keep_records(self.records)
            del self.records[before:]
        self._all_results(loads, found)

    def _all_results(self, loads: Any, found: dict[str, dict[str, list[Any]]]) -> None:
        for name, by_engine in found.items():
            for engine, results in by_engine.items():
                self.record_results(engine, name, loads[name], results)

    def turn(self, name: str, load: Any, turn: int, found: Any) -> None:
        """Run one workload on each engine. The first turn warms up, and its tokens are compared."""
        answers = {engine: self.engines[engine].ask(load) for engine in self.engines}
        if load["tokens"]:
            self._compare(name, load, {engine: a.pop("tokens") for engine, a in answers.items()}, forget=True)
        for engine, answer in answers.items():
            if turn:
                found[engine].append(answer)
            self._keep(engine=engine, load=name, turn=turn, **answer)
        said = (f"{engine} {a['output'] / a['seconds']:.0f} tokens/s, first token {1e3 * np.median(a['ttft']):.1f} ms"
                for engine, a in answers.items())  # fmt: skip
        print(f"{name}, turn {turn} of {self._args.turns}: {'; '.join(said)}", file=sys.stderr, flush=True)

    def record_results(self, engine: str, name: str, load: Any, results: Any) -> None:
        if not results:
            return
        if load.get("kind") == "pauses":
            for what in results[0]["firsts"]:
                self._add(engine, f"{name}, {what}: time to first token", "ms",
                          [1e3 * r["firsts"][what] for r in results])  # fmt: skip
            return
        if engine == OWN or results[0]["kv"]:  # nobody tells what others have
            self._add(engine, f"{name}: KV memory, peak", "GiB", [r["kv_peak"] / 2**30 for r in results])
            self._add(engine, f"{name}: KV memory, 1 s idle", "GiB", [r["kv_idle"] / 2**30 for r in results])
            self._add(engine, f"{name}: KV memory, 1 s after the prefix cache is reset", "GiB",
                      [r["kv_reset"] / 2**30 for r in results if "kv_reset" in r])  # fmt: skip
        self._add(engine, f"{name}: device memory, peak", "GiB", [r["peak"] / 2**30 for r in results])
        self._add(engine, f"{name}: device memory, 1 s idle", "GiB", [r["idle"] / 2**30 for r in results])
        self._add(engine, f"{name}: output", "tokens/s", [r["output"] / r["seconds"] for r in results])
        if load.get("decode"):
            full = [r["full"] for r in results if r["full"]]
            # Their throughput is the figure above: it also depends on what the prefix cache had.
            self._add(engine, f"{name}: decode step", "ms", [f["median"] for f in full])
            self._add(engine, f"{name}: the same, mean", "ms", [f["mean"] for f in full])
        else:
            self._add(engine, f"{name}: time to first token", "ms", [1e3 * x for r in results for x in r["ttft"]])
            self._add(engine, f"{name}: time between tokens", "ms",
                      [1e3 * gap for r in results for gaps in r["gaps"] for gap in gaps])  # fmt: skip
            self._add(engine, f"{name}: preemptions", "", [r["preemptions"] for r in results])
        self._add(engine, f"{name}: prompt tokens from the prefix cache", "", [r["cached"] for r in results])
        states = [r["kv"] for r in results if r["kv"]]
        self._add(engine, f"{name}: memory of cached blocks", "GiB", [k["cached"] / 2**30 for k in states])
        self._add(engine, f"{name}: blocks that a step mapped itself", "", [k["step_maps"] for k in states])

    def _compare(self, name: str, load: Any, tokens: dict[str, Any], forget: bool) -> None:
        """Record how many tokens are vLLM's. If some are not, vLLM's own of another turn stand beside them.

        forget: that turn finds as little in the prefix cache as these.
        """
        own = tokens.pop(OWN)
        if any(found != own for found in tokens.values()):
            tokens[OWN] = self.engines[OWN].ask(dict(load, forget=forget))["tokens"]
        for engine, found in tokens.items():
            same = sum(a == b for a, b in zip(own, found))
            alike = sum(x == y for a, b in zip(own, found) for x, y in zip(a, b))
            self._add(engine, f"{name}: requests with vLLM's tokens, of {len(own)}", "", same)
            self._add(engine, f"{name}: tokens, of {sum(map(len, own))}", "", alike)

    def _equal(self, name: str, load: Any) -> None:
        answers = {engine: self.engines[engine].ask(load) for engine in self.engines}
        self._compare(name, load, {engine: a.pop("tokens") for engine, a in answers.items()},
                      forget=not name.endswith(" again"))  # fmt: skip
        for engine, answer in answers.items():
            self._add(engine, f"{name}: prompt tokens from the prefix cache", "", answer["cached"])
            self._add(engine, f"{name}: preemptions", "", answer["preemptions"])
            self._keep(engine=engine, load=name, **answer)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


# Alone, because it takes minutes and a whole GPU.
@benchmark("vllm", "unmodified vLLM and vLLM on vMem, in turns", arguments=arguments, order=900, alone=True)
def run(session: Session) -> list[Record]:
    """Records of all engines."""
    args = session.args
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm needs vLLM: pip install vllm", name="vllm")
    chosen = loads(args)
    import torch

    log = os.environ.get("VMEM_BENCH_LOG", os.devnull)
    device = torch.cuda.get_device_name(args.device) if torch.cuda.is_available() else "CPU"
    with open(log, "a", encoding="utf-8") as file:
        turns = Engines(args, device, file, session.keep)
        try:
            turns.measure(chosen, lambda work: session.track(work, "workloads"))
        finally:
            turns.close()
    return turns.records
