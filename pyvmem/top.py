"""``pyvmem top``: the KV caches of this user's processes, what they hold, and their budgets.

SPDX-License-Identifier: MIT
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from pyvmem.bench import argtypes
from pyvmem.bench.session import parse_size
from pyvmem.core import MIB
from pyvmem.kv_view import View, budget_answer, check_budget, read_views, want_budget

COLUMNS = (
    "pid", "name", "where", "budget", "held", "needed", "kept", "ahead", "free", "live", "requests", "swapped",
    "steps/s",
)  # fmt: skip


def rows(views: Iterable[View], rates: Mapping[Path, float]) -> list[tuple[str, ...]]:
    """Rows of text for `COLUMNS`; memory in MiB. rates: steps a second by path."""
    found = []
    for v in views:
        s = v.stats
        pages = [s[n + "_pages"] * s["page_size"] for n in ("budget", "held", "needed", "kept", "ahead", "free")]
        where = v.backend if v.backend == "host" else f"{v.backend}:{v.device}"
        memory = [f"{b / MIB:.0f}" for b in (*pages, s["live_bytes"])]
        requests = f"{s['active_slots']}/{s['slots']}"
        rate = f"{rates[v.path]:.0f}" if v.path in rates else ""
        found.append((str(v.pid), v.name, where, *memory, requests, str(s["swapped_slots"]), rate))
    return found


def _table(text: Sequence[tuple[str, ...]], title: str) -> str:
    widths = [max(len(row[i]) for row in [COLUMNS, *text]) for i in range(len(COLUMNS))]
    lines = [title]
    for row in [COLUMNS, *text]:
        cells = [c.ljust(w) if i in (1, 2) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument("--json", action="store_true", help="print once as JSON")
    wait = argtypes.seconds
    parser.add_argument("--interval", type=wait, default=1.0, metavar="SECONDS", help="time between refreshes (1)")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="PID=SIZE",
        help="set the budget of a process's KV caches, such as 1234=16G; they adopt it at their next step or when idle",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=wait, default=1.0, metavar="SECONDS", help="time to wait for the answer to --limit (1)"
    )  # fmt: skip


def _limit(text: str) -> list[tuple[View, int]]:
    """What one --limit asks of which caches. Raises ValueError where one of them cannot have that."""
    number, equals, wanted = text.partition("=")
    pid = size = 0
    try:
        pid, size = int(number), parse_size(wanted)
    except ValueError:
        equals = ""
    if not equals or size <= 0:
        raise ValueError(f"--limit {text} must be PID=SIZE, such as 1234=16G")
    chosen = [v for v in read_views() if v.pid == pid]
    if not chosen:
        raise ValueError(f"--limit {text}: process {pid} has no KV cache")
    try:
        return [(view, check_budget(view, size // len(chosen))) for view in chosen]
    except ValueError as error:
        raise ValueError(f"--limit {text}: {error}") from None


def top(args: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """Run the command; returns the exit status."""
    wanted = [limit for text in args.limit for limit in _limit(text)]  # all are looked at before one is asked
    for view, size in wanted:
        want_budget(view, size)
    for view, size in wanted:
        print(f"{view.pid} {view.name}: {budget_answer(view, size, args.wait)}", file=sys.stderr)
    if args.json:
        print(json.dumps([{**asdict(v), "path": str(v.path)} for v in read_views()]), file=out)
        return 0
    before: dict[Path, int] = {}
    then = time.monotonic()
    while True:
        views, now = read_views(), time.monotonic()
        rates = {v.path: (v.stats["steps"] - before[v.path]) / (now - then) for v in views if v.path in before}
        text = _table(rows(views, rates), f"{len(views)} KV caches; memory in MiB")
        if args.once or args.limit:
            print(text, file=out)
            return 0
        print("\x1b[2J\x1b[H" + text, file=out, flush=True)
        before, then = {v.path: v.stats["steps"] for v in views}, now
        try:
            time.sleep(args.interval)
        except KeyboardInterrupt:
            return 0
