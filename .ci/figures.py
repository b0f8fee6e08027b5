"""Makes the figures of docs/results that one GPU can give, those that tell most first: `make figures`.

T="step vmm" chooses some. Each ends in its own time, and the next one runs whatever became of it. What they print is in
build/figures. VLLM_TRACE names a CSV file of request lengths for the workload "azure".

SPDX-License-Identifier: MIT
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "figures"
PYVMEM = [sys.executable, "-m", "pyvmem"]


def figures() -> list[tuple[str, int, list[str]]]:
    """(name, seconds at most, command), in the order in which they run."""
    lease = [*PYVMEM, "bench", "lease", "--page-size", "2M", "--backend"]
    no_training = ["--part", "park", "--part", "block", "--part", "new"]
    return [
        ("lease-stock", 60, [*lease, "stock", *no_training]),
        ("lease-cuda", 60, [*lease, "cuda", *no_training]),
        ("lease-train", 180, [*lease, "stock", "--part", "train", "--steps", "100"]),
        ("lease-train-cuda", 120, [*lease, "cuda", "--part", "train"]),
        ("lease-saver", 60, [*lease, "stock", "--part", "saver"]),
        *(with_vllm() if importlib.util.find_spec("vllm") else ()),
        ("selftest-stock", 300, [*PYVMEM, "doctor", "--selftest", "--backend", "stock", "--prove"]),
        ("step", 240, [*PYVMEM, "bench", "step", "--quick"]),
        ("vmm", 120, [*PYVMEM, "bench", "vmm", "--quick"]),
        ("share", 180, [*PYVMEM, "bench", "share", "--quick"]),
        ("tests", 600, ["make", "test-gpu", "JOBS=6"]),
    ]


def with_vllm() -> list[tuple[str, int, list[str]]]:
    """The figures that need vLLM."""
    vllm, trace = [*PYVMEM, "bench", "vllm", "--turns"], os.environ.get("VLLM_TRACE")
    loads = ["--load", "azure:512", "--trace", trace] if trace else []
    loads += ["--load", "decode", "--load", "decode-short"]
    return [
        ("vllm-auto", 600, [*vllm, "2", "--layout", "auto", *loads]),
        ("vllm-slots", 600, [*vllm, "2", "--layout", "slots", *loads]),
        ("vllm-attack", 420, [sys.executable, "tests/vllm/attack.py", "--minutes", "3"]),
        ("vllm-bursts", 900, [*vllm, "1", "--bursts", "--kv-memory", "18G", "--load", "hot:600"]),
        ("rollout-vllm", 300, [sys.executable, "examples/rollout_vllm.py"]),
        ("rollout-vllm-no-lease", 300, [sys.executable, "examples/rollout_vllm.py", "--no-lease"]),
    ]


def main(chosen: list[str]) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    from entry_point import write

    plugin = write(OUT / "plugin")  # vLLM finds pyvmem only where it is installed, or by this
    path = os.pathsep.join([str(plugin), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment, failed = dict(os.environ, PYTHONPATH=path), 0
    for name, seconds, command in figures():
        if chosen and name not in chosen:
            continue
        begin = time.monotonic()
        with open(OUT / f"{name}.txt", "wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True)  # fmt: skip
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the engines that it has started
                process.wait()
        failed += process.returncode != 0
        print(f"{name}: {time.monotonic() - begin:.0f} s, exit status {process.returncode}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
