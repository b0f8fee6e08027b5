"""The time in which a model that falls asleep compares its weights with their copy: sums over the device's memory.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.registry import benchmark
from pyvmem.tools import argtypes
from pyvmem.tools.argtypes import size_text

if TYPE_CHECKING:
    from benchmarks.records import Record
    from benchmarks.session import Session

GIB = 1 << 30
MIB = 1 << 20
SEGMENTS = (20 * MIB, 256 * MIB)  # of small tensors, and of large ones


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("sums")
    group.add_argument("--weights", type=argtypes.size, metavar="SIZE", help="weights (15G on a GPU, else 256M)")


@benchmark("sums", "comparing weights with their copy, by Triton and torch", arguments=arguments, order=46)
def run(session: Session) -> list[Record]:
    """Add up weights in segments of each size, by the kernel and by torch."""
    import torch

    from pyvmem.sleep.sums import Sums

    records: list[Record] = []
    with session.context() as context:
        gpu = "cuda_pointer" in context.capabilities and torch.cuda.is_available()
        device = torch.device("cuda", context.device) if gpu else torch.device("cpu")
        size = session.args.weights or (15 * GIB if gpu else 256 * MIB)
        memory = torch.randint(0, 256, (min(size, 256 * MIB),), dtype=torch.uint8, device=device)
        memory = memory.repeat(-(-size // len(memory)))[:size]
        ways = {"torch": Sums(device)}
        ways["torch"]._kernel = None
        if (fast := Sums(device))._kernel is not None:
            ways["triton"] = fast
        for name, sums in ways.items():
            for segment in SEGMENTS:
                parts, samples = memory.split(segment), []
                for _ in range(3 if session.quick else 10):
                    if gpu:
                        torch.cuda.synchronize()
                    start = perf_counter()
                    torch.stack([sums(part) for part in parts]).tolist()
                    samples.append((perf_counter() - start) * 1e3)
                what = f"sums of {size_text(size)} in segments of {size_text(segment)}"
                records.append(session.record(samples[1:], context, what, "ms", backend=name))
    return records
