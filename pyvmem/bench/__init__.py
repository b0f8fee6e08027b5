"""The benchmarks. A module in this folder that registers one with `benchmark` adds it to ``pyvmem bench``.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pyvmem.bench.records import Record
    from pyvmem.bench.session import Session


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
        ``run(session)`` measures and returns a list of `pyvmem.bench.records.Record`; see `Session`.
    arguments : callable or None
        ``arguments(parser)`` adds this benchmark's own arguments. Each has a default.
    plot : callable or None
        ``plot(records, figure)`` draws into a matplotlib figure. By default it draws medians by page size.
    order : int
        The position in ``bench all``.
    alone : bool
        Not part of ``bench all``.
    """

    name: str
    help: str
    run: Run
    arguments: Callable[[argparse.ArgumentParser], None] | None = None
    plot: Callable[[list[Record], Figure], None] | None = None
    order: int = 100
    alone: bool = False


def benchmark(
    name: str,
    help: str,
    *,
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    plot: Callable[[list[Record], Figure], None] | None = None,
    order: int = 100,
    alone: bool = False,
) -> Callable[[Run], Run]:
    """Register the decorated ``run(session)`` as ``pyvmem bench NAME``."""

    def register(run: Run) -> Run:
        _registered[name] = Benchmark(name, help, run, arguments, plot, order, alone)
        return run

    return register


def all_benchmarks() -> list[Benchmark]:
    """Every benchmark of this folder, in the order of ``bench all``, also those that are not part of it."""
    for module in pkgutil.iter_modules(__path__):
        try:
            importlib.import_module(f"{__name__}.{module.name}")
        except ModuleNotFoundError as error:
            if error.name != "torch":  # without torch, benchmarks that need it are left out
                raise
    return sorted(_registered.values(), key=lambda b: (b.order, b.name))
