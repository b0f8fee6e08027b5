"""Tiny models with random weights, large enough to make tokens differ, and a tokenizer of words ``t3 t4 ..``."""

import json
import os

import torch

BASE = dict(vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=4096,
            rms_norm_eps=1e-5, initializer_range=0.08, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
            pad_token_id=0)  # fmt: skip
HEADS = dict(num_key_value_heads=2, head_dim=64)
EXPERTS = dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
               shared_expert_intermediate_size=128)  # fmt: skip
MODELS = {
    "llama": dict(BASE, **HEADS, model_type="llama", intermediate_size=512),
    "five layers": dict(BASE, **HEADS, model_type="llama", intermediate_size=512, num_hidden_layers=5),
    "qwen3": dict(BASE, **HEADS, model_type="qwen3", intermediate_size=512),
    "mimo": dict(BASE, model_type="qwen2", num_key_value_heads=2, intermediate_size=512),  # see write_mtp
    "gemma3": dict(BASE, **HEADS, model_type="gemma3_text", num_hidden_layers=6, intermediate_size=512,
                   sliding_window=256, sliding_window_pattern=6, query_pre_attn_scalar=64,
                   layer_types=["sliding_attention"] * 5 + ["full_attention"]),
    "deepseek": dict(BASE, model_type="deepseek_v2", intermediate_size=512, num_key_value_heads=4, kv_lora_rank=512,
                     q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
                     first_k_dense_replace=4),
    "qwen2moe": dict(BASE, **EXPERTS, model_type="qwen2_moe", intermediate_size=512, num_key_value_heads=2),
    "mixtral": dict(BASE, model_type="mixtral", intermediate_size=256, num_key_value_heads=2, num_local_experts=4,
                    num_experts_per_tok=2),
    "next": dict(BASE, **HEADS, **EXPERTS, model_type="qwen3_next", intermediate_size=512, full_attention_interval=4,
                 linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
                 linear_conv_kernel_dim=4, mlp_only_layers=[]),
    "gptoss": dict(BASE, **HEADS, model_type="gpt_oss", intermediate_size=256, num_local_experts=4,
                   num_experts_per_tok=2, sliding_window=128),
}  # fmt: skip


def write(name, folder):
    """Write a model and its tokenizer, once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        about = dict(MODELS[name])
        config = AutoConfig.for_model(about.pop("model_type"), **about)
        AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).save_pretrained(folder)
        write_tokenizer(folder)
        if name == "mimo":
            write_mtp(folder)
    return folder


def write_mtp(folder):
    """Make a Qwen2 a MiMo: the same with one layer that drafts the next token."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config.update(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    (folder / "config.json").write_text(json.dumps(config))
    weights, mtp, first = load_file(folder / "model.safetensors"), "model.mtp_layers.0", "model.layers.0"
    weights.update({name.replace(first, mtp): w.clone() for name, w in weights.items() if name.startswith(f"{first}.")})
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{mtp}.{name}.weight"] = torch.ones(256)
    weights[f"{mtp}.input_proj.weight"] = torch.randn(256, 512) * 0.08
    save_file(weights, folder / "model.safetensors")


def write_eagle(folder):
    """Write an EAGLE head of "llama": one layer of it behind the target's last."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    about = dict(MODELS["llama"], num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(about.pop("model_type"), **about))
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(config, architectures=["LlamaForCausalLM"])))
    layers = {name: w for name, w in model.state_dict().items() if name.startswith("model.layers.")}
    weights = {
        name.removeprefix("model."): w.contiguous() for name, w in layers.items() if "input_layernorm" not in name
    }
    save_file(weights | {"fc.weight": torch.randn(256, 512) * 0.08}, folder / "model.safetensors")
    return folder


def write_whisper(folder):
    """Write a Whisper: an encoder, and a decoder that hears two seconds of sound."""
    from transformers import AutoTokenizer, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers import WhisperProcessor

    torch.manual_seed(0)
    both = {f"{part}_{what}": n for part in ("encoder", "decoder")
            for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 512))}  # fmt: skip
    tokens = {name: BASE[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    model = WhisperForConditionalGeneration(WhisperConfig(
        **tokens, **both, d_model=256, num_mel_bins=80, max_source_positions=100, max_target_positions=1024,
        init_std=0.2, decoder_start_token_id=3, begin_suppress_tokens=None, suppress_tokens=None))  # fmt: skip
    with torch.no_grad():  # else it says one word
        model.model.decoder.embed_tokens.weight.mul_(0.1)
        model.model.decoder.embed_positions.weight.mul_(0.1)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    extractor = WhisperFeatureExtractor(feature_size=80, sampling_rate=16000, hop_length=160, chunk_length=2, n_fft=400)
    WhisperProcessor(extractor, AutoTokenizer.from_pretrained(folder)).save_pretrained(folder)
    return folder


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"t{i}": i for i in range(3, 1000)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                   unk_token="<pad>")  # fmt: skip
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def write_lora(folder):
    """Write an adapter of "llama"."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(3)
    weights = {}
    for layer in range(4):
        for name, out in (("q_proj", 256), ("v_proj", 128)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, 256) * 0.1
            weights[f"{key}.lora_B.weight"] = torch.randn(out, 8) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", bias="none",
        base_model_name_or_path="llama")))  # fmt: skip
    return folder
