"""Bytes that one request takes, by vLLM's own grouping of layers and its KVCacheManager: one line a model and length.

    python tests/vllm/memory.py            a table of Markdown, MiB

`need` is the request's rows and states themselves, `vLLM` the blocks that vLLM gives it. The rest is what pages behind
those blocks hold in the layout that vMem asks for: with the page size that vMem chooses, with pages of 64 KiB, and with
pages of 2 MiB, for blocks beside each other and for blocks of which no two are neighbours.
"""

import importlib
import math
import sys
from types import SimpleNamespace

import torch

from pyvmem.engine.memory import page_size
from pyvmem.vllm import layout

LENGTHS = 12, 1000, 32000
GPU = 128 << 30  # bytes of KV memory
SMALL, LARGE = 64 << 10, 2 << 20
SIZES = (64 << 10, 128 << 10, 256 << 10, 2 << 20)  # that the stock backend has


def planning():
    """The module of vLLM's that groups layers: 0.33 moved it."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def full(layers, heads, dim, block=16):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return {f"full{i}": FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=dim, dtype=torch.bfloat16)
            for i in range(layers)}  # fmt: skip


def window(layers, heads, dim, tokens):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return {f"window{i}": SlidingWindowSpec(block_size=16, num_kv_heads=heads, head_size=dim, dtype=torch.bfloat16,
                                            sliding_window=tokens) for i in range(layers)}  # fmt: skip


def latent(layers, block=64, dim=576, dtype=torch.bfloat16):
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return {f"latent{i}": MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=dim, dtype=dtype)
            for i in range(layers)}  # fmt: skip


def states(attention, row, layers, shapes, dtypes, unit=16, block=None):
    """Layers with states beside attention, whose blocks vLLM makes large enough for a state. row: bytes of a token."""
    from vllm.v1.kv_cache_interface import MambaSpec

    size = sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes))
    tokens = unit * -(-size // (unit * row))
    made = attention(tokens)
    for i in range(layers):
        made[f"state{i}"] = MambaSpec(
            block_size=tokens * -(-40000 // tokens), shapes=shapes, dtypes=dtypes,
            page_size_padded=tokens * row, mamba_cache_mode="none")  # fmt: skip
    return made


def models():
    half, single = torch.bfloat16, torch.float32
    gdn = (2 * 16 * 128 + 32 * 128, 3), (32, 128, 128)
    kda = (32 * 128 * 3, 3), (32, 128, 128)
    return {
        "Llama-3-8B": full(32, 8, 128),
        "Llama-3-70B, one of 8 GPUs": full(80, 1, 128),
        "Qwen2.5-7B": full(28, 4, 128),
        "Qwen3-30B-A3B": full(48, 4, 128),
        "DeepSeek-V3": latent(61),
        "gpt-oss-120b": {**full(18, 8, 64), **window(18, 8, 64, 128)},
        "Gemma-3-27B": {**full(10, 16, 128), **window(52, 16, 128, 1024)},
        "Qwen3-Next-80B": states(lambda n: full(12, 2, 256, n), 2 * 2 * 256 * 2, 36, gdn, (half, half)),
        "Kimi-Linear-48B": states(lambda n: latent(7, n), 1152, 20, kda, (half, single), 128),
        "Jamba-1.5-mini": states(lambda n: full(4, 8, 128, n), 8 * 2 * 128 * 2, 28, ((8192, 3), (8192, 16)),
                                 (half, single)),
    }  # fmt: skip


def config_of(specs):
    """vLLM's KVCacheConfig of these layers, a block's bytes, and the layout that vMem asks for."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    plan = planning()
    chosen = layout.order(["LBNHC", "BLNHC"], [s.page_size_bytes for s in specs.values()])[0]
    kind = KVCacheLayout[chosen]
    about = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: kind, num_gpu_blocks_override=None,
                                     prefix_cache_retention_interval=None, mamba_cache_mode="none"),
        attention_config=SimpleNamespace(hisparse_config=None), model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(), speculative_config=None)  # fmt: skip
    config = plan.get_kv_cache_config_from_groups(about, plan.get_kv_cache_groups(about, dict(specs)), GPU)
    block = layout.bytes_of(config) // config.num_blocks
    layout.spread(config)
    return config, block, chosen


def blocks_of(config, tokens):
    """The blocks of a request of so many tokens that computes 8,192 tokens a step, and then one more: by group."""
    import copy

    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.request import Request

    seen = generate_scheduler_kv_cache_config([copy.deepcopy(config)])
    sizes = [g.kv_cache_spec.block_size for g in seen.kv_cache_groups]
    manager = KVCacheManager(
        seen, max_model_len=40000, scheduler_block_size=math.lcm(*sizes), hash_block_size=math.gcd(*sizes),
        enable_caching=False, max_in_flight_tokens=8192)  # fmt: skip
    request = Request(request_id="a", prompt_token_ids=[7] * tokens, sampling_params=SamplingParams(max_tokens=8),
                      pooling_params=None)  # fmt: skip
    while request.num_computed_tokens < tokens:
        n = min(8192, tokens - request.num_computed_tokens)
        assert manager.allocate_slots(request, n) is not None
        request.num_computed_tokens += n
    manager.allocate_slots(request, 1)
    return [[b.block_id for b in ids if not b.is_null] for ids in manager.get_blocks("a").blocks]


def need_of(specs, tokens):
    """Bytes of the request's rows and states themselves."""
    found = 0
    for spec in specs.values():
        name = type(spec).__name__
        if name == "MambaSpec":
            found += sum(math.prod(s) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes))
        else:
            rows = min(tokens + 1, spec.sliding_window) if name == "SlidingWindowSpec" else tokens + 1
            found += spec.page_size_bytes // spec.block_size * rows
    return found


def held(ranges, ids, page):
    """Bytes of the pages behind blocks."""
    pages = set()
    for r in ranges:
        for number in ids:
            for n in range(r.layers):
                first = r.offset + n * r.layer_stride + number * r.stride
                pages.update(range(first // page, (first + r.bytes - 1) // page + 1))
    return len(pages) * page


def sizes_of(specs, tokens):
    """Bytes as in the columns of the table, the page size that vMem chooses, and the layout."""
    config, block, chosen = config_of(specs)
    ids = sorted({i for group in blocks_of(config, tokens) for i in group})
    ranges = layout.ranges_of(config)
    page = page_size(ranges, SIZES)
    apart = [1 + 7 * i for i in range(len(ids))]
    behind = (held(ranges, some, size) for some, size in ((ids, page), (ids, SMALL), (ids, LARGE), (apart, LARGE)))
    return need_of(specs, tokens), len(ids) * block, *behind, page, chosen


def main():
    print("| model | layout, pages | tokens | need | vLLM | vMem | 64 KiB | 2 MiB | 2 MiB, apart |")
    print("|---" * 9 + "|")
    for name, specs in models().items():
        for tokens in LENGTHS:
            *bytes_of, page, chosen = sizes_of(specs, tokens)
            print(f"| {name} | {chosen}, {page >> 10} KiB | {tokens:,} | "
                  + " | ".join(f"{b / 2**20:,.1f}" for b in bytes_of) + " |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
