"""Plots of `python -m benchmarks attention`: a panel for each figure of the vAttention paper that has measurements.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyvmem.bench.session import size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pyvmem.bench.records import Record

METRIC = re.compile(r"(decode|prefill) B=(\d+) L=(\d+) heads 32/8, (.+)")  # other heads belong to tables
Point = tuple[str, int, int]  # phase, batch, tokens


@dataclass(frozen=True)
class Panel:
    """Points and series of a figure. base: the series over whose time a series is drawn, if it is; None: tokens/s."""

    title: str
    points: Callable[[Point], bool]
    base: Callable[[str], str | None] | None = None


def _unpaged(series: str) -> str | None:
    found = re.fullmatch(r"(fa3|flashinfer) paged (16|256)", series)
    return found and {"fa3": "fa3, cudaMalloc", "flashinfer": "flashinfer unpaged, 64K"}[found[1]]


def _blocks_of_16(series: str) -> str | None:
    found = re.fullmatch(r"(.+ paged) (32|64|128|256)", series)
    return found and f"{found[1]} 16"


PANELS = {
    2: Panel("Figure 2: what paging costs a prefill", lambda p: p[:2] == ("prefill", 1), _unpaged),
    3: Panel("Figure 3: paged decode by block size", lambda p: p[0] == "decode", _blocks_of_16),
    4: Panel("Figure 4: decode by batch, 1K tokens", lambda p: p[0] == "decode" and p[2] == 1024),
    6: Panel("Figure 6: prefill", lambda p: p[:2] == ("prefill", 1)),
    7: Panel("Figure 7: decode by batch, 16K tokens", lambda p: p[0] == "decode" and p[2] == 16384),
    11: Panel("Figure 11: FlashAttention-3 by page size", lambda p: True,
              lambda series: "fa3, cudaMalloc" if series in ("fa3, 64K", "fa3, 2M") else None),
}  # fmt: skip


def times(records: list[Record]) -> dict[Point, dict[str, float]]:
    """{point: {series: microseconds}}, points in order."""
    found: dict[Point, dict[str, float]] = {}
    for r in records:
        if (match := METRIC.fullmatch(r.metric)) and r.unit == "us":
            name, memory = match[4], size_text(r.page_size) or r.backend
            series = name if "paged " in name.replace("unpaged", "") or "HBM" in name else \
                f"{name.removesuffix(' contiguous')}, {memory}"  # fmt: skip
            found.setdefault((match[1], int(match[2]), int(match[3])), {})[series] = r.median
    return dict(sorted(found.items()))


def lines(panel: Panel, at: dict[Point, dict[str, float]]) -> dict[str, dict[Point, float]]:
    """{series: {point: value}} of a panel."""
    found: dict[str, dict[Point, float]] = {}
    for point, values in at.items():
        for series, us in values.items() if panel.points(point) else ():
            if panel.base:
                base = panel.base(series)
                if base in values:
                    found.setdefault(f"{series} over {base}", {})[point] = us / values[base]
            elif not series.endswith(("paged 32", "paged 64", "paged 128")):
                tokens = point[1] if point[0] == "decode" else point[2]
                found.setdefault(series, {})[point] = tokens / us * 1e6
    return dict(sorted(found.items()))


def draw(records: list[Record], figure: Figure) -> None:
    """Every panel that has measurements, in one figure."""
    at = times(records)
    drawn = [(panel, found) for panel in PANELS.values() if (found := lines(panel, at))]
    columns = min(3, max(len(drawn), 1))
    figure.set_size_inches(5.5 * columns, 4.8 * max(-(-len(drawn) // columns), 1))
    for i, (panel, found) in enumerate(drawn):
        axes = figure.add_subplot(-(-len(drawn) // columns), columns, i + 1)
        points = [p for p in at if any(p in values for values in found.values())]
        for n, (series, values) in enumerate(found.items()):
            x, dashes = [points.index(p) for p in values], ("-", "--", ":", "-.")[n // 7 % 4]
            axes.plot(x, list(values.values()), label=series, marker="os^vDPX"[n % 7], linestyle=dashes, linewidth=1)
        axes.set_xticks(range(len(points)), [f"{p[0][0]} {p[1]}x{size_text(p[2])}" for p in points], rotation=90,
                        fontsize="xx-small")  # fmt: skip
        axes.set_ylabel("time, of the other's" if panel.base else "tokens per second, one layer")
        if not panel.base:
            axes.set_yscale("log")
        axes.set_title(panel.title, fontsize="medium")
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
