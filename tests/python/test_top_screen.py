"""``pyvmem top`` on a terminal: its keys, its widths, and what it draws.

SPDX-License-Identifier: MIT
"""

import fcntl
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import types
from pathlib import Path

import pytest
import torch

from pyvmem.kv import view as kv_view
from pyvmem.kv.cache import KVCache, Spare
from pyvmem._ffi import ffi
from pyvmem.engine import control
from pyvmem.tools import top as command

pytest.importorskip("rich")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def make(name="chat", **options):
    options = {"idle_seconds": math.inf, "spare": Spare(overlap=False), **options}
    cache = KVCache.for_model(2, 4, 64, 4, 1000, 32 * MIB, dtype=torch.float16, backend="host", name=name, **options)
    slot = cache.alloc(700)
    assert cache.step([700 if s == slot else 0 for s in range(4)])
    return cache


class Terminal:
    """`pyvmem top` on a terminal of so many columns."""

    def __init__(self, columns, *words, **env):
        self.file, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")} | {
            "TERM": "xterm-256color", "PYTHONUTF8": "1", **env
        }  # fmt: skip
        command = [sys.executable, "-m", "pyvmem", "top", *words]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self.seen = ""

    def until(self, pattern):
        """Returns the output until the pattern appears, and forgets it."""
        end = time.monotonic() + 120
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self.file], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.file, 1 << 16).decode(errors="replace")
                except OSError:  # closed at the other end
                    break
        assert found, self.seen
        self.seen = self.seen[found.end() :]
        return found

    def press(self, keys):
        os.write(self.file, keys.encode())

    def ends(self):
        try:
            return self.process.wait(120)
        finally:
            os.close(self.file)


def test_keys():
    page = control.open_page("chat", 0)
    control.claim(page)
    page[control.BLOCKS], page[control.BLOCK_BYTES], page[control.RANKS_USED] = 100, MIB, 1
    with make():
        top = Terminal(80, "--interval", "0.2")
        top.until("chat")
        top.press("s")
        top.until("sorted by pid")
        top.press("h")
        top.until("show or hide this help")
        top.press("hlchat=16X\r")
        top.until("must be PID=SIZE or NAME=SIZE")
        top.press("lchat=1\x7f16M\r")
        top.until(f"chat-0: {16 * MIB} bytes for each worker")
        assert page[control.LIMIT] == 16 * MIB
        top.press("q")
        assert top.ends() == 0
    page.unlink()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(columns):
    with make("a-name-that-is-longer-than-the-column-for-it"), make("b"):
        from rich.console import Console

        from pyvmem.tools.top_screen import Rates, Screen

        with open(os.devnull, "w", encoding="utf-8") as out:
            console = Console(file=out, width=columns, height=24, record=True, force_terminal=True)
            screen = Screen(1, console)
            for _ in range(2):
                screen.refresh(Rates())
            console.print(screen.draw())
            lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= columns
        assert any(re.search(r"b +(host +)?32 +\d.* 1/4 .*█", line) for line in lines), lines


def test_a_pipe_gets_tables_once_and_no_escape_code():
    with make():
        command = [sys.executable, "-m", "pyvmem", "top", "--interval", "0.1"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600).stdout
        assert text.count("chat") == 1 and "\x1b" not in text


@pytest.mark.parametrize("said, state", [
    ({}, "idle"), ({"used": 1}, "serves"), ({"used": 1, "wanted": 1}, "waits"), ({"lent": True}, "lent"),
    ({"asleep": True, "lent": True}, "asleep"), ({"state": "draining"}, "draining"), ({"state": "awake"}, "idle"),
])  # fmt: skip
def test_what_an_engine_does_is_one_word(said, state):
    engine = types.SimpleNamespace(**{"used": 0, "wanted": 0, "lent": False, "state": "", **said})
    assert command.engine_state(engine, types.SimpleNamespace(asleep=said.get("asleep", False))) == state


@pytest.mark.parametrize("interval", ["0", "0.01", "-1", "nan", "4000", "soon"])
def test_an_interval_that_spins_is_refused(interval):
    done = subprocess.run(
        [sys.executable, "-m", "pyvmem", "top", f"--interval={interval}"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "between 0.1 and 3600" in done.stderr


def test_parts_add_up():
    stats = dict.fromkeys(kv_view.STATS, 0) | {
        "page_size": 65536, "budget_pages": 100, "held_pages": 60, "kept_pages": 10, "ahead_pages": 5,
        "prefix_pages": 7, "shared_pages": 8,
    }  # fmt: skip
    from pyvmem.tools import top_screen  # needs rich

    parts = top_screen.shares(stats)
    assert parts == {"used": 30, "shared": 8, "cached": 7, "ahead": 5, "kept": 10, "unused": 40}
    assert top_screen.shares(stats | {"budget_pages": 50})["unused"] == 0  # above its budget
    assert sum(top_screen.shares(stats | {"kept_pages": 1000}).values()) == 100  # read at different moments
    for width in range(200):
        drawn = top_screen.cells(parts, width)
        assert sum(count for _, count in drawn) == width
        assert width < 6 or [part for part, _ in drawn] == list(top_screen.PARTS)


def test_every_statistic_has_a_help_line():
    native = [name for name, _ in ffi.typeof("struct vmem_kv_stats").fields if name not in ("size", "pad")]
    assert native == list(kv_view.STATS)
    pytest.importorskip("prometheus_client")
    from pyvmem.metrics import Collector

    with make():
        families = {family.name: family for family in Collector().collect()}
    assert len(families) == len(kv_view.STATS)
    assert families["pyvmem_kv_held_pages"].documentation == "Pages that exist."
    assert all(f.documentation and f.type in ("gauge", "counter") for f in families.values())


def test_the_dashboard_asks_for_metrics_that_exist():
    pytest.importorskip("prometheus_client")
    from pyvmem.metrics import Collector

    text = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"\$\{prefix\}(\w+)", text))
    with make():
        names = {sample.name for family in Collector().collect() for sample in family.samples}
    assert asked and {f"pyvmem_kv_{name}" for name in asked} <= names
