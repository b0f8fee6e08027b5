"""A prefix cache: requests that begin with the same tokens share their pages.

As in vLLM's automatic prefix caching, a block's hash covers its tokens, all tokens before them, and whatever else
determines their rows (a salt, an adapter). Each block is a run of its request's rows (vmem_kv.h, "runs"): the manager
holds the pages of runs, and evicts runs when memory is short. This module has the table from hashes to runs.

SPDX-License-Identifier: MIT
"""

import errno
import hashlib
import operator
import threading
from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from pyvmem._checks import elements, flag, integers, shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.errors import InvalidArgument, _check
from pyvmem.kv.cache import KVCache

Hash: TypeAlias = "bytes | int"

_MOST = 2**32 - 1


def block_hashes(tokens: Any, block_tokens: SupportsIndex, salt: bytes = b"") -> list[bytes]:
    """Hash the whole blocks of a token sequence, for engines without hashes of their own.

    Parameters
    ----------
    tokens : sequence of int, or integer array or CPU tensor
        ``[n]``.
    block_tokens : int
        Tokens per block, at least 1.
    salt : bytes
        Separates sequences whose rows differ for equal tokens, for example by adapter or tenant.

    Returns
    -------
    list of bytes
        16 bytes each, of ``n // block_tokens`` blocks. Each covers all tokens before its end.
    """
    size = uint("block_tokens", block_tokens, 32)
    if not size:
        raise InvalidArgument(errno.EINVAL, "block_tokens 0 must be at least 1")
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, not {shown(salt)}")
    array = integers("tokens", tokens).astype(np.int64)
    hashes, before = [], hashlib.blake2b(salt, digest_size=16).digest() if salt else b""
    for end in range(size, len(array) + 1, size):
        before = hashlib.blake2b(before + array[end - size : end].tobytes(), digest_size=16).digest()
        hashes.append(before)
    return hashes


def hashes_of(hashes: Iterable[Hash]) -> list[Hash]:
    """The hashes of a call, integers as Python's. Raises TypeError for anything else."""
    found = elements("hashes", hashes)
    for i, hash in enumerate(found):
        if not isinstance(hash, bytes):
            if isinstance(hash, bool) or not hasattr(hash, "__index__"):
                raise TypeError(f"hashes[{i}] must be bytes or an integer, not {shown(hash)}")
            found[i] = operator.index(hash)
    return found


