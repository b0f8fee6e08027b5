"""``python -m benchmarks``: the command line of the benchmarks.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import records as form, session as view, summary
from benchmarks.argfiles import output_file
from benchmarks.records import Record
from benchmarks.registry import Benchmark, all_benchmarks
from pyvmem.core import backends
from pyvmem.errors import VmemError
from pyvmem.tools import argtypes, cli


def _common() -> cli.Parser:
    common = cli.Parser(add_help=False)
    group = common.add_argument_group("common to all benchmarks")
    group.add_argument("--backend", choices=backends(), help="the backend (default: the best that works)")
    argtypes.device(group)
    group.add_argument(
        "--page-size",
        type=argtypes.size,
        action="append",
        metavar="SIZE",
        help="64K, 128K, 256K or 2M; repeat for more (default: all; with --quick the smallest and the largest)",
    )
    group.add_argument("--quick", action="store_true", help="a smaller run with fewer samples and page sizes")
    text = "write the records to FILE (docs/benchmarks.md)"
    group.add_argument("--json", type=output_file, metavar="FILE", help=text)
    group.add_argument("--plot", type=output_file, metavar="FILE.png", help="plot the records into FILE")
    return common


def bench_parser(parser: argparse.ArgumentParser, benchmarks: Sequence[Benchmark]) -> None:
    """Add these benchmarks, and ``all``, to a parser. `run_bench` takes what it reads."""
    names = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    common = _common()
    alone = "".join(f" but {b.name}" for b in benchmarks if b.alone)
    everything = names.add_parser(
        "all",
        parents=[common],
        help=f"run all{alone}, and print one screen of results",
        conflict_handler="resolve",  # benchmarks may share an argument
    )
    everything.add_argument("--full", action="store_true", help="also print every row of every benchmark")
    for b in benchmarks:
        own = names.add_parser(b.name, parents=[common], help=b.help, description=b.help)
        if b.arguments:
            b.arguments(own)
            if not b.alone:  # "all" takes the same arguments, so that for instance a trace can be named there
                b.arguments(everything)


def run_bench(args: argparse.Namespace, benchmarks: Sequence[Benchmark]) -> int:
    """Run what `bench_parser` has read. Returns the exit status."""
    chosen = [b for b in benchmarks if args.bench == b.name or args.bench == "all" and not b.alone]
    if args.plot:
        _check_plot(args.plot)
    about = summary.about()
    records: list[Record] = []
    status = 0
    for b in chosen:
        keep = (lambda so_far: form.dump(records + so_far, args.json, about)) if args.json else None
        try:
            found = b.run(view.Session(b.name, args, keep=keep))
        except (ModuleNotFoundError, MemoryError, RuntimeError, VmemError) as error:
            if args.bench != "all":
                raise
            # The others may well work. A package that is an extra is not missed.
            print(f"benchmarks: {b.name}: {cli.error_text(error)}", file=sys.stderr)
            status = status if isinstance(error, ModuleNotFoundError) else 1
            continue
        if args.bench != "all" or args.full:
            view.show(f"{b.name}: {b.help}", found)
        records += found
        if args.json:
            form.dump(records, args.json, about)
    if args.bench == "all":
        print("\n".join(summary.screen(records, about)))
    if args.plot:
        _plot(chosen, records, args.plot, about)
    return status


def _check_plot(path: str) -> None:
    """Check, before anything runs, that a plot can be written to the path."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in known:
        raise ValueError(f"--plot {path}: the extension must be one of {', '.join(sorted(known))}")


def _plot(benchmarks: Sequence[Benchmark], records: list[Record], path: str, about: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure

    drawn = [(b, [r for r in records if r.bench == b.name]) for b in benchmarks]
    drawn = [(b, rows) for b, rows in drawn if rows]
    for b, rows in drawn:
        figure = Figure(layout="constrained")
        view.plot(rows, figure)
        figure.suptitle(f"{b.name}: {summary.machine(rows, about)}", fontsize="small")
        # One benchmark: the file named. Several: one file each, with the benchmark's name before the ending.
        stem, ending = os.path.splitext(path)
        figure.savefig(path if len(drawn) == 1 else f"{stem}-{b.name}{ending}", dpi=120, bbox_inches="tight")


def run(argv: Sequence[str] | None) -> int:
    """Run the command line."""
    known = all_benchmarks()
    parser = cli.Parser(prog="python -m benchmarks", description="What vMem costs on this machine, and engines on it.")
    bench_parser(parser, known)
    return run_bench(parser.parse_args(argv), known)


if __name__ == "__main__":
    sys.exit(cli.main(run=run, name="benchmarks"))
