"""Small, randomly initialised models of transformers' own classes, one of each kind of cache.

SPDX-License-Identifier: MIT
"""

import torch
import transformers

_BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENTS = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_nope_head_dim": 8, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_MAMBA = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
_PER_LAYER = {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "sliding_window": 8}
_SHARED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),  # sliding windows
    "gemma2": ("Gemma2", {"sliding_window": 8}),  # and full layers in turns, soft cap
    "gemma3": ("Gemma3Text", {"sliding_window": 8, "num_hidden_layers": 6}),
    "gemma3n": ("Gemma3nText", {"num_hidden_layers": 4, "num_kv_shared_layers": 1, "laurel_rank": 8,
                                "layer_types": _SHARED, **_PER_LAYER}),  # layers that read other layers' rows
    "gemma4": ("Gemma4Text", {"global_head_dim": 32, "num_kv_shared_layers": 0, **_PER_LAYER}),  # shapes that differ
    "gemma4_shared": ("Gemma4Text", {"global_head_dim": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                                     "layer_types": _SHARED, **_PER_LAYER}),  # and that trim a prompt
    "mixtral": ("Mixtral", _EXPERTS),
    "qwen3_moe": ("Qwen3Moe", _QWEN_EXPERTS),
    "gpt_oss": ("GptOss", {"sliding_window": 8, **_EXPERTS}),  # attention sinks
    "llama4": ("Llama4Text", {"attention_chunk_size": 8, "intermediate_size_mlp": 96, "num_local_experts": 2,
                              "num_hidden_layers": 4}),  # chunks
    "deepseek_v3": ("DeepseekV3", _LATENTS),  # latents
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_QWEN_EXPERTS}),  # linear attention beside attention
    "jamba": ("Jamba", {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                        "expert_layer_period": 2, "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "falcon_h1": ("FalconH1", _MAMBA),  # both in one layer
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "phi": ("Phi", {}),
    "moshi": ("Moshi", {"sliding_window": 8, "ffn_dim": 96}),  # windows in the cache, none in a prompt's mask
}  # fmt: skip


def tiny_config(name, **changes):
    """The configuration of a model of MODELS, with other settings."""
    family, extra = MODELS[name]
    base = _BASE if name != "gpt2" else {k: v for k, v in _BASE.items() if k.endswith("_id") or k == "vocab_size"}
    return getattr(transformers, family + "Config")(**{**base, **extra, **changes})


def tiny_model(name, seed=1, device="cpu", dtype=torch.float32, **changes):
    """A model of MODELS. The same name and seed give the same weights."""
    head = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    model_class = getattr(transformers, MODELS[name][0].removesuffix("Text") + head)
    config = tiny_config(name, **changes)
    torch.manual_seed(seed)
    return model_class(config).to(device=device, dtype=dtype).eval()


def prompts(batch=3, tokens=13, seed=0, device="cpu"):
    """Token ids, ``[batch, tokens]``, none of them the padding's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 96, (batch, tokens), generator=generator).to(device)
