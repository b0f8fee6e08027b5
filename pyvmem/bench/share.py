"""Two processes on one device, loaded by turns: how fast the memory of the idle one comes to the loaded one.

Each process has a KV cache in one pool and a small request that decodes all the time. By turns one of them gets
requests of --amount in all, which the other one's kept pages stand in the way of; it steps on while they come. At the
end one is killed in the middle of that, and the other goes on.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from pyvmem.bench import argtypes, benchmark
from pyvmem.core import MIB

if TYPE_CHECKING:
    from pyvmem.bench.records import Record
    from pyvmem.bench.session import Session
    from pyvmem.core import Context

GIB = 1 << 30


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark alone."""
    group = parser.add_argument_group("share")
    group.add_argument(
        "--amount", type=argtypes.size, metavar="SIZE", help="what changes sides (10G on a GPU, else 256M)"
    )
    group.add_argument("--exchanges", type=argtypes.whole(1), metavar="N", help="how often it does (6)")
    group.add_argument("--kills", type=argtypes.whole(0), metavar="N", help="processes killed in the middle (2)")


class Process:
    """One of the two, run by `pyvmem.bench.share_process`."""

    def __init__(self, about: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "pyvmem.bench.share_process", json.dumps(about)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, do: str, **what: Any) -> None:
        """Say what to do; the answer is `hear`."""
        assert self._child.stdin
        self._child.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._child.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError where the process has ended or failed."""
        assert self._child.stdout
        line = self._child.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with {self._child.wait()}"}
        if "error" in answer:
            raise RuntimeError(f"a process of the benchmark failed: {answer['error']}")
        return dict(answer)

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Tell and hear."""
        self.tell(do, **what)
        return self.hear()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()

    def close(self) -> None:
        """Let it end, or end it."""
        if self._child.poll() is None:
            try:
                self.tell("end")
                self._child.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                self.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                pipe.close()


def _longest(samples: list[list[float]], start: float, end: float) -> float:
    """Of steps [(begin, ms)], the longest of those that began in between."""
    return max((ms for begin, ms in samples if start <= begin <= end), default=0.0)


class _Run:
    """The exchanges at one page size."""

    def __init__(self, session: Session, context: Context, page_size: int, amount: int, folder: str) -> None:
        self.session, self.context, self.page_size = session, context, page_size
        layers = 32 if amount >= 4 * GIB else 2  # of the shape of Llama-3-8B
        block = 2 * layers * max(page_size, 2 * MIB)  # what a request gets at a time while memory is plentiful
        self.about = {
            "backend": context.backend, "device": session.args.device, "page_size": page_size, "amount": amount,
            "budget": amount + 10 * block, "path": os.path.join(folder, f"{page_size}.pool"), "layers": layers,
        }  # fmt: skip
        self.found: dict[str, list[float]] = {}

    def _note(self, metric: str, value: float) -> None:
        self.found.setdefault(metric, []).append(value)

    def _load(self, to: Process, other: Process | None, warm: bool = False) -> None:
        answer = to.ask("load")
        start, end = answer["need"], answer["mapped"]
        if warm:
            self._note("a step of the loaded one, memory at hand, longest", answer["longest_ms"])
            self._note("memory at hand to mapped", (end - start) * 1e3)
        else:
            self._note("from need to mapped", (end - start) * 1e3)
            self._note("a step of the loaded one meanwhile, longest", answer["longest_ms"])
            self._note("steps that found too little meanwhile", answer["short"])
        if other and not warm:
            steps = other.ask("steps")["steps"]
            self._note("a step of the other meanwhile, longest", _longest(steps, start, end))
        to.ask("free")

    def exchanges(self, n: int, kills: int) -> None:
        """All of it."""
        pair = [Process(self.about | {"name": name}) for name in ("first", "second")]
        try:
            for process in pair:
                process.hear()
            self._load(pair[0], None, warm=True)
            for turn in range(n):
                self._load(pair[(turn + 1) % 2], pair[turn % 2])
            for turn in range(kills):
                dead, alive = pair[(n + turn) % 2], pair[(n + turn + 1) % 2]
                # By turns the one that gives, and the one that gets.
                if turn % 2 == 0:
                    alive.tell("load", report=self.about["amount"] // 4)
                    alive.hear()
                    dead.kill()
                    answer = alive.hear()
                    self._note("the giving one killed: from need to mapped", (answer["mapped"] - answer["need"]) * 1e3)
                    alive.ask("free")
                else:
                    dead.tell("load", report=self.about["amount"] // 4)
                    dead.hear()
                    dead.kill()
                    answer = alive.ask("load")
                    self._note("the getting one killed: from need to mapped", (answer["mapped"] - answer["need"]) * 1e3)
                    alive.ask("free")
                alive.ask("verify")
                dead.close()
                pair[pair.index(dead)] = again = Process(self.about | {"name": f"again {turn}"})
                again.hear()
            for process in pair:
                process.ask("verify")
        finally:
            for process in pair:
                process.close()

    def records(self) -> list[Record]:
        """What was found."""
        return [
            self.session.record(values, self.context, metric, "" if metric.startswith("steps") else "ms",
                                page_size=self.page_size)
            for metric, values in self.found.items()
        ]  # fmt: skip


@benchmark(
    "share", "two processes on one device: from need to mapped, and kill -9 of either", arguments=arguments, order=45
)
def run(session: Session) -> list[Record]:
    """The benchmark."""
    if importlib.util.find_spec("torch") is None:  # its processes need it
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    records: list[Record] = []
    with session.context() as context:
        gpu = "gpu" in context.capabilities
        amount = session.args.amount or (10 * GIB if gpu else 64 * MIB if session.quick else 256 * MIB)
        n = session.args.exchanges or (2 if session.quick else 6)
        kills = 2 if session.args.kills is None else session.args.kills
        asked = session.page_sizes(context)
        sizes = asked if session.args.page_size else asked[:1]
        with tempfile.TemporaryDirectory(prefix="pyvmem-share-") as folder:
            for size in session.track(sizes, "exchanges"):
                one = _Run(session, context, size, amount, folder)
                one.exchanges(n, kills)
                records += one.records()
                session.keep(records)
    return records
