"""A prefix cache for engines that compute hashes of blocks of tokens (vmem_kv.h, "prefixes by hash").

As in vLLM's automatic prefix caching, a block's hash covers its tokens, all tokens before them, and whatever else
determines their rows (a salt, an adapter). The manager finds the blocks, holds their pages, and evicts them when memory
is short.

SPDX-License-Identifier: MIT
"""

import errno
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from pyvmem._checks import elements, flag, integer, shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.errors import InvalidArgument, _check

if TYPE_CHECKING:
    from pyvmem.kv.cache import KVCache

Hash: TypeAlias = "bytes | int"

SIZE = 32  # bytes of a hash
PRIORITY = lib.VMEM_KV_HASH_PRIORITY  # of a new block
KEEP = lib.VMEM_KV_HASH_KEEP  # the priority of a block that is not evicted


def token_array(tokens: Any) -> npt.NDArray[np.int64]:
    """A token sequence (a list, or an integer array or CPU tensor) as int64[n]. Raises TypeError for anything else."""
    try:
        array = np.asarray(tokens)
    except ValueError:  # of sequences that differ in length
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"tokens must be a sequence of integers, not {shown(tokens)}")
    return np.ascontiguousarray(array, dtype=np.int64)


def block_hashes(tokens: Any, block_tokens: SupportsIndex, salt: bytes = b"") -> list[bytes]:
    """Hashes (16 bytes each) of the whole blocks of a token sequence: a list, or an integer array or CPU tensor, [n].

    For engines without hashes of their own. `salt` separates sequences whose rows differ for equal tokens, for example
    by adapter or tenant.
    """
    size = uint("block_tokens", block_tokens, 32)
    if not size:
        raise InvalidArgument(errno.EINVAL, "block_tokens 0 must be at least 1")
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, not {shown(salt)}")
    array = token_array(tokens)
    hashes, before = [], hashlib.blake2b(salt, digest_size=16).digest() if salt else b""
    for end in range(size, len(array) + 1, size):
        before = hashlib.blake2b(before + array[end - size : end].tobytes(), digest_size=16).digest()
        hashes.append(before)
    return hashes


