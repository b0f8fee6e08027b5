# SPDX-License-Identifier: MIT
"""tests/hour/hour.sh with tools that play the machine: what it takes for a complaint, and what it leaves loaded."""

import os
import subprocess
from pathlib import Path

import pytest

HOUR = Path(__file__).resolve().parents[1] / "hour/hour.sh"
TOOLS = {
    "dmesg": 'cat "$HOUR/log"',
    "sudo": 'exec "$@"',
    "python3": 'exit "${CUDA:-0}"',
    "make": 'echo "$*" >>"$HOUR/made"\n'
    'case $1 in module) echo /nvidia-uvm.ko ;; test-gpu) cat "$HOUR/says" >>"$HOUR/log" ;; esac',
}
SAMPLES = (
    "all_reduce_perf",
    "vectorAdd",
    "UnifiedMemoryStreams",
    "conjugateGradientUM",
    "systemWideAtomics",
    "vectorAddMMAP",
    "memMapIPCDrv",
    "simpleIPC",
    "streamOrderedAllocation",
    "p2pBandwidthLatencyTest",
)


def hour(folder, step, says="", **env):
    """Run a step; what it printed, its status, and the targets that it made."""
    for name, text in TOOLS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "log").write_text("[    1.0] nvidia-uvm: Loaded the UVM driver\n[    2.0] WARNING: before the hour\n")
    (folder / "says").write_text(f"[    3.0] {says}\n")
    (folder / "cuda.stock").write_text("ok failing_map\n" + "".join(f"absent {name}\n" for name in SAMPLES))
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "HOUR": str(folder), "OUT": str(folder)}
    done = subprocess.run(["sh", HOUR, step], env={**path, **env}, capture_output=True, text=True)
    made = (folder / "made").read_text().splitlines() if (folder / "made").exists() else []
    return done.stdout + done.stderr, done.returncode, [line.split()[0] for line in made]


@pytest.mark.parametrize(
    "line",
    [
        "kernel BUG at mm/slub.c:4023!",
        "invalid opcode: 0000 [#1] PREEMPT SMP",
        "BUG: KASAN: slab-use-after-free in uvm_vmem_closed+0x12/0x80 [nvidia_uvm]",
        "BUG: unable to handle page fault for address: ffff8881",
        "WARNING: CPU: 1 PID: 44 at lib/refcount.c:28",
        "general protection fault, probably for non-canonical address",
        "Assert failed, condition overlay->pages not true",
        "INFO: task pyvmem:77 blocked for more than 120 seconds.",
        "NVRM: Xid (PCI:0000:65:00): 31, pid=77, MMU Fault",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 26s!",
        "nvidia-uvm: Memory leak of 64 bytes detected",
    ],
)
def test_a_kernel_that_complains_fails_the_step(tmp_path, line):
    told, rc, _ = hour(tmp_path, "tests", line)
    assert rc and line in told


def test_other_lines_and_those_from_before_are_no_complaint(tmp_path):
    told, rc, made = hour(tmp_path, "tests", "nvidia-uvm: DEBUG build")
    assert rc == 0 and "tests passed" in told and made == ["test-gpu"], told


@pytest.mark.parametrize("broken", [False, True])
def test_the_develop_module_does_not_stay(tmp_path, broken):
    told, rc, made = hour(tmp_path, "develop", CUDA="1" if broken else "0")
    assert bool(rc) == broken, told
    assert made == ["module", "module-load", "module-unload"]
