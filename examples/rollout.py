"""Reinforcement learning in one process: generate, train on the result, go on generating without a second prefill.

The sequences' KV cache and the training step share one budget, a KVPool. While the policy trains, the step borrows the
pages that no sequence needs. The sequences keep theirs, so the next round of generation continues where the last one
stopped: with an unchanged policy for some rounds, as in asynchronous methods, no token is computed again.

    python examples/rollout.py --device cuda          # the training step's memory comes out of the pool
    python examples/rollout.py                        # on a CPU, for which PyTorch has no memory pools: it does not

SPDX-License-Identifier: MIT
"""

import argparse
import contextlib
import inspect
import time

import torch
from reinforce import train
from transformers import LlamaConfig, LlamaForCausalLM

from pyvmem import KVPool, OutOfMemory, torch_pool
from pyvmem.transformers import VMemCache

MIB = 1 << 20


def small_model(layers, width):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), max_position_embeddings=8192,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )).eval()  # fmt: skip


def generate(model, cache, sequences, new):
    """Continue the sequences by so many tokens. Their rows in the cache stay, and only the last token is computed."""
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    return model.generate(
        sequences, attention_mask=torch.ones_like(sequences), **{named: cache}, max_new_tokens=new, do_sample=True,
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pool", type=int, help="bytes for the KV cache and the training step (64 MiB; cuda: 8 GiB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens (256)")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate in each round (16)")
    args = parser.parse_args()
    cuda = torch.device(args.device).type == "cuda"
    size = (8, 1024) if cuda else (2, 128)
    dtype = torch.bfloat16 if cuda else torch.float32  # in float32, PyTorch's attention stores all scores
    actor, policy = (small_model(*size).to(args.device, dtype) for _ in range(2))
    actor.set_attn_implementation("vmem")
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)

    budget = args.pool or (8 << 30 if cuda else 64 * MIB)
    with KVPool(budget) as pool:
        cache = VMemCache(actor, pool=pool, name="rollout")
        sequences = torch.randint(2, 512, (args.sequences, args.prompt), device=args.device)
        sequences = generate(actor, cache, sequences, args.new)
        if cuda:
            lease = torch_pool(pool)
        else:
            print("on a CPU, PyTorch has no memory pools: the training step allocates outside the pool")
        for round in range(args.rounds):
            start = time.perf_counter()
            advantages = torch.randn(args.sequences, device=args.device)  # of a reward model's
            try:
                with lease if cuda else contextlib.nullcontext():  # pages come here, and go at the end
                    loss = train(policy, optimizer, sequences, advantages)
            except (OutOfMemory, torch.OutOfMemoryError):  # on entering the block, or within
                help = f"a --pool of more than {budget} bytes, fewer --sequences or a shorter --prompt"
                raise SystemExit(f"no memory for the training step; what helps: {help}") from None
            trained = time.perf_counter()
            known, before = cache.get_seq_length(), sequences.shape[1]
            sequences = generate(actor, cache, sequences, args.new)
            generated = time.perf_counter()
            has = ", ".join(f"{m.name} {m.held / MIB:.1f}" for m in pool.members())
            print(
                f"round {round}: loss {loss:.4f}, {trained - start:.2f} s; {args.sequences} x {args.new} new tokens, "
                f"{known} of {before} before them not computed again, {generated - trained:.2f} s; MiB: {has}"
            )
        if cuda:
            stats = lease.stats()
            print(f"{stats.parks} segments parked, {stats.bytes / MIB:.0f} MiB lent in each round")
            lease.close()
        cache.close()


if __name__ == "__main__":
    main()
