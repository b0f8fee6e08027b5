"""Decode attention by slots, in Triton's interpreter where there is no GPU (slots_triton.py).

SPDX-License-Identifier: MIT
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_every_request_has_the_attention_of_its_own_rows():
    pytest.importorskip("triton")
    environment = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("slots_triton.py"))], env=environment,
                          capture_output=True, text=True, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "interpreter:" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.endswith("right\n")
