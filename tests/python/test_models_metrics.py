"""Metrics of models that can sleep, and the dashboard that asks for them.

SPDX-License-Identifier: MIT
"""

import argparse
import io
import os
import re
from pathlib import Path

import pytest

from pyvmem.engine import control, metrics
from pyvmem.engine.control import State
from pyvmem.tools import top

pytest.importorskip("prometheus_client")

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    page = control.open_page("abc", 0)
    control.claim(page, "chat", 8001)
    words = dict(BLOCKS=100, BLOCK_BYTES=1 << 20, RANKS_USED=1, STATE=State.ASLEEP, QUEUED=2, LACKS=7, WAKES=3,
                 SLEEPS=4, WAKING=1_500_000, UNSERVED=5, WAIT=250_000,
                 ROOM=9, WEIGHTS=64 << 20, WEIGHTS_HELD=16 << 20)  # fmt: skip
    for word, value in words.items():
        page[getattr(control, word)] = value
    return page


def samples():
    """{(name, state or None): value} of what a server exports."""
    collector = metrics.Collector("vllm:", os.getpid)
    return {(s.name, s.labels.get("state")): s for family in collector.collect() for s in family.samples}


def test_a_model_exports_its_state_queue_weights_and_wakes(page):
    found = samples()
    told = {name.removeprefix("vllm:vmem_model_"): s.value for (name, state), s in found.items() if state is None}
    assert {k: v for k, v in told.items() if "vmem_kv" not in k} == dict(
        running=0, queued=2, lacks_bytes=7, weights_bytes=64 << 20, weights_held_bytes=16 << 20, wakes_total=3,
        sleeps_total=4, waking_seconds_total=1.5, unserved_total=5, wait_seconds=0.25, room_bytes=9)  # fmt: skip
    states = {state: s.value for (name, state), s in found.items() if name == "vllm:vmem_model_state"}
    assert states == dict(asleep=1, waking=0, awake=0, closing=0, drained=0)
    assert all(s.labels["model_name"] == "chat" for s in found.values())


def test_an_engine_whose_server_says_nothing_has_no_model(page):
    page[control.STATE] = 0
    assert samples() and not any("vmem_model" in name for name, _ in samples())


def test_the_dashboard_asks_models_for_metrics_that_exist(page):
    asked = set(re.findall(r"\$\{engine\}(\w+)", DASHBOARD.read_text()))
    names = {name.removeprefix("vllm:vmem_") for name, _ in samples()}
    assert {"model_state", "model_wakes_total", "kv_backed_bytes"} <= asked <= names


def test_top_shows_the_state_queue_and_weights(page):
    told = io.StringIO()
    assert top.top(argparse.Namespace(limit=[], json=False, once=True, wait=1), told) == 0
    lines = told.getvalue().splitlines()
    columns = next(line.split() for line in lines if "engine" in line.split())
    row = next(line.split() for line in lines if "abc-0" in line)
    about = dict(zip(columns, row))
    assert (about["model"], about["port"], about["state"]) == ("chat", "8001", "asleep")
    assert (about["running"], about["queued"], about["weights"]) == ("0", "2", "16/64")


def test_a_narrow_terminal_keeps_what_tells_of_a_model(page):
    for line in top.screen([], 80).splitlines():
        assert len(line) <= 80
    row = next(line for line in top.screen([], 60).splitlines() if "chat" in line)
    assert {"chat", "asleep", "2", "16/64"} <= set(row.split())
