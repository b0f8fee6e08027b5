"""``pyvmem doctor``: what works here, and the one fact that stops what does not.

SPDX-License-Identifier: MIT
"""

import argparse
import glob
import importlib.metadata
import json
import os
import platform
import re
import resource
from typing import Any, TextIO

from pyvmem.core import Context, backends, probe
from pyvmem.errors import VmemError
from pyvmem.selftest import BACKENDS as selftest_backends, run_selftest, stamp_state
from pyvmem.tools import argtypes
from pyvmem.tools.argtypes import size_text, three_digits


def examine(device: int = 0, unknown_driver: bool = False) -> dict[str, Any]:
    """Everything the doctor knows, as plain data for JSON. unknown_driver: as of `Context`."""
    known = [_backend(name, device, unknown_driver) for name in backends()]
    return {
        "machine": machine(),
        "driver": driver(),
        "environment": environment([str(b.get("device", "")) for b in known]),
        "backends": known,
    }


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The kernel, the versions and the limits of this process; opens no backend."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    maps = _read("/proc/sys/vm/max_map_count")
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "pyvmem": _version("pyvmem"),
        "torch": _version("torch"),
        "address_space_limit": None if soft == resource.RLIM_INFINITY else soft,
        "max_map_count": int(maps) if maps else None,
        "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "vmem_backend": os.environ.get("VMEM_BACKEND"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def driver() -> dict[str, Any] | None:
    """The loaded NVIDIA driver: its release, whether its kernel modules are the open ones, whether UVM is loaded."""
    text = _read("/proc/driver/nvidia/version")
    if not text:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return {
        "release": found.group(1) if found else text.splitlines()[0],
        "open": "Open Kernel Module" in text,
        "uvm_loaded": os.path.isdir("/sys/module/nvidia_uvm"),
    }


def environment(devices: list[str], root: str = "/") -> list[str]:
    """Lines on the surroundings that decide which backends work (docs/install.md, Environments).

    devices: the names of the GPUs that backends have opened. root: where /proc, /dev and /sys are looked for.
    """

    def text(path: str) -> str:
        return _read(os.path.join(root, path)) or ""

    found, version = [], text("proc/version")
    if "microsoft" in version.lower():
        found.append("WSL2: CUDA goes through Windows's driver, and there is no nvidia-uvm: only cuda and host work")
    if version.startswith("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"):  # the same in every release
        found.append("gVisor: it passes on only the driver calls that it knows, and none of uvm's")
    if os.path.exists(os.path.join(root, "etc/nv_tegra_release")) or "tegra" in version.lower():
        found.append("Jetson: its driver does not have the calls that stock makes: only cuda and host work")
    marks = (".dockerenv", "run/.containerenv")  # of Docker and Podman; Kubernetes sets a variable in each container
    contained = any(os.path.exists(os.path.join(root, m)) for m in marks) or "KUBERNETES_SERVICE_HOST" in os.environ
    if contained and text("proc/driver/nvidia/version"):
        found.append("a container: the host's self-tests are not seen here, so uvm is never the default: set "
                     "VMEM_BACKEND=uvm, or mount the host's /var/lib/vmem (docs/install.md)")  # fmt: skip
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "") or glob.glob(
        os.path.join(root, "proc/driver/nvidia/capabilities/gpu*/mig/gi*")
    ):
        found.append("MIG: the driver does not tell how nvidia-uvm names an instance: only cuda and host work")
    if any(name.startswith("GRID ") or re.search(r"-\d+[ABCQ]$", name) for name in devices):
        found.append("vGPU: vMem has not been tried with it")
    if os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")):
        found.append("CUDA MPS: measured with stock, not tried with uvm")
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "vmem" not in plugins.split(","):  # vLLM takes spaces for a part of a name
        found.append(f"VLLM_PLUGINS={plugins}: vLLM runs without vMem, also with VMEM_VLLM=1; add vmem to it")
    return found


def _backend(name: str, device: int, unknown_driver: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"name": name, "works": False, "reason": None}
    error: VmemError | None = probe(name, device, unknown_driver=unknown_driver)
    if error is None:
        try:
            with Context(name, device, unknown_driver=unknown_driver) as context:
                info = context.info()
                free = context.memory_free
        except VmemError as failed:
            error = failed
    if error is not None:
        said["reason"] = str(error).replace("unknown_driver=True", "--unknown-driver")
        return said
    kept = probe(name, device, by_default=True)
    if kept is not None:
        said["reason"] = str(kept.args[0])
        if name in selftest_backends and stamp_state(name, device) == "failed":
            said["reason"] = "its self-test has FAILED here: not chosen by default (pyvmem doctor --selftest)"
    return said | {
        "works": True,
        "by_default": kept is None,
        "device": info.device_name,
        "device_uuid": info.device_uuid.hex() if any(info.device_uuid) else None,
        "driver": info.driver or None,
        "page_sizes": list(info.page_sizes),
        "reserve_align": info.reserve_align,
        "capabilities": sorted(info.capabilities),
        "memory_total": info.memory_total,
        "memory_free": free,
    }


