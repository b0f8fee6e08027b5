"""What a benchmark says: a list of `Record`, the same for every benchmark. docs/benchmarks.md is its documentation.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Samples = float | npt.ArrayLike  # of one metric: a number or an array of numbers, in its unit


@dataclass(frozen=True)
class Record:
    """One measured metric.

    Attributes
    ----------
    bench : str
        Name of the benchmark, as on the command line.
    backend : str
        "uvm", "stock", "cuda" or "host"; for what stands beside them, what was measured: "cuda-bare", "host-bare",
        "cudaMalloc", or the name of another system.
    device : str
        Name of the device, as the driver or the machine gives it.
    page_size : int or None
        Bytes; None where pages play no part.
    metric : str
        What was measured, with everything that tells it apart from the benchmark's other metrics.
    unit : str
        Of median, p10, p90, p99 and paper.
    median, p10, p90, p99 : float
        Over the samples. A single sample has four times the same value.
    n : int
        Samples.
    paper : float or None
        The figure of the vAttention paper (A100) for the same thing, where there is one.
    """

    bench: str
    backend: str
    device: str
    page_size: int | None
    metric: str
    unit: str
    median: float
    p10: float
    p90: float
    p99: float
    n: int
    paper: float | None = None

    @classmethod
    def of(
        cls,
        samples: Samples,
        *,
        bench: str,
        backend: str,
        device: str,
        page_size: int | None,
        metric: str,
        unit: str,
        paper: float | None = None,
    ) -> Record:
        """A record of the samples' distribution. samples: a number or an array of numbers, in `unit`."""
        samples = np.atleast_1d(np.asarray(samples, dtype=float))
        p10, median, p90, p99 = (float(p) for p in np.percentile(samples, (10, 50, 90, 99)))
        return cls(bench, backend, device, page_size, metric, unit, median, p10, p90, p99, samples.size, paper)


FIELDS = tuple(f.name for f in fields(Record))


def dump(records: Sequence[Record], path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
    """Write records as JSON, one a line: ``{"about": {...}, "records": [...]}``.

    about: what they belong to, such as date, versions and machine (`pyvmem.bench.summary.about`). A file that was there
    is replaced as a whole, so that it is complete whenever the process ends.
    """
    rows = ",\n".join(json.dumps(asdict(r)) for r in records)
    whole = os.path.isfile(path) or not os.path.exists(path)  # else a pipe or a device
    target = f"{path}.part" if whole else path
    with open(target, "w", encoding="utf-8") as file:
        file.write(f'{{"about": {json.dumps(about or {})},\n"records": [\n{rows}\n]}}\n')
    if whole:
        os.replace(target, path)


def load(path: str | os.PathLike[str]) -> list[Record]:
    """The records that `dump` wrote; a plain list of records is taken too. Raises ValueError for any other file."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    rows = found.get("records") if isinstance(found, dict) else found
    if not isinstance(rows, list) or any(not isinstance(r, dict) or set(r) != set(FIELDS) for r in rows):
        raise ValueError(f"{path} is not a list of records with the fields {', '.join(FIELDS)}")
    return [Record(**row) for row in rows]
