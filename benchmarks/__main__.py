"""``python -m benchmarks``: the command of ``pyvmem bench``, with the benchmarks of this folder too.

SPDX-License-Identifier: MIT
"""

import argparse
import sys
from collections.abc import Sequence

import benchmarks
from pyvmem.bench import all_benchmarks
from pyvmem.tools import cli


def run(argv: Sequence[str] | None) -> int:
    """Run the command line."""
    known = all_benchmarks(benchmarks)
    about = "Benchmarks of vMem and of engines on it."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about)
    cli.bench_parser(parser, known)
    return cli.run_bench(parser.parse_args(argv), known)


if __name__ == "__main__":
    sys.exit(cli.main(run=run))
