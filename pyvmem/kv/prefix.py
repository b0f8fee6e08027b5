"""A prefix cache: prompts with a common prefix share its pages.

Prompts are divided into blocks of tokens. A block's key hashes its tokens and all tokens before them, so equal keys
mean equal prefixes (as in vLLM's automatic prefix caching). The manager holds the pages (vmem_kv.h, "prefixes"). This
module only decides which prefixes are worth holding.

SPDX-License-Identifier: MIT
"""

import errno
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyvmem._checks import uint
from pyvmem.errors import VmemError
from pyvmem.kv.hashes import block_hashes, token_array

if TYPE_CHECKING:
    from pyvmem.kv.cache import KVCache, Lengths, Prefix


@dataclass
class _Entry:
    prefix: "Prefix"
    keys: list[bytes] = field(default_factory=list)  # one per block, in order: the last covers the whole prefix


class PrefixCache:
    """Prefixes of finished or running requests, found by their tokens. Eviction drops the least recently used first.

    Parameters
    ----------
    cache : KVCache
    block_tokens : int
        Prefixes are matched and shared in multiples of this number of tokens. Small blocks match more tokens, but only
        whole pages are shared without a copy.
    max_entries : int
        The largest number of prefixes held.

    Attributes
    ----------
    hits, misses, hit_tokens, evictions : int
        Requests that found a prefix, requests that found none, prompt tokens that were found and need not be computed,
        and prefixes dropped.
    """

    def __init__(self, cache: "KVCache", block_tokens: int = 32, max_entries: int = 4096) -> None:
        if not uint("block_tokens", block_tokens):
            raise ValueError("block_tokens 0 must be at least 1")
        self.cache = cache
        self.block_tokens = block_tokens
        self.max_entries = uint("max_entries", max_entries)
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # prefix id -> _Entry, least recently used first
        self._blocks: dict[bytes, list[int]] = {}  # key -> prefix ids that have the block, the newest last
        self.hits = self.misses = self.hit_tokens = self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache

    def keys(self, tokens: Any) -> list[bytes]:
        """The keys (bytes) of the whole blocks of a token sequence: a list, or an integer array or CPU tensor, [n]."""
        return block_hashes(tokens, self.block_tokens)

    def match(self, tokens: Sequence[int]) -> "tuple[Prefix | None, int]":
        """Return the longest known prefix of the sequence: (prefix, tokens of it that can be attached), or (None, 0).

        It never covers the whole sequence: the last token must always be computed.
        """
        keys = self.keys(token_array(tokens)[:-1])
        for count in range(len(keys), 0, -1):
            for id in reversed(self._blocks.get(keys[count - 1], ())):
                prefix = self._entries[id].prefix
                # The window tensors of a longer prefix may begin too late for a shorter one.
                if prefix.min_tokens <= count * self.block_tokens:
                    self._entries.move_to_end(id)
                    return prefix, count * self.block_tokens
        return None, 0

    def alloc(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        """Allocate a slot for a request and attach the longest known prefix of its prompt.

        Returns
        -------
        (slot, cached) : (int or None, int)
            cached: how many of the prompt's tokens the slot already has. The slot is None if all slots are taken, or if
            there is no memory to copy a partial page.
        """
        length = token_array(tokens).size
        prefix, cached = self.match(tokens)
        slot = self.cache.alloc(length, prefix_tokens=cached)
        if slot is None or prefix is None:
            self.misses += slot is not None
            return slot, 0
        while not self.cache.attach_prefix(prefix, slot, cached):
            if not self.evict(self.cache.shortage.missing_pages, spare=prefix.id):
                self.cache.free(slot)
                return None, 0
        self.hits += 1
        self.hit_tokens += cached
        return slot, cached

    def insert(self, slot: int, tokens: Sequence[int]) -> bool:
        """Hold the whole blocks of a request's written tokens.

        Returns False if there is no whole block, if this prefix is already held, or if it cannot be saved.
        """
        keys = self.keys(tokens)
        if not keys or any(self._entries[id].keys[-1] == keys[-1] for id in self._blocks.get(keys[-1], ())):
            return False
        try:
            prefix = self.cache.save_prefix(slot, len(keys) * self.block_tokens)
        except VmemError as error:
            if error.errno == errno.ENODATA:  # the windows have moved past the end of the prefix
                return False
            raise
        self._entries[prefix.id] = _Entry(prefix, keys)
        for key in keys:
            self._blocks.setdefault(key, []).append(prefix.id)
        while len(self._entries) > self.max_entries:
            self._drop(next(iter(self._entries)))
        return True

    def _drop(self, id: int) -> None:
        entry = self._entries[id]
        self.cache.drop_prefix(entry.prefix)
        del self._entries[id]
        for key in entry.keys:
            holders = self._blocks[key]
            holders.remove(id)
            if not holders:
                del self._blocks[key]
        self.evictions += 1

    def evict(self, pages: int, spare: int | None = None) -> int:
        """Drop prefixes, least recently used first, until `pages` pages are free. Returns the number of pages freed.

        Dropping a prefix frees nothing if all its pages have other holders. Such prefixes are dropped only if no others
        are left. The prefix with the id `spare` is never dropped.
        """
        freed, pages = 0, uint("pages", pages)
        for id in [id for id in self._entries if id != spare]:
            if freed >= pages:
                break
            own = self.cache.prefix_pages(self._entries[id].prefix)[1]
            if own:
                self._drop(id)
                freed += own
        if freed < pages:
            # Pages that only prefixes share become free when the last of those prefixes is dropped.
            before = self.cache.stats().prefix_pages
            for id in [id for id in self._entries if id != spare]:
                gone = before - self.cache.stats().prefix_pages
                if freed + gone >= pages or gone == before:
                    break
                self._drop(id)
            freed += before - self.cache.stats().prefix_pages
        return freed

    def step(self, lengths: "Lengths") -> bool:
        """Perform `KVCache.step`, dropping prefixes while memory is short. Returns False if that is not enough."""
        while not self.cache.step(lengths):
            if not self.evict(self.cache.shortage.missing_pages):
                return False
        return True

    def clear(self) -> None:
        """Drop every prefix."""
        for id in list(self._entries):
            self._drop(id)
