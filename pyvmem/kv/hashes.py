"""The table of a `PrefixCache`: which run has the rows of a block of tokens, by the block's hash.

SPDX-License-Identifier: MIT
"""

import operator
import threading
from collections.abc import Iterable
from typing import TypeAlias

from pyvmem._checks import elements, shown

Hash: TypeAlias = "bytes | int"


def hashes_of(hashes: Iterable[Hash]) -> list[Hash]:
    """The hashes of a call, integers as Python's. Raises TypeError for anything else."""
    found = elements("hashes", hashes)
    for i, hash in enumerate(found):
        if not isinstance(hash, bytes):
            if isinstance(hash, bool) or not hasattr(hash, "__index__"):
                raise TypeError(f"hashes[{i}] must be bytes or an integer, not {shown(hash)}")
            found[i] = operator.index(hash)
    return found


class BlockTable:
    """The blocks that are known. `lock` guards the dictionaries."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.lock = threading.RLock()
        self.runs: dict[Hash, tuple[int, int]] = {}  # the number of each block's run, and which block it is
        self.hash_of: dict[int, Hash] = {}  # by the number of the run

    def beginning(self, hashes: list[Hash]) -> list[int]:
        """The runs of the first blocks that are known. Some may have been evicted meanwhile."""
        runs: list[int] = []
        with self.lock:
            for n, hash in enumerate(hashes):
                run, block = self.runs.get(hash, (0, -1))
                if block != n:
                    break
                runs.append(run)
        return runs

    def known(self, hashes: list[Hash]) -> list[int]:
        """The runs of all known blocks among these."""
        with self.lock:
            return [self.runs[hash][0] for hash in hashes if hash in self.runs]

    def add(self, run: int, hash: Hash, block: int) -> None:
        self.hash_of[run] = hash  # first: Ctrl-C after it leaves no block that is never forgotten
        self.runs[hash] = run, block

    def forget(self, run: int) -> "Hash | None":
        """The hash of the run's block, which is known no more."""
        hash = self.hash_of.pop(run, None)
        if hash is not None and self.runs.get(hash, (0, 0))[0] == run:
            del self.runs[hash]
        return hash
