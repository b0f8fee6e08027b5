"""Attempts of others to get at a virtual tensor's memory: what is refused stays refused, and nothing damages the pages.

SPDX-License-Identifier: MIT
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BACKENDS

import pyvmem

torch = pytest.importorskip("torch")
GPU = [name for name in BACKENDS if name != "host" and "cuda_pointer" in pyvmem.Context(name).info().capabilities]


@pytest.mark.parametrize("backend", GPU)
def test_cuda_ipc_and_shareable_handles_are_refused(backend):
    program = Path(__file__).with_name("exports.py")
    done = subprocess.run([sys.executable, program, backend], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ipc_handle"] != 0, "another process would map the backdrop"
    assert said.get("export_handle", 1) != 0, "another process would map the backdrop"
    assert said["torch_share"] != "shared", "torch.multiprocessing would send the backdrop"
    assert said["pages_whole"]
