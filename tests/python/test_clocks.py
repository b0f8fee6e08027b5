"""Processes whose clocks differ, as those of a container with a time namespace do, and what they publish.

SPDX-License-Identifier: MIT
"""

import json
import os
import subprocess
import sys

import pytest

from pyvmem import _clock
from pyvmem.engine import control
from pyvmem.kv import view

AWAY = ["--monotonic", "-100", "--boottime", "5000"]  # seconds that the clocks of the namespace are ahead


@pytest.fixture
def away(tmp_path, monkeypatch):
    """Runs a Python program in a time namespace of its own, with this process's folder: what it prints as JSON."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    may = [["unshare", *user, "--time", *AWAY] for user in ([], ["--user", "--map-root-user"])]
    try:
        may = [one for one in may if not subprocess.run([*one, "true"], capture_output=True).returncode]
    except FileNotFoundError:
        may = []
    if not may:
        pytest.skip("this user may make no time namespace")

    def run(program):
        done = subprocess.run([*may[0], sys.executable, "-c", program], capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return json.loads(done.stdout)

    return run


def test_processes_of_two_time_namespaces_publish_times_of_one_clock(away):
    before, program = _clock.now_us(), "import json, time; from pyvmem._clock import now_us; print(json.dumps({}))"
    there = away(program.format("now_us()"))
    assert before <= there <= _clock.now_us()
    assert away(program.format("time.monotonic()")) < before / 1e6  # the namespace is one


def test_a_process_of_another_time_namespace_sees_who_lives(away):
    page = control.open_page("here", 0)
    control.claim(page)
    mine = view.new_view_path()
    open(mine, "w").close()
    program = """
import json
from pyvmem.engine import control
from pyvmem.kv import view

view.new_view_path()  # which sweeps
print(json.dumps([[e.name, control.is_here(page)] for e, page in control.engines()]))
"""
    assert away(program) == [["here", True]] and os.path.exists(mine)
