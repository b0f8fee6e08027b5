"""How fast memory is backed, by page size: Table 7 of the vAttention paper (Prabhu et al., ASPLOS 2025).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import native
from benchmarks.registry import benchmark
from benchmarks.vmm import SIZES, STRIDE, backdrop_flag, sample_arrays
from pyvmem.core import MIB, Context, probe
from pyvmem.tools import argtypes
from pyvmem.tools.argtypes import size_text

if TYPE_CHECKING:
    from benchmarks.records import Record
    from benchmarks.session import Session


# GB/s on one A100: 64, 128 and 256 KiB through the paper's driver, 2 MiB through CUDA. One call for each page.
PAPER = dict(zip(SIZES, (7.59, 14.56, 27.04, 35.17)))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("bandwidth")
    number, size = argtypes.whole(1), argtypes.size
    group.add_argument("--tensors", type=number, default=64, metavar="N", help="tensors to back (64)")
    group.add_argument("--size", type=size, default=32 * MIB, metavar="SIZE", help="size of each tensor (32M)")


def backing(context: Context, page_size: int, tensors: int, size: int, repeats: int) -> Any:
    """(GB/s of backing, GB/s of releasing): whole tensors, all in one call."""
    flag = bool(backdrop_flag(context))
    size = -(-size // page_size) * page_size
    ranges = [context.reserve(size, backdrop=flag) for _ in range(tensors)]
    addrs = np.array([r.addr for r in ranges], np.uint64)
    context.prealloc(tensors * size)
    times = np.zeros((2, repeats))
    for i in range(repeats):
        start = perf_counter_ns()
        context.commit(addrs, size, page_size)
        backed = perf_counter_ns()
        context.decommit(addrs, size)
        times[:, i] = backed - start, perf_counter_ns() - backed
    for r in ranges:
        r.close()
    context.trim()
    return tensors * size / times


def page_by_page(context: Context, page_size: int, size: int) -> Any:
    """GB/s of mapping one page per call, as in the paper."""
    n = max(size // page_size, 1)
    (_, map_, _, _), raw = sample_arrays(4, n)
    with context.reserve(n * page_size, backdrop=bool(backdrop_flag(context))) as range_:
        native.call("pages", context._use(), page_size, range_.addr, n * page_size, STRIDE, 0, n, *raw)
    return page_size / np.maximum(map_, 1)


@benchmark("bandwidth", "memory backed and taken back per second, by page size", arguments=arguments, order=20)
def run(session: Session) -> list[Record]:
    """Back many tensors, on a GPU also by CUDA's own calls."""
    args = session.args
    repeats = 10 if session.quick else 50
    records = []

    def measure(context: Context, page_sizes: Sequence[int]) -> None:
        # At most half of the free memory: the defaults take 2 GiB, which a small machine may not have.
        tensors = max(1, min(args.tensors, context.memory_free // 2 // args.size))
        what = f"{tensors} tensors of {size_text(args.size)}"
        for page_size in session.track(page_sizes, f"{context.backend} page sizes"):
            figure = PAPER.get(page_size)
            back, take = backing(context, page_size, tensors, args.size, repeats)
            single = page_by_page(context, page_size, args.size)
            for metric, samples, known in (
                (f"back {what}", back, figure),
                (f"take back {what}", take, None),
                ("map, one page a call", single, figure),
            ):
                records.append(session.record(samples, context, metric, "GB/s", page_size=page_size, paper=known))

    with session.context() as context:
        measure(context, session.page_sizes(context))
        beside = context.backend not in ("host", "cuda") and probe("cuda", args.device) is None
    if beside:
        with Context("cuda", args.device) as context:
            measure(context, context.page_sizes)
    return records
