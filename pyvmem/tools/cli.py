"""The command ``pyvmem``: doctor, top and models.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pyvmem import __version__
from pyvmem.errors import VmemError
from pyvmem.tools import doctor, models, top


class Parser(argparse.ArgumentParser):
    """Argparse's, whose failure to write is an error of the command."""

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own would swallow a failure


def _parser() -> Parser:
    parser = Parser(prog="pyvmem", description="GPU memory on demand, at addresses that never change.")
    parser.add_argument("--version", action="version", version=f"pyvmem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module, name, text in (
        (doctor, "doctor", "report which backends work on this machine, and what prevents the others"),
        (top, "top", "show this user's KV caches and engines, and set their limits"),
        (models, "models", "configure, list and control models that share a GPU"),
    ):
        module.arguments(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    return parser


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    status: int = args.run(args)
    return status


def error_text(error: Exception) -> str:
    """One line of it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "needs torch: pip install torch"
    return " ".join(str(error).split()) or type(error).__name__


def _flush() -> None:
    """Write what was printed: a failure of it is an error of the command, and none at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter's last flush must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OSError(error.errno, error.strerror, "standard output") from None


def main(
    argv: Sequence[str] | None = None, run: Callable[[Sequence[str] | None], int] = _run, name: str = "pyvmem"
) -> int:
    """Run a command line. Returns the exit status: 0, 1 with one line on standard error after the name, or 2."""
    if sys.stderr is None:  # closed; print() would use standard output instead
        sys.stderr = open(os.devnull, "w")
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "closed", "standard output")
        try:
            return run(argv)
        finally:
            _flush()
    except BrokenPipeError:  # the reader has closed the pipe
        return 1
    except KeyboardInterrupt:
        return 130
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError, VmemError) as error:
        print(f"{name}: {error_text(error)}", file=sys.stderr)
        return 1
