"""Tests against SGLang itself, without a GPU: run by a Python that has an SGLang (`make test-sglang-cpu`)."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "engines"))  # what both engines' tests use

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", OMP_NUM_THREADS="1")
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")  # SGLang's leak check after each step
_alone = tempfile.TemporaryDirectory()  # control pages and pools: no other engine of this user is in sight
os.environ["XDG_RUNTIME_DIR"] = _alone.name
