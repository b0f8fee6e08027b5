"""``pyvmem top``: the KV caches and engines of this user's processes, what they hold, and the engines' limits.

On a terminal it is a live picture by rich, with keys (`pyvmem.tools.top_screen`). Into a pipe or a file, with --once,
or without rich, it prints tables without escape codes once, and ends.

SPDX-License-Identifier: MIT
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from pyvmem.core import MIB
from pyvmem.engine import control, pools
from pyvmem.kv.view import View, read_views, view_folder
from pyvmem.tools import argtypes
from pyvmem.tools.argtypes import parse_size

COLUMNS = (
    "pid", "name", "where", "budget", "held", "needed", "kept", "ahead", "free", "live", "requests", "swapped",
    "steps/s",
)  # fmt: skip

POOL_COLUMNS = (
    "pool", "pid", "name", "min", "max", "has", "needs", "could give", "giving", "own request", "reply to others",
)  # fmt: skip
ENGINE_COLUMNS = (
    "pid", "engine", "model", "where", "port", "state", "running", "queued", "weights", "limit", "min", "max", "least",
    "backed", "used", "cached", "spare", "preempted", "refused",
)  # fmt: skip
TEXT = {"name", "where", "pool", "own request", "reply to others", "engine", "model", "state", "node", "device",
        "models"}  # fmt: skip


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
        found.append((where, str(v.pid), v.name, *memory, "" if own == "unasked" else own,
                      "" if reply == "unasked" else reply))  # fmt: skip
    return found


def model_name(engine: control.Engine) -> str:
    """The name of an engine's model, without the folders of a path; "" if the engine does not say it."""
    return engine.model.rstrip("/").rpartition("/")[2]


def engine_state(engine: control.Engine, page: control.Page) -> str:
    """An engine's state in one word: its server's, unless it is only awake."""
    if engine.state not in ("", "awake"):
        return engine.state
    if page.asleep:
        return "asleep"
    if engine.lent:
        return "lent"
    return "waits" if engine.wanted else "serves" if engine.used else "idle"


def engine_rows(engines: Iterable[tuple[control.Engine, control.Page]]) -> list[tuple[str, ...]]:
    """Rows of text for `ENGINE_COLUMNS`: engines on vMem, of vLLM or SGLang; memory of one worker, in MiB.

    Weights are those of the pool: on the device / all. Only servers that let models sleep publish requests.
    """
    found, names = [], pools.names()
    for e, page in engines:
        limit = "" if e.limit is None else f"{e.limit / MIB:.0f}"
        share = [f"{size / MIB:.0f}" if size else "" for size in (e.min, e.max)]
        held = [f"{size / MIB:.0f}" for size in (e.least, e.resident, e.used, e.cached, e.spare)]
        at = names.get(page.pools()[0], "-")
        who = f"{e.name}-{e.rank}", model_name(e), at, str(e.port or ""), engine_state(e, page)
        requests = (str(e.running), str(e.queued)) if e.state else ("", "")
        weights = f"{e.weights_held / MIB:.0f}/{e.weights / MIB:.0f}" if e.weights else ""
        found.append((str(e.pid), *who, *requests, weights, limit, *share, *held, str(e.preempted), str(e.refused)))
    return found


# The columns that a narrow terminal leaves out first. A file or a pipe gets all of them.
_LESS = ("swapped", "free", "ahead", "kept", "where", "needed", "live", "steps/s", "giving", "could give", "needs",
         "reply to others", "port", "refused", "preempted", "spare", "least", "cached", "max", "min",
         "running", "own request", "limit", "engine", "backed")  # fmt: skip


def fitting(text: Sequence[tuple[str, ...]], columns: Sequence[str], room: int | None, gap: int = 2) -> list[int]:
    """The columns that fit into so many characters, by what a narrow terminal leaves out first; None: all."""
    show, left = list(range(len(columns))), list(_LESS)
    widths = [max(len(row[i]) for row in [columns, *text]) for i in show]
    while room is not None and left and sum(widths[i] + gap for i in show) - gap > room:
        dropped = left.pop(0)
        show = [i for i in show if columns[i] != dropped]
    return show


def table(text: Sequence[tuple[str, ...]], columns: Sequence[str], room: int | None = None) -> str:
    """A table of as many columns as fit: those of `TEXT` to the left, numbers to the right."""
    show = fitting(text, columns, room)
    lines = [[row[i] for i in show] for row in [columns, *text]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(c.ljust(w) if columns[i] in TEXT else c.rjust(w) for c, w, i in zip(line, widths, show)).rstrip()
        for line in lines
    )


