"""A small model of every family of the installed transformers, from the defaults of its configuration.

SPDX-License-Identifier: MIT
"""
# ruff: noqa: E501  (a line for each kind of setting)

import re

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

VOCABULARY = 96
LAYERS = 4
MOST = 4_000_000  # parameters

# The first pattern that matches the whole name of a setting decides. A value of None keeps what is there.
# fmt: off
_SIZES = [
    (r".*vocab_size.*|.*vocabulary_size.*|num_tokens", VOCABULARY),
    (r".*_token_id|.*_token_index|.*_id", None),
    (r"num_nextn_predict_layers|num_mtp_layers|mtp_num_hidden_layers|num_mem_blocks", None),
    (r"num_kv_shared_layers|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"n_layers?|num_layers|num_hidden_layers|num_hidden_layers.*|encoder_layers|decoder_layers|depth|num_blocks", LAYERS),
    (r".*(num_key_value_heads|num_kv_heads|n_head_kv|kv_heads|kv_n_heads|num_global_key_value_heads)", 2),
    (r".*(num_attention_heads|n_heads?|num_heads|attention_heads|attn_heads|n_attention_heads)", 4),
    (r"linear_num_(key|value)_heads|index_n_heads|mamba_n_heads|mamba_num_heads", 4),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*lora_rank|laurel_rank|.*_low_rank_dim|.*_rank", 16),
    (r"qk_nope_head_dim|qk_rope_head_dim|rotary_dim|.*rope_dim|v_head_dim|qk_head_dim|index_head_dim", 8),
    (r"head_dim|attention_head_dim|d_kv|kv_channels|global_head_dim|linear_(key|value)_head_dim|.*head_dim", 16),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_state_dim|mamba_dt_rank|time_step_rank", 8),
    (r"mamba_d_ssm", 64), (r"mamba_d_head|mamba_head_dim", 16), (r"mamba_chunk_size|chunk_size", 16),
    (r".*(sliding_window|window_size|local_attention|attention_window|local_window|window)", 8),
    (r"attention_chunk_size", 8),
    (r"(n|num)_(routed_|local_)?experts|moe_num_experts|num_experts.*per_layer|n_routed_experts", 4),
    (r".*experts_per_tok.*|moe_top_?k|top_?k|num_selected_experts|moe_k|moe_topk", 2),
    (r"n_group|topk_group|n_groups|mamba_n_groups|num_groups|topk_groups", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r".*(intermediate_size|ffn_dim|ffn_size|d_ff|n_inner|inner_dim|ff_dim|mlp_dim|feedforward_dim|d_inner|intermediate_dim).*", 96),
    (r"hidden_size_per_layer_input", 8),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|emb_dim|n_embed|word_embed_proj_dim|lru_width|attention_hidden_size|embedding_dim)(_.*)?", 64),
    (r".*(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_target_positions|max_source_positions|seq_length|context_length|max_seq_length).*", 256),
    (r"image_size|input_size", 32), (r"patch_size", 8),
]
# fmt: on


def _sized(name, value):
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return value if size is None else min(value, size) if value > 0 else value
    return value


def _small(settings):
    out = {}
    counts = (settings.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"))
    count = next((n for n in counts if isinstance(n, int)), None)
    for name, value in settings.items():
        if isinstance(value, dict) and not name.startswith(("rope", "id2label", "label2id")):
            out[name] = _small(value)
        elif isinstance(value, list) and count and len(value) == count and count > LAYERS:
            out[name] = _shortened(value)
        else:
            out[name] = _sized(name, value)
    if "head_dim" in out and out.get("qk_rope_head_dim"):  # the rotary embedding of latents (MLA) reads head_dim
        out["head_dim"] = out["qk_rope_head_dim"]
    return out


def _shortened(values):
    """The first LAYERS, with each kind of layer among them if it fits."""
    kinds = list(dict.fromkeys(map(str, values)))
    if 1 < len(kinds) <= LAYERS:
        picked = []
        for kind in kinds:
            picked.append(next(i for i, v in enumerate(values) if str(v) == kind))
        for i in range(len(values)):
            if len(picked) == LAYERS:
                break
            if i not in picked:
                picked.append(i)
        return [values[i] for i in sorted(picked)]
    return values[:LAYERS]


def names(kinds=("causal", "seq2seq", "text")):
    """(model type, class name) of every family that generates tokens from tokens."""
    tables = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    seen, found = set(), []
    for kind in kinds:
        for model_type, each in tables[kind].items():
            for name in each if isinstance(each, (tuple, list)) else [each]:
                if name not in seen:
                    seen.add(name)
                    found.append((kind, model_type, name))
    return found


def _tokens(settings):
    """Special tokens that the small vocabulary has, and none that ends a sequence."""
    for name, value in settings.items():
        if name == "pad_token_id":
            settings[name] = 0
        elif name in ("decoder_start_token_id", "bos_token_id"):
            settings[name] = 1
        elif name == "eos_token_id" or name.startswith(("forced_", "suppress_", "begin_suppress_")):
            settings[name] = None
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            settings[name] = VOCABULARY - 1


def small_config(model_type):
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    settings = config_class().to_dict()
    for name in ("transformers_version", "architectures", "model_type", "torch_dtype", "dtype", "_name_or_path"):
        settings.pop(name, None)
    settings = _small(settings)
    for each in (settings, *(v for v in settings.values() if isinstance(v, dict) and "hidden_size" in v)):
        _tokens(each)
    return config_class(**settings)


def small_model(model_type, class_name):
    """A model with random weights. Raises whatever its class raises if the sizes do not fit it."""
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(small_config(model_type)).parameters())
    if parameters > MOST:
        raise ValueError(f"{parameters} parameters")
    torch.manual_seed(1)
    return model_class(small_config(model_type)).float().eval()
