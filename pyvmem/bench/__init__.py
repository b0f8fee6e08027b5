"""The benchmarks. A module in this folder that registers one with `benchmark` adds it to ``pyvmem bench``.

SPDX-License-Identifier: MIT
"""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Callable

_registered = {}


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark.

    Attributes
    ----------
    name, help : str
        On the command line.
    run : callable
        ``run(session)`` measures and returns a list of `pyvmem.bench.records.Record`; see `Session`.
    arguments : callable or None
        ``arguments(parser)`` adds what only this benchmark takes; every argument has a default.
    plot : callable or None
        ``plot(records, figure)`` draws into a matplotlib figure; by default medians by page size.
    order : int
        Place in ``bench all``.
    """

    name: str
    help: str
    run: Callable
    arguments: Callable | None = None
    plot: Callable | None = None
    order: int = 100


def benchmark(name, help, *, arguments=None, plot=None, order=100):
    """Register the decorated ``run(session)`` as ``pyvmem bench NAME``."""

    def register(run):
        _registered[name] = Benchmark(name, help, run, arguments, plot, order)
        return run

    return register


def all_benchmarks():
    """Every benchmark of this folder, in the order of ``bench all``."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_registered.values(), key=lambda b: (b.order, b.name))
