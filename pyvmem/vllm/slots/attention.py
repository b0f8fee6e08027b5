"""Attention by slots, vLLM's attention backend CUSTOM.

Decode steps of many requests run `kernels.decode`, which reads from a request's first row to its last without
a block table. One kernel a layer also stores the new rows, for which vLLM has a kernel of its own, and joins the parts
of its result. Prompts and mixed steps use FlashAttention over the constant table, as with vLLM's own backend.

`pyvmem.vllm.platform` chooses it where vLLM would choose FlashAttention 3 by itself. Its builder asks whether the KV
cache is in slots: until then, and where it is not, every step uses FlashAttention.

SPDX-License-Identifier: MIT
"""

from typing import Any

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from pyvmem.vllm.slots import memory
from pyvmem.vllm.slots.kernels import LEAST, Work, decode


def window_of(impl: Any) -> int:
    """Tokens that a layer's query sees, including itself; 0 for all."""
    return int(impl.sliding_window[0]) + 1


class SlotsBackend(FlashAttentionBackend):
    supports_kv_cache_update_bypass = False  # the attention kernel stores new rows

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
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 256 and super().supports_head_size(head_size)  # tiles of more need too much shared memory

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_sink = supports_non_causal = supports_mm_prefix = _no
    supports_batch_invariance = _no  # how a request's rows are cut into parts depends on the other requests

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"


def unsupported(asked: Any) -> list[str]:
    """Why a layer for which vLLM chose FlashAttention keeps it. asked: vLLM's `AttentionSelectorConfig` of the layer.

    Slots replace FlashAttention 3 alone, vLLM's choice on Hopper: on other GPUs the kernel was not measured.
    """
    config = get_current_vllm_config()
    capability = current_platform.get_device_capability()
    reasons: list[str] = SlotsBackend.validate_configuration(device_capability=capability, **asked._asdict())
    version = get_flash_attn_version(head_size=asked.head_size)
    if version != 3:
        reasons.append(f"FlashAttention {version}")
    if config.attention_config.flash_attn_version is not None:
        reasons.append("a chosen version of FlashAttention")
    mode = config.compilation_config.cudagraph_mode
    if mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL:
        reasons.append("full CUDA graphs of mixed steps")
    return reasons


class SlotsBuilder(FlashAttentionMetadataBuilder):
    # The number of new tokens per request selects the kernel, so a graph serves only steps with the captured number.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._most = most = vllm_config.scheduler_config.max_num_seqs
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names) if memory.active else {}
        impls = [] if self.rswa_window else [layer.impl for layer in layers.values() if layer.impl.by_slots]
        # By the window of their layers.
        self._works = {w: Work(most, device, impls[0].num_kv_heads, w) for w in {window_of(impl) for impl in impls}}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        decodes = bool(self._works) and common_attn_metadata.max_query_len == 1
        decodes = decodes and LEAST <= common_attn_metadata.num_reqs <= self._most
        metadata = super().build(0, common_attn_metadata, fast_build or decodes)
        metadata.works = self._works if decodes else None
        if decodes:
            for work in self._works.values():
                work.plan(metadata.seq_lens)
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class SlotsImpl(FlashAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM does not tell `SlotsBackend` about ALiBi. Such layers use FlashAttention in every step.
        self.by_slots = self.alibi_slopes is None and self.sinks is None
        # The attention kernel stores a decode step's new rows. A layer that shares another's rows stores none.
        self.stores = self.by_slots and self.kv_sharing_target_layer_name is None

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        # `forward` sees the same context: vLLM runs both in the same step, or captures both in the same graph.
        metadata = get_attention_context(layer.layer_name)[0] if self.stores else None
        if not (metadata and metadata.works):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

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
        works = self.by_slots and attn_metadata and attn_metadata.works
        if not works or output_scale is not None or output_block_scale is not None:
            if works and self.stores:
                super().do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                                   output_block_scale)  # fmt: skip
        n = attn_metadata.num_actual_tokens
        new = (key[:n], value[:n], attn_metadata.slot_mapping) if self.stores else None
        decode(query[:n], kv_cache, output[:n], attn_metadata.block_table, attn_metadata.seq_lens,
               works[window_of(self)], self.scale, self.logits_soft_cap, new)  # fmt: skip
        return output
