"""FlashAttention-2 in torch: ``aten::_flash_attention_forward`` with offsets of slots and lengths.

With `seqused_k` for the lengths, the offsets of K and V need not increase from request to request. Slots in any order
are therefore read in place. Loads past the length are masked.

SPDX-License-Identifier: MIT
"""

import torch

from pyvmem.attention.batch import Batch
from pyvmem.attention.kernel import BF16, FP16, Call, Kernel, Shape, flat_rows, slot_rows


class _Offsets:
    """The beginning of each request's rows: ``slot * rows``, int32[n + 1] on the device (the last is not used)."""

    def __init__(self, batch: Batch, rows: int) -> None:
        self._rows = rows
        self.starts = torch.zeros(len(batch) + 1, dtype=torch.int32, device=batch.device)
        self.refresh(batch)

    def refresh(self, batch: Batch) -> None:
        torch.mul(batch.slots_t, self._rows, out=self.starts[:-1])


class FlashAttention2(Kernel):
    """torch's FlashAttention-2."""

    name = "fa2"
    dtypes = (BF16, FP16)
    softcap = False

    def tile_rows(self, shape: Shape) -> int:
        """1; with a window, the tile in which the window begins is loaded whole."""
        return 128 if shape.window else 1

    def refusal(self, shape: Shape) -> str | None:
        reason = super().refusal(shape)
        if reason is None and shape.slots * shape.slot_rows >= 2**31:
            reason = f"{shape.slots} slots of {shape.slot_rows} rows (together under 2^31)"
        return reason

    def unavailable(self, shape: Shape) -> str | None:
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch is built without FlashAttention"
        return None

    def plan(self, call: Call) -> _Offsets:
        return _Offsets(call.batch, slot_rows(call.k))

    def run(self, call: Call) -> torch.Tensor:
        batch, window = call.batch, call.shape.window
        out = torch.ops.aten._flash_attention_forward(
            call.q, flat_rows(call.k), flat_rows(call.v), batch.cu_seqlens_q, call.plan.starts, batch.max_query,
            batch.max_length, 0.0, True, False, scale=call.softmax_scale, seqused_k=batch.lengths_t,
            window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
        )[0]  # fmt: skip
        return out if call.out is None else call.out.copy_(out)
