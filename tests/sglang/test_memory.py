"""SGLang's own KV pools on vMem, without a model: where the rows lie, and what their pages hold."""

import pytest
import torch
from steps import forked, imports

POOLS = {
    "MHA": ("MHATokenToKVPool", dict(head_num=4, head_dim=128)),
    "GQA with a smaller V": ("MHATokenToKVPool", dict(head_num=2, head_dim=128, v_head_dim=64)),
    "FP8": ("MHATokenToKVPool", dict(head_num=8, head_dim=128, dtype=torch.float8_e4m3fn)),
    "MLA": ("MLATokenToKVPool", dict(kv_lora_rank=512, qk_rope_head_dim=64)),
    "MLA in FP8": ("MLATokenToKVPool", dict(kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.float8_e4m3fn)),
}


@pytest.fixture(scope="module", autouse=True)
def imported():
    imports()


def _buffers(pool):
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", POOLS)
def test_the_rows_of_a_pool_are_its_own_and_go_with_their_pages(name, page_size):
    kind, options = POOLS[name]

    def run():
        from sglang.srt import plugins
        from sglang.srt.mem_cache import memory_pool

        plugins.load_plugins()
        size = 40 * page_size
        options.setdefault("dtype", torch.bfloat16)
        pool = getattr(memory_pool, kind)(size=size, page_size=page_size, layer_num=3, device="cpu",
                                          enable_memory_saver=False, **options)  # fmt: skip
        memory = pool._vmem
        assert memory.number == 41
        start = memory.blocks.stats().held
        ids = [3, 4, 17, 40]
        memory.back(ids)
        rng = torch.Generator().manual_seed(1)
        rows = torch.cat([torch.arange(i * page_size, (i + 1) * page_size) for i in ids])
        wanted = []
        for buffer in _buffers(pool):
            assert len(buffer) == size + page_size
            flat = buffer.view(torch.uint8)
            assert not flat[rows].any()
            value = torch.randint(1, 255, flat[rows].shape, dtype=torch.uint8, generator=rng)
            flat[rows] = value
            wanted.append((flat, value))
        for flat, value in wanted:  # no row of another layer is in its place
            assert torch.equal(flat[rows], value)
        memory.blocks.unback(ids[1:])
        memory.blocks.flush()
        for flat, value in wanted:
            assert torch.equal(flat[rows[:page_size]], value[:page_size])
        memory.blocks.unback(ids)
        memory.blocks.flush()
        assert memory.blocks.stats().held == start

    forked(run)


def test_a_buffer_of_another_shape_is_refused():
    def run():
        from sglang.srt import plugins
        from sglang.srt.mem_cache import memory_pool

        class Odd(memory_pool.MLATokenToKVPool):
            def __getattribute__(self, name):
                found = super().__getattribute__(name)
                return [b[1:] for b in found] if name == "kv_buffer" else found

        plugins.load_plugins()
        Odd(size=64, page_size=16, layer_num=1, device="cpu", enable_memory_saver=False, dtype=torch.bfloat16,
            kv_lora_rank=512, qk_rope_head_dim=64)  # fmt: skip

    with pytest.raises(ChildProcessError, match="SystemExit: pyvmem: VMEM_SGLANG=1: a KV buffer has 79 rows for 64"):
        forked(run)
