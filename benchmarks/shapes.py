"""Shapes of models whose engines `benchmarks` measures.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

# Weights are random (load_format "dummy" of vLLM and SGLang, the same in every engine).
SHAPES: dict[str, dict[str, Any]] = {
    "mini": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64, vocab_size=16000, rope_theta=10000.0),
    "tiny": dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
                 num_key_value_heads=4, head_dim=128, vocab_size=32000, rope_theta=10000.0),
    "llama-3-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=8, head_dim=128, vocab_size=128256, rope_theta=500000.0),
    # Five layers with a window of 1,024 tokens to one with full attention.
    "gemma-3-4b": dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], hidden_size=2560,
                       intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4,
                       head_dim=256, vocab_size=262208, rope_theta=1000000.0, rope_local_base_freq=10000.0,
                       sliding_window=1024, sliding_window_pattern=6, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
                       hidden_activation="gelu_pytorch_tanh"),
    # Latent attention, and experts.
    "deepseek-v2-lite": dict(model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], hidden_size=2048,
                             intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
                             num_attention_heads=16, num_key_value_heads=16, vocab_size=102400, rope_theta=10000,
                             kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
                             v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
                             first_k_dense_replace=1, moe_layer_freq=1, topk_method="greedy", n_group=1,
                             topk_group=1, scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0),
}  # fmt: skip


def known(model: str) -> bool:
    """True for a name of `SHAPES`, perhaps with a number of layers (llama-3-8b:16)."""
    return model.partition(":")[0] in SHAPES


def model_name(text: str) -> str:
    """A type of argument: a name of `SHAPES`, perhaps with a number of layers, or a path."""
    name, colon, layers = text.partition(":")
    if colon and name in SHAPES:
        most = SHAPES[name]["num_hidden_layers"]
        if not (layers.isdecimal() and 1 <= int(layers) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} must have 1 to {most} layers, as in {name}:{most // 2}")
    return text


def write_config(folder: Any, shape: str, max_model_len: int) -> None:
    """config.json of a shape."""
    name, _, layers = shape.partition(":")
    common = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", max_position_embeddings=max_model_len,
        rms_norm_eps=1e-5, torch_dtype="bfloat16", hidden_act="silu", tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**common, **SHAPES[name], **(dict(num_hidden_layers=int(layers)) if layers else {})}, file)
