"""Reinforcement learning with vLLM: generate, train on the result, go on generating from vLLM's prefix cache.

vLLM's KV cache and the training step share one budget, the pool that VMEM_VLLM_POOL names. While the policy trains, the
step borrows the memory that no sequence needs. The sequences' blocks stay in vLLM's prefix cache, so the next round
continues them where the last one stopped. The weights of the engine stay, too, as in asynchronous methods: new ones
would need `llm.reset_prefix_cache()`.

    python examples/rollout_vllm.py                                  # made-up weights: nothing is downloaded
    python examples/rollout_vllm.py --model Qwen/Qwen3-0.6B --pool 24576
    python examples/rollout_vllm.py --no-lease                       # PyTorch's own memory; the tokens must be the same

SPDX-License-Identifier: MIT
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import random
import tempfile
import time

import torch
from reinforce import train
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pyvmem import Context, OutOfMemory, torch_pool
from pyvmem.vllm import open_pool

MIB = 1 << 20


def write_model(folder, layers, width):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, max_position_embeddings=8192,
        initializer_range=0.08, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )).save_pretrained(folder)  # fmt: skip
    return folder


def start_engine(model, pool_bytes, **options):
    """vLLM on vMem, in this process and in a pool that has a name of its own."""
    os.environ.update(VMEM_VLLM="1", VMEM_VLLM_POOL=f"rollout-{os.getpid()}", VMEM_VLLM_POOL_SIZE=str(pool_bytes))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # it reads the variables

    return LLM(model, skip_tokenizer_init=True, enable_prefix_caching=True, kv_cache_memory_bytes=pool_bytes,
               gpu_memory_utilization=0.1, seed=0, **options)  # fmt: skip


def generate(llm, sequences, new):
    """Continue each sequence by `new` tokens. Returns them, and how many of their tokens vLLM had in its cache."""
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, seed=i) for i in range(len(sequences))]
    answers = llm.generate([{"prompt_token_ids": s} for s in sequences], params, use_tqdm=False)
    longer = [s + list(a.outputs[0].token_ids) for s, a in zip(sequences, answers)]
    return longer, sum(a.num_cached_tokens or 0 for a in answers)


def lease_of(pool, context):
    """PyTorch as a member of the pool."""
    if "gpu" in context.capabilities:
        return torch_pool(pool, context=context)
    print("on a CPU, PyTorch has no memory pools: the training step allocates outside the pool")
    return contextlib.nullcontext()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", help="a folder, or a name on Hugging Face's hub; by default made-up weights")
    parser.add_argument("--pool", type=int, help="MiB for the KV cache and the training step (64; on a GPU 8192)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=16 if cuda else 4)
    parser.add_argument("--prompt", type=int, default=2048 if cuda else 256, help="tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate in each round (32)")
    parser.add_argument("--no-lease", action="store_true", help="train in PyTorch's own memory, to compare the tokens")
    args = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("rollout_vllm: this Python has no vLLM: run the Python of vLLM's environment (docs/vllm.md)")

    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_model(folder, *((8, 1024) if cuda else (2, 128)))
        options = dict(dtype="bfloat16") if cuda else dict(dtype="float32", block_size=32, enforce_eager=True)
        most = args.prompt + (args.rounds + 1) * args.new
        llm = start_engine(model, (args.pool or (8192 if cuda else 64)) * MIB, max_model_len=most, **options)
        dtype = torch.bfloat16 if cuda else torch.float32
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to("cuda" if cuda else "cpu")
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)
    context = Context(device=0) if cuda else Context("host")
    pool = open_pool(context)
    lease = contextlib.nullcontext() if args.no_lease else lease_of(pool, context)

    draw = random.Random(0)
    sequences = [
        [draw.randrange(3, policy.config.vocab_size) for _ in range(args.prompt)] for _ in range(args.sequences)
    ]
    sequences, _ = generate(llm, sequences, args.new)
    for round in range(args.rounds):
        start = time.perf_counter()
        tensor = torch.tensor(sequences, device=policy.device)
        advantages = torch.randn(args.sequences, device=policy.device)  # of a reward model's
        try:
            with lease:  # pages come here, and go at the end
                loss = train(policy, optimizer, tensor, advantages)
                has = ", ".join(f"{m.name} {m.held / MIB:.1f}" for m in pool.members())
        except (OutOfMemory, torch.OutOfMemoryError):  # on entering the block, or within
            help = "a larger --pool, fewer --sequences or a shorter --prompt"
            raise SystemExit(f"no memory for the training step; what helps: {help}") from None
        trained = time.perf_counter()
        before = sum(map(len, sequences))
        sequences, known = generate(llm, sequences, args.new)
        print(
            f"round {round}: loss {loss:.4f}, {trained - start:.2f} s, MiB: {has}; {args.sequences} x {args.new} new "
            f"tokens, {known} of {before} before them not computed again, {time.perf_counter() - trained:.2f} s"
        )
    print("tokens", hashlib.sha256(str(sequences).encode()).hexdigest()[:12])


if __name__ == "__main__":
    main()
