"""The live screen of ``pyvmem top``: who owns which pages, redrawn in place, with keys.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pyvmem.kv.view import View, read_views
from pyvmem.tools.argtypes import three_digits
from pyvmem.tools.top import COLUMNS, TEXT, fitting, limit, nothing, set_engine, tables

# The parts of a cache's budget, in the order in which they are drawn, and the pages that they count.
PARTS = {
    "used": "for the lengths of requests, in pages of their own",
    "shared": "for requests and prefixes, mapped or held more than once",
    "cached": "held by prefixes or blocks, and by no request",
    "ahead": "mapped behind a request's length, for its next tokens",
    "kept": "of free slots, for the next request",
    "unused": "of the budget, not allocated",
}
CHARACTERS = dict(zip(PARTS, "█▓▒▞░·"))
ASCII = dict(zip(PARTS, "#&%+=."))
_STYLES = {
    "used": "blue", "shared": "magenta", "cached": "green", "ahead": "cyan", "kept": "yellow", "unused": "dim",
}  # fmt: skip
_KEYS = (
    ("q, Esc", "quit"),
    ("s", "sort by the next column: name, pid, held, needed, requests, steps/s"),
    ("l", "set an engine's limit: NAME=SIZE or PID=SIZE, such as chat=16G or 1234=60%"),
    ("h, ?", "show or hide this help"),
    ("space", "refresh now"),
)
_SORTS: dict[str, Callable[[View, dict[Path, float]], tuple[float | str, ...]]] = {
    "name": lambda v, _: (v.name, v.pid),
    "pid": lambda v, _: (v.pid, v.name),
    "held": lambda v, _: (-v.stats["held_pages"] * v.stats["page_size"], v.name),
    "needed": lambda v, _: (-v.stats["needed_pages"] * v.stats["page_size"], v.name),
    "requests": lambda v, _: (-v.stats["active_slots"], v.name),
    "steps/s": lambda v, rates: (-rates.get(v.path, 0), v.name),
}


def shares(stats: Mapping[str, int]) -> dict[str, int]:
    """Pages of each of `PARTS`, from a cache's statistics. They add up to the budget, or to the pages held above it."""
    left = held = stats["held_pages"]
    found = {}
    for part in ("kept", "ahead", "cached", "shared"):
        counted = stats["prefix_pages" if part == "cached" else f"{part}_pages"]
        found[part] = min(counted, left)  # counters are read one after another, while pages change hands
        left -= found[part]
    found["used"] = left
    found["unused"] = max(stats["budget_pages"] - held, 0)
    return {part: found[part] for part in PARTS}


def cells(parts: Mapping[str, int], width: int) -> list[tuple[str, int]]:
    """How many of `width` cells each part gets: in proportion, and one at least if it is there and a cell is left."""
    total = sum(parts.values())
    if not total or width < 1:
        return []
    exact = {part: count * width / total for part, count in parts.items()}
    given = {part: int(share) for part, share in exact.items()}
    for part in sorted(exact, key=lambda p: given[p] - exact[p])[: width - sum(given.values())]:
        given[part] += 1
    for part, count in parts.items():
        most = max(given, key=lambda p: given[p])
        if count and not given[part] and given[most] > 1:
            given[most] -= 1
            given[part] = 1
    return [(part, given[part]) for part in parts if given[part]]


@contextlib.contextmanager
def _keys(file: int) -> Iterator[None]:
    """Keys arrive one by one and unseen; Ctrl-C still interrupts."""
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


class Rates:
    """Steps a second of each cache since the call before."""

    def __init__(self) -> None:
        self._before: dict[Path, int] = {}
        self._then = time.monotonic()

    def __call__(self, views: Iterable[View]) -> dict[Path, float]:
        now, steps = time.monotonic(), {v.path: v.stats["steps"] for v in views}
        passed = max(now - self._then, 1e-3)
        found = {p: (n - self._before[p]) / passed for p, n in steps.items() if p in self._before}
        self._before, self._then = steps, now
        return found


