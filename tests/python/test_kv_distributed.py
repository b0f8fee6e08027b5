"""Tensor-parallel ranks agree: processes under torchrun, over gloo on the host backend, and over NCCL where GPUs are.

VMEM_TEST_STEPS sets how many steps (default 1000).

SPDX-License-Identifier: MIT
"""

import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch

from pyvmem.kv.cache import _GONE, KVCache
from pyvmem.parallel.cache import TensorParallelKVCache
from pyvmem.parallel.local import LocalCalls

HERE = Path(__file__).parent


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])}


STEPS = int(os.environ.get("VMEM_TEST_STEPS", "1000"))
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")


def ranks_agree(backend, ranks, program="kv_agreement.py", steps=STEPS):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(HERE / program), backend, str(steps)],
        capture_output=True, text=True, timeout=900, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ranks} ranks agreed" in done.stdout


# What KVCache has and TensorParallelKVCache lacks, and why.
ABSENT = {"for_model": "init_cache takes its place: it divides the heads among the ranks"}


def test_every_call_of_a_cache_is_there():
    """A call that KVCache gains is agreed on, or each rank answers it for itself: nothing is left out by oversight."""
    options = {"dtype": torch.float16, "backend": "host", "name": None, "same_slots": True}
    with KVCache.for_model(1, 1, 64, 2, 10, 1 << 22, **options) as cache:
        public = {name for name in {*dir(cache), *vars(cache)} if not name.startswith("_")}
    agreed, local = ({n for n in vars(c) if not n.startswith("_")} for c in (TensorParallelKVCache, LocalCalls))
    assert public - agreed - local - {"shortage"} == set(ABSENT)
    assert not agreed & local and not local - public


@pytest.mark.parametrize("name", sorted(set(dir(TensorParallelKVCache)) & set(dir(KVCache)) - set(_GONE)))
def test_a_call_takes_what_that_of_a_cache_takes(name):
    call, here = (getattr(c, name) for c in (KVCache, TensorParallelKVCache))
    if (name.startswith("_") and name not in ("__enter__", "__exit__")) or not callable(here):
        return
    parameters = [[(p.name, p.kind, p.default) for p in signature(c).parameters.values()] for c in (call, here)]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("name", sorted(_GONE))
def test_a_name_that_is_gone_says_what_took_its_place(name):
    with pytest.raises(AttributeError, match=re.escape(_GONE[name])):
        getattr(TensorParallelKVCache, name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_over_gloo_agree_with_one_starved(ranks):
    ranks_agree("gloo", ranks)


@pytest.mark.parametrize(("how", "asks"), [("dies", "steps"), ("sleeps", "steps"), ("dies", "hashes")])
def test_a_lost_rank_is_reported_by_the_others(how, asks, tmp_path):
    command = [sys.executable, str(HERE / "kv_lost_rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "3", str(tmp_path), how, asks],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    assert "lost" in said[0] and "lost" in said[1]


@needs_two_gpus
def test_two_ranks_over_nccl_agree_with_one_starved():
    ranks_agree("nccl", 2)
