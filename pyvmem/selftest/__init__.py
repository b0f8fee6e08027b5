"""``pyvmem doctor --selftest``: whether a backend does on this machine what libvmem relies on.

Stages run one after the other, each in a process of its own with a time limit (`stages`). A *canary*, ordinary memory
of CUDA's with a pattern, is compared after each. The first failure ends the test. If every stage passes, a *stamp* is
written, a file named for the driver's release, the GPU's architecture and the build of nvidia-uvm.ko. libvmem chooses
the backend "uvm" by default only where it finds one.

It calls libvmem and CUDA, and nothing of pyvmem's caches. Begin with `stages`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pyvmem._ffi import ffi, lib
from pyvmem.core import MIB, Context, probe
from pyvmem.errors import VmemError, _check
from pyvmem.selftest.agents import UInts, pattern, simulated
from pyvmem.selftest.child import UNKNOWN, refused
from pyvmem.selftest.stages import HUGE, STAGES, Stage

__all__ = ["BACKENDS", "run_selftest", "stamp_state"]

BACKENDS = ("uvm", "stock")
NEEDED = 4 << 30  # bytes of free device memory, on a real GPU
CANARY = 1 << 30
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux's proc_ns.h: the number of /proc/self/ns/pid
_PART = 32 * MIB  # of the canary, compared at a time
_PREFLIGHT = Stage("preflight", None, "the backend opens")
_CANARY = Stage("canary", None, "memory that can be written")


# ---- stamps -------------------------------------------------------------------------------------------------


def stamp_name(backend: str, device: int) -> str:
    """Return the stamp's file name. Raises `VmemError` where no driver or no device is found."""
    name = ffi.new("char[160]")
    _check(lib.pv_stamp_name(backend.encode(), device, name, len(name)))
    return str(ffi.string(name).decode())


def stamp_folders() -> list[Path]:
    """Return the folders that libvmem looks in: the system's, then the user's."""
    found: list[Path] = []
    path = ffi.new("char[4096]")
    while not lib.pv_stamp_folder(len(found), path, len(path)):
        found.append(Path(os.fsdecode(ffi.string(path))))
    return found


def stamp_state(backend: str, device: int) -> str | None:
    """Return "passed" or "failed", of the last self-test of this build here, or None if there was none."""
    try:
        name = stamp_name(backend, device)
    except VmemError:
        return None
    for folder in stamp_folders():
        for state, file in (("failed", f"{name}.failed"), ("passed", name)):
            if os.access(folder / file, os.R_OK):
                return state
    return None


