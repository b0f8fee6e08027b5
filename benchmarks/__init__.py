"""Measurements of engines on vMem, for those who repeat docs/results. They are not part of the installed package.

``python -m benchmarks`` in the repository's root runs them, and those of ``pyvmem bench``.

SPDX-License-Identifier: MIT
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
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
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **more},
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
        found = json.loads(line) if line else {"error": f"it ended with status {self._process.wait()}"}
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
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._answers.close()


def of_parent() -> tuple[Any, TextIO, Callable[..., None]]:
    """In the child: what it is about, its orders, and a function that answers."""
    answers = os.fdopen(int(sys.argv[3]), "w")

    def say(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    return json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2])), say
