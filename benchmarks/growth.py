"""How fast an engine's memory grows from nothing and goes back, and what its kernels notice of it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import threading
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.registry import benchmark
from benchmarks.vmm import backdrop_flag
from pyvmem.blocks import BlockRange, Blocks
from pyvmem.core import MIB, Context
from pyvmem.tools import argtypes
from pyvmem.tools.argtypes import size_text

if TYPE_CHECKING:
    from benchmarks.records import Record
    from benchmarks.session import Session

SIZES = (64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB)
GIB = 1 << 30
COPIED = 32 * MIB  # at once
MOST_PROGRAMS = 1024


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("growth")
    group.add_argument(
        "--grow", action="append", type=argtypes.size, metavar="SIZE", help="bytes to grow by (64M, 256M, 1G and 4G)"
    )
    text = (
        "in turn: copy from pinned host memory to the GPU meanwhile, as a model that wakes does, by the copy engine "
        "or by a kernel, of so many programs if `:N` follows; or copy nothing"
    )
    group.add_argument("--copies", nargs="+", type=copier, metavar="none|engine|kernel[:N]", help=text)


def copier(text: str) -> str:
    """Check what copies: a type for argparse."""
    how, _, programs = text.partition(":")
    if how not in ("none", "engine", "kernel") or (":" in text and not (how == "kernel" and programs.isdecimal())):
        raise argparse.ArgumentTypeError(f"{text!r}: must be none, engine, kernel, or kernel:N of N programs")
    if programs and not 1 <= int(programs) <= MOST_PROGRAMS:
        raise argparse.ArgumentTypeError(f"{text!r}: from 1 to {MOST_PROGRAMS} programs")
    return text


class Beside:
    """What a thread does with a device while memory grows and goes back."""

    def __init__(self, device: int) -> None:
        import torch

        self._torch, self._device, self._stop = torch, torch.device("cuda", device), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


class Launches(Beside):
    """Launches a kernel, and waits for it, again and again; `longest` is the longest round in ms."""

    longest = 0.0

    def _run(self) -> None:
        torch = self._torch
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            x, event = torch.zeros(1024, device="cuda"), torch.cuda.Event()
            while not self._stop.is_set():
                start = perf_counter()
                x.add_(1)
                event.record()
                while not event.query():
                    pass
                self.longest = max(self.longest, 1e3 * (perf_counter() - start))


class Copies(Beside):
    """Copies from pinned host memory to the device, by the copy engine or by a kernel; `done` is the bytes copied."""

    done = 0

    def __init__(self, device: int, how: str) -> None:
        super().__init__(device)
        self._copy = self._copier(how)
        words = COPIED // 8
        self._source = self._torch.empty(words, dtype=self._torch.int64, pin_memory=True)
        self._to = self._torch.empty(words, dtype=self._torch.int64, device=self._device)

    def _copier(self, how: str) -> Callable[[Any, Any], None]:
        by, _, programs = how.partition(":")
        if by == "engine":
            return lambda to, source: to.copy_(source, non_blocking=True)
        from pyvmem.sleep.to_device import ToDevice

        copies = ToDevice(self._device)
        copies.prepare()
        if not copies.has_kernel:
            raise ValueError(f"--copies {how}: Triton does not work here")
        from pyvmem.sleep import to_device_kernel as kernel

        n = int(programs or kernel.PROGRAMS)
        return lambda to, source: kernel.copy(to, source, n)

    def _run(self) -> None:
        torch, queued = self._torch, []
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            while not self._stop.is_set():
                self._copy(self._to, self._source)
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > 4:
                    queued.pop(0).synchronize()
                    self.done += COPIED
            torch.cuda.current_stream().synchronize()


def beside(context: Context, device: int, copies: str | None) -> Beside | None:
    """What runs beside: copies, or launches unless these are `none`. None where torch cannot launch kernels."""
    found = "cuda_pointer" in context.info().capabilities
    try:
        import torch

        found = found and torch.cuda.is_available()
    except ImportError:
        found = False
    if copies == "none":
        return None
    if copies and not found:
        raise ValueError(f"--copies {copies}: torch does not reach the device of the {context.backend} backend")
    if copies:
        return Copies(device, copies)
    return Launches(device) if found else None


def turn(context: Context, page_size: int, size: int, runs: Beside | None) -> dict[tuple[str, str], float]:
    """{(metric, unit): value} of one growth by `size` bytes from nothing, and of giving all of it back."""
    n = size // page_size
    launches = runs if isinstance(runs, Launches) else None
    copies = runs if isinstance(runs, Copies) else None
    found: dict[tuple[str, str], float] = {}

    def timed(what: str, call: Callable[[], Any]) -> None:
        calls = context.stats().syscalls
        if launches:
            launches.longest = 0.0
        copied = copies.done if copies else 0
        start = perf_counter()
        call()
        took = perf_counter() - start
        found[f"{what} {size_text(size)}", "GiB/s"] = size / GIB / took
        found[f"driver calls to {what} {size_text(size)}", "1/GiB"] = (context.stats().syscalls - calls) / (size / GIB)
        if launches:
            found[f"longest launch beside, {what} {size_text(size)}", "ms"] = launches.longest
        if copies:
            found[f"copied beside, {what} {size_text(size)}", "GiB/s"] = (copies.done - copied) / GIB / took

    with context.reserve(n * page_size, backdrop=bool(backdrop_flag(context))) as space:
        with Blocks(space, [BlockRange(0, page_size, page_size)], n, page_size=page_size) as blocks:
            ids = np.arange(n, dtype=np.uint32)

            def grow() -> None:
                blocks.order(ids)
                blocks.flush()

            def give_back() -> None:
                blocks.unback(ids)
                blocks.flush()
                context.trim()

            timed("grow by", grow)
            timed("give back", give_back)
    return found


@benchmark(
    "growth", "memory that an engine gets from nothing and gives back, per second", arguments=arguments, order=25
)
def run(session: Session) -> list[Record]:
    """Order blocks of one page each and wait for them, then give them up, as an engine does with its KV cache."""
    repeats = 3 if session.quick else 10
    records = []
    with session.context() as context:
        page_sizes = session.args.page_size and session.page_sizes(context) or [max(context.page_sizes)]
        room = context.memory_free // 2
        sizes = session.args.grow or [size for size in SIZES[: 2 if session.quick else None] if size <= room]
        for page_size in session.track(page_sizes, "page sizes"):
            for size, how in itertools.product(sizes, session.args.copies or [None]):
                runs = beside(context, session.args.device, how)
                with runs or contextlib.nullcontext():
                    turns = [turn(context, page_size, size, runs) for _ in range(repeats + 1)][1:]
                for metric, unit in turns[0]:
                    samples = [found[metric, unit] for found in turns]
                    name = f"{metric}; copies: {how}" if how else metric
                    records.append(session.record(samples, context, name, unit, page_size=page_size))
            session.keep(records)
    return records
