"""Which columns of a batch have rows. A column has a token of each sequence, or padding, which may have no row.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bools = npt.NDArray[np.bool_]


def padding_after_tokens(kept: Bools, before: Any) -> Bools:
    """Bool ``[batch, tokens]``: padding that follows tokens. before: the rows of each sequence before the pass."""
    found: Bools = ~kept & (np.asarray(before)[:, None] + np.cumsum(kept, 1) > 0)
    return found


class Columns:
    """The columns of `batch` sequences. Each has a row until a pass adds some that have none."""

    def __init__(self, batch: int, max_tokens: int, device: torch.device) -> None:
        self._shape, self._device = (batch, max_tokens), device
        self._kept: Bools | None = None  # [batch, max_tokens]: the columns that have rows; None: all columns
        self._on_device: Any = None  # the same there
        self._places: Any = None  # what `places` returned last, and for which columns

    @property
    def ragged(self) -> bool:
        """True if sequences have different lengths, because padding has no rows."""
        return self._kept is not None

    def select(self, sources: Sequence[int]) -> Columns:
        """The columns of the sequences `sources` of these, with memory of their own."""
        new = Columns(len(sources), self._shape[1], self._device)
        if self._kept is not None:
            new._keep(self._kept[list(sources)])
        return new

    def num_rows(self, end: int) -> list[int]:
        """The rows of each sequence among its first `end` columns."""
        if self._kept is None:
            return [end] * self._shape[0]
        stored: list[int] = self._kept[:, :end].sum(1).tolist()
        return stored

    def add(self, start: int, end: int, kept: Bools | None) -> None:
        """Add the columns of a pass. kept: bool ``[batch, end - start]``, those that have rows; None: all."""
        if kept is not None and self._kept is None:
            self._keep(np.ones(self._shape, bool))
        if self._kept is not None:
            self._kept[:, start:end] = True if kept is None else kept
            self._on_device[:, start:end] = True if kept is None else self.upload(kept)
        self._places = None

    def _keep(self, kept: Bools) -> None:
        with torch.inference_mode(False):  # later passes, which write here, may run in another mode
            self._kept, self._on_device = kept, self.upload(kept)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    # ---- masks -----------------------------------------------------------------------------------------------

    def compare(self, start: int, mask: torch.Tensor) -> tuple[Bools, bool]:
        """What a mask says, bool ``[batch, columns]``, of `start` columns that are there, and of those that come.

        Returns the new columns that it shows, ``[batch, columns - start]``, and whether it hides old ones that have
        rows.
        """
        past, new = mask[:, :start], mask[:, start:]
        have = torch.ones_like(past) if self._kept is None else self._on_device[:, :start]
        differ = torch.stack([(have & ~past).any(1), (past & ~have).any(1)], 1)
        known = torch.cat([differ, new], 1).cpu().numpy()  # one copy, for which the device is waited for
        if known[:, 1].any():
            row = int(known[:, 1].argmax())
            column = int((past & ~have)[row].nonzero()[0])
            raise ValueError(
                f"attention_mask shows column {column} of sequence {row}, which has no row, because an earlier pass "
                "masked it: mask it again, or reset() the cache"
            )
        return known[:, 2:], bool(known[:, 0].any())

    def cut_by(self, shown: Bools) -> list[tuple[int, Bools]] | None:
        """Each sequence of which `shown`, ``[batch, start]``, hides rows, and what is left of its first columns.

        None if some hidden rows are not the last of their sequence.
        """
        assert self._kept is not None
        kept = self._kept[:, : shown.shape[1]]
        seen, hidden = kept & shown, kept & ~shown
        after = np.maximum.accumulate(seen[:, ::-1], 1)[:, ::-1]  # columns that some column which is seen follows
        if (hidden & after).any():
            return None
        return [(row, seen[row]) for row in np.flatnonzero(hidden.any(1)).tolist()]

    def cut(self, row: int, seen: Bools) -> None:
        """A sequence has lost its last rows. seen: its first columns that are left, bool ``[start]``."""
        assert self._kept is not None
        self._kept[row, : len(seen)] = seen
        self._on_device[row, : len(seen)] = self.upload(seen)
        self._places = None

    # ---- places ----------------------------------------------------------------------------------------------

    def places(self, first: int, end: int, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and rows, int64 ``[batch, end - first]`` each, of the columns from `first` on. slots: of each sequence.

        A column without a row has another row's place, so that all can be read.
        """
        asked = first, end, tuple(slots)
        if self._places is None or self._places[0] != asked:
            of = np.broadcast_to(np.array(slots)[:, None], (len(slots), end - first)).copy()
            if self._kept is None:
                rows = np.broadcast_to(np.arange(first, end), of.shape)
            else:
                kept = self._kept[:, :end]
                count = np.cumsum(kept, 1)
                last = count[:, -1:] - 1
                rows = np.where(kept, count - 1, last)[:, first:]
                full = int(last.argmax())
                of[last[:, 0] < 0], rows[last[:, 0] < 0] = slots[full], last[full]
            self._places = asked, (self.upload(of), self.upload(rows.astype(np.int64)))
        where: tuple[torch.Tensor, torch.Tensor] = self._places[1]
        return where
