"""Plots of `python -m benchmarks attention`, one panel for each figure of the vAttention paper.

``python -m benchmarks.attention_plots RECORDS.json FOLDER`` draws each panel into its own PNG file.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem.bench.session import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pyvmem.bench.records import Record


COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
HEADS = ("32", "8")  # of the points that are drawn; others belong to tables
METRIC = re.compile(r"(decode|prefill) B=(\d+) L=(\d+) heads (\d+)/(\d+), (.+)")


def legend(axes: Axes) -> None:
    """A legend below the axes, where it covers nothing."""
    count = len(axes.get_legend_handles_labels()[1])
    if count:
        below = (0.5, -0.2 if axes.get_xlabel() else -0.12)
        columns = 1 if count < 4 else 2
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=below, ncols=columns, frameon=False)


class Timed:
    """The medians of one run's records: ``at(phase, batch, tokens)`` is {series: microseconds}."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._at: dict[tuple[str, int, int], dict[str, float]] = {}
        for r in records:
            found = METRIC.fullmatch(r.metric)
            if not found or r.unit != "us" or (found[4], found[5]) != HEADS:
                continue
            phase, batch, tokens, name = found[1], int(found[2]), int(found[3]), found[6]
            memory = size_text(r.page_size) or r.backend
            if "paged " in name or "HBM" in name:
                series = name
            else:
                series = f"{name.removesuffix(' contiguous')}, {memory}"
            self._at.setdefault((phase, batch, tokens), {})[series] = r.median

    def at(self, phase: str, batch: int, tokens: int) -> Any:
        return self._at.get((phase, batch, tokens), {})

    def points(self, phase: str, **fixed: Any) -> Any:
        """(batch, tokens) that were measured, sorted; batch or tokens may be fixed."""
        found = sorted((b, t) for p, b, t in self._at if p == phase)
        return [(b, t) for b, t in found if fixed.get("batch", b) == b and fixed.get("tokens", t) == t]

    def lines(self, phase: str, points: Any) -> Any:
        """{series: {point: microseconds}}: series measured at half of the points or more, blocks of 16 and 256 only."""
        lines: dict[str, dict[Any, float]] = {}
        for point in points:
            for series, value in self.at(phase, *point).items():
                if not series.endswith(("paged 32", "paged 64", "paged 128")):
                    lines.setdefault(series, {})[point] = value
        return {series: values for series, values in lines.items() if 2 * len(values) >= len(points)}


