"""The command ``pyvmem``: doctor, top, models and bench.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyvmem import __version__
from pyvmem.core import backends
from pyvmem.errors import VmemError
from pyvmem.tools import argtypes, doctor, models, top

if TYPE_CHECKING:
    from pyvmem.bench import Benchmark
    from pyvmem.bench.records import Record


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own would swallow a failure


def _common() -> _Parser:
    common = _Parser(add_help=False)
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
    file = argtypes.output_file
    group.add_argument("--json", type=file, metavar="FILE", help="write the records to FILE (docs/benchmarks.md)")
    group.add_argument("--plot", type=file, metavar="FILE.png", help="plot the records into FILE")
    return common


def _parser(benchmarks: Sequence[Benchmark]) -> _Parser:
    parser = _Parser(prog="pyvmem", description="GPU memory on demand, at addresses that never change.")
    parser.add_argument("--version", action="version", version=f"pyvmem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module, name, text in (
        (doctor, "doctor", "report which backends work on this machine, and what prevents the others"),
        (top, "top", "show this user's KV caches and engines, and set their limits"),
        (models, "models", "configure, list and control models that share a GPU"),
    ):
        module.arguments(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    bench = commands.add_parser("bench", help="measure what calls and steps cost on this machine")
    bench.set_defaults(run=lambda args: run_bench(args, benchmarks))
    bench_parser(bench, benchmarks)
    return parser


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
    from pyvmem.bench import records as form, session as view, summary

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
            print(f"pyvmem: {b.name}: {_text(error)}", file=sys.stderr)
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

    from pyvmem.bench import summary
    from pyvmem.bench.session import plot

    drawn = [(b, [r for r in records if r.bench == b.name]) for b in benchmarks]
    drawn = [(b, rows) for b, rows in drawn if rows]
    for b, rows in drawn:
        figure = Figure(layout="constrained")
        plot(rows, figure)
        figure.suptitle(f"{b.name}: {summary.machine(rows, about)}", fontsize="small")
        # One benchmark: the file named. Several: one file each, with the benchmark's name before the ending.
        stem, ending = os.path.splitext(path)
        figure.savefig(path if len(drawn) == 1 else f"{stem}-{b.name}{ending}", dpi=120, bbox_inches="tight")


def _run(argv: Sequence[str] | None) -> int:
    from pyvmem.bench import all_benchmarks

    args = _parser(all_benchmarks()).parse_args(argv)
    status: int = args.run(args)
    return status


def _text(error: Exception) -> str:
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


def main(argv: Sequence[str] | None = None, run: Callable[[Sequence[str] | None], int] = _run) -> int:
    """Run the command line. Returns the exit status: 0, 1 with one line on standard error, or argparse's 2."""
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
        print(f"pyvmem: {_text(error)}", file=sys.stderr)
        return 1