def _stops(found: dict[str, Any]) -> str:
    """Why contexts that name no backend fail, to follow VMEM_BACKEND's value; empty if they do not."""
    chosen = found["machine"]["vmem_backend"]
    works = {b["name"]: b["works"] for b in found["backends"]}
    if not chosen or works.get(chosen):
        return ""
    return ", which does not work here" if chosen in works else f", which must be one of {', '.join(works)}"


def _lines(found: dict[str, Any]) -> list[str]:
    machine, driver = found["machine"], found["driver"]
    lines = [f"{machine['kernel']}, Python {machine['python']}, torch {machine['torch'] or 'not installed'}"]
    if driver:
        kind = "open" if driver["open"] else "proprietary"
        uvm = "loaded" if driver["uvm_loaded"] else "not loaded"
        lines.append(f"NVIDIA driver {driver['release']} ({kind} kernel modules), nvidia-uvm {uvm}")
    else:
        lines.append("no NVIDIA driver is loaded")
    lines += found["environment"]
    limit = machine["address_space_limit"]
    space = "unlimited" if limit is None else size_text(limit)
    maps, files = machine["max_map_count"], machine["descriptor_limit"]
    lines.append(f"limits: {maps} mappings (vm.max_map_count), {files} file descriptors, address space {space}")
    chosen = machine["vmem_backend"]
    if chosen is not None:
        lines.append(f"VMEM_BACKEND={chosen}{_stops(found)}")
    if machine["cuda_visible_devices"] is not None:
        lines.append(f"CUDA_VISIBLE_DEVICES={machine['cuda_visible_devices']}")
    lines.append("")
    first = chosen or next((b["name"] for b in found["backends"] if b["works"] and b["by_default"]), None)
    for b in found["backends"]:
        if not b["works"]:
            lines.append(f"{b['name']:6} no     {b['reason']}")
            continue
        pages = ", ".join(map(size_text, b["page_sizes"]))
        mark = "works" if b["name"] != first else "chosen" if chosen else "best"
        memory = f"{three_digits(b['memory_free'])} free of {three_digits(b['memory_total'])}"
        lines.append(f"{b['name']:6} {mark:6} {b['device']}: pages of {pages}; {memory}")
        lines += [f"{'':13} {text}" for text in (", ".join(b["capabilities"]), b["reason"]) if text]
    return lines


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.set_defaults(run=run)
    argtypes.device(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--unknown-driver", action="store_true",
        help="try the stock backend with a driver release that is newer than those it knows",
    )  # fmt: skip
    test = parser.add_argument_group("self-test of a GPU backend (docs/kernel-module.md)")
    test.add_argument("--selftest", action="store_true", help="test the backend on this GPU, in about three minutes")
    test.add_argument("--backend", choices=selftest_backends, help="the backend to test (default: the best that works)")
    test.add_argument("--shared", action="store_true", help="test although other processes use the GPU")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if args.selftest:
        return selftest(args)
    if args.backend or args.shared:
        raise ValueError("--backend and --shared need --selftest")
    return doctor(args.device, args.json, unknown_driver=args.unknown_driver)


def selftest(args: argparse.Namespace) -> int:
    """Test a backend (`pyvmem.selftest`). Returns the exit status: 1 if it failed."""
    works = (b for b in selftest_backends if probe(b, args.device, unknown_driver=args.unknown_driver) is None)
    report = run_selftest(
        args.backend or next(works, "stock"),  # which says why it does not work
        args.device,
        shared=args.shared,
        unknown_driver=args.unknown_driver,
        say=(lambda line: None) if args.json else (lambda line: print(line, flush=True)),
    )
    if args.json:
        print(json.dumps(report, indent=2))
    return 0 if report["passed"] else 1


def doctor(device: int = 0, as_json: bool = False, out: TextIO | None = None, unknown_driver: bool = False) -> int:
    """Print what `examine` finds. Returns the exit status: 1 if no backend works, or VMEM_BACKEND's does not."""
    found = examine(device, unknown_driver)
    print(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)), file=out)
    return 0 if any(b["works"] for b in found["backends"]) and not _stops(found) else 1
