"""Prefixes by hash over tensor-parallel ranks: processes under torchrun, over gloo on the host backend.

VMEM_TEST_STEPS sets how many steps (default 1000), for all kinds of caches together.

SPDX-License-Identifier: MIT
"""

import os
import subprocess
import sys
from inspect import signature

import pytest

from pyvmem.distributed_hashes import TensorParallelBlockHashes
from pyvmem.kv_hashes import BlockHashes
from test_kv_distributed import HERE, environment

CALLS = sorted(name for name in vars(BlockHashes) if callable(getattr(BlockHashes, name)) and name[:1] != "_")


@pytest.mark.parametrize("name", ["__init__", *CALLS])
def test_a_call_takes_what_that_of_one_cache_takes(name):
    parameters = [
        [(p.name, p.kind, p.default) for p in signature(getattr(kind, name)).parameters.values()]
        for kind in (BlockHashes, TensorParallelBlockHashes)
    ]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_while_one_evicts_more(ranks):
    steps = str(int(os.environ.get("VMEM_TEST_STEPS", "1000")) // 4)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(HERE / "kv_hash_agreement.py"), steps],
        capture_output=True, text=True, timeout=900, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ranks} ranks agreed" in done.stdout
