"""Swapping: the rows of a request go to CPU memory, and its pages to others. vLLM and transformers do the same.

SPDX-License-Identifier: MIT
"""

import errno
from typing import TYPE_CHECKING

import torch

from pyvmem._ffi import ffi, lib
from pyvmem.errors import OutOfMemory, VmemError, _check

if TYPE_CHECKING:
    from pyvmem.kv.cache import KVCache


def rows_of(cache: "KVCache", slot: int) -> list[torch.Tensor]:
    """Return, for each tensor, a view of the rows of a slot that its request can read."""
    first, end, views = ffi.new("uint32_t *"), ffi.new("uint32_t *"), []
    for i, tensor in enumerate(cache.tensors):
        _check(lib.vmem_kv_get_rows(cache._use(), slot, i, first, end))
        views.append(tensor[slot, first[0] : end[0]])
    return views


def _host_memory(rows: list[torch.Tensor], slot: int) -> list[torch.Tensor]:
    """Return CPU memory for the rows, pinned for a GPU: PyTorch keeps it for the next request that is swapped out."""
    try:
        return [torch.empty_like(view, device="cpu", pin_memory=view.is_cuda) for view in rows]
    except RuntimeError as error:
        size = sum(view.nbytes for view in rows)
        raise OutOfMemory(errno.ENOMEM, f"no CPU memory for the {size} bytes of slot {slot}'s rows: {error}") from error


def _copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Copy behind the kernels of the current stream, and wait for the end."""
    for a, b in zip(to, source, strict=True):
        a.copy_(b, non_blocking=True)
    for device in {t.device for t in (*to[:1], *source[:1]) if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def swap_out(cache: "KVCache", slot: int) -> list[torch.Tensor]:
    """Copy the slot's rows to CPU memory, and give up its pages. Returns the copies."""
    if cache.tensors and cache.tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise VmemError(errno.EBUSY, f"slot {slot}: a captured step has not run: swap before or after the capture")
    step = cache.last_step
    tokens = cache.slot(slot).tokens  # after the step's number: a step in between is noticed
    rows = rows_of(cache, slot)
    host = _host_memory(rows, slot)
    _copy(host, rows)
    _check(lib.vmem_kv_swap_out(cache._use(), slot, tokens, step))
    return host


def swap_in(cache: "KVCache", slot: int, host: list[torch.Tensor]) -> bool:
    """Back the slot's rows again, and copy them back. False: there is no memory. Nothing has changed after an error."""
    if not cache._answer(lib.vmem_kv_swap_in(cache._ready(), slot, 0)):
        return False
    try:
        _copy(rows_of(cache, slot), host)
    except BaseException:
        lib.vmem_kv_swap_out(cache._use(), slot, cache.slot(slot).tokens, cache.last_step)
        raise
    return True
