"""Continuous batching over a KVCache: the serving loop of the vAttention paper (Algorithm 1) with a transformers model.

Requests come and go between iterations. Each iteration adds a token to every running request and a chunk of a prompt
to every new one, in one forward pass without padding. Before it, `step` backs the rows; where that fails, the newest
request is preempted and computed anew later. Prompts that begin alike share pages. Tokens stream out as they come.

    python examples/continuous_batching.py                        # a small random model, on CPU memory
    python examples/continuous_batching.py --model NAME --device cuda --budget 8000000000

SPDX-License-Identifier: MIT
"""

import argparse
import random
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pyvmem import KVCache, attention
from pyvmem.kv.prefix import PrefixCache, block_hashes

BLOCK = 32  # tokens to a block of a prefix


@dataclass
class Request:
    id: int
    prompt: list
    new: int  # tokens wanted
    output: list = field(default_factory=list)
    slot: int = -1
    done: int = 0  # tokens whose rows are written

    @property
    def tokens(self):
        return self.prompt + self.output


class Engine:
    """Requests in, tokens out. budget: bytes of pages; chunk: prompt tokens that an iteration takes of one request."""

    def __init__(self, model, slots, max_tokens, budget, chunk=64, **options):
        c = model.config
        heads, dim = c.num_key_value_heads, c.head_dim
        backend = "host" if model.device.type == "cpu" else None
        if model.device.type == "cuda":  # the rows that a kernel loads together are backed together
            options["tile_rows"] = attention.tile_rows("fa3", c.num_attention_heads, heads, dim, model.dtype)
        self.cache = KVCache.for_model(
            c.num_hidden_layers, heads, dim, slots, max_tokens, budget, dtype=model.dtype, backend=backend, **options
        )
        self.prefixes = PrefixCache(self.cache, BLOCK)
        self.model, self.chunk = model, chunk
        self.waiting, self.running, self.preemptions = deque(), [], 0
        self.full = False  # something was preempted: nobody comes in before somebody has ended
        AttentionInterface.register("example-engine", self.attend)
        model.set_attn_implementation("example-engine")

    def submit(self, request):
        limit = self.cache.max_tokens
        if len(request.prompt) + request.new > limit:
            raise ValueError(f"request {request.id}: {len(request.prompt)} + {request.new} tokens; {limit} at most")
        self.waiting.append(request)

    def admit(self):
        """Give waiting requests slots; what is known of their prompts is in them already."""
        while self.waiting and not self.full:
            tokens = self.waiting[0].tokens
            slot, cached = self.prefixes.alloc(len(tokens), block_hashes(tokens, BLOCK))
            if slot is None:
                return
            request = self.waiting.popleft()
            request.slot, request.done = slot, cached
            self.running.append(request)

    def release(self, request, back=False):
        """Take a request's slot; with `back`, it waits to be computed anew."""
        self.running.remove(request)
        self.cache.free(request.slot)
        self.full = back
        if back:
            self.waiting.appendleft(request)
            self.preemptions += 1

    def schedule(self):
        """Back the rows of the coming iteration. Returns [(request, tokens it takes)]."""
        self.admit()
        while self.running:
            batch = [(r, min(self.chunk, len(r.tokens) - r.done)) for r in self.running]
            lengths = [0] * self.cache.slots
            for request, count in batch:
                lengths[request.slot] = request.done + count
            if self.cache.step(lengths):
                return batch
            if len(self.running) == 1:
                raise MemoryError(f"request {self.running[0].id} alone needs more than the budget")
            self.release(self.running[-1], back=True)
        return []

    def attend(self, module, query, key, value, mask, scaling=None, **kwargs):
        """The model's attention: write the new rows where they belong, then read each slot by its length."""
        layer = module.layer_idx
        self.cache.keys[layer].index_put_(self.rows, key[0].transpose(0, 1))
        self.cache.values[layer].index_put_(self.rows, value[0].transpose(0, 1))
        q = query[0].transpose(0, 1).contiguous()  # [tokens, heads, dim], request after request
        return attention.prefill(q, self.cache, layer, self.batch, softmax_scale=scaling)[None], None

    @torch.inference_mode()
    def iterate(self):
        """One iteration. Yields (request, token) for each new token."""
        batch = self.schedule()
        if not batch:
            return
        ids = [t for r, n in batch for t in r.tokens[r.done : r.done + n]]
        positions = [p for r, n in batch for p in range(r.done, r.done + n)]
        slots = [r.slot for r, n in batch for _ in range(n)]
        ids, positions, slots = (torch.tensor(x, device=self.model.device) for x in (ids, positions, slots))
        self.rows = slots, positions
        self.batch = attention.Batch(
            self.cache, [r.slot for r, _ in batch], [r.done + n for r, n in batch], [n for _, n in batch]
        )
        logits = self.model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
        ends = torch.tensor([n for _, n in batch]).cumsum(0) - 1
        tokens = logits[ends.to(logits.device)].argmax(-1).tolist()
        for (request, count), token in zip(batch, tokens):
            request.done += count
            if request.done < len(request.tokens):
                continue  # more of the prompt is to come
            if not request.output:
                hashes = block_hashes(request.prompt, BLOCK)
                self.prefixes.add(request.slot, hashes)  # its rows are written: tolist() waited for them
            request.output.append(token)
            yield request, token
            if len(request.output) == request.new:
                self.release(request)

    def run(self):
        """Until nothing is left to do, yield (request, token)."""
        while self.waiting or self.running:
            yield from self.iterate()

    def close(self):
        self.cache.close()


def small_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=1024, bos_token_id=1, eos_token_id=None,
    )).eval()  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of transformers with Llama's attention (a small random one)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--budget", type=int, default=4 << 20, help="bytes of pages (4 MiB)")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto") if args.model else small_model()
    engine = Engine(model.to(args.device), slots=8, max_tokens=512, budget=args.budget)
    draw = random.Random(1)
    system = [draw.randrange(2, 512) for _ in range(96)]  # every prompt begins alike
    for i in range(args.requests):
        engine.submit(Request(i, system + [draw.randrange(2, 512) for _ in range(draw.randrange(5, 150))], 20))
    for request, token in engine.run():
        print(f"request {request.id}: {token}", flush=True)
    stats = engine.cache.stats()
    print(f"{engine.preemptions} preemptions, {stats.hit_tokens} tokens from prefixes, {stats.steps} iterations")
    engine.close()


if __name__ == "__main__":
    main()
