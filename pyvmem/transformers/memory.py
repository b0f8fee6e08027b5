"""The memory of a `VMemCache`: how much it may have, what it does when that is short, and which kernels may read it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from pyvmem._ffi import lib
from pyvmem.errors import _check
from pyvmem.kv.cache import KVCache

POOL_SECONDS = 5.0  # that a call waits for the memory of other members of its pool


def default_budget(device: torch.device) -> int:
    """The default budget in bytes: the GPU's free memory, or half of the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def with_pool(kv: KVCache, attempt: Callable[[], bool]) -> bool:
    """Try until an attempt finds enough memory, while other members of the cache's pool give memory back."""
    pool = kv.options.pool
    fits, until = attempt(), time.monotonic() + POOL_SECONDS
    while not fits and pool and kv.shortage.coming_pages and (left := until - time.monotonic()) > 0:
        if pool.wait(kv, left) == "refused":
            break
        fits = attempt()
    return fits


def wait(kv: KVCache) -> None:
    """Wait until no kernel reads the rows. Raises `VmemError` (EBUSY) while a CUDA graph is captured."""
    _check(lib.pv_wait_for_kernels(kv.context._use()))


def is_quiet(kv: KVCache) -> bool:
    """Wait until no kernel reads the rows; False if nobody can tell, because a CUDA graph is captured."""
    return bool(lib.pv_wait_for_kernels(kv.context._use()) != -errno.EBUSY)


def finish(kv: KVCache) -> None:
    """Free a cache's memory once no kernel reads it."""
    if kv.options.pool and is_quiet(kv):  # views of the rows may keep the cache, but not the memory of other members
        for slot in range(kv.slots):
            kv.free(slot)
        kv.reclaim()
    kv.close()


def what_helps(kv: KVCache) -> str:
    """A remedy for a shortage, besides a smaller batch, in words."""
    shortage = kv.shortage
    return "use a pool with a larger budget" if shortage.coming_pages else shortage.remedy


_lock = threading.RLock()  # garbage collection may end an owner in the middle of a call here
_users = 0


def cudnn_off(owner: object) -> weakref.finalize[..., Any] | Literal[False]:
    """Switch cuDNN's attention off in this process while `owner` lives, or until the returned function is called.

    torch's scaled_dot_product_attention would use it. It makes a plan for every new length, which takes tens of
    milliseconds: longer than all else in a decode step, where the rows grow by one. Returns False if other code has
    already switched it off.
    """
    global _users
    with _lock:
        if not _users and not torch.backends.cuda.cudnn_sdp_enabled():
            return False
        _users += 1
        torch.backends.cuda.enable_cudnn_sdp(False)
    return weakref.finalize(owner, _cudnn_on)


def _cudnn_on() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            torch.backends.cuda.enable_cudnn_sdp(True)
