"""transformers' continuous batching on vMem: its own tokens, and memory for what requests use.

SPDX-License-Identifier: MIT
"""

import gc

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

from pyvmem import KVPool
from pyvmem.transformers import paged

if paged.CachePool is None:
    pytest.skip("this transformers' paged cache has no sectors", allow_module_level=True)

MIB = 1 << 20
PAGE = 32  # tokens of a page; a sector is then a page of memory
PROMPTS = [[1] + [3 + (k * i) % 100 for i in range(5 + 23 * k)] for k in range(1, 6)]
NEW = 8


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    yield LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()  # fmt: skip
    torch.set_num_threads(threads)


def config(**more):
    sizes = dict(num_blocks=256, page_size=PAGE, max_batch_tokens=128)
    return ContinuousBatchingConfig(**sizes, use_cuda_graph=False, **more)


def generate(model, made, prompts=PROMPTS):
    asked = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    told = model.generate_batch(prompts, generation_config=asked, continuous_batching_config=made, warmup=False)
    answers = sorted(told.items(), key=lambda one: int(one[0].split("_")[-1]))
    return [list(answer.generated_tokens) for _, answer in answers]


@pytest.fixture
def caches(monkeypatch):
    """The caches that are made, and the most bytes that each has held."""
    made = []
    own = paged.VMemPagedCache.__init__

    def note(self, *args, **kwargs):
        own(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(paged.VMemPagedCache, "__init__", note)
    yield made
    for cache in made:
        cache.close()


@pytest.mark.parametrize("sharing", [False, True])
def test_tokens_are_transformers_own_and_memory_follows_the_requests(model, caches, sharing):
    own = generate(model, config(allow_block_sharing=sharing))
    assert generate(model, paged.batching_on_vmem(config(allow_block_sharing=sharing))) == own
    (cache,) = caches
    stats, sector = cache.blocks.stats(), cache.bytes_per_sector
    used = sum(-(-(len(p) + NEW) // PAGE) for p in PROMPTS)
    assert 0 < stats.most_held <= (used + 4) * sector < cache.num_sectors * sector // 2
    if not sharing:
        assert stats.backed <= 2 + paged.KEEP
    assert generate(model, config(allow_block_sharing=sharing)) == own  # one without vMem afterwards


def test_a_manager_that_goes_on_takes_memory_again(model, caches):
    made = paged.batching_on_vmem(config(allow_block_sharing=False))
    asked = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    own = generate(model, config(allow_block_sharing=False))
    manager = model.init_continuous_batching(generation_config=asked, continuous_batching_config=made)
    manager.start()
    try:
        for _ in range(2):
            names = [manager.add_request(p, max_new_tokens=NEW) for p in PROMPTS]
            told = {}
            while len(told) < len(names):
                answer = manager.get_result(timeout=60)
                if answer is not None and answer.is_finished():
                    told[answer.request_id] = list(answer.generated_tokens)
            assert [told[name] for name in names] == own
    finally:
        manager.stop(block=True, timeout=60)
    assert caches[0].blocks.stats().backed <= 2 + paged.KEEP


def test_in_a_pool_that_is_too_small_for_all_requests_wait(model, caches):
    own = generate(model, config(allow_block_sharing=False))
    sector = 2 * 2 * 128 * 4 * PAGE
    with KVPool(10 * sector) as pool:
        assert generate(model, paged.batching_on_vmem(config(allow_block_sharing=False), pool=pool)) == own
        (cache,) = caches
        assert cache.bytes_per_sector == sector and cache.blocks.stats().most_held <= 10 * sector
        (member,) = pool.members()
        assert member.name == "paged"
        cache.close()
    caches.clear()
    gc.collect()
