"""The rows of numbered blocks as runs of a cache, for a random engine (test_kv_engine_model.py)."""

from collections.abc import Iterable, Sequence

from pyvmem._ffi import ffi, lib
from pyvmem.errors import _check
from pyvmem.kv.cache import KVCache

_RUNS, _NUMBERS, _FOUND = ffi.typeof("struct vmem_kv_run[]"), ffi.typeof("uint64_t[]"), ffi.typeof("uint32_t *")
_KEEP, _MOST = 1, 2**32 - 1


class BlockRuns:
    """The rows of each block as a run of the cache (vmem_kv.h, "runs"): the scheduler alone decides which blocks stay.

    Blocks have numbers and `tokens` tokens each: whole pages in each tensor of `cache`.

    A block is found only at its place: behind as many blocks as there are before it in the slot that shared it. vLLM
    shares a block only among requests that begin alike.
    """

    def __init__(self, cache: KVCache, tokens: int) -> None:
        self._cache, self._tokens = cache, tokens
        self._runs: dict[int, int] = {}  # block -> run

    def share(self, parts: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Hold rows of slots, which the last step has backed, as blocks: all or none.

        parts: (slot, which of its blocks comes first, the numbers of the blocks). A number that is held must be dropped
        first.
        """
        size, held = self._tokens, self._runs
        blocks: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        for slot, first, numbers in parts:
            blocks += numbers
            rows += [(slot, row, size, _KEEP) for row in range(first * size, (first + len(numbers)) * size, size)]
        if not held.keys().isdisjoint(blocks):
            raise ValueError(f"block {next(block for block in blocks if block in held)} is held: drop it first")
        raw = ffi.new(_RUNS, rows)
        _check(lib.vmem_kv_share(self._cache._use(), raw, len(rows), 0))
        for block, run in zip(blocks, raw):
            held[block] = run.id

    def attach(self, slot: int, blocks: Sequence[int]) -> None:
        """Start a newly allocated slot, which no kernel accesses, with these blocks.

        Kernels that read their rows there must run after those that write them. Raises `ValueError` if a block is not
        held as the one at this place; the slot then has those before it.
        """
        runs, found = [self._runs.get(block, 0) for block in blocks], ffi.new(_FOUND)
        _check(lib.vmem_kv_attach(self._cache._use(), slot, ffi.new(_NUMBERS, runs), len(runs), _MOST, 0, found))
        n = found[0] // self._tokens
        if n != len(blocks):
            raise ValueError(f"block {blocks[n]} is not held as block {n} of a request")

    def drop(self, blocks: Iterable[int]) -> None:
        """Hold these blocks no longer. Those that are not held are skipped."""
        runs = [self._runs.pop(block, 0) for block in blocks]
        _check(lib.vmem_kv_drop(self._cache._use(), ffi.new(_NUMBERS, runs), len(runs), ffi.NULL))
