"""Request-length traces of LLM serving: readers for the public formats, and a generator.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from benchmarks.argfiles import input_file
from pyvmem.tools import argtypes


@dataclass(frozen=True)
class Trace:
    """Requests in the order of the trace.

    Attributes
    ----------
    name : str
    prompt, output : int64[n]
        Tokens of the prompt and tokens generated; both at least 1.
    hash_ids : list of lists of int, optional
        Names of each prompt's blocks of `HASHED_TOKENS` tokens, the last of which may be shorter: equal names, equal
        tokens up to there. None where the format has none: only Mooncake's has.
    """

    name: str
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    hash_ids: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.prompt)

    def head(self, n: int) -> Trace:
        """The first `n` requests."""
        ids = self.hash_ids
        return Trace(self.name, self.prompt[:n], self.output[:n], None if ids is None else ids[:n])


HASHED_TOKENS = 512  # of a block that Mooncake's trace names
MOST_TOKENS = 2**31 - 1  # of a request: what a KV cache's lengths hold

# (name of the format, prompt column, output column)
_FORMATS = (
    ("Azure LLM inference trace", "ContextTokens", "GeneratedTokens"),
    ("Sarathi-Serve and vAttention", "num_prefill_tokens", "num_decode_tokens"),
    ("Mooncake", "input_length", "output_length"),
)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; the format is told by its column names.

    Azure's CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``), Mooncake's JSON lines (``input_length``,
    ``output_length``, perhaps ``hash_ids``) and the CSV of Sarathi-Serve and vAttention
    (``num_prefill_tokens,num_decode_tokens``). Lengths below 1 count as 1: every request has a prompt and yields
    a token.

    Raises
    ------
    ValueError
        Names the line that is not of the format.
    OSError
        The file cannot be read.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            prompt, output, ids = _columns_of(file, path)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is not a trace: {error}") from None
    if not prompt:
        raise ValueError(f"{path} holds no request")
    prompts, outputs = (np.maximum(np.rint(column), 1).astype(np.int64) for column in (prompt, output))
    return Trace(str(path), prompts, outputs, ids)


def _columns_of(file: TextIO, path: str | os.PathLike[str]) -> tuple[list[float], list[float], list[list[int]] | None]:
    """The lists of both lengths, and of the hash_ids where each request has its own."""
    json_lines = file.read(1) == "{"
    file.seek(0)
    rows = _json_rows(file, path) if json_lines else csv.DictReader(file)
    lengths: tuple[list[float], list[float]] = ([], [])
    hashes: list[list[int]] = []
    columns: tuple[str, str] | None = None
    for number, row in enumerate(rows, start=1 if json_lines else 2):
        columns = columns or _columns(row, path)
        for column, found in zip(columns, lengths):
            try:
                found.append(float(row[column]))
            except (KeyError, TypeError, ValueError):
                found.append(math.nan)
            if not found[-1] <= MOST_TOKENS:  # also where it is no number
                raise ValueError(f"{path}, line {number}: {column} must be a number up to {MOST_TOKENS}")
        if json_lines and "hash_ids" in row:
            hashes.append(row["hash_ids"])
            if not isinstance(hashes[-1], list) or not all(type(name) is int for name in hashes[-1]):
                raise ValueError(f"{path}, line {number}: hash_ids must be a list of integers")
    return *lengths, hashes if len(hashes) == len(lengths[0]) else None


def _json_rows(file: TextIO, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def _columns(row: Mapping[str, Any], path: str | os.PathLike[str]) -> tuple[str, str]:
    for _, prompt, output in _FORMATS:
        if prompt in row and output in row:
            return prompt, output
    known = "; ".join(f"{name}: {prompt}, {output}" for name, prompt, output in _FORMATS)
    raise ValueError(f"{path} must have one of these pairs of columns: {known}")


def synthetic_trace(
    n: int = 1000, *, mean_prompt: float = 1100, mean_output: float = 210, longest: int = 8192, seed: int = 0
) -> Trace:
    """`n` requests of a conversation's shape: prompt and output lengths log-normal, clipped to [1, longest].

    The means default to those of Azure's conversation trace of 2023.
    """
    rng = np.random.default_rng(seed)

    def lengths(mean: float, sigma: float) -> npt.NDArray[np.int64]:
        return np.clip(np.rint(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, n)), 1, longest).astype(np.int64)

    return Trace(f"synthetic, {n} requests, seed {seed}", lengths(mean_prompt, 1.0), lengths(mean_output, 0.8))


def trace_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the arguments of a benchmark that runs the requests of a trace."""
    formats = "Azure CSV, Mooncake JSON lines or num_prefill_tokens CSV"
    parser.add_argument("--trace", type=input_file, metavar="FILE", help=formats)
    parser.add_argument("--requests", type=argtypes.whole(1), metavar="N", help="only the first N requests")
