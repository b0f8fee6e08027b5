"""A prefix cache: prompts with a common prefix share its pages.

It is `BlockHashes` for engines without hashes of their own: the hashes are those of `block_hashes`.

SPDX-License-Identifier: MIT
"""

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyvmem._checks import shown, uint
from pyvmem.errors import InvalidArgument, VmemError
from pyvmem.kv.hashes import block_hashes, token_array

if TYPE_CHECKING:
    from pyvmem.kv.cache import KVCache


class PrefixCache:
    """Blocks of finished or running requests, found by their tokens. Eviction takes the least recently used first.

    Parameters
    ----------
    cache : KVCache
        A cache can have one `PrefixCache` or `BlockHashes` in its life.
    block_tokens : int
        Prefixes are matched and shared in multiples of this number of tokens. Small blocks match more tokens, but only
        whole pages are shared without a copy.
    max_entries : int
        The largest number of blocks held; 0: what memory allows.

    Attributes
    ----------
    blocks : BlockHashes
        The blocks, under the hashes that `keys` returns.
    hits, misses, hit_tokens : int
        Requests that found a prefix, requests that found none, and prompt tokens that were found and need not be
        computed.
    """

    def __init__(self, cache: "KVCache", block_tokens: int = 32, max_entries: int = 0) -> None:
        if not hasattr(cache, "_new_hashes"):
            raise TypeError(f"cache must be a KVCache, not {shown(cache)}")
        self.cache = cache
        self.block_tokens = uint("block_tokens", block_tokens, 32)
        self.max_entries = uint("max_entries", max_entries, 32)
        if not self.block_tokens:
            raise InvalidArgument(errno.EINVAL, "block_tokens 0 must be at least 1")
        self.blocks = cache._new_hashes(self.block_tokens, self.max_entries * self.block_tokens)
        self.hits = self.misses = self.hit_tokens = self._inserted = 0

    def __len__(self) -> int:
        """How many blocks are held."""
        return len(self.blocks)

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache

    @property
    def evictions(self) -> int:
        """How many inserted blocks are no longer held."""
        return self._inserted - len(self.blocks)

    def keys(self, tokens: Any) -> list[bytes]:
        """The keys (bytes) of the whole blocks of a token sequence: a list, or an integer array or CPU tensor, [n]."""
        return block_hashes(tokens, self.block_tokens)

    def match(self, tokens: Sequence[int]) -> tuple[list[bytes], int]:
        """Return the longest known prefix of the sequence: (keys of its blocks, tokens of it). It counts as used.

        It never covers the whole sequence: the last token must always be computed.
        """
        keys = self.keys(token_array(tokens)[:-1])
        found = self.blocks.peek(keys)
        del keys[found // self.block_tokens :]
        self.blocks.order(keys)
        return keys, found

    def alloc(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        """Allocate a slot for a request and attach the longest known prefix of its prompt.

        Returns
        -------
        (slot, cached) : (int or None, int)
            cached: how many of the prompt's tokens the slot already has. The slot is None if all slots are taken, or if
            there is no memory to copy a partial page.
        """
        slot, cached = self.blocks.alloc(token_array(tokens).size, self.keys(tokens))
        if slot is not None:
            self.hits += cached > 0
            self.misses += not cached
            self.hit_tokens += cached
        return slot, cached

    def insert(self, slot: int, tokens: Sequence[int]) -> bool:
        """Hold the whole blocks of a request's written tokens. With windows, insert them while a window has them.

        Returns False if no block is new, or if windows have given up rows of new ones.
        """
        try:
            added = self.blocks.add(slot, self.keys(tokens))
        except VmemError as error:
            if error.errno == errno.ENODATA:
                return False
            raise
        self._inserted += added
        return added > 0

    def evict(self, pages: int) -> int:
        """Evict blocks that no request uses, until `pages` pages are freed. Returns how many were freed."""
        return self.blocks.evict(uint("pages", pages))

    def clear(self) -> None:
        """Drop every block. Running requests keep their pages."""
        self.blocks.clear()