def tables(
    views: Sequence[View], rates: Mapping[Path, float]
) -> list[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """Title, columns and rows of caches, of members of pools and of engines, as far as there are any."""
    control.sweep()
    many = f"{len(views)} KV cache{'' if len(views) == 1 else 's'}"
    found = [
        (f"{many}; memory in MiB", COLUMNS, rows(views, rates)),
        ("members of pools; memory in MiB", POOL_COLUMNS, pool_rows(views)),
        ("engines; a worker's memory in MiB", ENGINE_COLUMNS, engine_rows(control.engines())),
    ]
    return [table for table in found if table[2]]


def where() -> str:
    """Where the caches and engines of this user are, to follow words such as "nothing was found"."""
    if folder := view_folder():
        return f"in {folder}"
    return "anywhere: XDG_RUNTIME_DIR, or else the temporary folder, has no folder of this user's with mode 0700"


def nothing() -> str:
    """The message that there is nothing to show."""
    return (f"No caches and no engines {where()}.\nListed are this user's engines on vMem, and caches with a name, "
            'such as KVCache(..., name="chat").')  # fmt: skip


def screen(views: Sequence[View], room: int | None = None) -> str:
    """The tables as text. room: characters in a line; None: as many as it takes."""
    found = [f"{title}\n{table(text, columns, room)}" for title, columns, text in tables(views, {})]
    return "\n\n".join(found) or nothing()


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--once", action="store_true", help="print once and exit, as into a pipe or a file")
    parser.add_argument("--json", action="store_true", help="print once as JSON")
    parser.set_defaults(run=top)
    parser.add_argument(
        "--interval", type=lambda text: argtypes.seconds(text, 0.1, 3600), default=1.0, metavar="SECONDS",
        help="time between refreshes, 0.1 to 3600 (1)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", action="append", default=[], metavar="WHICH=SIZE",
        help="set the limit of each worker of an engine. WHICH is its process, its name or its model: 1234=16G, "
        "chat=60%% (of all its blocks)",
    )  # fmt: skip


Limit = tuple[control.Engine, control.Page, int]


def _engines(which: str) -> list[tuple[control.Engine, control.Page]]:
    """The engines that a --limit is about: of a process, a name or a model. Raises ValueError."""
    known = control.engines()
    found = [(e, p) for e, p in known if which in (str(e.pid), e.name, f"{e.name}-{e.rank}")]
    if found:
        return found
    found = [(e, p) for e, p in known if which in (e.model, model_name(e))]
    pids = {e.pid for e, _ in found}
    if len(pids) > 1:
        raise ValueError(f"processes {', '.join(map(str, sorted(pids)))} serve a model of that name; give one")
    if not found and which.isdecimal():
        raise ValueError(f"process {which} has no engine")
    if not found:
        raise ValueError(f"no engine or model has the name {which!r}")
    return found


def limit(text: str) -> list[Limit]:
    """The limit that one --limit sets, and for which engines. Raises ValueError where one cannot have it."""
    which, _, wanted = text.rpartition("=")
    try:
        part, size = (float(wanted[:-1]), 0) if wanted.endswith("%") else (0.0, parse_size(wanted))
    except ValueError:
        part, size = 0.0, 0
    if not which or not (part > 0 or size > 0):
        raise ValueError(f"--limit {text} must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%")
    try:
        if part > 100:
            raise ValueError(f"{wanted} must lie between 0 and 100 %")
        limits = [(e, page, size or int(e.blocks * e.block_bytes * part / 100)) for e, page in _engines(which)]
        for _, page, bytes in limits:
            control.check_change(page, limit=bytes)
        return limits
    except ValueError as error:
        raise ValueError(f"--limit {text}: {error}") from None


def top(args: argparse.Namespace, out: TextIO | None = None) -> int:
    """Run the command; returns the exit status."""
    out = out or sys.stdout
    for one in [one for text in args.limit for one in limit(text)]:  # all are checked before one is set
        print(set_engine(*one), file=sys.stderr)
    if args.json:
        print(json.dumps([{**asdict(v), "path": str(v.path)} for v in read_views()]), file=out)
        return 0
    terminal = out.isatty()
    live = terminal and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if live and not args.once and not args.limit:
        with contextlib.suppress(ModuleNotFoundError):  # rich is an extra
            from pyvmem.tools.top_screen import Screen

            return Screen(args.interval).run()
    print(screen(read_views(), shutil.get_terminal_size().columns if terminal else None), file=out)
    return 0


def set_engine(engine: control.Engine, page: control.Page, size: int) -> str:
    """Set the limit of each worker of an engine; returns what to say about it."""
    control.change(page, limit=size)
    at_least = f", which counts as the {engine.least} that its longest request needs" if size < engine.least else ""
    return f"{engine.pid} {engine.name}-{engine.rank}: {size} bytes for each worker{at_least}"
