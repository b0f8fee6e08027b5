"""Two models over one pool of memory: what one does not need, the other can have.

The caches of both models are members of a KVPool. The budget of each grows as its sequences do. If the pool has too
little left, the forward pass waits: the other member gives back what it only keeps for its next sequences, down to its
minimum. With a name (`KVPool(bytes, name="models")`), the models can be in different processes.

    python examples/two_models.py

SPDX-License-Identifier: MIT
"""

import argparse
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pyvmem import KVPool, OutOfMemory
from pyvmem.transformers import VMemCache

MIB = 1 << 20
SIZE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def generate(model, cache, batch, tokens, new=8):
    """Greedy tokens of random prompts. The cache keeps the rows until its `reset`."""
    ids = torch.randint(2, 256, (batch, tokens), generator=torch.Generator().manual_seed(batch))
    ids = ids.to(model.device)
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), **{named: cache}, max_new_tokens=new, do_sample=False
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pool", type=int, default=8 * MIB, help="bytes for both (8 MiB)")
    args = parser.parse_args()
    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZE)).eval().to(args.device),
        "qwen": Qwen3ForCausalLM(Qwen3Config(**SIZE)).eval().to(args.device),
    }
    with KVPool(args.pool) as pool:
        caches = {name: VMemCache(model, pool=pool, pool_min=MIB, name=name) for name, model in models.items()}
        for batch, tokens in ((2, 600), (1, 100), (4, 400)):
            for name, model in models.items():
                model.set_attn_implementation("vmem")
                generate(model, caches[name], batch, tokens)
                budgets = ", ".join(f"{m.name} has {m.has / MIB:.2f} MiB" for m in pool.members())
                print(f"{name}: {batch} x {tokens} tokens; {budgets}")
                caches[name].reset()

        generate(models["llama"], caches["llama"], 4, 400)  # and keeps these sequences
        try:
            generate(models["qwen"], caches["qwen"], 4, 400)
        except OutOfMemory as error:
            print(f"qwen, while llama needs its memory: {error}")
        for cache in caches.values():
            cache.close()


if __name__ == "__main__":
    main()
