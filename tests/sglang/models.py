"""Tiny models with random weights, one for each kind of attention that SGLang's CPU engine runs."""

import functools
import tempfile
from pathlib import Path

import torch

_folder = tempfile.TemporaryDirectory()
COMMON = dict(vocab_size=512, max_position_embeddings=2048, initializer_range=0.15, dtype="float32")


def _config(kind):
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

    if kind in ("mha", "gqa"):
        heads = 4 if kind == "mha" else 2
        return LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                           num_key_value_heads=heads, head_dim=128, tie_word_embeddings=False, **COMMON)  # fmt: skip
    if kind == "wide":  # 32 MiB in its embeddings, which vLLM keeps as they are, too
        return LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
                           **dict(COMMON, vocab_size=16000))  # fmt: skip
    if kind == "qwen2":
        return Qwen2Config(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=1, tie_word_embeddings=True, **COMMON)  # fmt: skip
    if kind == "qwen3":
        return Qwen3Config(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=4, head_dim=64, tie_word_embeddings=False, **COMMON)  # fmt: skip
    if kind == "windows":
        return Gemma3TextConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=128, sliding_window=128,
                                layer_types=["sliding_attention"] * 3 + ["full_attention"], **COMMON)  # fmt: skip
    raise ValueError(kind)


def _tokenizer():
    """A tokenizer of the words t0 to t511."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="t0", eos_token="t1", bos_token="t2")


@functools.cache
def model(kind):
    """The folder of a model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    path = Path(_folder.name, kind)
    AutoModelForCausalLM.from_config(_config(kind)).to(torch.float32).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return str(path)


@functools.cache
def adapter(kind):
    """The folder of a LoRA adapter for a model, in PEFT's format."""
    import json

    from safetensors.torch import save_file

    config, path = _config(kind), Path(_folder.name, f"{kind}-adapter")
    path.mkdir(exist_ok=True)  # forks make it, each for itself
    about = dict(peft_type="LORA", r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"], bias="none",
                 task_type="CAUSAL_LM", base_model_name_or_path=model(kind))  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(about))
    draw, rows = torch.Generator().manual_seed(3), {}
    for layer in range(config.num_hidden_layers):
        for name, heads in (("q_proj", config.num_attention_heads), ("v_proj", config.num_key_value_heads)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            rows[f"{base}.lora_A.weight"] = torch.randn(8, config.hidden_size, generator=draw) * 0.1
            rows[f"{base}.lora_B.weight"] = torch.randn(heads * config.head_dim, 8, generator=draw) * 0.1
    save_file(rows, path / "adapter_model.safetensors")
    return str(path)
