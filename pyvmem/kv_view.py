"""What KV caches publish of themselves: one small file for each cache, read by ``pyvmem top``.

A file holds a ``struct vmem_kv_view`` (vmem_kv.h), which the cache's native code keeps up to date in place. The folder
is ``$XDG_RUNTIME_DIR/pyvmem``, or ``pyvmem-UID`` in the folder for temporary files.

SPDX-License-Identifier: MIT
"""

import itertools
import mmap
import os
import time
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyvmem._checks import uint
from pyvmem._ffi import ffi, lib

STATS = tuple(name for name, _ in ffi.typeof("struct vmem_kv_stats").fields if name not in ("size", "pad"))

_number = itertools.count()
GAUGES = {
    "page_size", "budget_pages", "held_pages", "needed_pages", "kept_pages", "ahead_pages", "shared_pages",
    "prefix_pages", "free_pages", "live_bytes", "active_slots", "swapped_slots", "ending_slots", "slots", "prefixes",
    "watermark_pages", "hashed_blocks", "evictable_pages", "absent_slots",
}  # fmt: skip


def view_folder() -> Path | None:
    """The folder of this user's views; made if need be. None where there is none that only this user can write to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "pyvmem") if runtime else Path(tempfile.gettempdir(), f"pyvmem-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    safe = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder if safe else None


def _started(pid: str) -> str | None:
    """When a process was started, in ticks since the machine was; None where it has ended."""
    try:
        fields = Path("/proc", pid, "stat").read_bytes().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "XZ" else fields[19]


def _dead(path: Path) -> bool:
    # Numbers of processes come again, and in a container the same ones at each start.
    owner = re.fullmatch(r"([0-9]+)-([0-9]+)-[0-9]+\.kv", path.name)
    return owner is not None and _started(owner[1]) != owner[2]


def _sweep(folder: Path) -> None:
    """Remove the views of processes that are gone."""
    for path in folder.glob("*.kv"):
        if _dead(path):
            path.unlink(missing_ok=True)


def new_view_path() -> str | None:
    """A path for one more view of this process, or None where nothing can be published."""
    folder = view_folder()
    if folder is None:
        return None
    _sweep(folder)
    return str(folder / f"{os.getpid()}-{_started('self')}-{next(_number)}.kv")


@dataclass(frozen=True)
class View:
    """A cache of some process: who it is, and its statistics (a dict, names as in ``struct vmem_kv_stats``)."""

    path: Path
    pid: int
    name: str
    backend: str
    device: int
    stats: dict[str, int]
    memory_total: int = 0  # bytes of the device


def _open(path: str | os.PathLike[str]) -> tuple[mmap.mmap | None, Any]:
    size = ffi.sizeof("struct vmem_kv_view")
    with open(path, "r+b") as file:
        if os.fstat(file.fileno()).st_size < size:
            return None, None
        data = mmap.mmap(file.fileno(), size)
    view = ffi.cast("struct vmem_kv_view *", ffi.from_buffer(data))
    return (data, view) if view.magic == lib.VMEM_KV_VIEW_MAGIC and view.size == size else (None, None)


def read_view(path: str | os.PathLike[str]) -> View | None:
    """The `View` in a file, or None where the file holds none (yet)."""
    data, view = _open(path)
    if data is None:
        return None
    for _ in range(1000):  # the writer is quick: again until nothing changed meanwhile
        before = view.sequence
        copy = ffi.new("struct vmem_kv_view *", view[0])
        if before % 2 == 0 and view.sequence == before:
            break
    return View(
        Path(path),
        copy.pid,
        ffi.string(copy.name).decode(errors="replace"),
        ffi.string(copy.backend).decode(errors="replace"),
        copy.device,
        {name: int(getattr(copy.stats, name)) for name in STATS},
        copy.memory_total,
    )


def read_views() -> list[View]:
    """Every `View` of this user's running processes; files of dead processes are removed."""
    folder = view_folder()
    if folder is None:
        return []
    _sweep(folder)
    found = []
    for path in sorted(folder.glob("*.kv")):
        try:
            view = read_view(path)
        except OSError:  # gone meanwhile
            continue
        if view:
            found.append(view)
    return found


def check_budget(view: View, bytes: int) -> int:
    """`bytes`, if the cache can be asked to have that budget. Raises ValueError: less than a page, or too much."""
    bytes, page = uint("bytes", bytes), view.stats["page_size"]
    if not page <= bytes <= view.memory_total:
        most = f"the {view.memory_total} bytes of its device"
        raise ValueError(f"bytes {bytes} must lie between a page of {view.name!r}, {page}, and {most}")
    return bytes


def want_budget(view: View, bytes: int) -> None:
    """Ask a process to change its cache's budget: it does so when idle, or at its next step.

    Raises ValueError as `check_budget`.
    """
    bytes = check_budget(view, bytes)
    data, raw = _open(view.path)
    if data is None:
        raise ValueError(f"{view.path} holds no view")
    raw.wanted_budget = bytes


def budget_answer(view: View, bytes: int, seconds: float) -> str:
    """What became of a `want_budget`, in words, after `seconds` at most: taken over, refused, or not looked at yet."""
    until = time.monotonic() + seconds
    while True:
        data, raw = _open(view.path) if view.path.exists() else (None, None)
        now = read_view(view.path) if data is not None else None
        if now is None or raw is None:
            return "gone: the process has ended"
        page, pages = now.stats["page_size"], now.stats["budget_pages"]
        if not raw.wanted_budget and pages == bytes // page:
            beyond = now.stats["held_pages"] - pages
            if beyond <= 0:
                return f"applied: {pages * page >> 20} MiB"
            return f"applied: {pages * page >> 20} MiB; requests hold {beyond * page >> 20} MiB more until they end"
        if time.monotonic() >= until:
            if raw.wanted_budget:
                return "deferred: it is taken over at the next step"
            return f"refused: {pages * page >> 20} MiB stay; the device has not as much memory as was asked for"
        time.sleep(0.01)


def prometheus(stats: Mapping[str, Any], prefix: str = "pyvmem_kv_", labels: Mapping[str, Any] | None = None) -> str:
    """Statistics (a dict) in Prometheus's text exposition format."""
    text = ",".join(f'{k}="{_escape(v)}"' for k, v in (labels or {}).items())
    text = f"{{{text}}}" if text else ""
    lines = []
    for name, value in stats.items():
        gauge = name in GAUGES
        full = prefix + name + ("" if gauge else "_total")
        lines += [f"# TYPE {full} {'gauge' if gauge else 'counter'}", f"{full}{text} {value}"]
    return "\n".join(lines) + "\n"


def _escape(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
