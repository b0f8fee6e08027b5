"""Prefixes by hash over tensor-parallel ranks.

Each rank's manager finds, holds and evicts blocks as `pyvmem.kv.hashes` describes. A rank with less memory evicts more,
so the ranks may know different blocks. A request therefore begins with the blocks that every rank knows, and the ranks
agree on them before any of them changes anything.

SPDX-License-Identifier: MIT
"""

import errno
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

from pyvmem._checks import elements, uint
from pyvmem.errors import OutOfMemory
from pyvmem.kv.arguments import Request
from pyvmem.kv.hashes import KEEP, BlockHashes, Hash
from pyvmem.parallel.cache import TensorParallelKVCache


def _sum_of(hashes: Any) -> int:
    """A checksum that detects different hashes on different ranks."""
    return zlib.crc32(repr(hashes).encode())


class TensorParallelBlockHashes:
    """The `BlockHashes` of a `TensorParallelKVCache`: the same calls, which every rank makes with the same arguments.

    A block is known if every rank knows it. `alloc` asks the other ranks once or twice, `attach`, `peek`, `evict` and
    `evicted` at least once. `add`, `drop`, `prioritize` and `clear` ask nobody.

    Parameters
    ----------
    cache : TensorParallelKVCache
    tokens, max_tokens, events
        As in `BlockHashes`. Each rank evicts by its own memory.

    Raises
    ------
    InvalidArgument, RuntimeError
        As in `BlockHashes` and `TensorParallelKVCache`.
    """

    def __init__(
        self,
        cache: TensorParallelKVCache,
        tokens: SupportsIndex,
        max_tokens: SupportsIndex = 0,
        *,
        events: bool = False,
    ) -> None:
        def create() -> BlockHashes:
            return BlockHashes(cache.cache, tokens, max_tokens, events=events)

        what = f"BlockHashes({tokens}, {max_tokens}, {events})"
        self._blocks: BlockHashes = cache._vote(what, create)[0]
        self.cache = cache
        self.tokens: int = self._blocks.tokens
        # Of a shorter sequence, the window tensors may lack rows that they have of a longer one.
        self._asks_again = any(spec.window for spec in cache.specs)
        cache._hashes, cache._evicts = self, True

    def __len__(self) -> int:
        """How many blocks this rank knows."""
        return len(self._blocks)

    def __bool__(self) -> bool:
        return True

    # ---- requests --------------------------------------------------------------------------------------------

    def _known(self, what: str, chains: Sequence[Sequence[Hash]]) -> list[int]:
        """How many of the first blocks of each chain every rank knows."""
        known = [len(chain) for chain in chains]
        what = f"{what}, {len(chains)} chains, {_sum_of(chains)}"
        while True:
            asked = known

            def peek(asked: list[int] = asked) -> list[int]:
                return [self._blocks.peek(c[:n]) // self.tokens for c, n in zip(chains, asked)]

            known = self.cache._least(what, peek)
            if known == asked or not self._asks_again:
                return known

    def requests(self, requests: Sequence[Request]) -> list[Request]:
        """The requests of `KVCache.fit`, with the hashes that every rank knows."""
        found = list(requests)
        at = [i for i, r in enumerate(found) if isinstance(r, tuple) and len(r) == 2 and isinstance(r[1], list | tuple)]
        if at:
            given: list[Any] = [found[i] for i in at]
            known = self._known("fit", [hashes for _, hashes in given])
            for i, (tokens, hashes), n in zip(at, given, known):
                found[i] = tokens, hashes[:n]
        return found

    def peek(self, hashes: Iterable[Hash]) -> int:
        """As `BlockHashes.peek`: the tokens that every rank knows."""
        return self._known("peek", [self._elements("peek", hashes)])[0] * self.tokens

    def _elements(self, what: str, hashes: Iterable[Hash]) -> list[Hash]:
        found: list[Hash] = self.cache._argument(what, lambda: elements("hashes", hashes))
        return found

    def _agree(self, what: str, hashes: list[Hash]) -> list[Hash] | None:
        """The blocks with which every rank can begin a request; None: memory is too short on one."""

        def look(most: int) -> int:
            return self._blocks._look(hashes, most)[0]

        tokens = self.cache._agreed(f"{what}, {_sum_of(hashes)}", look, len(hashes) * self.tokens)
        return None if tokens is None else hashes[: tokens // self.tokens]

    def _begin(self, slot: SupportsIndex | None, hashes: list[Hash]) -> int:
        tokens = self._blocks.attach(slot, hashes)
        if tokens is None or tokens != len(hashes) * self.tokens:
            why = self.cache.shortage
            raise OutOfMemory(errno.ENOMEM, f"on this rank only, although the ranks agreed: {why}")
        return tokens

    def attach(self, slot: SupportsIndex | None, hashes: Iterable[Hash], *, dry: bool = False) -> int | None:
        """As `BlockHashes.attach`, on every rank or on none."""
        found = self._elements("attach", hashes)
        if dry:
            agreed = self._agree(f"attach({slot}, dry)", found)
            return None if agreed is None else len(agreed) * self.tokens
        self.cache._pledge.clear()
        agreed = self._agree(f"attach({slot})", found)
        return None if agreed is None else self._begin(slot, agreed)

    def alloc(self, tokens: SupportsIndex, hashes: Iterable[Hash]) -> tuple[int | None, int]:
        """As `BlockHashes.alloc`: the same slot and the same blocks on every rank."""
        hashes, length = (
            self._elements("alloc", hashes),
            self.cache._argument("alloc", lambda: uint("tokens", tokens, 32)),
        )
        del hashes[max(length - 1, 0) // self.tokens :]
        self.cache._pledge.clear()
        agreed = self._agree(f"alloc({length})", hashes)
        if agreed is None:
            return None, 0
        slot = self.cache.alloc(length, prefix_tokens=len(agreed) * self.tokens)
        return (None, 0) if slot is None else (slot, self._begin(slot, agreed))

    def add(self, slot: SupportsIndex, hashes: Iterable[Hash], first: SupportsIndex = 0) -> int:
        """As `BlockHashes.add`. Returns how many blocks were new on this rank."""
        hashes, added = elements("hashes", hashes), [0]

        def call() -> None:
            added[0] = self._blocks.add(slot, hashes, first)

        self.cache._note(f"add({slot}, {_sum_of(hashes)}, {first})", call)
        return added[0]

    # ---- eviction --------------------------------------------------------------------------------------------

    def drop(self, hashes: Iterable[Hash]) -> None:
        """As `BlockHashes.drop`."""
        hashes = elements("hashes", hashes)
        self.cache._note(f"drop({_sum_of(hashes)})", self._blocks.drop, hashes)

    def evict(self, pages: SupportsIndex, hashes: Iterable[Hash] | None = None) -> int:
        """As `BlockHashes.evict`. Returns the pages freed on the rank where they are fewest."""
        given = None if hashes is None else self._elements("evict", hashes)
        what = f"evict({pages}, {_sum_of(given)})"
        least = self.cache._vote(what, self._blocks.evict, pages, given, number=lambda freed: -freed)[1]
        return -least

    def prioritize(self, hashes: Iterable[Hash], priority: SupportsIndex) -> None:
        """As `BlockHashes.prioritize`."""
        hashes = elements("hashes", hashes)
        if priority == KEEP:  # pages that could be evicted no longer can
            self.cache._pledge.clear()
        self.cache._note(f"prioritize({_sum_of(hashes)}, {priority})", self._blocks.prioritize, hashes, priority)

    def clear(self) -> None:
        """As `BlockHashes.clear`."""
        self.cache._note("clear", self._blocks.clear)

    def evicted(self) -> list[Hash]:
        """As `BlockHashes.evicted`: what any rank has evicted, the first rank's hashes first.

        A block that several ranks evict at different times appears more than once.
        """
        found: list[Hash] = []
        for hashes in self.cache._gather("evicted", self._blocks.evicted):
            found += hashes
        return list(dict.fromkeys(found))
