"""Decode steps of generate() by a kernel that stores the rows itself, as Triton's does: planned once, then repeated.

SPDX-License-Identifier: MIT
"""

import copy
import ctypes
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from generations import generate, make_cache, padding, reference, single_thread  # noqa: E402, F401
from tiny_models import prompts, tiny_model  # noqa: E402

from pyvmem.attention import RepeatedDecode, Batch, decode, table  # noqa: E402
from pyvmem.attention.sdpa import SDPA  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def at(pointer, shape, dtype, stride):
    """A tensor over memory."""
    size = (sum((n - 1) * s for n, s in zip(shape, stride)) + 1) * dtype.itemsize
    buffer = (ctypes.c_char * size).from_address(pointer)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)


class Appends(SDPA):
    """SDPA that stores a decode step's rows, and repeats a launch by addresses."""

    appends = True

    def __init__(self):
        self.full = self.repeated = 0

    def run(self, call):
        if call.new is not None:
            self.full += 1
            rows = call.batch.last_rows()
            for x, row in zip((call.k, call.v), call.new):
                x.index_put_(rows, row)
        return super().run(replace(call, new=None))

    def repeat(self, call):
        def launch(q, out, k_new, v_new):
            self.full -= 1
            self.repeated += 1
            new = tuple(at(p, x.shape, x.dtype, x.stride()) for p, x in zip((k_new, v_new), call.new))
            result = at(out, call.out.shape, call.out.dtype, call.out.stride())
            self.run(replace(call, q=at(q, call.q.shape, call.q.dtype, call.q.stride()), new=new, out=result))
            return True

        return launch


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
    if side == "none":  # 11 steps: the first is checked in full, in every layer
        layers = model.config.num_hidden_layers
        assert (kernel.full, kernel.repeated) == (layers, 10 * layers)


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
    assert kernel.repeated > 0
    other = copy.deepcopy(cache)
    want = reference(model, first, new=3)
    for each in (other, cache):
        assert generate(model, first, each, "vmem", new=3).tolist() == want.tolist()
    other.close()


@pytest.mark.parametrize("other", ["dtype", "shape"])
def test_other_values_than_the_first_calls_are_seen(make, kernel, other):
    """K alone is like the first call's: a launch by addresses would read V as something else."""
    model = tiny_model("llama")
    cache = make(model, max_tokens=64)
    generate(model, prompts(), cache, "vmem")
    batch = Batch(cache.kv, [0, 2], [18, 7], check=False)
    k, v = layer = cache.layers[0].kv()
    q = torch.randn(2, k.shape[2], 1, k.shape[3])
    rows = torch.randn(2, *k.shape[2:])[:, :, None]
    again, most = RepeatedDecode(cache.kv, layer), k.shape[2]
    again(q, rows, rows, batch, None, 0, 0.0)
    again(q, rows, rows, batch, None, 0, 0.0)
    assert kernel.repeated > 0
    before = kernel.repeated
    if other == "dtype":
        with pytest.raises(ValueError, match="new: V .* of torch.float64"):
            again(q, rows, rows.double(), batch, None, 0, 0.0)
    else:
        with pytest.raises(ValueError, match="new: V "):
            again(q, rows, rows[:, : most - 1], batch, None, 0, 0.0)
    assert kernel.repeated == before
    out = again(q, rows, rows, batch, None, 0, 0.0)
    assert torch.equal(out[:, 0], decode(q[:, :, 0], cache.kv, layer, batch))


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
