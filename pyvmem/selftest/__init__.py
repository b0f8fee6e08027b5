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
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyvmem._ffi import ffi, lib
from pyvmem.core import MIB, Context, probe
from pyvmem.errors import VmemError, _check
from pyvmem.selftest.agents import agent, pattern
from pyvmem.selftest.child import UNKNOWN
from pyvmem.selftest.stages import HUGE, OTHERS, STAGES, Stage

__all__ = ["BACKENDS", "run_selftest", "stamp_state"]

BACKENDS = ("uvm", "stock")
NEEDED = 4 << 30  # bytes of free device memory, on a real GPU
CANARY = 1 << 30
_PART = 32 * MIB  # of the canary, compared at a time


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

    def __init__(self, device: int) -> None:
        self._context = Context("cuda", device)
        self.slow = agent(device).slow
        self.free = self._context.memory_free
        length = min(CANARY, self.free // 16 // HUGE * HUGE) or HUGE
        self._range = self._context.reserve(length)
        self._pages = self._context.create(HUGE, length // HUGE)
        self._range.map(self._pages)
        self._room = np.empty(_PART // 8, np.uint64)
        for at, words in self._parts():
            self._context.write(self._range.addr + at, pattern(at // 8 + 1, words))

    def _parts(self) -> list[tuple[int, int]]:
        length = self._range.length
        return [(at, min(_PART, length - at) // 8) for at in range(0, length, _PART)]

    def differs(self) -> int:
        """Return how many words changed."""
        wrong = 0
        for at, words in self._parts():
            part = self._room[:words]
            self._context.copy(part.ctypes.data, self._range.addr + at, 8 * words)
            wrong += int((part != pattern(at // 8 + 1, words)).sum())
        return wrong

    @property
    def bytes(self) -> int:
        return self._range.length

    def close(self) -> None:
        self._context.close()


def _others(uuid: bytes) -> int | None:
    """Return how many processes compute on the GPU, as nvidia-smi sees it; None if it cannot tell."""
    name = uuid.hex()
    text = "GPU-" + "-".join((name[:8], name[8:12], name[12:16], name[16:20], name[20:]))
    query = ["nvidia-smi", "-i", text, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if found.returncode else len(found.stdout.split())


def _uuid(device: int) -> bytes:
    """Return a device's UUID, asked of CUDA in a process that ends at once: this one must have no context yet."""
    code = (
        "import sys, pyvmem\n"
        "with pyvmem.Context('cuda', int(sys.argv[1])) as c: print(c.info().device_uuid.hex(), c.info().device_name)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(device)], capture_output=True, text=True, timeout=120)
    if found.returncode:
        raise RuntimeError(f"CUDA does not work here: {found.stderr.strip().splitlines()[-1]}")
    return bytes.fromhex(found.stdout.split()[0])


def _xid() -> str:
    """Return the kernel log's last line about a fault of the GPU, if this user may read it."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in log.splitlines() if "Xid" in line]
    return lines[-1] if lines else ""


def _refused(what: str, seen: object, expected: object) -> dict[str, Any]:
    return {"ok": False, "what": what, "seen": str(seen), "expected": str(expected)}


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
        return _refused("the stage", f"no end after {seconds:.0f} s", "an end")
    except (IndexError, ValueError):
        last = (err.strip().splitlines() or ["no output"])[-1]
        return _refused("the stage", f"exit status {process.returncode}: {last}", "a result")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _preflight(backend: str, device: int, shared: bool, unknown: bool) -> dict[str, Any]:
    """Check what must hold before anything is touched."""
    error = probe(backend, device, unknown_driver=unknown)
    if error is not None:
        return _refused(f"the backend {backend}", error, "a backend that works")
    others = _others(_uuid(device))
    if others and not shared:
        return _refused("processes that compute on this GPU", others, "0, or --shared")
    note = "" if others is not None else "nvidia-smi cannot tell whether other processes use the GPU"
    return {"ok": True, "note": note, "figures": {} if others is None else {"other_processes": others}}


def run_selftest(
    backend: str,
    device: int = 0,
    *,
    prove: bool = False,
    shared: bool = False,
    unknown_driver: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the self-test and return its report; `say` gets a line for each stage.

    The report's "passed" is True only if every stage passed. The report is written as the stamp, or, after a failure,
    to a file whose name ends in ".failed". With `prove`, which is for "stock", one more stage ends a process by a fault
    (Xid 31 in the kernel's log). It shows that the readers of the other stages notice one. `shared` allows other
    processes on the GPU. `unknown_driver` is as of `Context`.

    Raises `VmemError` if no driver or device is found.
    """
    if prove and backend != "stock":
        raise ValueError("--prove needs --backend stock: uvm replaces pages without a fault")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report: dict[str, Any] = {"backend": backend, "stamp": stamp_name(backend, device), "date": now, "passed": False,
                              "stages": []}  # fmt: skip

    def record(name: str, proves: str, perform: Callable[[], dict[str, Any]]) -> bool:
        started = time.monotonic()
        result = perform()
        seconds = time.monotonic() - started
        row = {"stage": name, "seconds": round(seconds, 2), **{k: v for k, v in result.items() if v not in ("", {})}}
        report["stages"].append(row)
        figures = ", ".join(
            f"{v:,} {k}" if isinstance(v, int) else f"{k} {v}" for k, v in result.get("figures", {}).items()
        )
        verdict = "ok    " if result["ok"] else "FAILED"
        say(f"{len(report['stages']) - 1:2} {name:12} {verdict} {seconds:6.1f} s  {figures or proves}")
        if result.get("note"):
            say(f"{'':24}     {result['note']}")
        if not result["ok"]:
            say(f"   {result['what']}: seen {result['seen']}; expected {result['expected']}")
        return bool(result["ok"])

    def preflight() -> dict[str, Any]:
        return _preflight(backend, device, shared, unknown_driver)

    def perform(stage: Stage) -> dict[str, Any]:
        result = _child(stage, backend, device, stage.seconds * (5 if canary.slow else 1), unknown_driver)
        if differs := canary.differs():
            result |= _refused("the canary, memory that no stage may touch", f"{differs} words changed", 0)
        return result

    if not record("preflight", "the backend opens", preflight):
        return _end(report, say, touched=False)
    try:
        canary = _Canary(device)
    except VmemError as error:
        refused = _refused("the canary", error, "memory that can be written")
        record("canary", "", lambda: refused)
        return _end(report, say)
    try:
        report.update(simulated=canary.slow, canary_bytes=canary.bytes)
        if not canary.slow and canary.free < NEEDED:
            record("memory", "", lambda: _refused("free device memory", canary.free, NEEDED))
            return _end(report, say, touched=False)
        for stage in (*STAGES, *(s for s in OTHERS if prove and s.name == "loud")):
            passed = record(stage.name, stage.proves, functools.partial(perform, stage))
            if not passed or stage.name == "loud":
                report["xid"] = _xid()
            if not passed:
                return _end(report, say)
    finally:
        canary.close()
    report["passed"] = True
    return _end(report, say)


def _end(report: dict[str, Any], say: Callable[[str], None], touched: bool = True) -> dict[str, Any]:
    """Write the stamp, and say what follows."""
    from pyvmem import __version__

    report["pyvmem"] = __version__
    if report["passed"] or touched:
        report["file"] = str(_write_stamp(report["stamp"], report))
    if report["passed"]:
        simulated = " on a SIMULATED GPU" if report["simulated"] else ""
        say(f"passed{simulated}: {report['file']}")
    elif touched:
        if report.get("xid"):
            say(f"   {report['xid']}")
        say(f"failed: {report['file']}")
        if report["backend"] == "uvm":
            say("stock is used by default; `sudo make module-unload` removes the module; reboot if nvidia-smi hangs")
    else:
        say("nothing was tested")
    return report
