"""Tests against vLLM itself, without a GPU: run by a Python that has a vLLM (`make test-vllm-cpu`)."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "engines"))  # what both engines' tests use

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", DO_NOT_TRACK="1")
os.environ["OMP_NUM_THREADS"] = "1"  # a child forked beside OpenMP's threads would wait for them
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
_alone = tempfile.TemporaryDirectory()  # control pages and pools: no other engine of this user is in sight
os.environ["XDG_RUNTIME_DIR"] = _alone.name
