"""Attention by slots: a backend that vLLM knows as CUSTOM (``--attention-backend CUSTOM``).

Decode steps run `slot_kernels`, which go from a request's first row to its last without a block table. All else,
prompts and mixed steps, is FlashAttention over the constant table, as with vLLM's own backend.

SPDX-License-Identifier: MIT
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from pyvmem.vllm import slot_kernels as kernels

BLOCK_N = 64  # rows that are loaded together
LOG2E = math.log2(math.e)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def _parts(device: torch.device, group: int, dim: int) -> Any:
    """(programs, results of parts, logarithms of their sums): every layer's, one after the other."""
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    shape = (2 * programs, group)
    return programs, torch.empty(*shape, dim, device=device), torch.empty(*shape, device=device)


@dataclass(frozen=True)
class Rows:
    """A decode step's work, the same for all layers. ends: int32[requests], see `slot_kernels.plan`."""

    ends: torch.Tensor
    window: int
    most: int  # a power of 2 that no step has more requests than


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    rows: Any,
    scale: float,
    softcap: float,
) -> None:
    """Attention of one new token of each request.

    Parameters
    ----------
    query, out : torch.Tensor
        ``[requests, heads, dim]``
    kv_cache : torch.Tensor
        ``[blocks, KV heads, tokens, 2 * dim]``: K, then V.
    table : torch.Tensor
        int32[requests, ...]; only its first column is read: the request's first block, which the others follow.
    lengths : torch.Tensor
        int32[requests]: rows, that of the new token among them.
    rows : Rows
    """
    requests, heads, dim = query.shape
    kv_heads, tokens = kv_cache.shape[1:3]
    group = heads // kv_heads
    programs, partial, lse = _parts(query.device, group, dim)
    common = dict(HEADS=kv_heads, GROUP=group, GROUP_PAD=max(_power(group), 16), DIM=dim, DIM_PAD=max(_power(dim), 16))
    kernels.decode[(programs,)](
        query, kv_cache, out, partial, lse, table, lengths, rows.ends,
        scale if softcap else scale * LOG2E, softcap, rows.window, requests,
        query.stride(0), query.stride(1), table.stride(0), kv_cache.stride(0), kv_cache.stride(2), kv_cache.stride(1),
        dim, out.stride(0), out.stride(1),
        **common, TOKENS=tokens, BLOCK_N=BLOCK_N, WINDOW=rows.window > 0, SOFTCAP=softcap > 0, REQUESTS=rows.most,
        num_warps=4, num_stages=3 if dim <= 128 else 2,
    )  # fmt: skip
    kernels.join[(requests, kv_heads)](out, partial, lse, rows.ends, programs, out.stride(0), out.stride(1), **common)


class SlotsBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        return SlotsImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return SlotsBuilder

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype in (None, "auto", "float16", "bfloat16")

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"


class SlotsBuilder(FlashAttentionMetadataBuilder):
    # A graph serves steps with as many new tokens of each request as it was captured with: they choose the kernel.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._most = _power(max(most, graphs))
        self._window = getattr(kv_cache_spec, "sliding_window", None) or 0
        self._ends = torch.zeros(self._most, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        decodes = common_attn_metadata.max_query_len == 1
        metadata = super().build(0, common_attn_metadata, fast_build or decodes)
        metadata.rows = None
        if decodes:
            lengths = metadata.seq_lens
            kernels.plan[(1,)](self._ends, lengths, lengths.shape[0], self._window, REQUESTS=self._most,
                               BLOCK_N=BLOCK_N)  # fmt: skip
            metadata.rows = Rows(self._ends, self._window, self._most)
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class SlotsImpl(FlashAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None or self.sinks is not None:
            raise ValueError("attention by slots (CUSTOM) has neither ALiBi nor sinks; use --attention-backend "
                             "FLASH_ATTN")  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        rows = attn_metadata and attn_metadata.rows
        if not rows or output_scale is not None or output_block_scale is not None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                                   output_block_scale)  # fmt: skip
        n = attn_metadata.num_actual_tokens
        decode(query[:n], kv_cache, output[:n], attn_metadata.block_table, attn_metadata.seq_lens, rows, self.scale,
               self.logits_soft_cap)  # fmt: skip
        return output
