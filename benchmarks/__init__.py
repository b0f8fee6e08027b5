"""Benchmarks of vMem and of engines on it. They are not part of the installed package.

``python -m benchmarks`` in the repository's root runs them. Each is a module that `registry` finds; `session` has what
all of them share, `records` what they write, and `native` times single calls in C. They call pyvmem, which calls none
of them. Begin with `registry`, and with `step` for an example.

SPDX-License-Identifier: MIT
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """A process that runs a module of this package. Its orders and answers are JSON lines, over pipes of their own."""

    def __init__(self, module: str, about: Any, more: Mapping[str, str] = {}, log: Any = None) -> None:
        """about: the module's first argument, as JSON. more: variables of its environment. log: takes its output."""
        down, up = os.pipe(), os.pipe()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # from any folder
        command = [sys.executable, "-m", module, json.dumps(about), str(down[0]), str(up[1])]
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **more},
                                         pass_fds=(down[0], up[1]), stdout=log, stderr=log)  # fmt: skip
        os.close(down[0])
        os.close(up[1])
        self._orders, self._answers = os.fdopen(down[1], "w"), os.fdopen(up[0])

    def tell(self, order: Any) -> None:
        """Send an order. `answer` returns what comes of it."""
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()

    def answer(self) -> Any:
        """The next answer. Raises RuntimeError if the process has ended, or its answer is an error."""
        line = self._answers.readline()
        found = json.loads(line) if line else {"error": f"it ended with status {self.process.wait()}"}
        if "error" in found:
            raise RuntimeError(f"a process of the benchmark failed: {found['error']}")
        return found

    def ask(self, order: Any) -> Any:
        self.tell(order)
        return self.answer()

    def close(self) -> None:
        """End the process: there are no more orders."""
        try:
            self._orders.close()
            self.process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self._answers.close()


def some_of(known: Collection[Any]) -> Callable[[str], list[Any]]:
    """A type of argument: some of these, with commas."""

    def chosen(text: str) -> list[Any]:
        named = {str(each): each for each in known}
        if not named.keys() >= set(text.split(",")):
            raise argparse.ArgumentTypeError(f"{text!r} must be some of {', '.join(named)}")
        return [named[name] for name in text.split(",")]

    return chosen


class Peak:
    """The most that a function returned while a block ran, sampled every so many seconds."""

    def __init__(self, pause: float, read: Callable[[], int]) -> None:
        self.most, self._pause, self._read, self._stop = 0, pause, read, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def _run(self) -> None:
        self.most = self._read()
        while not self._stop.wait(self._pause):
            self.most = max(self.most, self._read())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def device_memory_used() -> int:
    """Bytes of the current device that the driver counts as used; 0 without a GPU."""
    import torch

    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return int(total - free)


def of_parent() -> tuple[Any, TextIO, Callable[..., None]]:
    """In the child: what it is about, its orders, and a function that answers."""
    answers = os.fdopen(int(sys.argv[3]), "w")

    def say(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    return json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2])), say
