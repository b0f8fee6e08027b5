"""The stages of the self-test. Each proves one mechanism, and runs in a process of its own.

A failure stays harmless. A stage reads before it writes, and writes only through a translation that a read has
identified. It owns the pages under test until it ends, so that a late write can only hit them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyvmem.core import KIB, MAP_OP, MIB, Context, Pages, Reservation
from pyvmem.errors import InvalidArgument, VmemError
from pyvmem.selftest.agents import Agent, DeviceFault, UInts, pattern

PAGE = 64 * KIB
HUGE = 2 * MIB
STRAY = 8 * MIB  # by which the device's free memory may vary for reasons of the driver's


class Failed(Exception):
    """A mechanism does not do what it must: what was seen, and what was expected."""

    def __init__(self, what: str, seen: object, expected: object) -> None:
        super().__init__(f"{what}: seen {seen}, expected {expected}")
        self.what, self.seen, self.expected = what, str(seen), str(expected)


@dataclass
class Run:
    """A stage's context and agent, and the figures that it reports."""

    backend: str
    device: int
    context: Context
    agent: Agent
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def live(self) -> bool:
        """True if pages may be replaced while kernels run, and kernels can run."""
        return "live_remap" in self.context.capabilities and self.agent.continuous

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


def _every(addr: int, length: int, step: int) -> UInts:
    return np.arange(addr, addr + length, step, dtype=np.uint64)


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
            addrs = _every(space.addr, n * size, run.scaled(4 * KIB, 64 * KIB))
            equal(f"fresh pages of {size >> 10} KiB, as kernels read them", run.agent.gather(addrs), 0)
            data = np.frombuffer(run.context.read(space.addr, n * size), np.uint64)
            equal(f"fresh pages of {size >> 10} KiB, as copies read them", data, 0)
            space.unmap()


