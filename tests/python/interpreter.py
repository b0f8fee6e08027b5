"""Triton's kernels in its interpreter, on the host.

SPDX-License-Identifier: MIT
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def kernel_is_right(module):
    """Call `kernel_is_right` of a test module for the host, in a process whose Triton interprets kernels."""
    pytest.importorskip("triton")
    code = f"import torch, {module}; {module}.kernel_is_right(torch.device('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300)  # fmt: skip
    assert done.returncode == 0 and "the kernel is right" in done.stdout, done.stdout + done.stderr[-2000:]
