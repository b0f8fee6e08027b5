"""The interface of a running benchmark, and the display of its records.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from benchmarks.records import Record, Samples
from pyvmem.core import Context
from pyvmem.tools.argtypes import size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


try:
    import rich
    import rich.console
    import rich.progress
except ImportError:  # optional: plain text without it
    rich = None  # type: ignore[assignment]


T = TypeVar("T")


EVERY_SECONDS = 10  # between progress lines without a terminal


class Session:
    """One benchmark's run.

    Attributes
    ----------
    name : str
        The benchmark's name.
    args : argparse.Namespace
        The common arguments (backend, page_size, quick, device) and the benchmark's own.
    quick : bool
        Whether to make a smaller run of the same measurements.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        out: TextIO | None = None,
        keep: Callable[[list[Record]], None] | None = None,
    ) -> None:
        self.name = name
        self.args = args
        self.quick = args.quick
        self._out = out or sys.stderr
        self._keep = keep

    def keep(self, records: list[Record]) -> None:
        """Write the records so far to the output file, because a long run may be cut off."""
        if self._keep is not None:
            self._keep(records)

    def context(self, backend: str | None = None, **options: Any) -> Context:
        """A new `Context` of the backend given on the command line, or of another one."""
        backend = backend or self.args.backend
        if backend == "host" and self.args.device:
            raise ValueError(f"--device {self.args.device}: the host backend has no device but 0")
        return Context(backend, self.args.device, **options)

    def page_sizes(self, context: Context) -> list[int]:
        """The page sizes to measure, ascending: the selected ones, or all; in a quick run the smallest and the largest.

        Raises ValueError if the context does not support a selected size.
        """
        asked, sizes = self.args.page_size, context.page_sizes
        if asked and any(size not in sizes for size in asked):
            texts = [", ".join(map(size_text, some)) for some in (asked, sizes)]
            raise ValueError(f"--page-size {texts[0]}: the {context.backend} backend has pages of {texts[1]}")
        if not asked and self.quick:
            asked = (sizes[0], sizes[-1])
        return [size for size in sizes if not asked or size in asked]

    def record(
        self,
        samples: Samples,
        context: Context,
        metric: str,
        unit: str,
        *,
        page_size: int | None = None,
        backend: str | None = None,
        paper: float | None = None,
    ) -> Record:
        """A `Record` of samples measured on a context. `backend` overrides its backend's name, for comparisons."""
        return Record.of(
            samples,
            bench=self.name,
            backend=backend or context.backend,
            device=context.info().device_name,
            page_size=page_size,
            metric=metric,
            unit=unit,
            paper=paper,
        )

    def track(self, items: Collection[T], text: str) -> Iterator[T]:
        """Iterate over items, showing progress."""
        with self.progress(text, len(items)) as advance:
            for item in items:
                yield item
                advance(1)

    @contextlib.contextmanager
    def progress(self, text: str, total: float) -> Iterator[Callable[[float], None]]:
        """Yields advance(n). Shows a progress bar in a terminal, otherwise a line at the start and every 10 seconds."""
        if rich is not None and self._out.isatty():
            console = rich.console.Console(file=self._out)
            with rich.progress.Progress(console=console, transient=True) as bar:
                task = bar.add_task(f"{self.name}: {text}", total=total)
                yield lambda n: bar.advance(task, n)
            return
        print(f"{self.name}: {text}", file=self._out, flush=True)
        start = last = perf_counter()
        done = 0.0

        def advance(n: float) -> None:
            nonlocal last, done
            done += n
            now = perf_counter()
            if now - last >= EVERY_SECONDS:
                last = now
                part = f"{100 * done / total:.0f} %" if total else "going on"
                print(f"{self.name}: {text}: {part} after {now - start:.0f} s", file=self._out, flush=True)

        yield advance


def number_text(value: float | None) -> str:
    """A number with four significant digits, and all digits before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1e3 else f"{value:.4g}"


COLUMNS = ("median", "p10", "p90", "p99", "n", "paper")
_LABEL, _WIDTHS = 23, (10, 10, 10, 10, 8, 8)  # of the table's columns: 79 in all; numbers have up to nine characters


def by_metric(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """The records of each metric and unit, in order of first appearance."""
    found: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        found.setdefault((r.metric, r.unit), []).append(r)
    return found


def table(records: Sequence[Record]) -> list[str]:
    """Lines of at most 80 columns: each metric with its unit, and below it a line for each backend and page size.

    A single sample has no spread to show.
    """

    def line(label: str, cells: Sequence[str]) -> str:
        return (label.ljust(_LABEL) + "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS))).rstrip()

    lines = [line("", COLUMNS)]
    for (metric, unit), rows in by_metric(records).items():
        lines += textwrap.wrap(f"{metric}, {unit}" if unit else metric, 79, subsequent_indent="  ")
        for r in rows:
            spread = (r.p10, r.p90, r.p99) if r.n > 1 else (None,) * 3
            cells = [*map(number_text, (r.median, *spread)), str(r.n), number_text(r.paper)]
            label = f"  {r.backend} {size_text(r.page_size)}".rstrip()
            if len(label) >= _LABEL:  # gets its own line
                lines.append(label)
                label = ""
            lines.append(line(label, cells))
    return lines


def show(title: str, records: Sequence[Record]) -> None:
    """Print records as a table, and below it what its words mean."""
    words = ["paper: vAttention on an A100"] if any(r.paper is not None for r in records) else []
    if any(r.backend.endswith("-bare") for r in records):
        words.append("bare: CUDA's or the system's own calls, in turns with vMem's; over: the ratio of the two")
    print("\n".join([title, *table(records), "", *words, *[""] * bool(words)]))


def plot(records: Sequence[Record], figure: Figure) -> None:
    """Draw records: a panel per metric and unit, bars by page size, whiskers from p10 to p90, dots for the paper.

    Metrics that are 0 throughout get no panel.
    """
    panels = {key: rows for key, rows in by_metric(records).items() if any(r.median or r.p90 for r in rows)}
    columns = min(3, max(len(panels), 1))
    lines = -(-len(panels) // columns)
    figure.set_size_inches(5 * columns, 3.4 * max(lines, 1))
    for i, ((metric, unit), rows) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, i + 1)
        names = [f"{r.backend} {size_text(r.page_size)}".strip() for r in rows]
        spread = [[r.median - r.p10 for r in rows], [r.p90 - r.median for r in rows]]
        axes.bar(names, [r.median for r in rows], yerr=spread, capsize=3, color="#4477aa")
        paper = [(i, r.paper) for i, r in enumerate(rows) if r.paper is not None]
        if paper:
            axes.plot(*zip(*paper), "o", color="#cc6677")
        if max(all_of := [r.median for r in rows if r.median > 0] + [p for _, p in paper]) > 30 * min(all_of):
            axes.set_yscale("log")
        axes.set_title(metric + (" (dots: the paper, A100)" if paper else ""), fontsize="medium")
        axes.set_ylabel(unit)
        axes.tick_params(axis="x", labelrotation=30, labelsize="small")
