"""The benchmarks by name. A module of this folder that registers a function with `benchmark` adds it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import benchmarks

if TYPE_CHECKING:
    from benchmarks.records import Record
    from benchmarks.session import Session


Run = Callable[["Session"], "list[Record]"]

_registered: dict[str, Benchmark] = {}


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark.

    Attributes
    ----------
    name, help : str
        As on the command line.
    run : callable
        ``run(session)`` measures and returns a list of `benchmarks.records.Record`; see `Session`.
    arguments : callable or None
        ``arguments(parser)`` adds this benchmark's own arguments. Each has a default.
    order : int
        The position in ``bench all``.
    alone : bool
        Not part of ``bench all``.
    """

    name: str
    help: str
    run: Run
    arguments: Callable[[argparse.ArgumentParser], None] | None = None
    order: int = 100
    alone: bool = False


def benchmark(name: str, help: str, **more: Any) -> Callable[[Run], Run]:
    """Register the decorated ``run(session)`` as a `Benchmark`, whose other attributes are in `more`."""

    def register(run: Run) -> Run:
        _registered[name] = Benchmark(name, help, run, **more)
        return run

    return register


def all_benchmarks() -> list[Benchmark]:
    """Every benchmark in the order of ``all``, also those that are not part of it."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name == "__main__":
            continue
        try:
            importlib.import_module(f"benchmarks.{module.name}")
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton"):  # without them, what needs them is left out
                raise
    return sorted(_registered.values(), key=lambda b: (b.order, b.name))
