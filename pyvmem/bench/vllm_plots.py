"""The figure of ``pyvmem bench vllm --plot``: bars by workload, one per engine.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyvmem.bench import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pyvmem.bench.records import Record

PANELS = (
    ("output, tokens/s", (": output",)),
    ("decode step, ms", (": decode step",)),
    ("time between tokens, ms", (": time between tokens",)),
    ("KV memory, GiB: peak, and 1 s idle (hatched)", (": KV memory, peak", ": KV memory, 1 s idle")),
)


def _bars(axes: Axes, records: list[Record], ending: str, engines: list[str], loads: list[str], hatched: bool) -> None:
    width = 0.8 / len(engines)
    for k, engine in enumerate(engines):
        found = {r.metric.removesuffix(ending): r for r in records if r.metric.endswith(ending) and r.backend == engine}
        places = [i for i, load in enumerate(loads) if load in found]
        chosen = [found[loads[i]] for i in places]
        at = [i + (k - (len(engines) - 1) / 2) * width for i in places]
        medians = [r.median for r in chosen]
        label = None if hatched else engine
        axes.bar(at, medians, width * 0.95, color=plots.COLOURS[k], label=label, hatch="////" if hatched else None,
                 edgecolor="black" if hatched else None)  # fmt: skip
        if not hatched:
            low, high = [r.median - r.p10 for r in chosen], [r.p90 - r.median for r in chosen]
            axes.errorbar(at, medians, (low, high), fmt="none", ecolor="black", capsize=2, linewidth=1)


def draw(records: list[Record], figure: Figure) -> None:
    """Medians, with whiskers from p10 to p90."""
    engines = list(dict.fromkeys(r.backend for r in records))
    wanted = [(title, endings) for title, endings in PANELS if any(r.metric.endswith(endings) for r in records)]
    figure.set_size_inches(5 * max(len(wanted), 1), 4)
    for i, (title, endings) in enumerate(wanted):
        axes = figure.add_subplot(1, len(wanted), i + 1)
        loads = list(dict.fromkeys(r.metric.removesuffix(endings[0]) for r in records if r.metric.endswith(endings[0])))
        for ending in endings:
            _bars(axes, records, ending, engines, loads, hatched=ending is not endings[0])
        axes.set_xticks(range(len(loads)), loads)
        axes.set_title(title, fontsize="medium")
        plots.legend(axes)
