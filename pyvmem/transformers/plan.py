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
    """One forward pass: the tokens that it adds, and the places of their rows.

    Attributes
    ----------
    start, tokens : int
        The pass adds the columns ``[start, start + tokens)`` of the batch, including padding.
    lengths : list of int
        Rows of each sequence after the pass.
    kept : numpy.ndarray or None
        Bool ``[batch, tokens]``: the columns that are not padding and get a row. None: all columns.
    uniform : bool
        Whether all sequences have equally many rows and their slots are in order.
    masked : bool
        Whether the pass must not see some rows that lengths and windows include, so that it needs a mask.
    batch : pyvmem.attention.Batch or None
        The sequences that have queries in the pass.
    padding : list of (int, numpy.ndarray, numpy.ndarray)
        Sequences with padding after tokens: the pass's columns that are padding, and the rows before each.
    targets : (torch.Tensor, torch.Tensor) or None
        int64: slots and rows that the pass writes.
    sources : torch.Tensor or None
        int64: which of the ``batch * tokens`` tokens are written there; None for all.
    narrowed : Plan or None
        The last columns of the pass, if some layers' queries come from these alone.
    """

    start: int
    tokens: int
    lengths: list[int]
    kept: npt.NDArray[np.bool_] | None = None
    uniform: bool = True
    masked: bool = False
    batch: Batch | None = None
    padding: Sequence[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]] = ()
    targets: tuple[torch.Tensor, torch.Tensor] | None = None
    sources: torch.Tensor | None = None
    narrowed: Plan | None = None


def follow(batch: Batch, slots: list[int], lengths: list[int], queries: list[int] | None = None) -> None:
    """Update a batch. Most decode steps add one row to each request, which needs no upload."""
    if batch.max_query == 1 and batch.slots.tolist() == slots and (batch.lengths + 1).tolist() == lengths:
        batch.advance()
    else:
        batch.update(slots, lengths, queries)
