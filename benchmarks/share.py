"""Two processes on one device, loaded in turns: how fast the memory of the idle one reaches the loaded one.

Each process has a KV cache in one pool and a small request that decodes all the time. In turns, each gets requests of
--amount in all while pages that the other keeps hold the memory, and goes on stepping while the memory arrives. The
same requests then come once more, when the process itself has that memory free: the difference is what an exchange
adds. At the end, one process is killed during an exchange, and the other goes on.

The number of driver calls for a request depends on the layout. On a GPU, two layouts are measured: one tensor for all
layers, and separate tensors for K and V of each layer.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks import Child
from pyvmem.bench import argtypes, benchmark
from pyvmem.core import MIB
from pyvmem.kv.view import read_view, read_views

if TYPE_CHECKING:
    from pyvmem.bench.records import Record
    from pyvmem.bench.session import Session
    from pyvmem.core import Context

GIB = 1 << 30
REQUESTS = 20  # at most, that make up the amount
LAYOUTS = ("block", "separate")
BLOCK_TOKENS = 16  # of vLLM
LAYER_ROW = 2 * 8 * 128 * 2  # bytes of a token's K and V in a layer


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("share")
    group.add_argument(
        "--amount", type=argtypes.size, metavar="SIZE", help="memory that changes sides (10G on a GPU, otherwise 256M)"
    )
    group.add_argument(
        "--layout", action="append", choices=LAYOUTS,
        help="block: one tensor for all layers; separate: one for K and one for V of each layer (both; on the host, "
        "separate)",
    )  # fmt: skip
    group.add_argument(
        "--exchanges", type=argtypes.whole(1), metavar="N", help="how often the memory changes sides (6)"
    )
    group.add_argument(
        "--kills", type=argtypes.whole(0), metavar="N", help="how often a process is killed during an exchange (2)"
    )


class Watch:
    """Memory that the pool's members have and need, sampled by a thread from the views of their caches."""

    def __init__(self, *pids: int) -> None:
        self.rows: dict[int, list[tuple[float, int, int]]] = {pid: [] for pid in pids}  # pid: [(time, has, needs)]
        self._paths = [view.path for view in read_views() if view.pid in pids]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.0002):
            for path in self._paths:
                try:
                    view = read_view(path)
                except OSError:  # the process has ended
                    continue
                if view and view.pool:
                    self.rows[view.pid].append((time.perf_counter(), view.pool.has, view.pool.needs))

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def when(self, pid: int, start: float, change: Callable[[int], bool]) -> list[float]:
        """The times after `start` at which the member's budget changed by a number of bytes that `change` accepts."""
        rows = self.rows[pid]
        return [b[0] for a, b in zip(rows, rows[1:], strict=False) if b[0] >= start and change(b[1] - a[1])]

    def asked(self, pid: int, start: float) -> list[float]:
        """The times after `start` at which the member was seen to ask for memory."""
        return [at for at, _, needs in self.rows[pid] if at >= start and needs]


def _longest(samples: list[list[float]], start: float, end: float) -> float:
    """The longest of the steps, [(begin, ms)], that began between `start` and `end`."""
    return max((ms for begin, ms in samples if start <= begin <= end), default=0.0)


def _layers(amount: int) -> int:
    return 32 if amount >= 4 * GIB else 2  # of the shape of Llama-3-8B


def _page_sizes(session: Session, context: Context, layout: str, layers: int) -> list[int]:
    """The page sizes asked for, or the default size of the layout."""
    asked = session.page_sizes(context)
    if session.args.page_size:
        return asked
    if layout == "separate":
        return asked[:1]
    block = BLOCK_TOKENS * layers * LAYER_ROW
    return [max(size for size in context.page_sizes if block % size == 0)]


