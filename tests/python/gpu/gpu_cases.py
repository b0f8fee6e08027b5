"""Cases on a GPU, each of which may end its process: run by as few processes as they leave alive.

SPDX-License-Identifier: MIT
"""

import json
import subprocess
import sys
from pathlib import Path

from conftest import BACKENDS

import pyvmem

HERE = Path(__file__).parent
GPU = [name for name in BACKENDS if name != "host" and "cuda_pointer" in pyvmem.Context(name).info().capabilities]


def results(program, arguments, cases, seconds, env=None):
    """{case: what the program said of it}. It gets the arguments and the cases that are left."""
    left, said = list(cases), {}
    while left:
        command = [sys.executable, str(HERE / program), *arguments, *left]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        finished = {line["case"]: line for line in lines if "ok" in line}
        started = [line["case"] for line in lines if line.get("started")]
        if len(started) > len(finished) or not started:  # it died there, or before the first
            case = started[-1] if started else left[0]
            finished[case] = {"ok": False, "error": f"exit status {done.returncode}\n{done.stderr[-4000:]}"}
        said.update(finished)
        left = [case for case in left if case not in said]
    return said
