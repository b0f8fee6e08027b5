"""What a running benchmark is given, and how its records are shown.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from pyvmem.bench.records import Record, Samples
from pyvmem.core import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure


try:
    import rich
    import rich.console
    import rich.progress
    import rich.table
except ImportError:  # an extra: plain text without it
    rich = None  # type: ignore[assignment]


T = TypeVar("T")


class Session:
    """One benchmark's run.

    Attributes
    ----------
    name : str
        Of the benchmark.
    args : argparse.Namespace
        The common arguments (backend, page_size, quick, device) and the benchmark's own.
    quick : bool
        A smaller run that shows the same.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        out: TextIO = sys.stderr,
        keep: Callable[[list[Record]], None] | None = None,
    ) -> None:
        self.name = name
        self.args = args
        self.quick = args.quick
        self._out = out
        self._keep = keep

    def keep(self, records: list[Record]) -> None:
        """Write the benchmark's records so far, where they are to go: a long run may be cut off."""
        if self._keep is not None:
            self._keep(records)

    def context(self, backend: str | None = None, **options: Any) -> Context:
        """A new `Context` of the backend asked for on the command line, or of another."""
        return Context(backend or self.args.backend, self.args.device, **options)

    def page_sizes(self, context: Context) -> list[int]:
        """The page sizes to measure: the ones asked for, or all that the context supports. Raises ValueError."""
        asked = self.args.page_size or context.page_sizes
        if any(size not in context.page_sizes for size in asked):
            texts = [", ".join(map(size_text, sizes)) for sizes in (asked, context.page_sizes)]
            raise ValueError(f"--page-size {texts[0]}: the {context.backend} backend has pages of {texts[1]}")
        return [size for size in context.page_sizes if size in asked]

    def record(
        self,
        samples: Samples,
        context: Context,
        metric: str,
        unit: str,
        *,
        page_size: int | None = None,
        backend: str | None = None,
        device: str | None = None,
        paper: float | None = None,
    ) -> Record:
        """A `Record` of samples measured on a context; backend names what stands beside it instead."""
        return Record.of(
            samples,
            bench=self.name,
            backend=backend or context.backend,
            device=device or context.info().device_name,
            page_size=page_size,
            metric=metric,
            unit=unit,
            paper=paper,
        )

    def track(self, items: Collection[T], text: str, total: int | None = None) -> Iterator[T]:
        """Iterate over items behind a progress bar, where somebody watches."""
        if total is None:
            total = len(items)
        with self.progress(text, total) as advance:
            for item in items:
                yield item
                advance(1)

    @contextlib.contextmanager
    def progress(self, text: str, total: float) -> Iterator[Callable[[float], None]]:
        """A progress bar, or where nobody watches a line when the work begins: yields advance(n)."""
        if rich is None or not self._out.isatty():
            print(f"{self.name}: {text}", file=self._out, flush=True)
            yield lambda n: None
            return
        console = rich.console.Console(file=self._out)
        with rich.progress.Progress(console=console, transient=True) as bar:
            task = bar.add_task(f"{self.name}: {text}", total=total)
            yield lambda n: bar.advance(task, n)


def size_text(bytes: int | None) -> str:
    """64K, 2M, 12T: a size in bytes as people say it."""
    if bytes is None:
        return ""
    for shift, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if bytes >= 1 << shift and bytes % (1 << shift) == 0:
            return f"{bytes >> shift}{unit}"
    return str(bytes)


def parse_size(text: str) -> int:
    """Bytes of a text such as 64K, 2M, 12TiB or 4096. Raises ValueError."""
    shift = {"K": 10, "M": 20, "G": 30, "T": 40}
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    try:
        if number and number[-1] in shift:
            return int(float(number[:-1]) * (1 << shift[number[-1]]))
        return int(number)
    except (OverflowError, ValueError):
        raise ValueError(f"{text!r} is no size such as 64K, 2M or 1G") from None


def number_text(value: float | None) -> str:
    """Four significant digits, and every digit before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1e3 else f"{value:.4g}"


COLUMNS = ("metric", "backend", "page", "median", "p10", "p90", "p99", "unit", "n", "paper")


def by_metric(records: Sequence[Record]) -> list[Record]:
    """The records with those of one metric together, in the order in which the metrics first come."""
    order = {metric: i for i, metric in enumerate(dict.fromkeys(r.metric for r in records))}
    return sorted(records, key=lambda r: order[r.metric])


def table(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Rows of text for `COLUMNS`. A single sample has no spread to show."""
    return [
        (
            r.metric,
            r.backend,
            size_text(r.page_size),
            number_text(r.median),
            *(number_text(p) if r.n > 1 else "" for p in (r.p10, r.p90, r.p99)),
            r.unit,
            str(r.n),
            number_text(r.paper),
        )
        for r in by_metric(records)
    ]


def show(title: str, records: Sequence[Record], out: TextIO = sys.stdout) -> None:
    """Print records as a table."""
    rows = table(records)
    right = {"median", "p10", "p90", "p99", "n", "paper", "page"}
    if rich is not None and out.isatty():
        shown = rich.table.Table(title=title, title_justify="left")
        for column in COLUMNS:
            shown.add_column(column, justify="right" if column in right else "left", no_wrap=column != "metric")
        for row in rows:
            shown.add_row(*row)
        rich.console.Console(file=out).print(shown)
        return
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    print(title, file=out)
    for row in [COLUMNS, *rows]:
        cells = [c.rjust(w) if n in right else c.ljust(w) for c, w, n in zip(row, widths, COLUMNS)]
        print("  " + "  ".join(cells).rstrip(), file=out)


def plot(records: Sequence[Record], figure: Figure) -> None:
    """Draw records: a panel for each metric and unit, bars by page size, whiskers p10 to p90, the paper as dots."""
    metrics = list(dict.fromkeys((r.metric, r.unit) for r in records))
    columns = min(3, len(metrics))
    figure.set_size_inches(5 * columns, 3.2 * -(-len(metrics) // columns))
    for i, (metric, unit) in enumerate(metrics):
        axes = figure.add_subplot(-(-len(metrics) // columns), columns, i + 1)
        rows = [r for r in records if (r.metric, r.unit) == (metric, unit)]
        names = [f"{r.backend} {size_text(r.page_size)}".strip() for r in rows]
        spread = [[r.median - r.p10 for r in rows], [r.p90 - r.median for r in rows]]
        axes.bar(names, [r.median for r in rows], yerr=spread, capsize=3, color="#4477aa")
        paper = [(i, r.paper) for i, r in enumerate(rows) if r.paper is not None]
        if paper:
            axes.plot(*zip(*paper), "o", color="#cc6677", label="paper (A100)")
            axes.legend(fontsize="small")
        axes.set_title(metric, fontsize="medium")
        axes.set_ylabel(unit)
        axes.tick_params(axis="x", labelrotation=30, labelsize="small")
    figure.tight_layout()
