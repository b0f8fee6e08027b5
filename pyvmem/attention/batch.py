"""The requests of an iteration: whose rows the kernels read, and how far.

SPDX-License-Identifier: MIT
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pyvmem._checks import integers

Ints = Sequence[int] | npt.NDArray[Any] | torch.Tensor


class Cache(Protocol):
    """The part of a `KVCache` that attention reads. If calls pass K and V, `tensors` takes the place of both lists."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slots: int
    max_tokens: int
    tile_rows: int

    def tokens(self, slots: Any) -> Any:
        """Backed rows of each of these slots; 0 for a slot that is not in use."""


def _ints(name: str, values: Ints) -> npt.NDArray[np.int32]:
    """values as an int32 array. Raises TypeError and ValueError."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise TypeError(f"{name} must be on the CPU: its values determine the launches")
        values = values.tolist()
    array = integers(name, values)
    narrow: npt.NDArray[np.int32] = array.astype(np.int32)
    if (narrow != array).any():
        i = int(np.flatnonzero(narrow != array)[0])
        raise ValueError(f"{name}[{i}] {array[i]} is larger than a cache can have")
    return narrow


class Batch:
    """Slots, lengths and queries of one iteration, checked once and uploaded once for all layers.

    Parameters
    ----------
    cache : KVCache
        Or anything with `keys`, `values`, `slots`, `max_tokens`, `tile_rows` and `tokens(slots)`.
    slots : sequence, numpy array or torch CPU tensor of n ints
        One for each request, in the order of the queries, without duplicates.
    lengths : n ints
        Rows of each slot that are attended to, including the new tokens'.
    query_lengths : n ints, optional
        Queries of each request, which are the last of its rows. 1 each by default (decode).
    max_length : int, optional
        Kernels are launched for lengths up to this; by default the longest of `lengths`. Pass it if a captured CUDA
        graph will later be replayed with longer ones.
    check : bool
        Compare the lengths with the rows that the cache has backed.

    Attributes
    ----------
    slots, lengths, query_lengths : numpy.ndarray of int32
    max_length, max_query, total_queries : int
    fixed : bool
        Whether `max_length` was given, so that graphs can be replayed with other lengths.
    slots_t, lengths_t : torch.Tensor
        int32[n] on the cache's device. `update` keeps their addresses.
    cu_seqlens_q : torch.Tensor
        int32[n + 1] on the device: query rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` are request i's.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid. The message names it, its limit and the element at fault.
    """

    def __init__(
        self,
        cache: Cache,
        slots: Ints,
        lengths: Ints,
        query_lengths: Ints | None = None,
        *,
        max_length: int | None = None,
        check: bool = True,
    ) -> None:
        held: list[torch.Tensor] | None = getattr(cache, "keys", None) or getattr(cache, "tensors", None)
        if not held:
            raise ValueError("cache has no keys and values: it must be a KVCache, or like one, and not closed")
        if max_length is not None and (not isinstance(max_length, int | np.integer) or max_length < 1):
            raise ValueError(f"max_length {max_length!r} must be a number of rows, or None")
        self.cache = cache
        self._check = check
        self.fixed = max_length is not None
        self._most = max_length
        self._plans: dict[Any, Any] = {}  # by everything that does not change from layer to layer
        self.device = held[0].device
        self._take(slots, lengths, query_lengths)
        n = len(self.slots)
        self._zeros = np.zeros(n * max(math.prod(x.shape[2:-1]) for x in held), np.int32)
        sizes = [n, n, n + 1, len(self._zeros)]
        with torch.inference_mode(False):  # later iterations, which write here, may run in another mode
            self._buffer = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
            self.slots_t, self.lengths_t, self.cu_seqlens_q, self._counts = self._buffer.split(sizes)
        self._upload()

    def __len__(self) -> int:
        return len(self.slots)

    def requests(self) -> Iterator[tuple[int, int, slice]]:
        """Return the slot and the length of each request, and the rows of q that are its queries.

        Returns
        -------
        iterator of (int, int, slice)
        """
        ends = np.cumsum(self.query_lengths)
        begin = ends - self.query_lengths
        return zip(self.slots.tolist(), self.lengths.tolist(), map(slice, begin.tolist(), ends.tolist()))

    def _take(self, slots: Ints, lengths: Ints, query_lengths: Ints | None) -> None:
        slots, lengths = _ints("slots", slots), _ints("lengths", lengths)
        queries = np.ones_like(slots) if query_lengths is None else _ints("query_lengths", query_lengths)
        n = len(slots)
        if n == 0:
            raise ValueError("slots is empty: a batch has at least one request")
        for name, array in (("lengths", lengths), ("query_lengths", queries)):
            if len(array) != n:
                raise ValueError(f"{name} has {len(array)} elements, slots has {n}")
        cache = self.cache
        limit = cache.max_tokens if self._most is None else min(self._most, cache.max_tokens)
        why = "max_tokens" if limit == cache.max_tokens else "max_length"
        for name, array, low, high, of in (
            ("slots", slots, 0, np.int32(cache.slots - 1), f"the cache has {cache.slots} slots"),
            ("lengths", lengths, 1, np.int32(limit), f"{why} is {limit}"),
            ("query_lengths", queries, 1, lengths, "lengths, which include the queries"),
        ):
            bad = np.flatnonzero((array < low) | (array > high))
            if len(bad):
                i = int(bad[0])
                top = np.broadcast_to(high, array.shape)[i]
                raise ValueError(f"{name}[{i}] {array[i]} must lie between {low} and {top} ({of})")
        if len(np.unique(slots)) != n:
            twice = next(s for s in slots if np.count_nonzero(slots == s) > 1)
            raise ValueError(f"slots has slot {twice} twice: each request may appear once")
        if self._check:
            backed = np.asarray(cache.tokens(slots))
            bad = np.flatnonzero(lengths > backed)
            if len(bad):
                i = int(bad[0])
                has = f"has {backed[i]} rows backed: call step first" if backed[i] else "is not in use, or swapped out"
                raise ValueError(f"lengths[{i}] {lengths[i]}: slot {slots[i]} {has}")
        self.slots, self.lengths, self.query_lengths = slots, lengths, queries
        self.max_length = int(lengths.max()) if self._most is None else limit
        self.max_query = int(queries.max())
        self.total_queries = int(queries.sum())

    def _upload(self) -> None:
        ends = np.zeros(len(self.slots) + 1, np.int32)
        np.cumsum(self.query_lengths, out=ends[1:])
        packed = torch.from_numpy(np.concatenate((self.slots, self.lengths, ends, self._zeros)))
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        self._buffer.copy_(packed, non_blocking=True)

    def zeros(self, count: int) -> torch.Tensor:
        """Return counters of a kernel, one for each request and KV head, which uploads set to 0.

        A captured graph finds them there, as it finds the lengths.

        Parameters
        ----------
        count : int
            How many.

        Returns
        -------
        torch.Tensor
            int32[count] on the device.
        """
        if count > len(self._counts):  # K and V given as a pair, with more heads than the cache's
            return torch.zeros(count, dtype=torch.int32, device=self.device)
        counts: torch.Tensor = self._counts[:count]
        return counts

    def last_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the last tokens.

        Returns
        -------
        (torch.Tensor, torch.Tensor)
            Slots and rows, int64[n] each on the device.
        """
        if self._last is None or self.fixed:  # a captured graph recomputes them
            self._last = self.slots_t.long(), self.lengths_t.long() - 1
        return self._last

    def update(self, slots: Ints, lengths: Ints, query_lengths: Ints | None = None) -> None:
        """Replace slots and lengths by the next iteration's, for the same number of requests and queries.

        The memory stays the same, so CUDA graphs captured with this batch read the new values. Launches copies on the
        current stream.

        Parameters
        ----------
        slots, lengths, query_lengths
            As in the class.

        Raises
        ------
        ValueError
            Another number of requests or queries.
        """
        before, kept = (len(self), self.total_queries, self.max_query), self.__dict__.copy()
        self._take(slots, lengths, query_lengths)
        if (len(self), self.total_queries, self.max_query) != before:
            now = len(self), self.total_queries
            self.__dict__.update(kept)
            has = f"the batch has {before[0]} and {before[1]}"
            raise ValueError(f"update with {now[0]} slots and {now[1]} queries: {has}")
        self._upload()
        self._refresh()

    def advance(self) -> None:
        """Make each request of a decode batch one row longer. It does what `update` does, without an upload.

        Whether the cache has backed the new rows is not checked.
        """
        longest, limit = int(self.lengths.max()) + 1, self.max_length if self.fixed else self.cache.max_tokens
        if self.max_query != 1 or longest > limit:
            asked = f"{longest} rows and {self.max_query} queries"
            raise ValueError(f"advance to {asked}: at most {limit} rows and 1 query")
        self.lengths = self.lengths + np.int32(1)
        self.max_length = limit if self.fixed else longest
        self._last = None
        self.lengths_t.add_(1)
        self._refresh()

    def _refresh(self) -> None:
        with torch.inference_mode(False):
            for plan in self._plans.values():
                if hasattr(plan[1], "refresh"):
                    plan[1].refresh(self)
