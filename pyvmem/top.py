"""``pyvmem top``: the KV caches of this user's processes, what they hold, and their budgets.

SPDX-License-Identifier: MIT
"""

import argparse
import contextlib
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

POOL_COLUMNS = (
    "pool", "pid", "name", "min", "max", "has", "needs", "could give", "giving", "answer (question)", "reply (up to)",
)  # fmt: skip
_TEXT = {"name", "where", "pool", "answer (question)", "reply (up to)"}


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


def pool_rows(views: Iterable[View]) -> list[tuple[str, ...]]:
    """Rows of text for `POOL_COLUMNS`, of the caches that are in a pool; memory in MiB."""
    found = []
    for v in sorted((v for v in views if v.pool), key=lambda v: v.pool_path):
        m = v.pool
        assert m
        where = Path(v.pool_path).stem if v.pool_path else f"of {v.pid}"
        memory = [f"{b / MIB:.0f}" for b in (m.min, m.max, m.has, m.needs, m.could_give, m.giving)]
        own = f"{m.answer}: {m.reason}" if m.reason else m.answer
        reply = f"{m.reply}: {m.why}" if m.why else m.reply
        found.append((where, str(v.pid), v.name, *memory, "" if own == "unasked" else f"{own} ({m.asked})",
                      "" if reply == "unasked" else f"{reply} ({m.looked})"))  # fmt: skip
    return found


def _table(text: Sequence[tuple[str, ...]], title: str, columns: Sequence[str] = COLUMNS) -> str:
    widths = [max(len(row[i]) for row in [columns, *text]) for i in range(len(columns))]
    lines = [title]
    for row in [columns, *text]:
        cells = [c.ljust(w) if columns[i] in _TEXT else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _screen(views: Sequence[View], rates: Mapping[Path, float]) -> str:
    text = _table(rows(views, rates), f"{len(views)} KV caches; memory in MiB")
    pooled = pool_rows(views)
    return text + "\n\n" + _table(pooled, "in pools", POOL_COLUMNS) if pooled else text


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument("--json", action="store_true", help="print once as JSON")
    wait = argtypes.seconds
    parser.add_argument("--interval", type=wait, default=1.0, metavar="SECONDS", help="time between refreshes (1)")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="WHICH=SIZE",
        help="set the budget of the KV caches of a process, or of those with a name: 1234=16G, chat=60%% (of the "
        "device); they adopt it at their next step or when idle, members of a pool at once, as their maximum",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=wait, default=1.0, metavar="SECONDS", help="time to wait for the answer to --limit (1)"
    )  # fmt: skip


def _chosen(text: str, which: str) -> list[View]:
    """The caches that a --limit is about: those of a process, or else those with a name, in one process."""
    views = read_views()
    found = [v for v in views if which.isdecimal() and v.pid == int(which)] or [v for v in views if v.name == which]
    if not found:
        what = f"process {which} has no KV cache" if which.isdecimal() else f"no KV cache has the name {which!r}"
        raise ValueError(f"--limit {text}: {what}")
    pids = sorted({v.pid for v in found})
    if len(pids) > 1:
        raise ValueError(f"--limit {text}: processes {', '.join(map(str, pids))} have caches of that name; give one")
    return found


def _bytes(wanted: str, view: View) -> int:
    """The bytes of a size, or of so many per cent of the device. Raises ValueError."""
    if not wanted.endswith("%"):
        return parse_size(wanted)
    part = float(wanted[:-1])
    if not 0 < part <= 100:
        raise ValueError(f"{wanted} is not between 0 and 100 %")
    return int(view.memory_total * part / 100)


def _limit(text: str) -> list[tuple[View, int]]:
    """What one --limit asks of which caches. Raises ValueError where one of them cannot have that."""
    which, equals, wanted = text.rpartition("=")
    try:
        valid = bool(equals and which) and (wanted.endswith("%") and float(wanted[:-1]) > 0 or parse_size(wanted) > 0)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"--limit {text} must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%")
    chosen = _chosen(text, which)
    try:
        return [(view, check_budget(view, _bytes(wanted, view) // len(chosen))) for view in chosen]
    except ValueError as error:
        raise ValueError(f"--limit {text}: {error}") from None


def top(args: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """Run the command; returns the exit status."""
    wanted = [limit for text in args.limit for limit in _limit(text)]  # all are looked at before one is asked
    for view, size in wanted:
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile, as the answer will say
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
        text = _screen(views, rates)
        if args.once or args.limit:
            print(text, file=out)
            return 0
        print("\x1b[2J\x1b[H" + text, file=out, flush=True)
        before, then = {v.path: v.stats["steps"] for v in views}, now
        try:
            time.sleep(args.interval)
        except KeyboardInterrupt:
            return 0
