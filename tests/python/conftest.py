"""Every test that takes `backend` or `context` runs on every backend that works here; the report's header names the
others with the reason that their own probe gives. VMEM_TEST_BACKENDS (names with commas) limits the run to those
backends, and they must work then. If the host is not among them, only tests run whose ids name a backend.

SPDX-License-Identifier: MIT
"""

import gc
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hypothesis
import pytest

import pyvmem

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))  # paper.py, decode_graphs.py

# A test takes the time that the machine takes.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", derandomize=True, max_examples=40, **UNTIMED)
hypothesis.settings.register_profile("brief", derandomize=True, max_examples=8, **UNTIMED)
hypothesis.settings.register_profile("long", max_examples=1000, **UNTIMED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

DEMANDED = [name for name in os.environ.get("VMEM_TEST_BACKENDS", "").split(",") if name]
PROBED = {name: pyvmem.probe(name) for name in DEMANDED or pyvmem.backends()}
# The host backend works everywhere: were its probe to fail, its tests are to fail, not to vanish.
BACKENDS = [name for name, error in PROBED.items() if error is None or name in DEMANDED or name == "host"]


def pytest_report_header():
    missing = [f"not tested: {name}: {error}" for name, error in PROBED.items() if name not in BACKENDS]
    return [f"backends: {', '.join(BACKENDS)}", *missing]


def pytest_collection_modifyitems(config, items):
    if DEMANDED and "host" not in DEMANDED:
        others = [item for item in items if not any(name in item.nodeid for name in BACKENDS)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    gc.collect()
    gc.freeze()  # a test's collection goes through its own objects, not through all of torch's and transformers'


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def context(backend):
    with pyvmem.Context(backend) as context:
        yield context


@pytest.fixture
def device(backend):
    """The torch device of the backend's addresses."""
    if backend == "host":
        return "cpu"
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return "cuda"


@pytest.fixture(autouse=any(name != "host" for name in BACKENDS))
def lag():
    """On a GPU, kernels run late (late.py)."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        yield
        return
    from late import Lag

    with Lag().everywhere():
        yield


@pytest.fixture(params=["smallest", "largest"])
def page_size(request, context):
    return {"smallest": min, "largest": max}[request.param](context.page_sizes)


def until(what, seconds=60):
    """Wait until something is so; returns what it is."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, what
        time.sleep(0.005)
    return found


FORKS = """
import gc, json, os, sys, torch  # which takes seconds, once

gc.freeze()
for name, code in json.loads(sys.argv.pop(1)).items():
    child = os.fork()
    if not child:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} failed")
if not child:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
"""


def forks(programs, *args, **options):
    """Run {name: code} one after the other, each as `python` does, but that torch is imported already."""
    return python(FORKS, json.dumps(programs), *args, **options)


def python(code, *args, check=True, env=None, timeout=900):
    """Run code in a fresh interpreter; returns the finished process. The time ends only a program that hangs."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done
