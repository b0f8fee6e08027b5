"""Panels for the figures of several benchmarks. The default figure of a benchmark is `session.plot`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyvmem.bench.session import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pyvmem.bench.records import Record


COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")


def legend(axes: Axes) -> None:
    """A legend below the axes, where it covers nothing."""
    count = len(axes.get_legend_handles_labels()[1])
    if count:
        below = (0.5, -0.2 if axes.get_xlabel() else -0.12)
        columns = 1 if count < 4 else 2
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=below, ncols=columns, frameon=False)


def panel(
    axes: Axes, records: Sequence[Record], title: str, prefix: str, *, above: str = "p90", log: bool = False
) -> None:
    """Draw the metrics that start with `prefix`: bars by page size, one colour per remainder of the metric's name.

    With more than one sample, whiskers go from p10 to the percentile `above`. Dots are the paper's figures.
    """
    rows = [r for r in records if r.metric.startswith(prefix)]
    places = list(dict.fromkeys((r.backend, r.page_size) for r in rows))
    series = list(dict.fromkeys(r.metric for r in rows))
    width = 0.8 / max(len(series), 1)
    for i, metric in enumerate(series):
        mine = [r for r in rows if r.metric == metric]
        at = [places.index((r.backend, r.page_size)) + (i - (len(series) - 1) / 2) * width for r in mine]
        spread = [[r.median - r.p10 for r in mine], [getattr(r, above) - r.median for r in mine]]
        errors = spread if any(r.n > 1 for r in mine) else None
        look: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "label": metric.removeprefix(prefix).strip(", ") or None,
        }
        axes.bar(at, [r.median for r in mine], width, yerr=errors, capsize=2, **look)
        paper = [(x, r.paper) for x, r in zip(at, mine) if r.paper is not None]
        if paper:
            axes.plot(*zip(*paper), "o", color="#cc3311", label="paper (A100)")
    axes.set_title(title, fontsize="medium")
    axes.set_xticks(range(len(places)), [f"{backend} {size_text(size)}" for backend, size in places], fontsize="small")
    if log and any(r.median > 0 for r in rows):
        axes.set_yscale("log")
    if rows:
        axes.set_ylabel(rows[0].unit)
    legend(axes)


def panels(records: Sequence[Record], figure: Figure, wanted: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    """A figure of panels side by side; wanted: title, prefix and options of `panel` for each."""
    wanted = [w for w in wanted if any(r.metric.startswith(w[1]) for r in records)]
    figure.set_size_inches(6 * max(len(wanted), 1), 4.5)
    for i, (title, prefix, options) in enumerate(wanted):
        panel(figure.add_subplot(1, len(wanted), i + 1), records, title, prefix, **options)
