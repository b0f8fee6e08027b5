"""The torch matrix on the GPU's backends, with torch's expandable segments off and on.

SPDX-License-Identifier: MIT
"""

import os
import subprocess
import sys

import pytest
from gpu_cases import GPU, results

import pyvmem

torch = pytest.importorskip("torch")

CASES = (
    "fill copy_ slice_copy_ clone cpu index_put matmul float8 streams sdpa_flash sdpa_cudnn triton_kernel"
    " graph_across_a_remap beside_the_caching_allocator dropped_with_kernels_queued ten_million_words_beside_maps"
    " flex_attention"
).split()


@pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
@pytest.mark.parametrize("backend", GPU)
def test_torch(backend, expandable):
    setting = f"expandable_segments:{expandable}"
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    said = results("matrix.py", [backend, str(min(pyvmem.Context(backend).page_sizes))], CASES, seconds=500, env=env)
    assert not {case: one["error"] for case, one in said.items() if not one["ok"]}


@pytest.mark.parametrize("backend", GPU)
def test_the_second_device(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    code = """
import sys, torch, pyvmem
ordinal = int(sys.argv[2])
context = pyvmem.Context(sys.argv[1], ordinal)
v = pyvmem.virtual_empty((64, 65536), torch.float32, f"cuda:{ordinal}", context=context)
v.commit()
v.tensor.fill_(2.0)
assert v.tensor.device.index == ordinal and v.tensor.sum().item() == 2.0 * v.tensor.numel()
print(context.info().device_uuid.hex())
"""

    def uuid(ordinal, **env):
        done = subprocess.run(
            [sys.executable, "-c", code, backend, str(ordinal)],
            capture_output=True,
            text=True,
            env={**os.environ, **env},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert uuid(0) != uuid(1)
    assert uuid(0, CUDA_VISIBLE_DEVICES="1") == uuid(1)
    assert uuid(1, CUDA_VISIBLE_DEVICES="1,0") == uuid(0)


@pytest.mark.parametrize("backend", GPU)
def test_12_tib_cost_little_memory(backend):
    with pyvmem.Context(backend) as context:

        def reserved_for_little():
            before = context.memory_free
            with context.reserve(12 << 40, backdrop="backdrop" in context.info().capabilities) as range_:
                page = context.create(min(context.page_sizes))
                range_.map(page, 11 << 40)
                context.fill(range_.addr + (11 << 40), 7, 4096)
                assert context.stats().overhead < 128 << 20
                return before - context.memory_free < 256 << 20

        # More than once, because other processes may take memory meanwhile.
        assert any(reserved_for_little() for _ in range(10))
