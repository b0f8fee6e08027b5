"""Tensor-parallel ranks agree: processes under torchrun, over gloo on the host backend, and over NCCL where GPUs are.

VMEM_TEST_STEPS sets how many steps (default 1000).

SPDX-License-Identifier: MIT
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyvmem import distributed
from pyvmem.kv import KVCache

HERE = Path(__file__).parent


def torchrun(backend, ranks):
    steps = os.environ.get("VMEM_TEST_STEPS", "1000")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(HERE / "kv_agreement.py"), backend, steps],
        capture_output=True, text=True, timeout=900, env=env,
    )  # fmt: skip


def test_every_call_of_a_cache_is_there():
    names = {name for name in dir(KVCache) if not name.startswith("_")} - {"for_model"}  # which is init_cache
    there = distributed._LOCAL | set(dir(distributed.TensorParallelKVCache))
    assert names - there == set()


def test_two_ranks_over_gloo_agree_with_one_starved():
    done = torchrun("gloo", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks agreed" in done.stdout


def test_two_ranks_over_nccl_agree_with_one_starved():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"torch sees {torch.cuda.device_count()} CUDA devices, two are needed")
    done = torchrun("nccl", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks agreed" in done.stdout
