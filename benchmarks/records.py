"""The results of a benchmark: a list of `Record`, in one format for all benchmarks (docs/benchmarks.md).

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
        "uvm", "stock", "cuda" or "host"; for a comparison, what was measured: "cuda-bare", "host-bare",
        "cudaMalloc", or the name of another system.
    device : str
        Name of the device, as the driver or the machine gives it.
    page_size : int or None
        Bytes; None if the metric does not depend on pages.
    metric : str
        What was measured, unique among the benchmark's metrics.
    unit : str
        The unit of median, p10, p90, p99 and paper.
    median, p10, p90, p99 : float
        Percentiles of the samples. With a single sample, all four are equal.
    n : int
        The number of samples.
    paper : float or None
        The corresponding figure of the vAttention paper (A100), if there is one.
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
        return cls(
            bench, backend, device, page_size, metric, unit=unit, median=median, p10=p10, p90=p90, p99=p99,
            n=samples.size, paper=paper,
        )  # fmt: skip


FIELDS = tuple(f.name for f in fields(Record))


def dump(records: Sequence[Record], path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
    """Write records as JSON, one per line: ``{"about": {...}, "records": [...]}``.

    about: the setting, such as date, versions and machine (`benchmarks.summary.about`). An existing file is replaced
    atomically, so it is complete whenever the process ends.
    """
    rows = ",\n".join(json.dumps(asdict(r)) for r in records)
    whole = os.path.isfile(path) or not os.path.exists(path)  # otherwise a pipe or a device
    target = f"{path}.part" if whole else path
    with open(target, "w", encoding="utf-8") as file:
        file.write(f'{{"about": {json.dumps(about or {})},\n"records": [\n{rows}\n]}}\n')
    if whole:
        os.replace(target, path)


def load(path: str | os.PathLike[str]) -> list[Record]:
    """The records that `dump` wrote. Also takes a plain list of records. Raises ValueError for any other file."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    rows = found.get("records") if isinstance(found, dict) else found
    if not isinstance(rows, list) or any(not isinstance(r, dict) or set(r) != set(FIELDS) for r in rows):
        raise ValueError(f"{path} must be a list of records with the fields {', '.join(FIELDS)}")
    return [Record(**row) for row in rows]
