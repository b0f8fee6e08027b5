"""KV caches whose `VMemCache` was dropped, kept for a moment for the next `VMemCache` of their kind.

``generate(past_key_values=VMemCache(model))`` in a loop creates a cache for each call. On a GPU, opening a context,
reserving addresses and mapping pages take longer than the rest of the first pass. On the host, a kept cache halves the
first pass (14 instead of 29 ms; a tiny model, medians of 60 turns). A context that caches share does not help, because
most of the time goes into the cache. torch's allocator keeps memory between calls for the same reason.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from typing import Any

import torch

from pyvmem._ffi import lib
from pyvmem.errors import VmemError
from pyvmem.kv.cache import KVCache
from pyvmem.transformers.memory import is_quiet

SECONDS = 1.0  # that a cache is kept
BYTES = 1 << 30  # of pages that all of them keep
MOST = 4  # caches: a model, its assistant, and those of another call

# Lists change in single steps, without a lock: garbage collection may end a cache in the middle of any call here.
_spares: list[_Spare] = []
# For each cache that may serve another `VMemCache`: the process, what must be the same, and `_users` when it was new.
_kinds: weakref.WeakKeyDictionary[KVCache, tuple[int, Any, list[int]]] = weakref.WeakKeyDictionary()


class _Spare:
    def __init__(self, kv: KVCache) -> None:
        stats = kv.stats()
        self.kv = kv
        self.bytes = stats.held_pages * stats.page_size
        self.timer = threading.Timer(SECONDS, self.end)
        self.timer.daemon = True

    def claim(self) -> bool:
        """Take it off the list; False if another call did."""
        try:
            _spares.remove(self)
        except ValueError:
            return False
        self.timer.cancel()
        return True

    def end(self) -> None:
        if self.claim():
            # `put` has waited. To wait here, in the timer's thread, would end a capture of another thread.
            if _users(self.kv) == _kinds[self.kv][2]:
                lib.pv_owner_quiet(self.kv._owned())
            self.kv.close()


def _users(kv: KVCache) -> list[int]:
    """How many tensors share the memory of each tensor of the cache, views included."""
    # Private to torch, which uses it for the same question (inductor's CUDA graph trees).
    count = torch._C._storage_Use_Count
    return [count(tensor.untyped_storage()._cdata) for tensor in kv.tensors]


def may_serve(kv: KVCache, key: Any) -> None:
    """Note that a new cache may serve another `VMemCache` of this key later."""
    _kinds[kv] = os.getpid(), key, _users(kv)


def put(kv: KVCache) -> None:
    """Keep a cache that no `VMemCache` has any more, if it may serve another one; otherwise close it."""
    try:
        spare = _Spare(kv)
        if kv not in _kinds or spare.bytes > BYTES or not is_quiet(kv):
            kv.close()
            return
        spare.timer.start()
    except Exception:  # at the interpreter's end there are no new threads
        kv.close()
        return
    _spares.append(spare)
    while len(_spares) > MOST or sum(each.bytes for each in list(_spares)) > BYTES:
        with contextlib.suppress(IndexError):
            _spares[0].end()


def take(key: Any) -> KVCache | None:
    """A kept cache of this key, whose memory nothing else uses. All its slots are taken, and none has a row."""
    for spare in list(_spares):
        kv = spare.kv
        pid, its, users = _kinds[kv]
        if (pid, its) != (os.getpid(), key) or not spare.claim():
            continue
        # A view of rows that outlives its cache keeps them. Only now are the views gone that a cache itself had, and
        # kernels that read them may run.
        if _users(kv) == users and is_quiet(kv):
            try:
                for slot in range(kv.slots):
                    kv.free(slot)
                    kv.alloc(slot=slot)
                return kv
            except VmemError:
                pass
        kv.close()
    return None


def clear() -> None:
    """Close all kept caches."""
    for spare in list(_spares):
        spare.end()


atexit.register(clear)
