"""KV caches whose `VMemCache` was dropped, kept for a moment for the next `VMemCache` of their kind.

``generate(past_key_values=VMemCache(model))`` in a loop creates a cache for each call. On a GPU, opening a context,
reserving addresses and mapping pages take longer than the rest of the first pass. On the host, the first pass of a new
cache takes about half as long with a kept one (a tiny model, 60 turns of each: medians of 14 and 29 ms); a context that
caches share does not help, because most of the time goes into the cache. torch's allocator keeps memory between calls
for the same reason.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from pyvmem.errors import VmemError
from pyvmem.kv.cache import KVCache

SECONDS = 1.0  # that a cache is kept
BYTES = 1 << 30  # of pages that all of them keep
MOST = 4  # caches: a model, its assistant, and those of another call

# Lists change in single steps, without a lock: garbage collection may end a cache in the middle of any call here.
_spares: list[_Spare] = []


@dataclass(eq=False)
class _Spare:
    kv: KVCache
    key: Any
    users: list[int]
    bytes: int
    timer: threading.Timer | None = field(default=None, repr=False)

    def claim(self) -> bool:
        """Take it off the list; False if another call did."""
        try:
            _spares.remove(self)
        except ValueError:
            return False
        if self.timer is not None:
            self.timer.cancel()
        return True

    def end(self) -> None:
        if self.claim():
            self.kv.close()


def users(kv: KVCache) -> list[int]:
    """How many tensors share the memory of each tensor of the cache, views included."""
    # Private to torch, which uses it for the same question (inductor's CUDA graph trees).
    count = torch._C._storage_Use_Count
    return [count(tensor.untyped_storage()._cdata) for tensor in kv.tensors]


def put(kv: KVCache, key: Any, before: list[int]) -> None:
    """Keep a cache that no `VMemCache` has, or close it.

    before: `users` when the cache was new.
    """
    try:
        stats = kv.stats()
        held = stats.held_pages * stats.page_size
        if held <= BYTES:
            spare = _Spare(kv, (os.getpid(), key), before, held)
            spare.timer = threading.Timer(SECONDS, spare.end)
            spare.timer.daemon = True
            spare.timer.start()
            _spares.append(spare)
    except Exception:  # at the interpreter's end there are no new threads
        held = BYTES + 1
    if held > BYTES:
        kv.close()
    while len(_spares) > MOST or sum(each.bytes for each in list(_spares)) > BYTES:
        with contextlib.suppress(IndexError):
            _spares[0].end()


def take(key: Any) -> KVCache | None:
    """A kept cache of this key, whose memory nothing else uses. All its slots are taken, and none has a row."""
    for spare in list(_spares):
        if spare.key != (os.getpid(), key) or not spare.claim():
            continue
        # A view of rows that outlives its cache keeps them. Only now are the views gone that a cache itself had.
        if users(spare.kv) == spare.users:
            try:
                for slot in range(spare.kv.slots):
                    spare.kv.free(slot)
                    spare.kv.alloc(slot=slot)
                return spare.kv
            except VmemError:
                pass
        spare.kv.close()
    return None


def clear() -> None:
    """Close all kept caches."""
    for spare in list(_spares):
        spare.end()


atexit.register(clear)
