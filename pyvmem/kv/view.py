"""The published state of KV caches: one link per cache, which ``pyvmem top`` follows.

It leads to a ``struct vmem_kv_view`` (vmem_kv.h) in memory of the cache's process, which the cache's native code keeps
up to date in place. The folder of the links is ``$XDG_RUNTIME_DIR/pyvmem``, or ``pyvmem-UID`` in the folder for
temporary files.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pyvmem._clock import started
from pyvmem._ffi import ffi, lib
from pyvmem.kv.shortage import REASONS

T = TypeVar("T")
_number = itertools.count()


def says(text: str) -> Any:
    """A field that says what it is, for `documented`."""
    return field(metadata={"text": text})


def gauge(text: str) -> Any:
    """The same, of a number that comes and goes."""
    return field(metadata={"text": text, "gauge": True})


def count(text: str) -> Any:
    """The same, of a number that only grows."""
    return field(metadata={"text": text, "gauge": False})


def documented(record: type[T]) -> type[T]:
    """Add what the fields of a dataclass say to its docstring."""
    if record.__doc__:  # python -OO has none
        lines = (f"    {f.name} : {f.type}\n        {f.metadata['text']}.\n" for f in fields(record))  # type: ignore[arg-type]
        record.__doc__ = "".join([record.__doc__.rstrip(), "\n\n    Attributes\n    ----------\n", *lines])
    return record


@documented
@dataclass(frozen=True)
class KVStats:
    """The state of a cache and what it has counted since its creation: struct vmem_kv_stats.

    Pages of all tensors together. A shared page counts once, except in `needed_pages`.
    """

    page_size: int = gauge("Bytes of a page")
    budget_pages: int = gauge("The most pages that may exist")
    held_pages: int = gauge("Pages that exist")
    needed_pages: int = gauge("Pages held for the lengths of requests; a shared page counts once per slot")
    kept_pages: int = gauge("Pages of free slots, kept for the next requests")
    ahead_pages: int = gauge("Pages mapped behind the lengths of requests, ahead of need")
    shared_pages: int = gauge("Pages mapped or held more than once")
    prefix_pages: int = gauge("Pages held by prefixes and by no slot")
    free_pages: int = gauge("Pages that a step could get")
    live_bytes: int = gauge("Bytes of the rows that active requests have")
    active_slots: int = gauge("Slots with a request")
    swapped_slots: int = gauge("Slots whose request is in CPU memory")
    slots: int = gauge("All slots")
    prefixes: int = gauge("Prefixes that are saved")
    ending_slots: int = gauge("Slots freed after a step whose kernels may be in flight")
    steps: int = count("Steps that succeeded")
    step_failures: int = count("Steps that found too little memory")
    step_mapped_pages: int = count("Pages that steps had to map themselves")
    step_maps: int = count("Steps that had to map pages themselves")
    step_waits: int = count("Steps that waited for the background thread")
    ahead_mapped_pages: int = count("Pages that the background thread mapped")
    ahead_jobs: int = count("Times that the background thread extended a slot")
    eager_pages: int = count("Pages that the background thread mapped for the next request")
    allocs: int = count("Requests that were given a slot")
    adopted_slots: int = count("Requests that began with pages of an earlier one")
    reclaimed_pages: int = count("Kept pages that were given up")
    window_pages: int = count("Pages that sliding windows gave up")
    attached_pages: int = count("Pages that requests took over from prefixes")
    copied_pages: int = count("Pages copied for prefixes and truncations")
    worker_errors: int = count("Operations of the background thread that failed, which a step does again")
    short_budget: int = count("Calls that failed because the budget was short")
    short_device: int = count("Calls that failed because the device's memory was short")
    short_mappings: int = count("Calls that failed because the process's mappings were short (vm.max_map_count)")
    short_slots: int = count("Calls that failed because no slot was free")
    hashed_blocks: int = gauge("Blocks known by hash")
    evictable_pages: int = gauge("Pages that only blocks known by hash hold, which count as free")
    hit_tokens: int = count("Tokens that requests began with because their blocks were known")
    evicted_blocks: int = count("Blocks known by hash that were evicted")
    absent_slots: int = gauge("Active slots without part in the last step")


STATS = {each.name: each.metadata for each in fields(KVStats)}


def view_folder() -> Path | None:
    """The folder of this user's views, created if necessary. None if no folder is this user's only (mode 0700)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "pyvmem") if runtime else Path(tempfile.gettempdir(), f"pyvmem-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    safe = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
    return folder if safe else None


def _dead(path: Path) -> bool:
    # Process numbers are reused, and a container has the same ones at each start.
    owner = re.fullmatch(r"([0-9]+)-([0-9]+)-[0-9]+\.kv", path.name)
    return owner is not None and started(owner[1]) != owner[2]


def _sweep(folder: Path) -> None:
    """Remove the views of processes that have ended. In a folder that is read-only now, they stay."""
    for path in folder.glob("*.kv"):
        if _dead(path):
            with contextlib.suppress(OSError):
                path.unlink()


def new_view_path() -> str | None:
    """A path for another view of this process, or None if nothing can be published."""
    folder = view_folder()
    if folder is None:
        return None
    _sweep(folder)
    return str(folder / f"{os.getpid()}-{started('self')}-{next(_number)}.kv")


ANSWERS = ("unasked", "applied", "deferred", "refused")


@documented
@dataclass(frozen=True)
class PoolMember:
    """A member of a pool: the bytes that it has and needs."""

    name: str = says("What others see")
    pid: int = says("Number of its process")
    min: int = says("Of its share: its budget never falls below it")
    max: int = says("Of its share: its budget never exceeds it")
    has: int = says("Its part of the pool's budget")
    held: int = says("Of pages")
    needs: int = says("That it requests")
    could_give: int = says("That others could get: unused, kept, ahead of need, and freed by evicting prefixes")
    giving: int = says("That it is giving back now")
    asked: int = says("Revision of its own last request")
    looked: int = says("Revision of the last request of others that it has answered")
    answer: str = says('To its own last request: "unasked", "applied", "deferred" or "refused"')
    reason: str | None = says("Of that answer")
    reply: str = says("Its answer to the others, up to the request with the number `looked`")
    why: str | None = says("The reason of that")
    gives_first: bool = says("The others give only what it cannot: it is a lease")


def pool_member(raw: Any) -> PoolMember:
    """The `PoolMember` in a ``struct vmem_kv_pool_member``, which other processes may have written."""
    numbers = {n: int(getattr(raw, n)) for n in _NUMBERS}
    return PoolMember(
        _text(raw.name),
        **numbers,
        answer=_of(ANSWERS, raw.answer) or "unasked",
        reason=_of(REASONS, raw.reason),
        reply=_of(ANSWERS, raw.reply) or "unasked",
        why=_of(REASONS, raw.why),
        gives_first=bool(raw.gives_first),
    )


def _of(words: tuple[str | None, ...], number: int) -> str | None:
    return words[number] if number < len(words) else None  # other processes may have written anything


_NUMBERS = ("pid", "min", "max", "has", "held", "needs", "could_give", "giving", "asked", "looked")


@dataclass(frozen=True)
class View:
    """A cache of any process, with its statistics (a dict with the names of ``struct vmem_kv_stats``)."""

    path: Path
    pid: int
    name: str
    backend: str
    device: int
    stats: dict[str, int]
    pool: PoolMember | None = None
    pool_path: str = ""


def _read(path: str | os.PathLike[str]) -> Any:
    """A copy of the structure in a file of this user, or None.

    The path is a link to the memory of the process that has the cache, which nobody can truncate. Whatever else is
    there is copied, not mapped: a file that becomes shorter cannot harm a reader.
    """
    size, sequence = ffi.sizeof("struct vmem_kv_view"), ffi.offsetof("struct vmem_kv_view", "sequence")
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            return None
        for _ in range(1000):  # the writer is quick: repeat until nothing changed during the read
            data = os.pread(file, size, 0)
            if len(data) < size:
                return None
            view = ffi.new("struct vmem_kv_view *")
            ffi.buffer(view)[:] = data
            if view.magic != lib.VMEM_KV_VIEW_MAGIC or view.size != size or not view.stats.page_size:
                return None
            again = os.pread(file, 8, sequence)
            if view.sequence % 2 == 0 and int.from_bytes(again, sys.byteorder) == view.sequence:
                break
        return view
    finally:
        os.close(file)


def _text(chars: Any) -> str:
    text = str(ffi.string(chars), "utf-8", "replace")
    return "".join(char if char.isprintable() else "?" for char in text)  # it goes to a terminal


def read_view(path: str | os.PathLike[str]) -> View | None:
    """The `View` in a file, or None if the file has none (yet)."""
    raw = _read(path)
    if raw is None:
        return None
    return View(
        Path(path),
        raw.pid,
        name=_text(raw.name),
        backend=_text(raw.backend),
        device=raw.device,
        stats={name: int(getattr(raw.stats, name)) for name in STATS},
        pool=pool_member(raw.pool) if raw.pool.size else None,
        pool_path=_text(raw.pool_path) if raw.pool.size else "",
    )


def read_views() -> list[View]:
    """Every `View` of this user's running processes. Removes the files of dead ones."""
    folder = view_folder()
    if folder is None:
        return []
    _sweep(folder)
    found = []
    for path in sorted(folder.glob("*.kv")):
        try:
            view = read_view(path)
        except OSError:  # removed meanwhile
            continue
        if view:
            found.append(view)
    return found
