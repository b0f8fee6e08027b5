"""The stages of the self-test. Each proves one mechanism, and runs in a process of its own.

A failure stays harmless. A stage reads before it writes, and writes only through a translation that a read has
identified. It owns the pages under test until it ends, so that a late write can only hit them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pyvmem.core import KIB, MAP_OP, MIB, Context, Pages, Reservation
from pyvmem.errors import InvalidArgument
from pyvmem.selftest.agents import Agent, UInts, every, pattern

PAGE = 64 * KIB
HUGE = 2 * MIB
STRAY = 8 * MIB  # by which the device's free memory may vary for reasons of the driver's


class Failed(Exception):
    """A mechanism does not do what it must. Its arguments: what it is, what was seen, and what was expected."""


@dataclass
class Run:
    """A stage's context and agent, and the figures that it reports."""

    backend: str
    device: int
    context: Context
    agent: Agent
    figures: dict[str, int] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """True if pages may be replaced while kernels run."""
        return "live_remap" in self.context.capabilities

    def scaled(self, real: int, slow: int) -> int:
        """A count for a real GPU, and one for a slow stand-in."""
        return slow if self.agent.slow else real


def equal(what: str, seen: UInts, expected: UInts | int) -> None:
    """Raise `Failed` with the first word that differs."""
    expected = np.broadcast_to(np.uint64(expected) if isinstance(expected, int) else expected, seen.shape)
    wrong = np.flatnonzero(seen != expected)
    if len(wrong):
        i = int(wrong[0])
        raise Failed(f"{what}: {len(wrong)} of {len(seen)} words, the first at {i}", hex(seen[i]), hex(expected[i]))


def same(what: str, seen: object, expected: object) -> None:
    """Raise `Failed` unless the two are equal."""
    if seen != expected:
        raise Failed(what, seen, expected)


def _within(what: str, free: Callable[[], int], before: int, slack: int, seconds: float) -> None:
    """Wait until so much memory is free again, up to a slack."""
    end = time.monotonic() + seconds
    while (now := free()) + slack < before:
        if time.monotonic() > end:
            raise Failed(f"{what}: free memory after {seconds:.0f} s", now, f"at least {before - slack}")
        time.sleep(0.05)


def _space(run: Run, length: int) -> Reservation:
    return run.context.reserve(length, backdrop=True)


# ---- 1 and 2: pages, what fresh ones hold, and where entries point ------------------------------------------


def memory(run: Run) -> None:
    """Pages come and go, fresh ones hold nothing, and what a killed process had comes back."""
    _come_and_go(run)
    _fresh_pages(run)
    _kills(run)


def _come_and_go(run: Run) -> None:
    context = run.context

    def free() -> int:
        context.trim()
        return context.memory_free

    before = free()
    for turn in range(3):
        for size in (PAGE, HUGE):
            for n in (1, 64, run.scaled(1024, 256 if size == PAGE else 64)):
                created = context.stats().created
                with context.create(size, n):
                    same("bytes created", context.stats().created, created + n * size)
                same("bytes after a release", context.stats().created, created)
        if turn == 0:  # what the driver keeps for itself is allocated now
            _within("after the first turn", free, before, 8 * STRAY, 2)
            before = free()
    _within("after two more turns", free, before, STRAY, 2)
    run.figures["pages"] = 3 * 2 * (65 + run.scaled(1024, 256))