def _look(i: int) -> dict[str, Any]:
    """How the i-th series is drawn: no two of the first 28 are alike, also without colour."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": "os^vDPX"[i % 7],
        "linestyle": ("-", "--", ":", "-.")[i // 7 % 4],
        "markersize": 4,
        "linewidth": 1,
    }


def _lines(axes: Axes, lines: Any, x: Any, value: Any, xlabel: str, ylabel: str) -> None:
    for i, (series, values) in enumerate(sorted(lines.items())):
        axes.plot([x(p) for p in values], [value(p, v) for p, v in values.items()], label=series, **_look(i))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    legend(axes)


def _kilo(n: int) -> str:
    return size_text(n) if n >= 1024 else str(n)


def figure_2(axes: Axes, timed: Timed) -> None:
    """Paged over unpaged kernels of the same library, prefill."""
    points = timed.points("prefill", batch=1)
    pairs = (("fa3 paged 16", "fa3, cudaMalloc"), ("fa3 paged 256", "fa3, cudaMalloc"),
             ("flashinfer paged 16", "flashinfer unpaged, 64K"), ("flashinfer-fa2 paged 16", "fa3, 64K"))  # fmt: skip
    width = 0.2
    for i, (paged, plain) in enumerate(pairs):
        both = [(n, timed.at("prefill", *p)) for n, p in enumerate(points)]
        at = [(n, 100 * (v[paged] / v[plain] - 1)) for n, v in both if paged in v and plain in v]
        if at:
            axes.bar([n + (i - 1.5) * width for n, _ in at], [v for _, v in at], width, color=COLOURS[i],
                     edgecolor="black", linewidth=0.5, hatch=("", "//", "..", "xx")[i],
                     label=f"{paged} over {plain}")  # fmt: skip
    axes.set_xticks(range(len(points)), [_kilo(t) for _, t in points])
    axes.set_ylabel("more time, %")
    axes.set_xlabel("tokens of the prompt")
    axes.axhline(0, color="black", linewidth=0.5)
    legend(axes)


def figure_3(axes: Axes, timed: Timed) -> None:
    """Decode of paged kernels by block size."""
    i = 0
    for point in timed.points("decode"):
        values = timed.at("decode", *point)
        for library in ("fa3", "flashinfer", "triton"):
            names = {block: f"{library} paged {block}" for block in (16, 32, 64, 128, 256)}
            blocks = {block: values[name] for block, name in names.items() if name in values}
            if len(blocks) > 2:
                of_16 = [v / blocks[16] for v in blocks.values()]
                axes.plot(list(blocks), of_16, label=f"{library}, B={point[0]} L={_kilo(point[1])}", **_look(i))
                i += 1
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows of a block")
    axes.set_ylabel("time, of blocks of 16")
    legend(axes)


def figure_4(axes: Axes, timed: Timed) -> None:
    """Decode tokens per second by batch, at 1K tokens."""
    lines = timed.lines("decode", timed.points("decode", tokens=1024))
    lines = {s: v for s, v in lines.items() if s.endswith((", 64K", ", cudaMalloc"))}
    _lines(axes, lines, lambda p: p[0], lambda p, us: p[0] / us * 1e6, "requests", "tokens per second, one layer")


def figure_6(axes: Axes, timed: Timed) -> None:
    """Prefill tokens per second by context length."""
    lines = timed.lines("prefill", timed.points("prefill", batch=1))
    _lines(axes, lines, lambda p: p[1], lambda p, us: p[1] / us * 1e6, "tokens of the prompt",
           "tokens per second, one layer")  # fmt: skip


def figure_7(axes: Axes, timed: Timed) -> None:
    """Decode tokens per second by batch, at 16K tokens."""
    lines = timed.lines("decode", timed.points("decode", tokens=16384))
    _lines(axes, lines, lambda p: p[0], lambda p, us: p[0] / us * 1e6, "requests", "tokens per second, one layer")


def figure_11(axes: Axes, timed: Timed) -> None:
    """Virtual tensors over cudaMalloc's memory."""
    names = []
    for phase in ("decode", "prefill"):
        names += [(phase, p) for p in timed.points(phase) if any(s.endswith(", 64K") for s in timed.at(phase, *p))]
    for i, size in enumerate(("64K", "2M")):
        at = []
        for n, (phase, point) in enumerate(names):
            values = timed.at(phase, *point)
            if f"fa3, {size}" in values and "fa3, cudaMalloc" in values:
                at.append((n, values[f"fa3, {size}"] / values["fa3, cudaMalloc"]))
        if at:
            axes.plot([n for n, _ in at], [v for _, v in at], "os"[i], markersize=4, color=COLOURS[2 * i], label=size)
    axes.set_xticks(range(len(names)), [f"{phase[0]} {b}x{_kilo(t)}" for phase, (b, t) in names], rotation=90,
                    fontsize="xx-small")  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_ylabel("time, of cudaMalloc's")
    legend(axes)


PANELS = {
    2: ("Figure 2: what paging costs a prefill", figure_2),
    3: ("Figure 3: paged decode by block size", figure_3),
    4: ("Figure 4: decode by batch, 1K tokens", figure_4),
    6: ("Figure 6: prefill", figure_6),
    7: ("Figure 7: decode by batch, 16K tokens", figure_7),
    11: ("Figure 11: FlashAttention-3 by page size", figure_11),
}


def draw(records: list[Record], figure: Figure) -> None:
    """All panels that have measurements, in one figure."""
    timed = Timed(records)
    panels = [(title, panel) for title, panel in PANELS.values() if _has_data(panel, timed)]
    columns = min(3, max(len(panels), 1))
    lines = max(-(-len(panels) // columns), 1)
    figure.set_size_inches(5.5 * columns, 4.8 * lines)
    for i, (title, panel) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        panel(axes, timed)
        axes.set_title(title, fontsize="medium")


def _has_data(panel: Callable[[Axes, Timed], None], timed: Timed) -> bool:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    panel(axes, timed)
    return bool(axes.get_legend_handles_labels()[1])


def main(records: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """One PNG for each panel. Each names the machine."""

    from matplotlib.figure import Figure

    from pyvmem.bench.records import load, load_about
    from pyvmem.bench.summary import machine

    rows, about = load(records), load_about(records)
    timed = Timed(rows)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, (title, panel) in PANELS.items():
        figure = Figure((7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        panel(axes, timed)
        axes.set_title(title, fontsize="medium")
        figure.suptitle(machine(rows, about), fontsize="x-small")
        figure.savefig(Path(folder, f"attention-figure-{number}.png"), dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
