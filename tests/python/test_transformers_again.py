"""Decode steps of generate() by a kernel that stores the rows itself, as Triton's does.

SPDX-License-Identifier: MIT
"""

import copy
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from generations import generate, make_cache, padding, reference, single_thread  # noqa: E402, F401
from tiny_models import prompts, tiny_model  # noqa: E402

from pyvmem.attention import Batch, table  # noqa: E402
from pyvmem.attention.sdpa import SDPA  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Appends(SDPA):
    """SDPA that stores a decode step's rows."""

    appends = True

    def __init__(self):
        self.stored = 0

    def run(self, call):
        if call.new is not None:
            self.stored += 1
            rows = call.batch.last_rows()
            for x, row in zip((call.k, call.v), call.new):
                x.index_put_(rows, row)
        return super().run(replace(call, new=None))


@pytest.fixture(autouse=True)
def kernel(backend, monkeypatch):
    if backend != "host":
        pytest.skip("the GPU's kernel is Triton's own")
    monkeypatch.setitem(table.KERNELS, "sdpa", Appends())
    return table.KERNELS["sdpa"]


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_greedy_tokens(name, side, make, kernel):
    model, mask = tiny_model(name), padding(side)
    got = generate(model, prompts(), make(model), "vmem", attention_mask=mask)
    assert got.tolist() == reference(model, prompts(), attention_mask=mask).tolist()
    if side == "none":
        assert kernel.stored == 11 * model.config.num_hidden_layers


def test_beams_and_assisted_decoding(make, kernel):
    model, ids = tiny_model("llama"), prompts(2)
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
    assert generate(model, ids, make(model), "vmem", **options).tolist() == reference(model, ids, **options).tolist()
    assistant, ids = tiny_model("llama", seed=2), prompts(1)
    got = generate(model, ids, make(model), "vmem", new=24, assistant_model=assistant)
    assert got.tolist() == reference(model, ids, new=24).tolist()


def test_a_cache_that_is_cropped_and_used_again(make, kernel):
    """Lengths that do not follow the last step's by one row are uploaded."""
    model, ids = tiny_model("llama"), prompts()
    cache = make(model)
    first = generate(model, ids, cache, "vmem")
    cache.crop(-3)
    # The cache has all but the last: a pass of one token that does not follow the pass before.
    ids = first[:, :-3].clone()
    ids[:, -1] = (ids[:, -1] + 1) % 90  # other rows than those that were cropped
    got = generate(model, ids, cache, "vmem", new=3, attention_mask=torch.ones_like(ids))
    assert got.tolist() == reference(model, ids, new=3).tolist()
    cache.reset()
    assert generate(model, prompts()[:2], cache, "vmem").tolist() == first[:2].tolist()


def test_a_cache_is_copied_after_decode_steps(make, kernel):
    model, ids = tiny_model("llama"), prompts()
    cache = make(model)
    first = generate(model, ids, cache, "vmem")
    assert kernel.stored > 0
    other = copy.deepcopy(cache)
    want = reference(model, first, new=3)
    for each in (other, cache):
        assert generate(model, first, each, "vmem", new=3).tolist() == want.tolist()
    other.close()


def test_a_batch_advances_to_its_limit(make):
    model = tiny_model("llama")
    cache = make(model, max_tokens=64)
    generate(model, prompts(), cache, "vmem")
    for most, why in ((None, 64), (20, 20)):
        batch = Batch(cache.kv, [0, 2], [18, 7], max_length=most, check=False)
        plain = Batch(cache.kv, [0, 2], [20, 9], max_length=most, check=False)
        where = batch.lengths_t.data_ptr()
        batch.last_rows()
        batch.advance()
        batch.advance()
        assert batch.lengths.tolist() == batch.lengths_t.tolist() == [20, 9] and batch.lengths_t.data_ptr() == where
        assert batch.max_length == plain.max_length == (most or 20)
        assert [x.tolist() for x in batch.last_rows()] == [[0, 2], [19, 8]]
        with pytest.raises(ValueError, match=f"at most {why} rows and 1 query"):
            for _ in range(64):
                batch.advance()
        assert int(batch.lengths.max()) == why == int(batch.lengths_t.max())
    with pytest.raises(ValueError, match="5 queries"):
        Batch(cache.kv, [0], [18], [5], check=False).advance()
