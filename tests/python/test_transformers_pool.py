"""Several models' `VMemCache` in one pool: memory goes to the model that generates.

SPDX-License-Identifier: MIT
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from hungry import Neighbour  # noqa: E402
from generations import generate, make_cache, pages_of_64_kib, reference, single_thread  # noqa: E402, F401
from tiny_models import prompts, tiny_model  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem.transformers import memory  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PAGES = 24  # of the pool; a sequence needs one page in each of two tensors for each `rows`


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(memory, "POOL_SECONDS", 600)  # on a slow machine, the other member takes its time


@pytest.fixture
def page(backend):
    with pyvmem.Context(backend) as context:
        return min(context.page_sizes)


@pytest.fixture
def rows(page):
    return page // (2 * 2 * 16 * 4)


def models(device):
    return [tiny_model(name, device=device, max_position_embeddings=16384) for name in ("llama", "qwen3")]


def forward(model, ids, cache):
    model.set_attn_implementation("vmem")
    with torch.no_grad():
        model(ids, past_key_values=cache)


def test_what_one_model_keeps_the_other_can_have(make, device, page, rows, small_pages):
    with pyvmem.KVPool(PAGES * page) as pool:
        both = [(model, make(model, pool=pool, pool_min=2 * page)) for model in models(device)]
        for _ in range(2):
            for model, cache in both:
                forward(model, prompts(2, 4 * rows, device=device), cache)  # 16 pages, and some ahead
                assert cache.kv.stats().needed_pages >= 16
                cache.reset()
                ids = prompts(3, 13, device=device)  # and a batch of another size, in other tensors
                assert generate(model, ids, cache, "vmem").tolist() == reference(model, ids).tolist()
                cache.reset()
                assert sum(member.has for member in pool.members()) <= PAGES * page


def test_what_a_model_needs_stays_and_the_other_is_told(make, device, page, rows, small_pages):
    with pyvmem.KVPool(PAGES * page) as pool:
        (llama, kept), (qwen, short) = ((model, make(model, pool=pool)) for model in models(device))
        ids = prompts(2, 4 * rows, device=device)
        got = generate(llama, ids, kept, "vmem")
        with pytest.raises(pyvmem.OutOfMemory, match="lower the batch.*use a pool with a larger budget"):
            forward(qwen, ids, short)
        kept.offload()
        forward(qwen, ids, short)
        with pytest.raises(pyvmem.OutOfMemory, match="to move 2 sequences back from CPU memory: .*larger budget"):
            kept.prefetch()
        short.close()
        kept.prefetch()
        again = torch.cat([got, got[:, :1]], 1)
        assert generate(llama, again, kept, "vmem").tolist() == reference(llama, again).tolist()


def test_a_guaranteed_minimum_moves_to_larger_tensors(make, device, page):
    with pyvmem.KVPool(PAGES * page) as pool:
        model = models(device)[0]
        cache = make(model, pool=pool, pool_min=PAGES // 2 * page + page)
        ids = prompts(2, device=device)
        forward(model, ids, cache)
        cache.batch_repeat_interleave(2)  # over what the first tensors have slots for
        assert [member.min for member in pool.members() if member.min] == [PAGES // 2 * page + page]
        assert cache.get_seq_length() == ids.shape[1]
        cache.reset()
        assert generate(model, ids, cache, "vmem").tolist() == reference(model, ids).tolist()


@pytest.mark.parametrize("attention", ["vmem", "sdpa"])
def test_layers_that_share_rows_read_them_when_other_shapes_come(make, device, attention):
    """Later layers of Gemma 4 read rows of the first ones, which the head_dim of full attention has moved."""
    model, ids = tiny_model("gemma4_shared", device=device), prompts(2, device=device)
    with pyvmem.KVPool(256 << 20) as pool:
        cache = make(model, pool=pool, pool_min=1 << 20)
        assert generate(model, ids, cache, attention).tolist() == reference(model, ids).tolist()
        assert len(pool.members()) == 1
        cache.close()
        assert pool.free == pool.budget


WAYS = {
    "reset": lambda cache: cache.reset(),
    "reset twice": lambda cache: (cache.reset(), cache.reset()),
    "offload": lambda cache: cache.offload(),
    "crop": lambda cache: cache.crop(-cache.get_seq_length()),
    "close": lambda cache: cache.close(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_gives_up_a_hungry_neighbour_gets(make, backend, device, page, rows, small_pages, way):
    with pyvmem.KVPool(PAGES * page) as pool:
        model = models(device)[0]
        cache = make(model, pool=pool)
        other = Neighbour(pool, page, backend=backend)
        forward(model, prompts(2, 4 * rows, device=device), cache)
        assert other.misses()
        WAYS[way](cache)
        assert other.misses() == 0
        other.close()
