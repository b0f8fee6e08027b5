"""Unmodified vLLM and vLLM on vMem, in turns (`benchmarks.turns`). All engines have the same KV memory.

Weights are random unless --model names a real model.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks import Child, Peak, turns
from benchmarks.records import Record
from benchmarks.registry import benchmark
from benchmarks.shapes import SHAPES, model_name
from benchmarks.traces import trace_arguments
from pyvmem.engine import metrics
from pyvmem.tools import argtypes
from pyvmem.vllm.plugin import LAYOUTS

if TYPE_CHECKING:
    from benchmarks.session import Session

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
    add("--prefix-caching", action="store_true", help="enable the prefix cache in both engines")
    add("--layout", choices=LAYOUTS, default="auto", help="VMEM_VLLM_LAYOUT of the engines on vMem (auto)")
    add("--eager", action="store_true", help="no CUDA graphs and no compilation, for a faster start")
    add("--tensor-parallel", type=whole, default=1, metavar="N", help="GPUs per engine (1)")
    text = "one more engine, with these variables in its environment, such as areas:VMEM_VLLM=1,VMEM_VLLM_LAYOUT=vllm"
    add("--beside", action="append", type=beside, default=[], metavar="NAME:VARIABLE=VALUE,...", help=text)
    text = "equal, azure (of --trace), decode, decode-short, hot, hot-from-nothing or idle, perhaps with a number of "
    text += "requests (azure:256), or pauses: first tokens after idle times; repeat for more (default: all but pauses)"
    add("--load", action="append", metavar="NAME", help=text)
    trace_arguments(group)
    turns.arguments(group)


def beside(text: str) -> tuple[str, dict[str, str]]:
    """A type of argument: another engine's name, and variables of its environment."""
    name, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    if not (name and colon and all(key and equals for key, equals, _ in pairs)) or name in (OWN, ON_VMEM):
        raise argparse.ArgumentTypeError(f"{text!r} must be a new name and variables, as in name:VARIABLE=value")
    return name, {key: value for key, _, value in pairs}


def loads(args: argparse.Namespace) -> Any:
    """The workloads by name: dictionaries for `benchmarks.vllm_engine`."""
    longest, n = args.max_model_len, args.requests

    def decode(batch: int, prompt: int) -> Any:
        batch, prompt = min(batch, args.max_num_seqs), min(prompt, longest - 300)
        return dict(kind="fixed", batch=batch, prompt=prompt, output=200, decode=True)

    hot = dict(kind="hot", batch=n or 2500, prefixes=16, prefix=128, suffix=64, ratio=0.3, cold=[192, 1024],
               output=[16, 256], seed=1234)  # fmt: skip
    made: dict[str, Any] = {
        "equal": dict(kind="ramp", batch=64, prompt=100, step=max(1, (longest - 300) // 80), output=64),
        "decode": decode(32, 6000),
        "decode-short": decode(256, 900),
        "hot": hot,
        "hot-from-nothing": dict(hot, forget=True),
        "idle": dict(hot, concurrency=96, forget=True, reset=True),  # kvcached's, for the memory of an idle engine
        "pauses": dict(kind="pauses", prompts=[n for n in PROMPTS if n < longest], pauses=PAUSES, batch=1, seed=11),
    }
    if args.trace:
        most = min(1000, longest // 8)
        made["azure"] = dict(kind="trace", path=args.trace, batch=n or 512, longest=longest, most_output=most)
    cached = ("hot", "idle") if args.prefix_caching else ()
    wanted = args.load or [name for name in made if name in ("equal", "decode", "decode-short", "azure", *cached)]
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

    def resident(self) -> int:
        """Device memory of its KV cache on vMem; 0 on unmodified vLLM."""
        return sum(engine.resident for engine, _ in metrics.engines(self.process.pid))

    def ask(self, order: Any) -> Any:
        with Peak(0.05, self.resident) as memory:  # from outside: the engine's own threads share its GIL
            found = super().ask(order)
        if memory.most:
            found["figures"]["KV memory, peak"] = "GiB", [memory.most / turns.GIB]
        return found


# Alone, because it takes minutes and a whole GPU.
@benchmark("vllm", "unmodified vLLM and vLLM on vMem, in turns", arguments=arguments, order=900, alone=True)
def run(session: Session) -> list[Record]:
    """Records of all engines."""
    args = session.args
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm needs vLLM: pip install vllm", name="vllm")
    chosen, others = loads(args), dict(args.beside)
    import torch

    device = torch.cuda.get_device_name(args.device) if torch.cuda.is_available() else "CPU"
    share = 0.8 / (2 + len(others))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(os.environ.get("VMEM_BENCH_LOG", os.devnull), "a", encoding="utf-8"))
        engines = {name: Engine(args, name == ON_VMEM, log, others.get(name, {}), share)
                   for name in (OWN, ON_VMEM, *others)}  # fmt: skip
        for engine in engines.values():
            stack.callback(engine.close)
        run = turns.Turns("vllm", engines, args, device, session.keep)
        for name, engine in engines.items():
            run.note(name, "start", "s", engine.answer()["started"])
        run.measure(chosen, lambda work: session.track(work, "workloads"))
    return run.records