def _fresh_pages(run: Run) -> None:
    """Map fresh pages with entries of both sizes and only read them."""
    # Memory that held something: written through CUDA's own mappings, and returned.
    with Context("cuda", run.device) as cuda:
        length = run.scaled(1 << 30, 32 * MIB)
        with cuda.reserve(length) as dirty, cuda.create(HUGE, length // HUGE) as pages:
            dirty.map(pages)
            cuda.fill(dirty.addr, 0xA5, length)
    for size in (PAGE, HUGE):
        n = 64 if size == PAGE else run.scaled(64, 4)
        with _space(run, n * size) as space, run.context.create(size, n, zero=True) as pages:
            space.map(pages)
            addrs = every(space.addr, n * size, run.scaled(4 * KIB, 64 * KIB))
            equal(f"fresh pages of {size >> 10} KiB, as kernels read them", run.agent.gather(addrs), 0)
            data = np.frombuffer(run.context.read(space.addr, n * size), np.uint64)
            equal(f"fresh pages of {size >> 10} KiB, as copies read them", data, 0)
            space.unmap()


def victim(run: Run) -> None:
    """Not a stage: create, map, replace, unmap and release until killed, with a child that keeps the descriptors."""
    if not os.fork():
        sys.stdin.read()  # until the stage has killed the victim, or has ended itself
        os._exit(0)
    print("begins", flush=True)
    with _space(run, 64 * HUGE) as space:
        while True:
            with run.context.create(PAGE, 64) as pages, run.context.create(HUGE, 4) as huge:
                space.map(pages)
                space.map(huge, 8 * HUGE)
                space.map(pages, replace=True)
                space.unmap()


def _kills(run: Run) -> None:
    """Kill processes in the middle of their calls."""
    kills, before = run.scaled(8, 2), run.context.memory_free
    for i in range(kills):
        _kill_one(run, 0.05 + 0.4 * random.Random(i).random())
        _within(f"after kill {i + 1}", lambda: run.context.memory_free, before, STRAY, run.scaled(10, 60))
    run.figures["kills"] = kills


def _kill_one(run: Run, seconds: float) -> None:
    command = [sys.executable, "-m", "pyvmem.selftest.child", "victim", run.backend, str(run.device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            if process.stdout.readline() != "begins\n":
                raise Failed("a process that is to be killed", f"exit status {process.wait()}", "a process that works")
            time.sleep(seconds)
        finally:
            process.kill()


def aliases(run: Run) -> None:
    """Write a word per 64 KiB through one mapping, and read it through another, in another order and entry size."""
    context, agent = run.context, run.agent
    for size, n in ((PAGE, 64), (HUGE, run.scaled(64, 4))):
        order = np.random.default_rng(n).permutation(n)
        each = size // PAGE
        with _space(run, n * size) as one, _space(run, n * size) as other, context.create(size, n, zero=True) as pages:
            one.map(pages)
            context.map(other.addr + order.astype(np.uint64) * np.uint64(size), pages, fine=True)
            words = every(one.addr, n * size, PAGE) + np.uint64(8 * 17)
            equal("a page before its first write", agent.gather(words), 0)
            values = pattern(1, n * each)
            agent.scatter(words, values)
            through = every(other.addr, n * size, PAGE) + np.uint64(8 * 17)
            permuted = np.empty_like(values).reshape(n, each)
            permuted[order] = values.reshape(n, each)
            what = f"pages of {size >> 10} KiB through a second mapping"
            equal(f"{what}, as kernels read them", agent.gather(through), permuted.reshape(-1))
            data = np.frombuffer(context.read(other.addr, n * size), np.uint64).reshape(-1, PAGE // 8)
            equal(f"{what}, as copies read them", np.ascontiguousarray(data[:, 17]), permuted.reshape(-1))
            rest = np.delete(data, 17, axis=1)
            equal(f"{what}: words nobody wrote", np.ascontiguousarray(rest).reshape(-1), 0)
            one.unmap()
            other.unmap()
    run.figures["pages"] = 64 + run.scaled(64, 4)


# ---- 3 to 5: remapping, late writes, reads past the end -----------------------------------------------------


class _Readers:
    """Loads of a word by every SM: while pages are remapped on a backend that can do it, and between that on others."""

    def __init__(self, run: Run, addr: int, least: int = 0) -> None:
        self._run, self._addr = run, addr
        self._loop = run.agent.poll(addr, least)
        self.loads = self.largest = 0

    def beside(self, remap: Callable[[], None], least: int = 0) -> None:
        """Remap; no load that begins after it may return less than `least`."""
        if self._run.live:
            remap()
            self._loop.allow(least)
        else:
            self.stop()
            remap()
            self._loop = self._run.agent.poll(self._addr, least)

    def stop(self) -> None:
        seen = self._loop.stop()
        if seen.wrong:
            raise Failed(f"{seen.wrong} SMs read an old page after its replacement", seen.value, seen.least)
        same("loads without a translation, or of free memory", seen.faulted, 0)
        self.loads += seen.loads
        self.largest = max(self.largest, seen.largest)


class _Ring:
    """Three pages, each also mapped at a home of its own, of which one at a time is mapped at `target`."""

    def __init__(self, run: Run, target: Reservation, home: Reservation, pages: Pages) -> None:
        self.run, self.target, self.home = run, target, home
        self.handles = [int(h) for h in pages.handles]
        home.map(pages)

    def write(self, generation: int) -> None:
        """Write the generation into the page whose turn it is, which is not at the target."""
        addr = self.home.addr + generation % 3 * PAGE
        self.run.agent.scatter(np.array([addr], np.uint64), np.array([generation], np.uint64))

    def put(self, generation: int) -> None:
        page = self.handles[generation % 3]
        self.run.context.map(self.target.addr, page, replace=generation > 1, fine=True)


def replace(run: Run) -> None:
    """Replace a page again and again: every SM must see the new one once the call has returned."""
    rounds = run.scaled(10_000 if run.live else 2_000, 50)
    with _space(run, HUGE) as target, _space(run, HUGE) as home, run.context.create(PAGE, 3, zero=True) as pages:
        ring = _Ring(run, target, home, pages)
        ring.write(1)
        ring.put(1)
        if not run.agent.poll(target.addr, 2).stop().wrong:
            raise Failed("SMs that read a page, and are told that it was replaced", "nothing", "an old page")
        readers = _Readers(run, target.addr, 1)
        for generation in range(2, rounds):
            ring.write(generation)
            readers.beside(partial(ring.put, generation), generation)
        readers.stop()
        target.unmap()
        home.unmap()
    run.figures.update(loads=readers.loads, replacements=rounds - 2)


def late_writes(run: Run) -> None:
    """Unmap a page that SMs write to, zero it, and watch it through another mapping: no store may come late."""
    rounds = run.scaled(1_000 if run.live else 200, 10)
    with _space(run, HUGE) as target, _space(run, HUGE) as home, run.context.create(PAGE, zero=True) as page:
        home.map(page)
        target.map(page, fine=True)
        words = every(target.addr, PAGE, 8 if not run.agent.slow else 4 * KIB)
        equal("the page before its first write", run.agent.gather(words), 0)
        run.agent.store(target.addr, PAGE).stop()
        if not run.agent.gather(words).any():
            raise Failed("a page that SMs have written to", 0, "another word")
        for _ in range(rounds):
            stores = run.agent.store(target.addr, PAGE)
            if not run.live:
                stores.stop()
            target.unmap()
            run.context.fill(home.addr, 0, PAGE)
            if run.live:
                stores.stop()
            if run.agent.drops:
                run.agent.scatter(words, np.ones(1, np.uint64))
            data = np.frombuffer(run.context.read(home.addr, PAGE), np.uint64)
            equal("a page that was unmapped and zeroed", data, 0)
            equal("unbacked addresses after a write", run.agent.gather(words), 0)
            target.map(page, fine=True)
        target.unmap()
        home.unmap()
    run.figures["unmaps"] = rounds


def over_read(run: Run) -> None:
    """Read past the last page while the first page of the next 2 MiB is mapped; unbacked addresses read as zero."""
    rounds = run.scaled(500, 6)
    with _space(run, 2 * HUGE * rounds) as space, run.context.create(PAGE, 2, zero=True) as pages:
        last, first = (int(h) for h in pages.handles)
        for i in range(rounds):
            edge = space.addr + (2 * i + 1) * HUGE
            run.context.map(edge - PAGE, last, fine=True)
            beyond = every(edge, HUGE, PAGE)
            equal("addresses past the last page", run.agent.gather(beyond), 0)
            readers = _Readers(run, edge + PAGE)
            readers.beside(partial(run.context.map, edge, first, fine=True))
            readers.stop()
            same("the largest value past the last page", readers.largest, 0)
            equal("addresses past the last page, once a page is there", run.agent.gather(beyond), 0)
            run.context.unmap(edge - PAGE, 2 * PAGE)
            if run.agent.drops:
                run.agent.scatter(beyond[:1], np.ones(1, np.uint64))
            equal("an unbacked address after a write", run.agent.gather(beyond[:1]), 0)
    run.figures["blocks"] = rounds


# ---- 6: everything at once ----------------------------------------------------------------------------------


def _failed_batch(run: Run, space: Reservation, ops: Any) -> None:
    """A batch whose last page is invalid changes nothing."""
    bad = ops.copy()
    bad["page"][-1] = 0
    try:
        run.context.map(bad["addr"], bad["page"], fine=True)
    except InvalidArgument as error:
        same("the element that an error names", error.index, len(ops) - 1)
    else:
        raise Failed("a batch whose last page is invalid", "success", "an error")
    equal("addresses of a batch that failed", run.agent.gather(ops["addr"].astype(np.uint64)), 0)


def _threads(run: Run, space: Reservation, ops: Any, tags: UInts) -> None:
    """Eight threads map and unmap a part of the addresses each, and leave it mapped."""

    def work(mine: Any) -> None:
        for _ in range(run.scaled(50, 4)):
            run.context.unmap(int(mine["addr"][0]), len(mine) * PAGE)
            run.context.map(mine["addr"], mine["page"], fine=True)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, np.array_split(ops, 8)))  # raises what a thread has raised
    words = ops["addr"].astype(np.uint64)
    equal("addresses that eight threads mapped", run.agent.gather(words), tags)
    space.unmap()
    equal("the same addresses, once they are unmapped", run.agent.gather(words), 0)


def everything(run: Run) -> None:
    """A batch that fails, threads, and random operations against a shadow, beside kernels that check other memory."""
    context, agent = run.context, run.agent
    rng = random.Random(1)
    slots, n = run.scaled(512, 64), run.scaled(256, 32)
    words = run.scaled(512 * MIB, MIB) // 8
    with (
        Context("cuda", run.device) as cuda,
        cuda.reserve(-(-words * 8 // HUGE) * HUGE) as around,
        cuda.create(HUGE, around.length // HUGE) as neighbours,
        _space(run, slots * PAGE) as space,
        _space(run, n * PAGE) as home,
        context.create(PAGE, n, zero=True) as pages,
    ):
        around.map(neighbours)
        for first in range(0, words, 8 * MIB):
            part = min(8 * MIB, words - first)
            cuda.write(around.addr + 8 * first, pattern(first + 1, part))
        home.map(pages)
        handles = [int(h) for h in pages.handles]
        tags = pattern(1 << 40, n)
        agent.scatter(every(home.addr, n * PAGE, PAGE), tags)
        ops = np.empty(n, MAP_OP)
        ops["addr"], ops["page"] = every(space.addr, n * PAGE, PAGE), pages.handles
        _failed_batch(run, space, ops)
        _threads(run, space, ops, tags)
        shadow: list[int | None] = [None] * slots
        addrs = every(space.addr, slots * PAGE, PAGE)
        end = time.monotonic() + run.scaled(60, 8)
        operations = checks = 0
        while time.monotonic() < end:
            end_check = agent.check(around.addr, words, 1)
            for _ in range(rng.randrange(1, 30)):
                operations += _operation(run, rng, space, handles, shadow)
            expected = np.array([0 if p is None else tags[p] for p in shadow], np.uint64)
            equal("an address after random operations", agent.gather(addrs), expected)
            same("words that changed in memory of others", end_check(), 0)
            checks += 1
        space.unmap()
        equal("pages after random operations", agent.gather(every(home.addr, n * PAGE, PAGE)), tags)
        home.unmap()
    run.figures.update(operations=operations, checks=checks)


def _operation(run: Run, rng: random.Random, space: Reservation, handles: list[int], shadow: list[int | None]) -> int:
    """Map, replace or unmap a few pages; returns 1."""
    first = rng.randrange(len(shadow))
    slots = list(range(first, min(first + rng.randrange(1, 9), len(shadow))))
    if rng.random() < 0.4:
        run.context.unmap(space.addr + slots[0] * PAGE, len(slots) * PAGE)
        for slot in slots:
            shadow[slot] = None
        return 1
    chosen = [rng.randrange(len(handles)) for _ in slots]
    addrs = np.array([space.addr + slot * PAGE for slot in slots], np.uint64)
    pages = np.array([handles[c] for c in chosen], np.uint64)
    run.context.map(addrs, pages, replace=True, fine=rng.random() < 0.5)
    for slot, page in zip(slots, chosen, strict=True):
        shadow[slot] = page
    return 1


@dataclass(frozen=True)
class Stage:
    """A stage: what it proves, and the seconds after which it hangs, on a real GPU."""

    name: str
    run: Callable[[Run], None] | None  # None: it is no process of its own
    proves: str
    seconds: int = 120


STAGES = (
    Stage("memory", memory, "pages are allocated, zeroed, and come back", 240),
    Stage("aliases", aliases, "entry arithmetic"),
    Stage("replace", replace, "invalidates reach all TLBs"),
    Stage("late writes", late_writes, "no store after an unmap", 180),
    Stage("over-read", over_read, "the next block, unbacked addresses"),
    Stage("everything", everything, "batches, threads, all of it together", 240),
)
VICTIM = Stage("victim", victim, "")