class PrefixCache:
    """Blocks of tokens of a cache's requests, running or finished, found by their hashes.

    The hashes, bytes or integers, are the engine's, or those of `block_hashes`. All calls are thread-safe.

    Parameters
    ----------
    cache : KVCache
        A cache can have one `PrefixCache` in its life.
    block_tokens : int
        Tokens per block, 1 to the cache's `max_tokens`. Small blocks match more tokens, but only whole pages are shared
        without a copy.
    events : bool
        Keep the hashes of evicted blocks for `evicted`.

    Raises
    ------
    InvalidArgument
        A number is outside its limits, or the cache already has a `PrefixCache`.

    Notes
    -----
    A call that needs memory evicts blocks which no request uses, the least recently used first. Pages that only
    evictable blocks hold count as free. An engine that decides by itself what goes has runs of its own
    (`KVCache.share`).
    """

    def __init__(self, cache: KVCache, block_tokens: SupportsIndex = 32, *, events: bool = False) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, not {shown(cache)}")
        kv, size = cache._use(), uint("block_tokens", block_tokens, 32)
        if cache._prefix_block:
            text = f"this cache has a PrefixCache already, of blocks of {cache._prefix_block}"
            raise InvalidArgument(errno.EINVAL, text)
        _check(lib.vmem_kv_share(kv, ffi.NULL, 0, 0))  # whether the cache shares pages at all
        if not 1 <= size <= cache.max_tokens:
            raise InvalidArgument(
                errno.EINVAL, f"block_tokens {size} is not between 1 and max_tokens, {cache.max_tokens}"
            )
        self.cache = cache
        self.block_tokens: int = size
        self._events = flag("events", events)
        self._lock = threading.RLock()  # of the following
        self._runs: dict[Hash, tuple[int, int]] = {}  # the number of each block's run, and which block it is
        self._hash_of: dict[int, Hash] = {}  # by the number of the run
        self._gone: list[Hash] = []  # with events: evicted, the oldest first
        cache._prefix_block = size

    def __len__(self) -> int:
        """How many blocks are known."""
        with self._lock:
            self._forget_evicted()
            return len(self._runs)

    def __bool__(self) -> bool:
        return True  # also if it is empty

    # ---- the table -------------------------------------------------------------------------------------------

    def _beginning(self, hashes: list[Hash]) -> list[int]:
        """The runs of the first blocks that are known. Some may have been evicted meanwhile."""
        runs: list[int] = []
        with self._lock:
            for n, hash in enumerate(hashes):
                run, block = self._runs.get(hash, (0, -1))
                if block != n:
                    break
                runs.append(run)
        return runs

    def _known(self, hashes: list[Hash]) -> list[int]:
        """The runs of all known blocks among these."""
        with self._lock:
            return [self._runs[hash][0] for hash in hashes if hash in self._runs]

    def _forget(self, run: int) -> "Hash | None":
        hash = self._hash_of.pop(run, None)
        if hash is not None and self._runs.get(hash, (0, 0))[0] == run:
            del self._runs[hash]
        return hash

    def _forget_evicted(self) -> None:
        """Take from the table what the manager has evicted."""
        raw, got = ffi.new("uint64_t[]", 256), ffi.new("size_t *")
        while True:
            _check(lib.vmem_kv_evicted(self.cache._use(), raw, 256, got))
            gone = [hash for hash in map(self._forget, raw[0 : got[0]]) if hash is not None]
            if self._events:
                self._gone += gone
            if got[0] < 256:
                return

    # ---- requests --------------------------------------------------------------------------------------------

    def peek(self, hashes: Iterable[Hash]) -> int:
        """Say how many tokens of a request with these blocks are known, from the first on. Changes nothing.

        Parameters
        ----------
        hashes : iterable of bytes or int
            Of blocks, from the first of the prompt on.

        Returns
        -------
        int
        """
        runs, tokens = self._beginning(hashes_of(hashes)), ffi.new("uint32_t *")
        _check(lib.vmem_kv_attach(self.cache._use(), 0, runs, len(runs), _MOST, lib.VMEM_KV_LOOK, tokens))
        return int(tokens[0])

    def attach(self, slot: SupportsIndex, hashes: Iterable[Hash]) -> int | None:
        """Start a newly allocated slot, which no kernel accesses, with the known ones of these blocks.

        The next token must be computed, so leave out the hash of a block that ends the prompt.

        Parameters
        ----------
        slot : int
        hashes : iterable of bytes or int
            Of blocks, from the first of the prompt on.

        Returns
        -------
        int or None
            The tokens that the slot then has; 0 if no block is known. None: there is no memory to copy the last,
            partial page.
        """
        return self.cache._attach(slot, self._beginning(hashes_of(hashes)), _MOST)

    def alloc(self, tokens: SupportsIndex, hashes: Iterable[Hash]) -> tuple[int | None, int]:
        """Allocate a slot for a prompt, and start it with the known ones of its blocks.

        The last token always remains to be computed.

        Parameters
        ----------
        tokens : int
            Of the prompt.
        hashes : iterable of bytes or int
            Of blocks, from the first of the prompt on.

        Returns
        -------
        (int or None, int)
            The slot, and the tokens that it already has. None: all slots are taken or memory is short;
            `KVCache.shortage` says which.
        """
        hashes, length = elements("hashes", hashes), uint("tokens", tokens, 32)
        del hashes[max(length - 1, 0) // self.block_tokens :]
        slot = self.cache.alloc(length, prefix_tokens=self.peek(hashes))
        if slot is None:
            return None, 0
        try:
            cached = self.attach(slot, hashes)
        except BaseException:
            self.cache.free(slot)
            raise
        if cached is not None:
            return slot, cached
        self.cache.free(slot)
        return None, 0

    def add(self, slot: SupportsIndex, hashes: Iterable[Hash], first: SupportsIndex = 0) -> int:
        """Add the slot's blocks first, first + 1, ..., whose rows are written and will not change.

        Rows in whole pages may also be written later, by kernels that run before those that read them elsewhere. Known
        blocks are not added again.

        Parameters
        ----------
        slot : int
        hashes : iterable of bytes or int
            Of these blocks.
        first : int
            The number of the first block in the request.

        Returns
        -------
        int
            How many were new.

        Raises
        ------
        InvalidArgument
            The slot has fewer rows, or a hash is known for another place.
        """
        found = hashes_of(hashes)
        number, at = uint("slot", slot, 32), uint("first", first, 32)
        with self._lock:
            for i, hash in enumerate(found):
                _, block = self._runs.get(hash, (0, at + i))
                if block != at + i:
                    text = f"hashes[{i}] is that of block {block}: a hash covers all tokens before it"
                    raise InvalidArgument(errno.EINVAL, text)
            self._forget_evicted()
            return self._share(number, at, found)

    def _share(self, slot: int, first: int, hashes: list[Hash]) -> int:
        """Share blocks of the slot. Returns how many are new."""
        raw = ffi.new("struct vmem_kv_run[]", len(hashes))
        before = [self._runs.get(hash, (0, 0))[0] for hash in hashes]
        for i, run in enumerate(raw):
            run.slot, run.first, run.tokens = slot, min((first + i) * self.block_tokens, 2**32 - 1), self.block_tokens
            run.id = before[i]
        _check(lib.vmem_kv_share(self.cache._use(), raw, len(hashes), lib.VMEM_KV_RUN_REPORT))
        new = 0
        for i, (run, old, hash) in enumerate(zip(raw, before, hashes)):
            if run.id == old:
                continue
            if old:
                gone = self._forget(old)  # evicted a moment ago
                self._gone += [gone] if self._events and gone is not None else []
            if run.id:
                self._hash_of[int(run.id)] = hash  # first: Ctrl-C after it leaves no block that is never forgotten
                self._runs[hash] = int(run.id), first + i
                new += 1
        return new

    # ---- eviction --------------------------------------------------------------------------------------------

    def drop(self, hashes: Iterable[Hash]) -> None:
        """Drop blocks. Requests that use them keep their pages.

        Parameters
        ----------
        hashes : iterable of bytes or int
            Unknown ones are skipped.
        """
        found = hashes_of(hashes)
        with self._lock:
            runs = self._known(found)
            _check(lib.vmem_kv_drop(self.cache._use(), runs, len(runs), ffi.NULL))
            for run in runs:
                self._forget(run)

    def evict(self, pages: SupportsIndex) -> int:
        """Evict blocks that no request uses, the least recently used first, until enough pages are freed.

        Parameters
        ----------
        pages : int
            How many are enough.

        Returns
        -------
        int
            Pages freed.
        """
        freed, most = ffi.new("uint64_t *"), uint("pages", pages)
        with self._lock:
            _check(lib.vmem_kv_evict(self.cache._use(), most, freed))
            self._forget_evicted()
        return int(freed[0])

    def clear(self) -> None:
        """Evict every block, also those that requests use."""
        with self._lock:
            self.evict(2**64 - 1)
            self._gone += self._runs if self._events else []
            self.drop(list(self._runs))

    def evicted(self) -> list[Hash]:
        """Return the hashes of blocks that were evicted since the last call, the oldest first.

        These are the blocks that the cache or `evict` chose, not those that `drop` named.

        Returns
        -------
        list of bytes or int

        Raises
        ------
        InvalidArgument
            The PrefixCache was made without ``events=True``.
        """
        if not self._events:
            raise InvalidArgument(errno.EINVAL, "the PrefixCache was created without events=True")
        with self._lock:
            self._forget_evicted()
            gone, self._gone = self._gone, []
        return gone
