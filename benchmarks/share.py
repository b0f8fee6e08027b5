"""Two processes on one device, loaded in turns: how fast the memory of the idle one reaches the loaded one.

README.md tells what is timed.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from typing import TYPE_CHECKING, Any

from benchmarks import Child
from benchmarks.registry import benchmark
from pyvmem.core import MIB
from pyvmem.tools import argtypes

if TYPE_CHECKING:
    from benchmarks.records import Record
    from benchmarks.session import Session
    from pyvmem.core import Context

GIB = 1 << 30
REQUESTS = 20  # at most, that make up the amount
LAYOUTS = ("block", "separate")
BLOCK_TOKENS = 16  # of vLLM
LAYER_ROW = 2 * 8 * 128 * 2  # bytes of a token's K and V in a layer


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    add = parser.add_argument_group("share").add_argument
    add("--amount", type=argtypes.size, metavar="SIZE", help="memory that moves (10G on a GPU, otherwise 256M)")
    text = "block: one tensor for all layers; separate: one for K and one for V of each (both; on the host, separate)"
    add("--layout", action="append", choices=LAYOUTS, help=text)
    add("--exchanges", type=argtypes.whole(1), metavar="N", help="how often the memory moves (6)")


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
        ready = [ms for _, ms, ok in steps if ok]
        self._note(f"{what}: from need to mapped", (answer["mapped"] - answer["need"]) * 1e3)
        self._note(f"{what}: a step that backs a request, median", sorted(ready)[len(ready) // 2])
        self._note(f"{what}: a step, longest", max(ms for _, ms, _ in steps))
        self._note(f"{what}: driver calls", answer["calls"])

    def _own(self, process: Child, what: str) -> None:
        """Load a process that already has the budget."""
        self._note_steps(process.ask({"do": "load"}), what)
        process.ask({"do": "free"})

    def _exchange(self, to: Child, other: Child) -> None:
        calls = other.ask({"do": "steps"})["calls"]
        answer = to.ask({"do": "load"})
        start, end = answer["need"], answer["mapped"]
        self._note_steps(answer, "exchange")
        report = other.ask({"do": "steps"})
        others = [s for s in report["steps"] if s[0] >= start - 0.2]
        self._note("exchange: driver calls of the other", report["calls"] - calls)
        self._note("exchange: a step of the other, longest", _longest(others, start, end))
        self._note("a step of the other just before, longest", _longest(others, start - 0.2, start))
        to.ask({"do": "free"})
        to.ask({"do": "drop"})
        self._own(to, "own free memory")

    def exchanges(self, n: int) -> None:
        """Measure `n` exchanges."""
        pair = [Child("benchmarks.share_process", self.about | {"name": name}) for name in ("first", "second")]
        try:
            for process in pair:
                process.answer()
            for process in pair:  # the second one's addresses are used for the first time here, too
                self._own(process, "first use of the addresses")
            for turn in range(n):
                self._exchange(pair[turn % 2], pair[(turn + 1) % 2])
            for process in pair:
                process.ask({"do": "verify"})
        finally:
            for process in pair:
                process.close()

    def records(self) -> list[Record]:
        """The records of what was measured."""
        return [
            self.session.record(values, self.context, f"{self.name}, {metric}",
                                "" if "driver calls" in metric else "ms", page_size=self.page_size)
            for metric, values in self.found.items()
        ]  # fmt: skip


@benchmark("share", "time for memory to move between two processes", arguments=arguments, order=45)
def run(session: Session) -> list[Record]:
    """Exchange memory between two processes, in each layout and page size."""
    if importlib.util.find_spec("torch") is None:  # its processes need it
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    records: list[Record] = []
    with session.context() as context:
        gpu = "gpu" in context.capabilities
        amount = session.args.amount or (10 * GIB if gpu else 64 * MIB if session.quick else 256 * MIB)
        n = session.args.exchanges or (2 if session.quick else 6)
        cases = [
            (layout, size)
            for layout in dict.fromkeys(session.args.layout or (LAYOUTS if gpu else ("separate",)))
            for size in _page_sizes(session, context, layout, _layers(amount))
        ]
        with tempfile.TemporaryDirectory(prefix="pyvmem-share-") as folder:
            for layout, size in session.track(cases, "exchanges"):
                one = _Run(session, context, layout=layout, page_size=size, amount=amount, folder=folder)
                one.exchanges(n)
                records += one.records()
                session.keep(records)
    return records