def victim(run: Run) -> None:
    """Not a stage: create, map, replace, unmap and release until killed, with a child that keeps the descriptors."""
    sleeper = os.fork()
    if not sleeper:
        signal.pause()
        os._exit(0)
    print(f"sleeper {sleeper}", flush=True)
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    sleeper = 0
    try:
        for line in process.stdout:
            if line.startswith("sleeper "):
                sleeper = int(line.split()[1])
                break
        if not sleeper:
            raise Failed("a process that is to be killed", f"exit status {process.wait()}", "a process that works")
        time.sleep(seconds)
    finally:
        process.kill()
        if sleeper:
            os.kill(sleeper, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def aliases(run: Run) -> None:
    """Write a word per 64 KiB through one mapping, and read it through another, in another order and entry size."""
    context, agent = run.context, run.agent
    for size, n in ((PAGE, 64), (HUGE, run.scaled(64, 4))):
        order = np.random.default_rng(n).permutation(n)
        each = size // PAGE
        with _space(run, n * size) as one, _space(run, n * size) as other, context.create(size, n, zero=True) as pages:
            one.map(pages)
            context.map(other.addr + order.astype(np.uint64) * np.uint64(size), pages, fine=True)
            words = _every(one.addr, n * size, PAGE) + np.uint64(8 * 17)
            equal("a page before its first write", agent.gather(words), 0)
            values = pattern(1, n * each)
            agent.scatter(words, values)
            through = _every(other.addr, n * size, PAGE) + np.uint64(8 * 17)
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


class _Ring:
    """Three pages, each also mapped at a home of its own, of which one at a time is mapped at `target`."""

    def __init__(self, run: Run, target: Reservation, home: Reservation, pages: Pages) -> None:
        self.run, self.target, self.home, self.pages = run, target, home, pages
        self.handles = [int(h) for h in pages.handles]
        home.map(pages)

    def write(self, generation: int) -> None:
        """Write the generation into the page whose turn it is, which is not at the target."""
        addr = self.home.addr + generation % 3 * PAGE
        self.run.agent.scatter(np.array([addr], np.uint64), np.array([generation], np.uint64))

    def put(self, generation: int) -> None:
        page = self.handles[generation % 3]
        self.run.context.map(self.target.addr, page, replace=generation > 1, fine=True)


@contextmanager
def _ring(run: Run) -> Iterator[_Ring]:
    with _space(run, HUGE) as target, _space(run, HUGE) as home, run.context.create(PAGE, 3, zero=True) as pages:
        ring = _Ring(run, target, home, pages)
        ring.write(1)
        ring.put(1)
        try:
            yield ring
        finally:
            target.unmap()
            home.unmap()


def replace(run: Run) -> None:
    """Replace a page again and again: every SM must see the new one once the call has returned."""
    rounds = run.scaled(10_000 if run.live else 2_000, 50)
    with _ring(run) as ring:
        target = ring.target.addr
        if run.live:
            readers = run.agent.poll(target)
            for generation in range(2, rounds):
                ring.write(generation)
                ring.put(generation)
                readers.allow(generation)
                if readers.fault():
                    break
            seen = readers.stop()
            if seen.wrong:
                raise Failed(f"{seen.wrong} SMs read an old page after its replacement", seen.value, seen.least)
            if seen.faulted or seen.freed:
                raise Failed("loads without a translation, and of free memory", (seen.faulted, seen.freed), (0, 0))
            run.figures["loads"] = seen.loads
        else:
            run.note = "no kernel ran during a replacement"
            addrs = np.full(32 * run.agent.sms, target, np.uint64)
            for generation in range(2, rounds):
                ring.write(generation)
                ring.put(generation)
                equal("a page after its replacement", run.agent.gather(addrs), generation)
    run.figures["replacements"] = rounds - 2


def loud(run: Run) -> None:
    """Replace a page on a backend that cannot do it live while every SM reads it: the readers must fault."""
    rounds = run.scaled(20_000, 200)
    code = generation = 0
    try:
        with _ring(run) as ring:
            readers = run.agent.poll(ring.target.addr)
            for generation in range(2, rounds):
                ring.put(generation)
                code = readers.fault()
                if code:
                    break
            readers.stop()
    except DeviceFault as fault:
        code = code or fault.code
    except VmemError:  # of what the context is asked for after the fault
        if not code:
            raise
    if not code:
        raise Failed(f"CUDA's error after {rounds} replacements beside readers", 0, "700: an access faulted")
    run.figures.update(cuda_error=code, replacements=generation - 1)
    run.note = "the readers noticed, as they must"


def late_writes(run: Run) -> None:
    """Unmap a page that SMs write to, zero it, and watch it through another mapping: no store may come late."""
    rounds = run.scaled(1_000 if run.live else 200, 10)
    with _space(run, HUGE) as target, _space(run, HUGE) as home, run.context.create(PAGE, zero=True) as page:
        home.map(page)
        target.map(page, fine=True)
        words = _every(target.addr, PAGE, 8 if not run.agent.slow else 4 * KIB)
        equal("the page before its first write", run.agent.gather(words), 0)
        stores = run.agent.store(target.addr, PAGE) if run.live else None
        if not stores:
            run.note = "no kernel ran during an unmap"
        for _ in range(rounds):
            if stores:
                stores.again()
            else:
                run.agent.scatter(words, np.full(len(words), ~0 & (1 << 64) - 1, np.uint64))
            target.unmap()
            run.context.fill(home.addr, 0, PAGE)
            if stores:
                stores.settle()
            elif run.agent.drops:
                run.agent.scatter(words, np.ones(1, np.uint64))
            data = np.frombuffer(run.context.read(home.addr, PAGE), np.uint64)
            equal("a page that was unmapped and zeroed", data, 0)
            if not stores:
                equal("unbacked addresses after a write", run.agent.gather(words), 0)
            target.map(page, fine=True)
        if stores:
            stores.stop()
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
            beyond = _every(edge, HUGE, PAGE)
            equal("addresses past the last page", run.agent.gather(beyond), 0)
            readers = run.agent.poll(edge + PAGE) if run.live else None
            run.context.map(edge, first, fine=True)
            if readers:
                readers.allow(0)
                seen = readers.stop()
                if seen.largest or seen.faulted:
                    raise Failed("past the last page: the largest value, and loads that faulted",
                                 (seen.largest, seen.faulted), (0, 0))  # fmt: skip
            equal("addresses past the last page, once a page is there", run.agent.gather(beyond), 0)
            run.context.unmap(edge - PAGE, 2 * PAGE)
            if run.agent.drops:
                run.agent.scatter(beyond[:1], np.ones(1, np.uint64))
            equal("an unbacked address after a write", run.agent.gather(beyond[:1]), 0)
    run.figures["blocks"] = rounds
    if not run.live:
        run.note = "no kernel ran during a map"


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
        agent.scatter(_every(home.addr, n * PAGE, PAGE), tags)
        ops = np.empty(n, MAP_OP)
        ops["addr"], ops["page"] = _every(space.addr, n * PAGE, PAGE), pages.handles
        _failed_batch(run, space, ops)
        _threads(run, space, ops, tags)
        shadow: list[int | None] = [None] * slots
        addrs = _every(space.addr, slots * PAGE, PAGE)
        end = time.monotonic() + run.scaled(60, 8)
        operations = checks = 0
        while time.monotonic() < end:
            agent.begin_check(around.addr, words, 1)
            for _ in range(rng.randrange(1, 30)):
                operations += _operation(run, rng, space, handles, shadow)
            expected = np.array([0 if p is None else tags[p] for p in shadow], np.uint64)
            equal("an address after random operations", agent.gather(addrs), expected)
            if (differ := agent.end_check()) != 0:
                raise Failed("words that changed in memory of others", differ, 0)
            checks += 1
        space.unmap()
        equal("pages after random operations", agent.gather(_every(home.addr, n * PAGE, PAGE)), tags)
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
    run: Callable[[Run], None]
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
OTHERS = (Stage("loud", loud, "the detector detects"), Stage("victim", victim, "", 10**9))
