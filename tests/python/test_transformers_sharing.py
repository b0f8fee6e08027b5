"""VMemCache on a backend that maps faster where no pages are shared: cuda. The host stands in for it.

SPDX-License-Identifier: MIT
"""

import pytest

transformers = pytest.importorskip("transformers", minversion="5.0")

import torch  # noqa: E402
from generations import generate, make_cache, padding, reference, single_thread  # noqa: E402, F401
from tiny_models import prompts, tiny_model  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem import KVCache  # noqa: E402
from pyvmem.transformers import rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def as_on_cuda(backend, monkeypatch):
    if backend != "host":
        pytest.skip("the host stands in")

    def create(*arguments, **options):
        if options.get("sharing", True) is None:
            options["sharing"] = False
        return KVCache(*arguments, **options)

    monkeypatch.setattr(rows, "KVCache", create)


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_the_first_beams_move_to_pages_that_can_be_shared(attention, side, make):
    model, ids, mask = tiny_model("llama"), prompts(2), padding(side, 2)
    cache = make(model)
    assert generate(model, ids, cache, attention, attention_mask=mask).tolist() == (
        reference(model, ids, attention_mask=mask).tolist()
    )
    assert not cache.kv.sharing
    cache.reset()
    for _ in range(2):
        options = {"num_beams": 4, "attention_mask": mask, "num_return_sequences": 2, "length_penalty": 0.0}
        got = generate(model, ids, cache, attention, **options)
        assert got.tolist() == reference(model, ids, **options).tolist()
        assert cache.kv.sharing
        cache.reset()


def test_sequences_that_only_leave_share_nothing(make):
    model, ids = tiny_model("llama"), prompts(3)
    cache = make(model)
    model.set_attn_implementation("vmem")
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.batch_select_indices(torch.tensor([0, 1]))
    assert cache.rows.batch == 2 and not cache.kv.sharing
    cache.batch_repeat_interleave(2)
    assert cache.rows.batch == 4 and cache.kv.sharing
    with torch.no_grad():
        step = torch.tensor([[5]] * 4)
        logits = model(step, past_key_values=cache).logits
        expected = model(torch.cat([ids[[0, 0, 1, 1]], step], 1)).logits[:, -1:]
    assert torch.allclose(logits, expected, atol=1e-4)


def test_no_memory_to_move_to(make, monkeypatch):
    model, ids = tiny_model("llama"), prompts(2)
    cache = make(model, slots=4)
    model.set_attn_implementation("vmem")
    with torch.no_grad():
        model(ids, past_key_values=cache)
    monkeypatch.setattr(pyvmem.KVCache, "step", lambda cache, lengths: False)
    with pytest.raises(pyvmem.OutOfMemory, match="pass sharing=True to VMemCache"):
        cache.batch_repeat_interleave(2)
    monkeypatch.undo()  # and the host shares again
    assert cache.get_seq_length() == 0
    assert generate(model, ids, cache, "vmem").tolist() == reference(model, ids).tolist()


def test_the_choice_of_the_user_and_of_windows(make):
    model = tiny_model("llama")
    cache = make(model, sharing=False)
    generate(model, prompts(2), cache, "vmem")
    with pytest.raises(pyvmem.VmemError, match="share no pages"):
        cache.batch_repeat_interleave(2)
    cache = make(model, sharing=True)
    generate(model, prompts(2), cache, "vmem")
    assert cache.kv.sharing
    windows = tiny_model("mistral")  # gives up rows, page by page
    cache = make(windows)
    generate(windows, prompts(2), cache, "vmem")
    assert cache.kv.sharing
