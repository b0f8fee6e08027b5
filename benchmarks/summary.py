"""The final screen of ``bench all``: the machine, and the most important rows of all benchmarks.

It fits 80 columns. The tables (``--full``) and the JSON contain every measurement.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from benchmarks.session import number_text
from pyvmem.tools import doctor
from pyvmem.tools.argtypes import size_text

if TYPE_CHECKING:
    from benchmarks.records import Record


WIDTH = 80
OWN = {"uvm", "stock", "cuda", "host"}

# Label of the row, benchmark, pattern of the metric, and the figure beside it: the same metric of bare calls or plain
# memory ("bare"), another metric's pattern, or nothing.
ROWS = (
    ("reserve 1 GiB of addresses", "vmm", "reserve 1 GiB", None),
    ("create a page", "vmm", "create", "bare"),
    ("map a page", "vmm", "map", "bare"),
    ("map a page, from Python", "vmm", "map, from Python", None),
    ("release a page, unmap included", "vmm", "release, unmap included", "bare"),
    ("map 1,024 scattered pages", "vmm", "map, batch of 1024 scattered pages", "bare"),
    ("unmap 1,024 scattered pages", "vmm", "unmap, batch of 1024 scattered pages", "bare"),
    ("reserve 12 TiB", "vmm", "reserve 12 TiB", None),
    ("back 64 tensors of 32 MiB", "bandwidth", "back 64 tensors of 32M", "bare"),
    ("decode step of 256 requests", "step", r"decode step, B=256, \d+ layers, overlap", None),
    ("prompt of 16,384 tokens backed", "step", r"prompt of 16384 tokens backed, .*synchronous", None),
    ("attention, decode, 8 x 8,192", "attention", r"decode B=8 L=8192 heads 32/8, \w+ contiguous", "bare"),
    ("waste, 256 requests, nothing kept", "fragmentation", "waste, B=256.*, nothing kept", None),
    ("waste, 256 requests, default", "fragmentation", "waste, B=256.*, default", None),
    ("requests in the same memory", "fragmentation", r"largest batch, .* MiB", None),
)
COLUMNS = (33, 11, 11, 13, 8)  # with a blank between them: 80


def about() -> dict[str, Any]:
    """The setting of a run: {date, pyvmem, torch, python, kernel, driver}."""
    # Not doctor.examine(): it opens every backend.
    machine, driver = doctor.machine(), doctor.driver()
    found = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    found |= {name: machine[name] for name in ("pyvmem", "torch", "python", "kernel")}
    return {**found, "driver": driver and driver["release"]}


def _cell(record: Record | None) -> str:
    if not record:
        return ""
    unit = "" if record.unit == "requests" else record.unit.split(" of ")[0]  # the row's text says it
    return f"{number_text(record.median)} {unit}".rstrip()


def rows(records: Sequence[Record]) -> list[tuple[str, str, str, str, str]]:
    """(text, small pages, 2 MiB pages, beside, paper) of each row that the records have, as text."""
    best = next((r.backend for r in records if r.backend in OWN), None)
    found = []
    for text, bench, pattern, beside in ROWS:
        same = [r for r in records if r.bench == bench and re.fullmatch(pattern, r.metric)]
        mine = sorted((r for r in same if r.backend == best), key=lambda r: r.page_size or 0)
        if not mine:
            continue
        large = mine[-1] if len(mine) > 1 else None
        bare = sorted((r for r in same if r.backend not in OWN), key=lambda r: r.page_size or 0) if beside else []
        found.append((text, _cell(mine[0]), _cell(large), _cell(bare[0] if bare else None), number_text(mine[0].paper)))
    return found


def machine(records: Sequence[Record], about: Mapping[str, Any]) -> str:
    """The backend, the device, and as far as the setting names them, the driver and the day."""
    first = next((r for r in records if r.backend in OWN), None)
    parts = [f"{first.backend}: {first.device}" if first else "no backend of vMem"]
    if "driver" in about:
        parts.append(f"driver {about['driver']}" if about["driver"] else "no NVIDIA driver")
    if "date" in about:
        parts.append(about["date"][:10])
    return ", ".join(parts)


def screen(records: Sequence[Record], about: Mapping[str, Any]) -> list[str]:
    """The lines of the screen."""
    sizes = sorted({r.page_size for r in records if r.page_size and r.backend in OWN})
    if not any(r.backend in OWN for r in records):
        return []
    versions = f"pyvmem {about['pyvmem']}, torch {about['torch'] or 'none'}, Python {about['python']}"
    lines = [machine(records, about)[:WIDTH], f"{about['kernel']}, {versions}"[:WIDTH], ""]
    small, large = (size_text(sizes[0]), size_text(sizes[-1])) if sizes else ("", "")
    heads = ("median", small, large if len(sizes) > 1 else "", "bare calls", "paper")
    for row in [heads, *rows(records)]:
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, COLUMNS))]
        lines.append(" ".join(cells).rstrip())
    lines += [
        "",
        "bare calls: CUDA's or the system's own, in turns; paper: vAttention on an A100",
        "back: pages are mapped, from memory taken in advance; nothing is copied",
        "waste: of backed memory. The default keeps pages for the next request while",
        "memory is plentiful. Every row: --full, or --json FILE",
    ]
    return lines
