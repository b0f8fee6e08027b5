"""SGLang and SGLang on vMem in turns (`benchmarks.turns`), with random weights.

    python -m benchmarks.sglang --trace azure_llm_2023_conv.csv --json sglang.json

The cache is flushed after each turn. Workloads: ``azure`` (conversations of the trace, all at once), ``decode``
(32 requests of 6,000 tokens: milliseconds of a decode step) and ``rate`` (requests that arrive at a rate).

The weights of both engines must fit the GPU beside the KV memory of SGLang's own and of the one on vMem. Two engines of
llama-3-8b with 204,800 tokens take 82 GiB; 80 GB are enough for two of llama-3-8b:24.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from benchmarks import Child, turns
from benchmarks.argfiles import input_file
from benchmarks.records import Record
from benchmarks.registry import benchmark
from benchmarks.shapes import SHAPES, model_name, write_config
from pyvmem.tools import argtypes

if TYPE_CHECKING:
    from benchmarks.session import Session

OWN, ON_VMEM = "SGLang", "SGLang on vMem"
DECODE, DECODE_PROMPT, DECODE_TOKENS = 32, 6000, 200
LONGEST, PAGE, RATE = 8192, 64, 32  # tokens of a request and of a page, and requests a second of the last workload


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group, whole = parser.add_argument_group("sglang"), argtypes.whole(1)
    add = group.add_argument
    shape = f"{', '.join(SHAPES)}, with all or some layers (llama-3-8b)"
    add("--model", type=model_name, default="llama-3-8b", metavar="SHAPE[:LAYERS]", help=shape)
    add("--trace", "--azure", type=input_file, metavar="FILE", help="the Azure conversation trace")
    add("--load", action="append", choices=("azure", "decode", "rate"), help="a workload; may be repeated (all)")
    add("--requests", type=whole, default=512, metavar="N", help="of azure and rate (512)")
    add("--kv-tokens", type=whole, default=204800, metavar="N", help="KV memory of each (204800)")
    turns.arguments(group)


def loads(args: argparse.Namespace) -> dict[str, Any]:
    """The workloads by name: dictionaries for `benchmarks.sglang_engine`. Raises ValueError."""
    # Requests that decode at the same time must fit.
    prompt = min(DECODE_PROMPT, args.kv_tokens // DECODE - 2 * PAGE - DECODE_TOKENS)
    made: dict[str, Any] = {
        "decode": dict(kind="fixed", batch=DECODE, prompt=prompt, output=DECODE_TOKENS, decode=True),
        "rate": dict(kind="hot", batch=args.requests, prefixes=0, prefix=0, ratio=0, cold=(64, 1023), output=(16, 255),
                     rate=RATE),
    }  # fmt: skip
    if args.trace:
        made = {"azure": dict(kind="trace", path=args.trace, batch=args.requests, longest=LONGEST), **made}
    wanted = args.load or list(made)
    if "azure" in wanted and not args.trace:
        raise ValueError("--load azure needs --trace")
    if "decode" in wanted and prompt < PAGE:
        raise ValueError(f"--kv-tokens {args.kv_tokens} is too small for the workload decode")
    vocabulary = min(30000, SHAPES[args.model.partition(":")[0]]["vocab_size"])
    return {name: dict(load, vocabulary=vocabulary) for name, load in made.items() if name in wanted}


# Alone, because it takes minutes and a whole GPU.
@benchmark("sglang", "SGLang and SGLang on vMem, in turns", arguments=arguments, order=910, alone=True)
def run(session: Session) -> list[Record]:
    """Records of both engines."""
    args = session.args
    if importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError("sglang needs SGLang: pip install sglang", name="sglang")
    chosen = loads(args)
    import torch

    options: dict[str, Any] = dict(load_format="dummy", page_size=PAGE, max_total_tokens=args.kv_tokens,
                                   context_length=LONGEST, random_seed=1, log_level="warning",
                                   mem_fraction_static=0.9)  # fmt: skip
    gpu = torch.cuda.is_available()
    if not gpu:
        options |= dict(device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch")
    device = torch.cuda.get_device_name(args.device) if gpu else "CPU"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_config(folder, args.model, 131072)
        engines = {}
        # The one on vMem starts first: SGLang measures what memory is free, and its own takes it.
        for name, switch in ((ON_VMEM, "1"), (OWN, "0")):
            variables = dict(VMEM_SGLANG=switch) if gpu else dict(VMEM_SGLANG=switch, SGLANG_USE_CPU_ENGINE="1")
            engines[name] = Child("benchmarks.sglang_engine", [folder, options], variables)
            stack.callback(engines[name].close)
            if (there := engines[name].answer()["kv_tokens"]) < args.kv_tokens:
                raise MemoryError(f"{name} has KV memory for {there} tokens, not {args.kv_tokens}: choose fewer "
                                  "--kv-tokens or a --model with fewer layers")  # fmt: skip
        taken = turns.Turns("sglang", {OWN: engines[OWN], ON_VMEM: engines[ON_VMEM]}, args, device, session.keep)
        taken.measure(chosen, lambda work: session.track(work, "workloads"))
    return taken.records


if __name__ == "__main__":
    from benchmarks import __main__
    from pyvmem.tools import cli

    sys.exit(cli.main(["sglang", *sys.argv[1:]], __main__.run, "benchmarks"))
