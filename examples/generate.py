"""generate() with a VMemCache: one argument changes.

    python examples/generate.py                                   # a small random model, on CPU memory
    python examples/generate.py --model NAME --device cuda "Once upon a time"

SPDX-License-Identifier: MIT
"""

import argparse
import inspect

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pyvmem.transformers import VMemCache


def small_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )).eval()  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["vMem backs rows", "when they are written"])
    parser.add_argument("--model", help="a model of transformers (a small random one)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="vmem", help="vmem, sdpa, eager... (vmem)")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate (16)")
    args = parser.parse_args()
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        inputs = tokenizer(args.prompts, return_tensors="pt", padding=True).to(args.device)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device)
    else:  # bytes are its tokens, and the shorter prompts are padded on the left
        longest = max(len(p.encode()) for p in args.prompts)
        ids = torch.tensor([[0] * (longest - len(p.encode())) + list(p.encode()) for p in args.prompts])
        inputs = {"input_ids": ids.to(args.device), "attention_mask": (ids != 0).long().to(args.device)}
        model = small_model().to(args.device)
    model.set_attn_implementation(args.attention)

    cache = VMemCache(model)
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    out = model.generate(**inputs, **{named: cache}, max_new_tokens=args.new, do_sample=False)

    for prompt, row in zip(args.prompts, out[:, inputs["input_ids"].shape[1] :]):
        print(f"{prompt} -> {tokenizer.decode(row) if args.model else row.tolist()}")
    stats = cache.kv.stats()
    reserved = sum(t.numel() * t.element_size() for t in cache.kv.tensors)
    print(f"{stats.held_pages * stats.page_size >> 10} KiB of pages in {reserved >> 10} KiB of addresses")
    cache.close()


if __name__ == "__main__":
    main()