class Screen:
    """The screen. interval: seconds between refreshes."""

    def __init__(self, interval: float, console: Console | None = None) -> None:
        self._interval = interval
        self.console = console or Console()
        plain = not (self.console.encoding or "").lower().startswith("utf")
        self._characters = ASCII if plain else CHARACTERS
        self._sort = "name"
        self._help = False
        self._prompt: str | None = None  # what has been typed after l
        self._message = ""
        self._views: list[View] = []
        self._rates: dict[Path, float] = {}

    # ---- drawing ---------------------------------------------------------------------------------------------

    def _bar(self, view: View, width: int) -> Text:
        text = Text(no_wrap=True)
        for part, count in cells(shares(view.stats), width):
            text.append(self._characters[part] * count, style=_STYLES[part])
        return text

    def _table(self, columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int) -> Table:
        """As many of the columns as fit; those of caches beside a bar, which gets a third of the width or more."""
        bars = columns is COLUMNS
        if bars:
            rows = [(pid, name[:18], *others) for pid, name, *others in rows]
        show = fitting(rows, columns, width * 2 // 3 if bars else width, 1)
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
        for i in show:
            name = columns[i] + "*" * (bars and columns[i] == self._sort)
            table.add_column(name, justify="left" if columns[i] in TEXT else "right", no_wrap=True)
        left = width - sum(1 + max(len(columns[i]), *(len(row[i]) for row in rows)) for i in show) - 1  # 1: the "*"
        if bars:
            table.add_column("pages", no_wrap=True)
        for at, row in enumerate(rows):
            table.add_row(*(Text(row[i]) for i in show), *([self._bar(self._views[at], left)] if bars else []))
        return table

    def _legend(self) -> Text:
        text = Text()
        for part in PARTS:
            text.append(self._characters[part] * 2, style=_STYLES[part])
            text.append(f" {part}  ")
        return text

    def _about(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
        for key, what in _KEYS:
            table.add_row(Text(key, style="bold"), what)
        table.add_row("", "")
        for part, meaning in PARTS.items():
            table.add_row(Text(self._characters[part] * 2 + " " + part, style=_STYLES[part]), meaning)
        return table

    def draw(self) -> RenderableType:
        """The screen as it stands."""
        width, height = self.console.size
        held = sum(v.stats["held_pages"] * v.stats["page_size"] for v in self._views)
        head = Text(f"pyvmem top  {three_digits(held)} held  {time.strftime('%H:%M:%S')}", style="bold", no_wrap=True)
        body: list[RenderableType] = [head, Text()]
        self._views.sort(key=lambda v: _SORTS[self._sort](v, self._rates))
        found = tables(self._views, self._rates)
        if self._help:
            body.append(self._about())
        elif not found:
            body.append(Text(nothing()))
        else:
            for title, columns, rows in found:
                body += [Text(title, style="bold"), self._table(columns, rows, width), Text()]
            body += [self._legend()] if self._views else []
        body.append(Text())
        if self._prompt is not None:
            body.append(Text(f"limit (NAME=SIZE or PID=SIZE): {self._prompt}_", style="reverse"))
        else:
            body.append(Text(self._message or "q quit  s sort  l limit  h help", style="" if self._message else "dim"))
        return Group(*body)

    # ---- keys ------------------------------------------------------------------------------------------------

    def key(self, key: str) -> bool:
        """Take a key; returns False if it ends the program."""
        if self._prompt is not None:
            self._typed(key)
        elif key in ("q", "Q", "\x1b"):
            return False
        elif key == "s":
            names = list(_SORTS)
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
            self._message = f"sorted by {self._sort}"
        elif key in ("h", "?"):
            self._help = not self._help
        elif key == "l":
            self._prompt = ""
        return True

    def _typed(self, key: str) -> None:
        assert self._prompt is not None
        if key == "\x1b":
            self._prompt = None
        elif key in ("\x7f", "\b"):
            self._prompt = self._prompt[:-1]
        elif key in ("\r", "\n"):
            text, self._prompt = self._prompt.strip(), None
            if text:
                self._set(text)
        elif key.isprintable():
            self._prompt += key

    def _set(self, text: str) -> None:
        try:
            self._message = "; ".join(set_engine(*one) for one in limit(text))
        except ValueError as error:
            self._message = str(error).removeprefix("--limit ")

    # ---- the loop --------------------------------------------------------------------------------------------

    def _read(self, file: int, seconds: float) -> str:
        """The keys typed within that time, or "" for none. An arrow's escape sequence is no Esc."""
        ready, _, _ = select.select([file], [], [], seconds)
        if not ready:
            return ""
        text = os.read(file, 1024).decode(errors="replace")
        if not text:
            return "q"  # the terminal has gone
        return " " if text.startswith("\x1b") and len(text) > 1 else text

    def refresh(self, rate: Rates) -> None:
        """Read the caches again."""
        self._views = read_views()
        self._rates = rate(self._views)

    def run(self) -> int:
        """Show it until q or Ctrl-C; returns the exit status."""
        file, rate = sys.stdin.fileno(), Rates()
        with _keys(file), Live(console=self.console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    self.refresh(rate)
                    until = time.monotonic() + self._interval
                    while True:
                        live.update(self.draw(), refresh=True)
                        keys = self._read(file, max(until - time.monotonic(), 0))
                        if not all([self.key(key) for key in keys]):
                            return 0
                        if not keys or " " in keys and self._prompt is None:
                            break
            except KeyboardInterrupt:
                return 0
