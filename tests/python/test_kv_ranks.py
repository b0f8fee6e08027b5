"""Tensor-parallel ranks that repeat what rank 0 decides (examples/ranks.py): processes under torchrun, over gloo on the
host backend, and on GPUs where there are two.

VMEM_TEST_STEPS sets how many steps (default 200).

SPDX-License-Identifier: MIT
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
STEPS = os.environ.get("VMEM_TEST_STEPS", "200")


def run(program, ranks, *arguments):
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(program),
         *arguments],
        capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ranks_hold_the_same_with_one_starved():
    assert "3 ranks agreed" in run(HERE / "kv_ranks.py", 3, "gloo", STEPS)


def test_the_example_runs():
    assert "2 ranks: " in run(HERE.parents[1] / "examples" / "ranks.py", 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")
def test_two_ranks_on_gpus_hold_the_same():
    assert "2 ranks agreed" in run(HERE / "kv_ranks.py", 2, "nccl", STEPS)
