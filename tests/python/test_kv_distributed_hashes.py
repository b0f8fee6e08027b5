"""Prefixes by hash over tensor-parallel ranks: processes under torchrun, over gloo on the host backend, and over NCCL
where GPUs are.

VMEM_TEST_STEPS sets how many steps (default 1000), for all kinds of caches together.

SPDX-License-Identifier: MIT
"""

from inspect import signature

import pytest

import pyvmem
from pyvmem.parallel.hashes import TensorParallelBlockHashes
from pyvmem.kv.hashes import BlockHashes
from test_kv_distributed import STEPS, needs_two_gpus, ranks_agree

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
    ranks_agree("gloo", ranks, "kv_hash_agreement.py", STEPS // 4)


@needs_two_gpus
def test_two_ranks_over_nccl_agree_while_one_evicts_more():
    if pyvmem.probe("stock"):
        pytest.skip(f"its rows are for pages of 64 KiB: {pyvmem.probe('stock')}")
    ranks_agree("nccl", 2, "kv_hash_agreement.py", STEPS // 20)  # an agreement waits for the GPU, for some ms