class _Run:
    """The exchanges in one layout at one page size."""

    def __init__(
        self, session: Session, context: Context, layout: str, page_size: int, amount: int, folder: str
    ) -> None:
        self.session, self.context, self.page_size = session, context, page_size
        layers = _layers(amount)
        self.name = "1 tensor" if layout == "block" else f"{2 * layers} tensors"
        # The bytes that a request gets at a time while memory is plentiful: in separate tensors, or in one.
        block = 2 * layers * max(page_size, 2 * MIB)
        blocks = max(amount // block, 1)  # requests fill whole blocks, so that nothing is wasted
        requests = min(blocks, REQUESTS)
        amount = blocks // requests * requests * block
        self.about = {
            "backend": context.backend, "device": session.args.device, "page_size": page_size, "amount": amount,
            "requests": requests, "budget": amount + 10 * block, "min": 4 * block, "layers": layers, "layout": layout,
            "path": os.path.join(folder, f"{layout}-{page_size}.pool"),
        }  # fmt: skip
        self.found: dict[str, list[float]] = {}

    def _note(self, metric: str, value: float) -> None:
        self.found.setdefault(metric, []).append(value)

    def _note_steps(self, answer: dict[str, Any], what: str) -> None:
        steps = answer["steps"]
        ready = [ms for _, ms, ok, _ in steps if ok]
        self._note(f"{what}: from need to mapped", (answer["mapped"] - answer["need"]) * 1e3)
        self._note(f"{what}: a step that backs a request, median", sorted(ready)[len(ready) // 2])
        self._note(f"{what}: a step, longest", max(ms for _, ms, _, _ in steps))
        self._note(f"{what}: driver calls", answer["calls"])

    def _own(self, process: Child, what: str) -> None:
        """Load a process that already has the budget."""
        self._note_steps(process.ask({"do": "load"}), what)
        process.ask({"do": "free"})

    def _exchange(self, to: Child, other: Child) -> None:
        calls = other.ask({"do": "steps"})["calls"]
        watch = Watch(to.pid, other.pid)
        try:
            answer = to.ask({"do": "load"})
            time.sleep(0.002)  # the last samples
        finally:
            watch.close()
        start, end, steps = answer["need"], answer["mapped"], answer["steps"]
        self._note_steps(answer, "exchange")
        report = other.ask({"do": "steps"})
        others = [s for s in report["steps"] if s[0] >= start - 0.2]
        self._note("exchange: driver calls of the other", report["calls"] - calls)
        self._note("exchange: a step of the other, longest", _longest(others, start, end))
        self._note("a step of the other just before, longest", _longest(others, start - 0.2, start))
        self._note("steps that found too little meanwhile", sum(not ok for _, _, ok, _ in steps))
        given = watch.when(other.pid, start, lambda by: by < 0)
        got = watch.when(to.pid, start, lambda by: by > 0)
        asked = watch.asked(to.pid, start)
        allocated = [a for *_, a in steps]
        last = next((i for i, a in enumerate(allocated) if a == allocated[-1]), 0)
        times = {
            "asked": asked[:1], "first byte given": given[:1], "last byte given": given[-1:],
            "last byte granted": got[-1:], "last byte allocated": [steps[last][0] + steps[last][1] / 1e3],
        }  # fmt: skip
        for event, at in times.items():
            if at:
                self._note(f"from need to {event}", (min(at[0], end) - start) * 1e3)
        first = next(begin for begin, _, ok, _ in steps if ok)
        self._note("from need to the first step that backs a request", (first - start) * 1e3)
        self._note("time in steps that back a request", sum(ms for _, ms, ok, _ in steps if ok))
        longest = max(steps, key=lambda step: step[1])
        self._note("from need to the longest step", (longest[0] - start) * 1e3)
        to.ask({"do": "free"})
        to.ask({"do": "drop"})
        self._own(to, "own free memory")

    def _process(self, name: str) -> Child:
        return Child("benchmarks.share_process", self.about | {"name": name})

    def exchanges(self, n: int, kills: int) -> None:
        """Measure `n` exchanges, then `kills` exchanges in which a process is killed."""
        pair = [self._process(name) for name in ("first", "second")]
        try:
            for process in pair:
                process.answer()
            for process in pair:  # the second one's addresses are used for the first time here, too
                self._own(process, "first use of the addresses")
            for turn in range(n):
                self._exchange(pair[turn % 2], pair[(turn + 1) % 2])
            for turn in range(kills):
                dead, alive = pair[(n + turn + 1) % 2], pair[(n + turn) % 2]
                # By turns the one that gives, and the one that gets.
                if turn % 2 == 0:
                    alive.tell({"do": "load", "report": self.about["amount"] // 4})
                    alive.answer()
                    dead.kill()
                    answer = alive.answer()
                    self._note("the giving one killed: from need to mapped", (answer["mapped"] - answer["need"]) * 1e3)
                    alive.ask({"do": "free"})
                else:
                    dead.tell({"do": "load", "report": self.about["amount"] // 4})
                    dead.answer()
                    dead.kill()
                    answer = alive.ask({"do": "load"})
                    self._note("the getting one killed: from need to mapped", (answer["mapped"] - answer["need"]) * 1e3)
                    alive.ask({"do": "free"})
                alive.ask({"do": "verify"})
                dead.close()
                pair[pair.index(dead)] = again = self._process(f"again {turn}")
                again.answer()
            for process in pair:
                process.ask({"do": "verify"})
        finally:
            for process in pair:
                process.close()

    def records(self) -> list[Record]:
        """The records of what was measured."""
        return [
            self.session.record(values, self.context, f"{self.name}, {metric}",
                                "" if metric.startswith("steps") or "driver calls" in metric else "ms",
                                page_size=self.page_size)
            for metric, values in self.found.items()
        ]  # fmt: skip


@benchmark(
    "share", "time for memory to move between two processes, also if one is killed", arguments=arguments, order=45
)
def run(session: Session) -> list[Record]:
    """Exchange memory between two processes, in each layout and page size."""
    if importlib.util.find_spec("torch") is None:  # its processes need it
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    records: list[Record] = []
    with session.context() as context:
        gpu = "gpu" in context.capabilities
        amount = session.args.amount or (10 * GIB if gpu else 64 * MIB if session.quick else 256 * MIB)
        n = session.args.exchanges or (2 if session.quick else 6)
        kills = 2 if session.args.kills is None else session.args.kills
        cases = [
            (layout, size)
            for layout in dict.fromkeys(session.args.layout or (LAYOUTS if gpu else ("separate",)))
            for size in _page_sizes(session, context, layout, _layers(amount))
        ]
        with tempfile.TemporaryDirectory(prefix="pyvmem-share-") as folder:
            for layout, size in session.track(cases, "exchanges"):
                one = _Run(session, context, layout, size, amount, folder)
                one.exchanges(n, kills)
                records += one.records()
                session.keep(records)
    return records
