"""What prompts begin with alike: requests compute it once, and those that follow find it in the engine's cache.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any


class Prompts:
    """Prompts, each of which is a sequence of hashes. A hash covers all tokens before it, too."""

    def __init__(self) -> None:
        self._first: dict[Any, Sequence[Any]] = {}  # prompts, by the first hash that none before them has

    def add(self, hashes: Sequence[Any], at: int = 0) -> int:
        """Add a prompt from hash `at` on. Returns the first hash from there that no prompt before it has."""
        while at < len(hashes):
            other = self._first.setdefault(hashes[at], hashes)
            if other is hashes:
                break
            at = self._differ(hashes, other, at)
        return at

    @staticmethod
    def _differ(one: Sequence[Any], other: Sequence[Any], at: int) -> int:
        return bisect.bisect_left(range(min(len(one), len(other))), True, at, key=lambda i: one[i] != other[i])
