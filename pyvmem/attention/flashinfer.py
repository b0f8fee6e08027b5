"""FlashInfer: its kernel for contiguous K and V in prefill of few requests, its paged kernels for everything else.

The paged kernels read a constant table, whose pages are consecutive rows of a slot. It manages no memory and never
changes: page i of slot s has the number ``s * n + i``.

SPDX-License-Identifier: MIT
"""

import functools
import importlib.util
import math

import numpy as np
import numpy.typing as npt
import torch

from pyvmem.attention.batch import Batch
from pyvmem.attention.kernel import BF16, FP8, FP16, Call, Kernel, Shape

Int32s = npt.NDArray[np.int32]

PAGE = 64  # rows of a page of the table, if slots are multiples of it
FEW = 8  # requests of a prefill that are served one by one
WORKSPACE = 128 << 20  # bytes; what FlashInfer recommends


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """FlashInfer's scratch memory, zeroed once as FlashInfer requires. Calls on one stream share it."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


class _Table:
    """The batch's part of the constant table, and FlashInfer's plan for it."""

    def __init__(self, call: Call) -> None:
        import flashinfer

        batch, shape = call.batch, call.shape
        self._shape, self._scale = shape, call.softmax_scale
        self.page = math.gcd(shape.slot_rows, PAGE)
        self.pages = shape.slot_rows // self.page
        n, device = len(batch), batch.device
        buffers = {}
        ints = functools.partial(torch.empty, dtype=torch.int32, device=device)
        most = n * -(-batch.max_length // self.page)
        if shape.phase == "decode":
            # Tensor cores if query heads share a KV head: the other kernel takes 1.5 times as long.
            if batch.fixed:
                buffers = {"use_cuda_graph": True, "paged_kv_indptr_buffer": ints(n + 1),
                           "paged_kv_indices_buffer": ints(most), "paged_kv_last_page_len_buffer": ints(n)}  # fmt: skip
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(device), "NHD", use_tensor_cores=shape.group > 1, **buffers
            )
        else:
            if batch.fixed:
                buffers = {"use_cuda_graph": True, "qo_indptr_buf": ints(n + 1), "paged_kv_indptr_buf": ints(n + 1),
                           "paged_kv_indices_buf": ints(most), "paged_kv_last_page_len_buf": ints(n)}  # fmt: skip
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD", **buffers)
        self.refresh(batch)

    def refresh(self, batch: Batch) -> None:
        shape = self._shape
        indptr, indices, last = constant_table(batch.slots, batch.lengths, self.page, self.pages)
        table = [torch.from_numpy(x) for x in (indptr, indices, last)]
        table[1] = table[1].pin_memory().to(batch.device, non_blocking=True)
        options = {
            "window_left": shape.window - 1, "logits_soft_cap": shape.softcap, "q_data_type": shape.q_dtype,
            "kv_data_type": shape.kv_dtype, "sm_scale": self._scale,
        }  # fmt: skip
        heads = shape.query_heads, shape.kv_heads, shape.head_dim, self.page
        if shape.phase == "decode":
            self.wrapper.plan(*table, *heads, **options)
        else:
            ends = np.zeros(len(batch) + 1, np.int32)
            np.cumsum(batch.query_lengths, out=ends[1:])
            self.wrapper.plan(torch.from_numpy(ends), *table, *heads, causal=True, **options)

    def paged(self, x: torch.Tensor) -> torch.Tensor:
        """The cache's layer as the table's pages, ``[pages, page, heads, dim]``, without a copy."""
        slots, tokens, heads, dim = x.shape
        pages = max(((slots - 1) * self.pages * self.page + tokens) // self.page, 1)
        return x.as_strided((pages, self.page, heads, dim), (self.page * x.stride(1), *x.stride()[1:]))


def constant_table(slots: Int32s, lengths: Int32s, page: int, pages: int) -> tuple[Int32s, Int32s, Int32s]:
    """(indptr, indices, rows of the last page) of slots and lengths, int32; `pages` pages of `page` rows per slot."""
    count = -(-lengths // page)
    indptr = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(count, out=indptr[1:])
    first = slots.astype(np.int32) * pages - indptr[:-1]
    indices = np.repeat(first, count) + np.arange(indptr[-1], dtype=np.int32)
    return indptr, indices.astype(np.int32), (lengths - (count - 1) * page).astype(np.int32)


class FlashInfer(Kernel):
    """FlashInfer."""

    name = "flashinfer"
    dtypes = (BF16, FP16)
    mixed = ((BF16, FP8), (FP16, FP8))
    head_dims = (64, 128, 256)

    def tile_rows(self, shape: Shape) -> int:
        """1; with a window, the tile in which the window begins may be loaded whole."""
        return 128 if shape.window else 1

    def refusal(self, shape: Shape) -> str | None:
        reason = super().refusal(shape)
        if reason is None and shape.head_dim not in self.head_dims:
            reason = f"head_dim {shape.head_dim} (only {', '.join(map(str, self.head_dims))})"
        return reason

    def unavailable(self, shape: Shape) -> str | None:
        if importlib.util.find_spec("flashinfer") is None:
            return "FlashInfer is not installed (pip install flashinfer-python)"
        return None

    def plan(self, call: Call) -> _Table | None:
        batch, shape = call.batch, call.shape
        few = len(batch) <= FEW and not batch.fixed and shape.q_dtype == shape.kv_dtype
        return None if shape.phase == "prefill" and few else _Table(call)

    def run(self, call: Call) -> torch.Tensor:
        table = call.plan
        if table is None:
            return self._one_by_one(call)
        out: torch.Tensor = table.wrapper.run(call.q, (table.paged(call.k), table.paged(call.v)), out=call.out)
        return out

    def _one_by_one(self, call: Call) -> torch.Tensor:
        """Prefill with K and V as tensors of exactly each request's rows, one launch each: up to a fifth faster."""
        import flashinfer

        shape = call.shape
        outs = [
            flashinfer.single_prefill_with_kv_cache(
                call.q[rows], call.k[slot, :length], call.v[slot, :length], causal=True,
                sm_scale=call.softmax_scale, window_left=shape.window - 1, logits_soft_cap=shape.softcap,
            )
            for slot, length, rows in call.batch.requests()
        ]  # fmt: skip
        if call.out is None:
            return outs[0] if len(outs) == 1 else torch.cat(outs)
        return torch.cat(outs, out=call.out)
