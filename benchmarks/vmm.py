"""Latency of each call, by page size: Table 2 of the vAttention paper (Prabhu et al., ASPLOS 2025).

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks import native
from benchmarks.registry import benchmark
from pyvmem._ffi import ffi, lib
from pyvmem.core import KIB, MAP_OP, MIB
from pyvmem.errors import OutOfMemory, _check

if TYPE_CHECKING:
    import argparse

    from benchmarks.records import Record
    from benchmarks.session import Session
    from pyvmem.core import Context, Reservation


SIZES = (64 * KIB, 128 * KIB, 256 * KIB, 2 * MIB)

# Microseconds on an A100: 64, 128 and 256 KiB through the paper's driver, 2 MiB through CUDA. At 2 MiB, mapping is
# cuMemMap and cuMemSetAccess, releasing is cuMemUnmap and cuMemRelease.
PAPER = {
    "reserve 1 GiB": (18, 17, 16, 2),
    "create": (1.7, 2, 2.1, 29),
    "map": (8, 8.5, 9, 2 + 38),
    "unmap": (None, None, None, 34),
    "release, unmap included": (2, 3, 4, 34 + 23),
    "free 1 GiB": (35, 35, 35, 1),
}

Seen = dict[str, npt.NDArray[Any]]  # nanoseconds of each call, by metric
Bare = Callable[[npt.NDArray[np.uint64]], tuple[float, float]]

RANGE = 1 << 30
STRIDE = 1009  # pages between consecutive samples: prime, so that consecutive samples are far apart
BLOCK = 2 * MIB  # the addresses that one page table of small pages covers
BATCH = 1024
TURN = 20  # consecutive single calls in a turn
TIB = 1 << 40


def paper(metric: str, page_size: int) -> float | None:
    """The paper's microseconds, or None."""
    metric = metric.removesuffix(", ioctl")
    return PAPER[metric][SIZES.index(page_size)] if metric in PAPER and page_size in SIZES else None


def sample_arrays(count: int, n: int) -> tuple[list[npt.NDArray[np.uint64]], list[Any]]:
    """`count` arrays for n samples each, and pointers to them for the C loops."""
    arrays = [np.zeros(n, np.uint64) for _ in range(count)]
    return arrays, [ffi.from_buffer("uint64_t[]", a) for a in arrays]


def backdrop_flag(context: Context) -> int:
    """The flags with which tensors reserve: a backdrop, if the backend supports one."""
    return lib.VMEM_RESERVE_BACKDROP if "backdrop" in context.info().capabilities else 0


