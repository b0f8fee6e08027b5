"""Prints the records of the benchmark `lease` one a line, and whether the targets are met: lease_figures.py FILE.json

SPDX-License-Identifier: MIT
"""

import sys
from pathlib import Path

from pyvmem.tools.argtypes import size_text

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.records import load  # noqa: E402
from benchmarks.session import number_text  # noqa: E402

TARGETS = {  # metric, page size: the most
    ("park and unpark 4G", 2 << 20): 10,
    ("of PyTorch's own allocator", 2 << 20): 1.02,
}


def main(path):
    if not Path(path).exists():
        print(f"{path}: there is none")
        return
    for r in load(path):
        most = [n for (metric, size), n in TARGETS.items() if metric in r.metric and size == r.page_size]
        verdict = "".join(f"; at most {n}: {'yes' if r.median <= n else 'NO'}" for n in most)
        spread = f" ({number_text(r.p10)} to {number_text(r.p90)}, n={r.n})" if r.n > 1 else ""
        page = size_text(r.page_size)
        print(f"{r.backend} {page}: {r.metric}: {number_text(r.median)} {r.unit}{spread}{verdict}")


if __name__ == "__main__":
    main(sys.argv[1])