def _write_stamp(name: str, report: dict[str, Any]) -> Path:
    """Write the report, in place of what an earlier test left; root writes for the whole system.

    $XDG_STATE_HOME, if it is set, names the folder also for root.
    """
    folders = stamp_folders()
    own = os.geteuid() != 0 or "XDG_STATE_HOME" in os.environ
    folder = folders[-1] if own else folders[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name if report["passed"] else f"{name}.failed")
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(report, indent=2) + "\n")
    new.chmod(0o644)
    new.replace(path)
    for other in (folder / name, folder / f"{name}.failed"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


# ---- the parent's part --------------------------------------------------------------------------------------


class _Canary:
    """Memory of CUDA's with a pattern, which nobody may change."""

    def __init__(self, context: Context) -> None:
        self._context = context
        length = min(CANARY, context.memory_free // 16 // HUGE * HUGE) or HUGE
        self._range, pages = context.reserve(length), context.create(HUGE, length // HUGE)
        self._range.map(pages)
        for addr, words in self._parts():
            context.write(addr, words)

    def _parts(self) -> Iterator[tuple[int, UInts]]:
        for at in range(0, self._range.length, _PART):
            yield self._range.addr + at, pattern(at // 8 + 1, min(_PART, self._range.length - at) // 8)

    def differs(self) -> int:
        """Return how many words changed."""
        read = self._context.read
        return sum(int((np.frombuffer(read(addr, w.nbytes), np.uint64) != w).sum()) for addr, w in self._parts())


def _others(uuid: bytes) -> int | str:
    """Return how many processes but this one compute on the GPU, by nvidia-smi, or why that is unknown.

    nvidia-smi need not list this process, which has CUDA open. In another PID namespace than the machine's first, as in
    a container, it may list numbers of this namespace or of another, or nothing. Any of them may be this process.
    """
    name = uuid.hex()
    text = "GPU-" + "-".join((name[:8], name[8:12], name[12:16], name[16:20], name[20:]))
    query = ["nvidia-smi", "-i", text, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=60)
        apart = os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if found.returncode:
        said = (found.stderr or found.stdout).strip().splitlines() or ["nothing"]
        return f"nvidia-smi: exit status {found.returncode}: {said[-1]}"
    listed = set(found.stdout.split())
    if words := [word for word in listed if not (word.isascii() and word.isdecimal())]:
        return f"nvidia-smi lists {' '.join(found.stdout.split())!r}: {words[0]!r} is no process"
    if apart:
        return len(listed - {str(os.getpid())}) if listed else "nvidia-smi lists no process, not even this one"
    return len(listed) - 1 if len(listed) > 1 else "nvidia-smi cannot tell processes apart in this PID namespace"


def _child(stage: Stage, backend: str, device: int, seconds: float, unknown: bool = False) -> dict[str, Any]:
    """Run a stage in a process of its own, which is killed after so many seconds."""
    command = [sys.executable, "-m", "pyvmem.selftest.child", stage.name, backend, str(device)]
    # Kernels that run until they are stopped: nothing may be loaded while one runs.
    environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER", "VMEM_BACKEND": backend, UNKNOWN: str(int(unknown))}
    # A session of its own, so that the stage's own children end with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                               start_new_session=True)  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
        return dict(json.loads(out.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return refused("the stage", f"no end after {seconds:.0f} s", "an end")
    except (IndexError, ValueError):
        last = (err.strip().splitlines() or ["no output"])[-1]
        return refused("the stage", f"exit status {process.returncode}: {last}", "a result")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _results(backend: str, device: int, shared: bool, unknown: bool) -> Iterator[tuple[Stage, dict[str, Any]]]:
    """The stages and their results, up to the first that failed."""
    error = probe(backend, device, unknown_driver=unknown)
    if error is not None:
        yield _PREFLIGHT, refused(f"the backend {backend}", error, "a backend that works")
        return
    with Context("cuda", device) as context:
        others, slow = _others(context.info().device_uuid), simulated()
        if isinstance(others, int) and others and not shared:
            yield _PREFLIGHT, refused("other processes that compute on this GPU", others, "0, or --shared")
            return
        if not slow and context.memory_free < NEEDED:
            yield _PREFLIGHT, refused("free device memory", context.memory_free, NEEDED)
            return
        known = "figures" if isinstance(others, int) else "unknown"
        yield _PREFLIGHT, {"ok": True, known: {"other processes": others}}
        try:
            canary = _Canary(context)
        except VmemError as failed:
            yield _CANARY, refused("the canary", failed, _CANARY.proves)
            return
        for stage in STAGES:
            result = _child(stage, backend, device, stage.seconds * (5 if slow else 1), unknown)
            if differs := canary.differs():
                result |= refused("the canary, memory that no stage may touch", f"{differs} words changed", 0)
            yield stage, result
            if not result["ok"]:
                return


def run_selftest(
    backend: str,
    device: int = 0,
    *,
    shared: bool = False,
    unknown_driver: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the self-test and return its report; `say` gets a line for each stage.

    The report's "passed" is True only if every stage passed. The report is written as the stamp, or, after a failure,
    to a file whose name ends in ".failed". `shared` allows other processes on the GPU. `unknown_driver` is as of
    `Context`.

    Raises `VmemError` if no driver or device is found.
    """
    from pyvmem import __version__

    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    stages: list[dict[str, Any]] = []
    report: dict[str, Any] = {"backend": backend, "stamp": stamp_name(backend, device), "date": now,
                              "pyvmem": __version__, "simulated": simulated(), "stages": stages}  # fmt: skip
    started = time.monotonic()
    for stage, result in _results(backend, device, shared, unknown_driver):
        seconds = time.monotonic() - started
        figures = ", ".join(f"{n:,} {what}" for what, n in result.get("figures", {}).items())
        figures += ", ".join(f"{what}: unknown ({why})" for what, why in result.get("unknown", {}).items())
        verdict = "ok    " if result["ok"] else "FAILED"
        say(f"{len(stages):2} {stage.name:12} {verdict} {seconds:6.1f} s  {figures or stage.proves}")
        if not result["ok"]:
            say(f"   {result['what']}: seen {result['seen']}; expected {result['expected']}")
        stages.append({"stage": stage.name, "seconds": round(seconds, 2), **result})
        started = time.monotonic()
    report["passed"] = passed = all(each["ok"] for each in stages)
    if len(stages) == 1:
        say("nothing was tested")
        return report
    report["file"] = str(_write_stamp(report["stamp"], report))
    simulation = " on a SIMULATED GPU" if report["simulated"] else ""
    say(f"{'passed' if passed else 'failed'}{simulation}: {report['file']}")
    if not passed and backend == "uvm":
        say("stock is used by default; `sudo make module-unload` removes the module; reboot if nvidia-smi hangs")
    return report