class Calls:
    """Single calls at one page size, n of each, by `round(first, count)`; then `seen` is {metric: nanoseconds[n]}."""

    def __init__(self, context: Context, page_size: int, n: int, stack: contextlib.ExitStack) -> None:
        self.context, self.page_size = context, page_size
        flags = backdrop_flag(context)
        (reserve, free), raw = sample_arrays(2, min(n, 200))
        native.call("reserve", context._use(), RANGE, flags, len(reserve), *raw)
        self.seen = {"reserve 1 GiB": reserve, "free 1 GiB": free}
        self._rows = []  # (reservation, arrays)
        names = ("create", "map", "unmap", "release, unmap included")
        for backdrop in (True, False) if flags else (False,):
            range_ = stack.enter_context(context.reserve(RANGE, backdrop=backdrop))
            arrays, raw = sample_arrays(len(names), n)
            self._rows.append((range_, raw))
            if backdrop == bool(flags):
                self.seen |= zip(names, arrays)
            else:
                self.seen |= {"map, no backdrop": arrays[1], "release, unmap included, no backdrop": arrays[3]}
        if "gpu" in context.info().capabilities and page_size < BLOCK:
            self._open_blocks(self._rows[0][0])
        self._python = np.zeros((2, n), np.uint64)
        self.seen |= zip(("map, from Python", "unmap, from Python"), self._python)

    def _pages(self, range_: Reservation, stride: int, first: int, count: int, raw: Any) -> None:
        # The driver call that allocates memory for many pages is not part of a page's latency.
        self.context.prealloc(64 * MIB)
        native.call("pages", self.context._use(), self.page_size, range_.addr, RANGE, stride, first, count, *raw)

    def _open_blocks(self, range_: Reservation) -> None:
        """Map a page in each 2 MiB block. The first one creates the block's page table; `round` times later ones."""
        n = RANGE // BLOCK
        arrays, raw = sample_arrays(4, n)
        self._pages(range_, STRIDE * BLOCK // self.page_size, 0, n, raw)
        self.seen["map, first page in its 2M"] = arrays[1]

    def round(self, first: int, count: int) -> None:
        for range_, raw in self._rows:
            self._pages(range_, STRIDE, first, count, raw)
        self._from_python(self._rows[0][0], first, count)

    def _from_python(self, range_: Reservation, first: int, count: int) -> None:
        """The same page's samples through `Reservation.map` and `unmap`."""
        # The page is released again: while it exists, `prealloc` would allocate memory elsewhere.
        with self.context.create(self.page_size) as page:
            for i in range(first, first + count):
                offset = i * STRIDE % (RANGE // self.page_size) * self.page_size
                start = perf_counter_ns()
                range_.map(page, offset)
                mapped = perf_counter_ns()
                range_.unmap(offset, self.page_size)
                self._python[:, i] = mapped - start, perf_counter_ns() - mapped


class Ioctls:
    """The same for the ioctls of the patched module, which also creates pages of 64, 128 and 256 KiB."""

    def __init__(self, context: Context, page_size: int, n: int, stack: contextlib.ExitStack) -> None:
        self._context, self._page_size = context, page_size
        self._range = stack.enter_context(context.reserve(RANGE, backdrop=True))
        with context.create(2 * MIB) as page:  # libvmem's maps activate the backdrop, and create the page tables
            for offset in range(0, RANGE, BLOCK):
                self._range.map(page, offset)
                self._range.unmap(offset, BLOCK)
        arrays, self._raw = sample_arrays(4, n)
        self.seen = dict(zip(("create, ioctl", "map, ioctl", "unmap, ioctl", "release, unmap included, ioctl"), arrays))

    def round(self, first: int, count: int) -> None:
        where = self._context._use(), self._page_size, self._range.addr, RANGE
        native.call("ioctls", *where, STRIDE, first, count, *self._raw)


class CudaCalls:
    """The same for CUDA's own calls, at 2 MiB."""

    def __init__(self, device: int, n: int, stack: contextlib.ExitStack) -> None:
        cuda = ffi.new("void **")
        native.call("cuda_open", device, RANGE, cuda)
        self._cuda = cuda[0]
        stack.callback(native.call, "cuda_close", self._cuda)
        (reserve, free), raw = sample_arrays(2, n)
        native.call("cuda_reserve", self._cuda, n, *raw)
        (create, map_, access, unmap, release), self._raw = sample_arrays(5, n)
        self._release = release, unmap
        self.seen = {
            "reserve 1 GiB": reserve,
            "create": create,
            "map": map_,
            "cuMemSetAccess, of map": access,
            "unmap": unmap,
            "release, unmap included": np.zeros(n, np.uint64),
            "free 1 GiB": free,
        }

    def round(self, first: int, count: int) -> None:
        native.call("cuda_pages", self._cuda, STRIDE, first, count, *self._raw)
        part = slice(first, first + count)
        self.seen["release, unmap included"][part] = self._release[0][part] + self._release[1][part]


def single_calls(
    session: Session, context: Context, sizes: Sequence[int], n: int, direct: bool
) -> list[tuple[str | None, int, Seen]]:
    """[(backend or None, page size, {metric: nanoseconds[n]})] of single calls, and of CUDA's own calls on a GPU.

    direct: also of the module's ioctls themselves.

    The calls alternate in turns of TURN calls, so that changes of the machine's speed affect both equally.
    """
    with contextlib.ExitStack() as stack:
        rows: list[tuple[str | None, int, Calls | CudaCalls | Ioctls]]
        rows = [(None, size, Calls(context, size, n, stack)) for size in sizes]
        if direct:
            rows += [(None, size, Ioctls(context, size, n, stack)) for size in SIZES]
        if "gpu" in context.info().capabilities:
            rows.append(("cuda-bare", 2 * MIB, CudaCalls(session.args.device, n, stack)))
        for first in session.track(range(0, n, TURN), "single calls"):
            for _, _, calls in rows:
                calls.round(first, min(TURN, n - first))
        return [(backend, size, calls.seen) for backend, size, calls in rows]


def paired(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], turn: int) -> npt.NDArray[np.float64]:
    """Our time over theirs, turn by turn: float[turns], the ratio of the medians of each turn's samples."""
    turns = len(ours) // turn * turn
    mine, other = (np.median(np.asarray(x[:turns], float).reshape(-1, turn), axis=1) for x in (ours, theirs))
    ratios: npt.NDArray[np.float64] = mine / np.maximum(other, 1)
    return ratios


def scattered(n: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    """Page numbers 0 to n-1 in an order with almost no neighbours."""
    return np.random.default_rng(seed).permutation(n).astype(np.uint64)


ORDERS: dict[str, Callable[[], npt.NDArray[np.uint64]]] = {
    "consecutive": lambda: np.arange(BATCH, dtype=np.uint64),
    "scattered": lambda: scattered(BATCH),
}


def batches(context: Context, page_size: int, n: int, bare: Bare | None = None) -> dict[tuple[str, str], Any]:
    """{(who, metric): nanoseconds[n]} of whole batches of `BATCH` pages, addresses consecutive or scattered.

    bare(slots) does the same without libvmem, in turns with it, and returns the nanoseconds to map and to unmap.
    """
    seen = {}
    with context.reserve(BATCH * page_size, backdrop=bool(backdrop_flag(context))) as range_:
        with context.create(page_size, BATCH) as pages:
            ops = np.empty(BATCH, MAP_OP)
            ops["page"] = pages.handles
            for order, make in ORDERS.items():
                slots = make()
                ops["addr"] = range_.addr + slots * page_size
                raw_ops = ffi.from_buffer("struct vmem_map_op[]", ops)
                ours, theirs = np.zeros((2, n)), np.zeros((2, n))
                for i in range(n):
                    start = perf_counter_ns()
                    _check(lib.vMemMapBatch(context._use(), raw_ops, BATCH, 0, ffi.NULL))
                    mapped = perf_counter_ns()
                    _check(lib.vMemUnmap(context._use(), range_.addr, range_.length))
                    ours[:, i] = mapped - start, perf_counter_ns() - mapped
                    if bare:
                        theirs[:, i] = bare(slots)
                for row, what in enumerate(("map", "unmap")):
                    metric = f"{what}, batch of {BATCH} {order} pages"
                    seen["ours", metric] = ours[row]
                    if bare:
                        seen["bare", metric] = theirs[row]
    return seen


def bare_host(page_size: int) -> Bare:
    """The bare system calls, for `batches`."""

    def once(slots: npt.NDArray[np.uint64]) -> tuple[float, float]:
        times, raw = sample_arrays(2, 1)
        native.call("host", page_size, ffi.from_buffer("uint64_t[]", slots), BATCH, *raw)
        return times[0][0], times[1][0]

    return once


def largest_reservation(context: Context) -> tuple[float, float]:
    """(milliseconds, overhead in MiB) of reserving the paper's example: 12 TiB."""
    before = context.stats().overhead
    start = perf_counter_ns()
    with context.reserve(12 * TIB, backdrop=bool(backdrop_flag(context))):
        took = perf_counter_ns() - start
        return took / 1e6, (context.stats().overhead - before) / MIB


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vmm")
    group.add_argument("--direct", action="store_true", help="uvm: also time the module's ioctls themselves")


@benchmark("vmm", "latency of each call, by page size", arguments=arguments, order=10)
def run(session: Session) -> list[Record]:
    """Time single calls and batches for each page size, and on a GPU also CUDA's own calls."""
    n = 200 if session.quick else 2000
    repeats = 20 if session.quick else 100
    records = []
    with session.context() as context:
        if session.args.direct and context.backend != "uvm":
            raise ValueError(f"--direct times the ioctls of the uvm backend; this is {context.backend}")

        def add(seen: Mapping[str, Any], page_size: int, backend: str | None = None) -> None:
            for metric, samples in seen.items():
                figure = paper(metric, page_size)
                us = np.asarray(samples, float) / 1e3
                records.append(
                    session.record(us, context, metric, "us", page_size=page_size, backend=backend, paper=figure)
                )

        sizes = session.page_sizes(context)
        singles = single_calls(session, context, sizes, n, session.args.direct)
        for backend, page_size, seen in singles:
            add(seen, page_size, backend)
        cuda = {backend: seen for backend, _, seen in singles}.get("cuda-bare")
        for _, page_size, seen in singles:
            if cuda is None or seen is cuda or "map" not in seen:
                continue
            for metric in ("map", "release, unmap included"):
                ratios = paired(seen[metric], cuda[metric], TURN)
                records.append(session.record(ratios, context, f"{metric}, over CUDA's", "x", page_size=page_size))
        for page_size in session.track(sizes, "batches"):
            bare = bare_host(page_size) if context.backend == "host" else None
            both = batches(context, page_size, repeats, bare)
            for (who, metric), samples in both.items():
                add({metric: samples}, page_size, backend=f"{context.backend}-bare" if who == "bare" else None)
                if who == "bare":
                    ratios = paired(both["ours", metric], samples, 1)
                    metric += ", over the bare calls"
                    records.append(session.record(ratios, context, metric, "x", page_size=page_size))
        try:
            took, overhead = largest_reservation(context)
        except OutOfMemory:  # limited address space, or hardware with fewer address bits
            pass
        else:
            records.append(session.record(took, context, "reserve 12 TiB", "ms"))
            records.append(session.record(overhead, context, "memory that reserving 12 TiB takes", "MiB"))
    return records
