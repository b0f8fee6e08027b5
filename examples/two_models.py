"""Two models over one pool of memory: what one does not need, the other can have.

Both caches are in one Context, whose budget is the pool. Each takes pages as its sequences grow. When one runs out, the
other gives back what it only keeps for later, and the call is made again.

    python examples/two_models.py

SPDX-License-Identifier: MIT
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pyvmem import Context, OutOfMemory
from pyvmem.transformers import VMemCache

MIB = 1 << 20
SIZE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def generate(model, cache, other, batch, tokens, new=8):
    """Greedy tokens of random prompts; the other cache gives memory up where there is too little."""
    ids = torch.randint(2, 256, (batch, tokens), generator=torch.Generator().manual_seed(batch))
    ids = ids.to(model.device)
    for attempt in (1, 2):
        cache.reset()
        try:
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, do_sample=False
            )
        except OutOfMemory as error:
            if attempt == 2:
                raise
            given = other.trim()
            print(f"  {error}")
            print(f"  the other cache gives {given / MIB:.2f} MiB back")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pool", type=int, default=8 * MIB, help="bytes for both (8 MiB)")
    args = parser.parse_args()
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZE)).eval().to(args.device)
    qwen = Qwen3ForCausalLM(Qwen3Config(**SIZE)).eval().to(args.device)
    with Context("host" if args.device == "cpu" else None, budget=args.pool) as pool:
        caches = [VMemCache(m, context=pool, budget=args.pool, name=n) for m, n in ((llama, "llama"), (qwen, "qwen"))]
        for batch, tokens in ((2, 600), (1, 100), (4, 400)):
            for name, model, cache, other in (("llama", llama, *caches), ("qwen", qwen, *caches[::-1])):
                model.set_attn_implementation("vmem")
                generate(model, cache, other, batch, tokens)
                held = [0 if c.stats() is None else c.stats().held_pages * c.stats().page_size / MIB for c in caches]
                print(f"{name}: {batch} x {tokens} tokens; llama holds {held[0]:.2f} MiB, qwen {held[1]:.2f} MiB")
                cache.reset()
        for cache in caches:
            cache.close()


if __name__ == "__main__":
    main()