class BlockHashes:
    """Blocks of `tokens` tokens of a cache's requests, held under the engine's hashes.

    A hash is ``bytes`` (1 to 32, all of one length) or an ``int`` (at most 256 bits, may be negative). An engine uses
    one kind. All calls are thread-safe.

    Parameters
    ----------
    cache : KVCache
        A cache can have one `BlockHashes` in its life.
    tokens : int
        Tokens per block, 1 to the cache's `max_tokens`. A block need not fill whole pages, but only whole pages are
        shared without a copy.
    max_tokens : int
        The most tokens of all blocks together; 0: what memory allows.
    automatic : bool
        Evict blocks when a step needs their memory: those of the lowest priority first, and of one priority the least
        recently used. Pages that only evictable blocks hold count as free. False: only `drop` and `evict` release
        memory, in the engine's order.
    events : bool
        Keep the hashes of evicted blocks for `evicted`.

    Raises
    ------
    InvalidArgument
        A number is outside its limits, or the cache already has hashes.
    """

    def __init__(
        self,
        cache: "KVCache",
        tokens: SupportsIndex,
        max_tokens: SupportsIndex = 0,
        *,
        automatic: bool = True,
        events: bool = False,
    ) -> None:
        config = ffi.new("struct vmem_kv_hash_config *")
        config.size = ffi.sizeof("struct vmem_kv_hash_config")
        config.block_tokens = uint("tokens", tokens, 32)
        config.max_tokens = uint("max_tokens", max_tokens)
        config.flags = lib.VMEM_KV_HASH_EVENTS if flag("events", events) else 0
        config.flags |= 0 if flag("automatic", automatic) else lib.VMEM_KV_HASH_MANUAL
        _check(lib.vmem_kv_hash_init(cache._use(), config))
        self.cache = cache
        self.tokens = int(config.block_tokens)
        self._length: int | None = None  # length of hashes that are bytes; 0: they are integers
        cache._hashes = self

    def __len__(self) -> int:
        """How many blocks are known."""
        return self.cache.stats().hashed_blocks

    def __bool__(self) -> bool:
        return True  # also if it is empty

    # ---- hashes as C has them --------------------------------------------------------------------------------

    def _kind(self, hash: Any, i: int) -> int:
        if type(hash) is bytes and 1 <= len(hash) <= SIZE:
            return len(hash)
        if isinstance(hash, bytes) or not hasattr(hash, "__index__"):
            raise TypeError(f"hashes[{i}] must be 1 to {SIZE} bytes or an int, not {shown(hash)}")
        return 0

    def _raw(self, hashes: Iterable[Hash]) -> tuple[Any, int]:
        """(struct vmem_kv_hash[n], n)."""
        found = elements("hashes", hashes)
        if not found:
            return ffi.NULL, 0
        length = self._kind(found[0], 0) if self._length is None else self._length
        try:
            if length:
                if any(type(hash) is not bytes or len(hash) != length for hash in found):
                    raise TypeError
                raw = b"".join(hash.ljust(SIZE, b"\0") for hash in found)
            else:
                raw = b"".join(integer("hash", hash).to_bytes(SIZE, "little", signed=True) for hash in found)
        except (OverflowError, TypeError):
            self._complain(found, length)
            raise
        return ffi.from_buffer("struct vmem_kv_hash[]", raw), len(found)

    def _complain(self, hashes: list[Hash], length: int) -> None:
        for i, hash in enumerate(hashes):
            kind = self._kind(hash, i)
            if kind != length:
                words = [f"of {n} bytes" if n else "an int" for n in (kind, length)]
                raise InvalidArgument(errno.EINVAL, f"hashes[{i}] is {words[0]}, but this cache's are {words[1]}")
            if not kind and not -(1 << 255) <= integer("hash", hash) < 1 << 255:
                raise InvalidArgument(errno.EINVAL, f"hashes[{i}] has more than 256 bits")

    def _hash(self, raw: bytes) -> Hash:
        return raw[: self._length] if self._length else int.from_bytes(raw, "little", signed=True)

    # ---- requests --------------------------------------------------------------------------------------------

    def peek(self, hashes: Iterable[Hash]) -> int:
        """Return how many tokens of a request with these blocks are known, from the first on. Changes nothing."""
        raw, n = self._raw(hashes)
        tokens = ffi.new("uint32_t *")
        _check(lib.vmem_kv_hash_peek(self.cache._use(), raw, n, tokens))
        return int(tokens[0])

    def attach(self, slot: SupportsIndex | None, hashes: Iterable[Hash], *, dry: bool = False) -> int | None:
        """Start a newly allocated slot, which no kernel accesses, with the known ones of these blocks.

        Returns the tokens that the slot then has, 0 if no block is known, or None if there is no memory to copy the
        last, partial page. The next token must be computed, so leave out the hash of a block that
        ends the prompt. With `dry`, nothing changes, and the slot is ignored and may be None.
        """
        if dry:
            tokens, short = self._look(hashes)
            return None if short else tokens
        raw, n = self._raw(hashes)
        found = ffi.new("uint32_t *")
        rc = lib.vmem_kv_hash_attach(self.cache._ready(), uint("slot", slot, 32), raw, n, 0, found)
        return int(found[0]) if self.cache._answer(rc) else None

    def _look(self, hashes: Iterable[Hash]) -> tuple[int, bool]:
        """How many tokens are known, and whether memory is too short to begin with them."""
        raw, n = self._raw(hashes)
        tokens = ffi.new("uint32_t *")
        rc = lib.vmem_kv_hash_attach(self.cache._ready(), 0, raw, n, lib.VMEM_KV_DRY, tokens)
        short = not self.cache._answer(rc)
        return int(tokens[0]), short

    def alloc(self, tokens: SupportsIndex, hashes: Iterable[Hash]) -> tuple[int | None, int]:
        """Allocate a slot for a prompt of `tokens` tokens, and start it with the known ones of its blocks.

        Returns (slot, tokens that it already has). The slot is None if all slots are taken or memory is short;
        `shortage` says which. The last token always remains to be computed.
        """
        hashes, length = elements("hashes", hashes), uint("tokens", tokens, 32)
        del hashes[max(length - 1, 0) // self.tokens :]
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

        Returns how many were new. Known blocks are not added again. If `max_tokens` is reached and all other blocks
        belong to running requests, no more are added.
        """
        found = elements("hashes", hashes)
        raw, n = self._raw(found)
        added = ffi.new("size_t *")
        number, at = uint("slot", slot, 32), uint("first", first, 32)
        _check(lib.vmem_kv_hash_add(self.cache._use(), number, at, raw, n, added))
        if n and self._length is None:
            self._length = self._kind(found[0], 0)
        return int(added[0])

    # ---- eviction --------------------------------------------------------------------------------------------

    def drop(self, hashes: Iterable[Hash]) -> None:
        """Drop blocks. Unknown ones are skipped. Requests that use them keep their pages."""
        raw, n = self._raw(hashes)
        _check(lib.vmem_kv_hash_drop(self.cache._use(), raw, n, 2**64 - 1, 0, ffi.NULL))

    def evict(self, pages: SupportsIndex, hashes: Iterable[Hash] | None = None) -> int:
        """Evict blocks until `pages` pages are freed. Returns how many were freed.

        Without `hashes`, in order of priority and of use. With `hashes`, only these blocks, in this order; unknown
        blocks, blocks of running requests and blocks to be kept are skipped.
        """
        freed, most = ffi.new("uint64_t *"), min(uint("pages", pages), 2**64 - 2)
        if hashes is None:
            _check(lib.vmem_kv_hash_drop(self.cache._use(), ffi.NULL, 0, most, lib.VMEM_KV_NEXT, freed))
        else:
            raw, n = self._raw(hashes)
            _check(lib.vmem_kv_hash_drop(self.cache._use(), raw, n, most, lib.VMEM_KV_UNUSED, freed))
        return int(freed[0])

    def prioritize(self, hashes: Iterable[Hash], priority: SupportsIndex) -> None:
        """Set the priority of blocks, 0 to 100 (new blocks: `PRIORITY`, 50), and make them its most recently used ones.

        Blocks of a lower priority are evicted first. With `KEEP`, blocks are not evicted, and their pages do not count
        as free, until they get another priority or are dropped. Unknown blocks are skipped. A request finds a block
        only if it finds those before it: give no block a lower priority than the blocks after it.
        """
        raw, n = self._raw(hashes)
        _check(lib.vmem_kv_hash_prioritize(self.cache._use(), raw, n, uint("priority", priority, 32)))

    def clear(self) -> None:
        """Evict every block, also those to be kept."""
        _check(lib.vmem_kv_hash_drop(self.cache._use(), ffi.NULL, 0, 2**64 - 1, lib.VMEM_KV_NEXT, ffi.NULL))

    def limit(self, max_tokens: SupportsIndex) -> None:
        """Set the most tokens of all blocks together (0: what memory allows), and evict what exceeds it."""
        _check(lib.vmem_kv_hash_limit(self.cache._use(), uint("max_tokens", max_tokens)))

    def evicted(self) -> list[Hash]:
        """Return the hashes of blocks that were evicted since the last call, the oldest first.

        Requires `events`. Contains the blocks that the cache or `evict` chose, not those that `drop` named.
        """
        raw, got, found = ffi.new("struct vmem_kv_hash[]", 256), ffi.new("size_t *"), []
        while True:
            _check(lib.vmem_kv_hash_evicted(self.cache._use(), raw, 256, got))
            data = bytes(ffi.buffer(raw, got[0] * SIZE)) if got[0] else b""
            found += [self._hash(data[i : i + SIZE]) for i in range(0, len(data), SIZE)]
            if got[0] < 256:
                return found
