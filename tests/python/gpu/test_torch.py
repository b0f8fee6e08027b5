"""The torch matrix on the GPU's backends, with torch's expandable segments off and on.

SPDX-License-Identifier: MIT
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BACKENDS

import pyvmem

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
CASES = (
    "fill copy_ slice_copy_ clone cpu index_put matmul float8 streams sdpa_flash sdpa_cudnn triton_kernel"
    " graph_across_a_remap beside_the_caching_allocator dropped_with_kernels_queued ten_million_words_beside_maps"
    " flex_attention"
).split()
GPU = [name for name in BACKENDS if name != "host" and "cuda_pointer" in pyvmem.Context(name).info().capabilities]


def results(backend, page_size, expandable):
    """{case: what it said}, from as few processes as the cases leave alive."""
    left, said = list(CASES), {}
    setting = f"expandable_segments:{expandable}"
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    while left:
        command = [sys.executable, str(HERE / "matrix.py"), backend, str(page_size), *left]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        finished = {line["case"]: line for line in lines if "ok" in line}
        started = [line["case"] for line in lines if line.get("started")]
        if len(started) > len(finished) or not started:  # it died there, or before the first
            case = started[-1] if started else left[0]
            finished[case] = {"ok": False, "error": f"exit status {done.returncode}\n{done.stderr[-4000:]}"}
        said.update(finished)
        left = [case for case in left if case not in said]
    return said


@pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
@pytest.mark.parametrize("backend", GPU)
def test_torch(backend, expandable):
    said = results(backend, min(pyvmem.Context(backend).page_sizes), expandable)
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
