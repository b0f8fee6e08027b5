"""VMEM_TRACE: a timeline of steps, maps, unmaps and waits, as Perfetto reads it.

SPDX-License-Identifier: MIT
"""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import os, signal, sys, torch, pyvmem
from pyvmem.kv.options import Spare
specs = pyvmem.model_specs(2, 2, 64, torch.float16)
cache = pyvmem.KVCache(specs, 4, 4096, 64 << 20, backend="host", spare=Spare(overlap=OVERLAP))
for _ in range(4):
    cache.alloc()
for length in (100, 2000, 4096):
    cache.step([length] * 4)
cache.free(0)
cache.step([0, 4096, 4096, 4096])
cache.reclaim()
print(cache.context.stats().map_runs)
sys.stdout.flush()
END
"""


def run(path, end="cache.close()", overlap=False):
    code = PROGRAM.replace("END", end).replace("OVERLAP", str(overlap))
    return subprocess.run([sys.executable, "-c", code], env=os.environ | {"VMEM_TRACE": str(path)},
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def read(path):
    """The events: the format allows an array that does not end."""
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert all(event["ph"] in "XM" and {"name", "pid", "tid", "args"} <= set(event) for event in events)
    return [event for event in events if event["ph"] == "X"], [event for event in events if event["ph"] == "M"]


def inside(one, other):
    return one["tid"] == other["tid"] and other["ts"] <= one["ts"] and (
        one["ts"] + one["dur"] <= other["ts"] + other["dur"] + 0.002)  # fmt: skip


def test_steps_and_what_they_do(tmp_path):
    done = run(tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    events, names = read(tmp_path / "trace.json")
    steps = [event for event in events if event["name"] == "step"]
    maps = [event for event in events if event["name"] == "map"]
    assert len(steps) == 4 and all(step["args"]["result"] == 0 for step in steps)
    assert sum(event["args"]["runs"] for event in maps) == int(done.stdout)
    assert all(any(inside(event, step) for step in steps) for event in maps)
    assert {"reserve addresses", "allocate memory", "unmap", "free addresses"} <= {event["name"] for event in events}
    assert len({event["pid"] for event in events}) == 1 and names[0]["name"] == "thread_name"


def test_a_killed_process_leaves_whole_lines(tmp_path):
    done = run(tmp_path / "trace.json", "os.kill(os.getpid(), signal.SIGKILL)", overlap=True)
    assert done.returncode == -signal.SIGKILL
    events, _ = read(tmp_path / "trace.json")
    assert any(event["name"] == "step" for event in events)


def test_processes_share_a_file(tmp_path):
    for _ in range(2):
        assert run(tmp_path / "trace.json").returncode == 0
    events, _ = read(tmp_path / "trace.json")
    assert len({event["pid"] for event in events}) == 2


def test_a_file_that_cannot_be_written_is_no_error(tmp_path):
    assert run(tmp_path / "nowhere" / "trace.json").returncode == 0
    assert run("/dev/full").returncode == 0
