"""The rows that one forward pass adds to a batch.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyvmem.attention import Batch


@dataclass
class Plan:
    """One forward pass: the tokens that it adds, and the places of their rows."""

    start: int  # the pass adds the columns [start, start + tokens) of the batch, including padding
    tokens: int
    lengths: list[int]  # rows of each sequence after the pass
    kept: npt.NDArray[np.bool_] | None = None  # [batch, tokens]: the columns that get a row, not padding; None: all
    uniform: bool = True  # whether all sequences have equally many rows and their slots are in order
    masked: bool = False  # whether a mask must hide rows that lengths and windows include
    batch: Batch | None = None  # the sequences that have queries in the pass
    # Sequences with padding after tokens: the pass's columns that are padding, and the rows before each.
    padding: Sequence[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]] = ()
    targets: tuple[torch.Tensor, torch.Tensor] | None = None  # int64: slots and rows that the pass writes
    sources: torch.Tensor | None = None  # int64: which of the batch * tokens tokens are written there; None: all
    narrowed: Plan | None = None  # the last columns of the pass, if some layers' queries come from these alone


def follow(batch: Batch, slots: list[int], lengths: list[int], queries: list[int] | None = None) -> None:
    """Update a batch. Most decode steps add one row to each request, which needs no upload."""
    if batch.max_query == 1 and batch.slots.tolist() == slots and (batch.lengths + 1).tolist() == lengths:
        batch.advance()
    else:
        batch.update(slots, lengths, queries)
