"""VMemCache under generate(): the tokens are those of transformers' own DynamicCache, for every kind of model.

SPDX-License-Identifier: MIT
"""

import copy
import gc
import importlib
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from conftest import python  # noqa: E402
from generations import generate, make_cache, padding  # noqa: E402, F401
from generations import pages_of_64_kib, reference, single_thread  # noqa: E402, F401
from tiny_models import prompts, tiny_model  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem.transformers import VMemCache  # noqa: E402
from pyvmem.transformers.followed import FOLLOWED, changes  # noqa: E402

ATTENTIONS = ("eager", "sdpa", "vmem")


pytestmark = pytest.mark.filterwarnings("ignore")


# Every family, by logits: test_transformers_logits.
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_greedy_tokens(name, attention, make, device):
    model, ids = tiny_model(name, device=device), prompts(device=device)
    for side in ("none", "left"):
        mask = padding(side).to(device)
        cache = make(model)
        got = generate(model, ids, cache, attention, attention_mask=mask)
        assert got.tolist() == reference(model, ids, attention_mask=mask).tolist(), side


def encoder_decoder(name, device):
    """A small model with three layers in the encoder and two in the decoder, and the inputs of `generate`."""
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder")
             for what, n in (("layers", 2 + (part == "encoder")), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    tokens = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 95, "decoder_start_token_id": 1,
              "forced_eos_token_id": None, "d_model": 64}  # fmt: skip
    families = {
        "bart": ("BartForConditionalGeneration", {"max_position_embeddings": 64, **sizes}),
        "pegasus": ("PegasusForConditionalGeneration", {"max_position_embeddings": 64, **sizes}),
        "t5": ("T5ForConditionalGeneration", {"d_kv": 16, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2,
                                              "num_heads": 4}),
        "whisper": ("WhisperForConditionalGeneration", {"num_mel_bins": 8, "max_source_positions": 8, **sizes,
                                                        "max_target_positions": 64, "suppress_tokens": None,
                                                        "begin_suppress_tokens": None}),
    }  # fmt: skip
    kind, more = families[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**tokens, **more})).to(device).eval()
    if name == "whisper":
        return model, {"input_features": torch.randn(3, 8, 16, device=device)}
    return model, {"inputs": prompts(device=device), "attention_mask": padding("right").to(device)}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["bart", "pegasus", "t5", "whisper"])
def test_encoder_and_decoder(name, attention, early, wrapped, make, device):
    """The decoder's own rows are ours; what it reads of the encoder stays in transformers' cache.

    early: the cache is made before the attention is set.
    """
    model, inputs = encoder_decoder(name, device)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    model.set_attn_implementation("sdpa" if early else attention)
    own = make(model)
    model.set_attn_implementation(attention)
    assert own.layers[0].by_length == (attention == "vmem")
    for beams in (1, 2):
        # Another batch needs another cross-attention cache: transformers 5.17 keeps the old one's rows in a reset.
        cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache()) if wrapped else own
        model.set_attn_implementation("sdpa")
        theirs = model.generate(**inputs, num_beams=beams, **options)
        model.set_attn_implementation(attention)
        ours = model.generate(**inputs, num_beams=beams, past_key_values=cache, **options)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits))
        assert own.get_seq_length() > 4 and own.kv is not None and "VMem" in repr(own)
        cache.reset()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_padding_has_no_rows_with_our_attention(name, side, make, device):
    model, ids, mask = tiny_model(name, device=device), prompts(device=device), padding(side).to(device)
    cache = make(model)
    got = generate(model, ids, cache, "vmem", attention_mask=mask)
    assert got.tolist() == reference(model, ids, attention_mask=mask).tolist()
    lengths = [cache.kv.slot(s).tokens for s in range(3)]
    assert lengths == [int(n) + 11 for n in mask.sum(1)]
    assert cache.get_seq_length() == 13 + 11


def test_a_padded_row_reads_as_it_does_alone(make, device):
    """The rows before a sequence's start are not read: each row equals the row generated by itself."""
    model, ids, mask = tiny_model("mistral", device=device), prompts(device=device), padding("left").to(device)
    got = generate(model, ids, make(model), "vmem", attention_mask=mask)
    for row in range(3):
        alone = ids[row : row + 1, 13 - int(mask[row].sum()) :]
        want = generate(model, alone, make(model), "vmem")
        assert got[row, 13:].tolist() == want[0, alone.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "jamba", "falcon_h1"])
@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_beams(name, attention, side, make, device):
    model, ids, mask = tiny_model(name, device=device), prompts(2, device=device), padding(side, 2).to(device)
    options = {"num_beams": 4, "attention_mask": mask, "num_return_sequences": 2, "length_penalty": 0.0}
    cache = make(model)
    got = generate(model, ids, cache, attention, **options)
    assert got.tolist() == reference(model, ids, **options).tolist()


def test_beams_share_pages(make, device, small_pages):
    """Full pages are shared, so that beams of a long prompt need hardly more memory than one sequence."""
    model = tiny_model("llama", device=device, max_position_embeddings=4096)
    ids = prompts(1, 2048 + 100, device=device)
    cache = make(model)
    generate(model, ids, cache, "vmem", new=6, num_beams=4)
    stats = cache.kv.stats()
    assert stats.attached_pages > 0
    row = 2 * 2 * 2 * 16 * 4  # bytes of one token over both layers
    one = (2148 + 6) * row
    # Each of the 2 tensors holds 8 full pages of the prompt; a beam's own are its last, partial ones.
    assert stats.page_size * stats.held_pages < 2.2 * one


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_assisted_decoding(name, attention, make, device):
    model, assistant = (tiny_model(name, device=device, seed=seed) for seed in (1, 2))
    ids = prompts(1, device=device)
    cache = make(model)
    got = generate(model, ids, cache, attention, new=24, assistant_model=assistant)
    assert got.tolist() == reference(model, ids, new=24).tolist()
    assert type(cache.get_seq_length()) is int  # generate() crops by a tensor


def test_prompt_lookup(make, device):
    model = tiny_model("llama", device=device)
    ids = prompts(1, 6, device=device).repeat(1, 4)
    got = generate(model, ids, make(model), "vmem", new=24, prompt_lookup_num_tokens=4)
    assert got.tolist() == reference(model, ids, new=24).tolist()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_chunked_prefill(attention, make, device):
    for name in ("llama", "gemma3"):
        model, ids = tiny_model(name, device=device), prompts(2, 30, device=device)
        got = generate(model, ids, make(model), attention, prefill_chunk_size=7)
        assert got.tolist() == reference(model, ids).tolist(), name


# ---- one cache, several calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
def test_a_cache_is_continued_and_reset(attention, make, device):
    model, ids = tiny_model("gemma3", device=device), prompts(2, device=device)
    cache, dynamic = make(model), transformers.DynamicCache(config=model.config)
    first = generate(model, ids, cache, attention)
    assert first.tolist() == generate(model, ids, dynamic).tolist()
    longer = torch.cat([first, prompts(2, 5, 7, device=device)], 1)  # the conversation goes on
    again = generate(model, longer, cache, attention)
    assert again.tolist() == generate(model, longer, dynamic).tolist()
    held = cache.kv.stats().held_pages
    for batch in (1, 2, 5):  # and others of any size begin
        cache.reset()
        assert cache.get_seq_length() == 0
        ids = prompts(batch, 9, seed=batch, device=device)
        assert generate(model, ids, cache, attention).tolist() == reference(model, ids).tolist()
        if batch <= 2:
            assert cache.kv.stats().held_pages <= held


def test_several_caches_in_one_context(backend, device):
    model = tiny_model("llama", device=device)
    with pyvmem.Context(backend) as context:
        caches = [VMemCache(model, context=context, budget=1 << 25, name=None) for _ in range(3)]
        inputs = [prompts(2, 11, seed, device=device) for seed in range(3)]
        model.set_attn_implementation("vmem")
        for ids, cache in zip(inputs, caches):
            run(model, ids, cache)
        for ids, cache in zip(inputs, caches):
            got = generate(model, torch.cat([ids, ids[:, :1]], 1), cache, "vmem")
            assert got.tolist() == reference(model, torch.cat([ids, ids[:, :1]], 1)).tolist()
        for cache in caches:
            cache.close()


def test_deepcopy_is_independent(make, device):
    """A prompt's cache is copied and continued, as transformers' own are."""
    model, ids = tiny_model("gemma3", device=device), prompts(2, device=device)
    model.set_attn_implementation("sdpa")
    prefix = make(model)
    with torch.no_grad():
        model(ids, past_key_values=prefix)
    for seed in (3, 4):
        longer = torch.cat([ids, prompts(2, 3, seed, device=device)], 1)
        other = copy.deepcopy(prefix)
        assert generate(model, longer, other).tolist() == reference(model, longer).tolist()
        other.close()
    assert prefix.get_seq_length() == 13


# ---- crop and the batch -------------------------------------------------------------------------------------------


def run(model, ids, cache):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def pair(name, attention, make, device, batch=3, tokens=13):
    """A model, its VMemCache and its DynamicCache, which have seen the same prompts."""
    model = tiny_model(name, device=device)
    ours, theirs = make(model), transformers.DynamicCache(config=model.config)
    theirs.activate_past_recording()
    ours.activate_past_recording()
    both = []
    for cache, kind in ((ours, attention), (theirs, "sdpa")):
        model.set_attn_implementation(kind)
        both.append(run(model, prompts(batch, tokens, device=device), cache))
    torch.testing.assert_close(both[0][:, -1], both[1][:, -1])
    theirs.crop(0)
    ours.crop(0)
    return model, ours, theirs


def same_next(model, ours, theirs, attention, device):
    """The next tokens' logits agree, and so do lengths."""
    assert ours.get_seq_length() == theirs.get_seq_length()
    ids = prompts(theirs.layers[-1].keys.shape[0], 3, 9, device=device)
    model.set_attn_implementation(attention)
    got = run(model, ids, ours)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(got, run(model, ids, theirs))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("amount", [-1, -4, 0])
def test_crop_takes_back_the_last_pass(name, attention, amount, make, device):
    model, ours, theirs = pair(name, attention, make, device)
    for cache, kind in ((ours, attention), (theirs, "sdpa")):
        cache.crop(0)
        model.set_attn_implementation(kind)
        run(model, prompts(3, 5, 4, device=device), cache)
        cache.crop(amount)
    same_next(model, ours, theirs, attention, device)


@pytest.mark.parametrize("amount", [5, 13, 40, -13, -40])
def test_crop_to_a_length(amount, make, device):
    model, ours, theirs = pair("llama", "vmem", make, device)
    ours.crop(amount)
    assert ours.get_seq_length() == {5: 5, 13: 13, 40: 13, -13: 0, -40: 0}[amount]
    if amount in (5, 13, 40):
        theirs.crop(min(amount, 13) - 13)  # transformers 5.23 refuses a length
        same_next(model, ours, theirs, "vmem", device)


def test_crop_gives_pages_back(make, device, small_pages):
    model = tiny_model("llama", device=device, max_position_embeddings=4096)
    cache = make(model)
    run(model, prompts(1, 3000, device=device), cache)
    needed = cache.kv.stats().needed_pages
    cache.crop(-2900)
    assert cache.kv.stats().needed_pages < needed / 4


def test_crop_behind_a_window_is_refused(make, device):
    model, ours, _ = pair("mistral", "sdpa", make, device)
    for seed in range(2):
        run(model, prompts(3, 1, seed, device=device), ours)
    with pytest.raises(RuntimeError, match="sliding window gave up rows"):
        ours.crop(-8)
    assert ours.get_seq_length() == 15  # nothing changed
    run(model, prompts(3, 1, 5, device=device), ours)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("indices", [[2, 0, 0], [0, 1, 2], [1, 2, 0], [1], [2, 2, 1, 1, 0]])
def test_batch_select_indices(name, attention, indices, make, device):
    model, ours, theirs = pair(name, attention, make, device)
    for cache in (ours, theirs):
        cache.batch_select_indices(torch.tensor(indices, device=device))
    same_next(model, ours, theirs, attention, device)


def test_selected_sequences_keep_their_own_padding(make, device):
    model, ids, mask = tiny_model("llama", device=device), prompts(device=device), padding("left").to(device)
    order, more = torch.tensor([2, 0, 1, 0], device=device), prompts(4, 3, 9, device=device)
    outs = []
    for cache, kind in ((make(model), "vmem"), (transformers.DynamicCache(config=model.config), "sdpa")):
        model.set_attn_implementation(kind)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            cache.batch_select_indices(order)
            longer = torch.cat([mask[order], mask.new_ones(4, 3)], 1)
            positions = (longer.cumsum(1) - 1)[:, -3:]
            outs.append(model(more, attention_mask=longer, position_ids=positions, past_key_values=cache).logits)
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_batch_repeat_interleave(attention, make, device):
    model, ours, theirs = pair("gemma3", attention, make, device)
    for cache in (ours, theirs):
        cache.batch_repeat_interleave(2)
    same_next(model, ours, theirs, attention, device)


def test_reorder_again_and_again(make, device):
    """Shared rows are never written: random reorders, steps and crops agree with copies."""
    model, ours, theirs = pair("llama", "vmem", make, device, batch=4)
    generator = torch.Generator().manual_seed(5)
    for step in range(12):
        order = torch.randint(0, 4, (4,), generator=generator).to(device)
        for cache, kind in ((ours, "vmem"), (theirs, "sdpa")):
            model.set_attn_implementation(kind)
            cache.reorder_cache(order)
            run(model, prompts(4, 2, step, device=device), cache)
            cache.crop(-1)
    same_next(model, ours, theirs, "vmem", device)


def test_keys_and_values_are_views_of_the_live_rows(make, device):
    model, ours, theirs = pair("gemma3", "sdpa", make, device)
    theirs.crop(0)
    for a, b in zip(ours.layers, theirs.layers):
        torch.testing.assert_close(a.keys, b.keys)
        torch.testing.assert_close(a.values, b.values)
        assert a.get_mask_sizes(3) == b.get_mask_sizes(3)
        memory = {tensor.untyped_storage().data_ptr() for tensor in ours.kv.tensors}
        assert a.keys.untyped_storage().data_ptr() in memory


# ---- memory -------------------------------------------------------------------------------------------------------


def test_only_live_rows_have_pages(make, device):
    model = tiny_model("llama", device=device, max_position_embeddings=100_000)
    cache = make(model, slots=32)
    run(model, prompts(2, 10, device=device), cache)
    # K and V of a layer lie side by side: 2 tensors of 2 sequences with a page each.
    assert cache.kv.stats().held_pages <= 2 * 2 * 2
    assert sum(t.numel() for t in cache.kv.tensors) * 4 > 1 << 30


def test_sliding_layers_give_rows_up(make, device, small_pages):
    model = tiny_model("mistral", device=device, max_position_embeddings=20_000, sliding_window=64)
    cache = make(model)
    for seed in range(8):
        run(model, prompts(1, 700, seed, device=device), cache)
    cache.kv.wait()
    all_rows = 5600 * 2 * 2 * 2 * 16 * 4
    assert cache.kv.stats().held_pages * cache.kv.stats().page_size < all_rows / 1.5


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
def test_out_of_memory_names_what_to_lower_and_the_cache_goes_on(attention, make, device, backend, small_pages):
    model = tiny_model("llama", device=device, max_position_embeddings=8192)
    page = min(pyvmem.Context(backend).page_sizes)
    cache = make(model, budget=8 * page)  # for 2 tensors: four pages each
    ids = prompts(2, 64, device=device)
    want = generate(model, ids, cache, attention)
    cache.reset()
    rows = page // (2 * 16 * 4)
    long = prompts(1, 2 * rows + 100, device=device)
    with pytest.raises(pyvmem.OutOfMemory, match="lower the batch.*raise the budget"):
        run(model, long, cache)
    cache.reset()
    assert generate(model, ids, cache, attention).tolist() == want.tolist()
    # In the middle of a sequence: what was there stays.
    with pytest.raises(pyvmem.OutOfMemory):
        run(model, prompts(2, 2 * rows, device=device), cache)
    assert cache.get_seq_length() == 64 + 11
    dynamic = transformers.DynamicCache(config=model.config)
    run(model, want[:, :-1], dynamic)
    same_next(model, cache, dynamic, attention, device)


def test_out_of_memory_in_a_reorder_leaves_an_empty_cache(make, device, backend):
    model = tiny_model("llama", device=device)
    page = min(pyvmem.Context(backend).page_sizes)
    cache = make(model, budget=8 * page, slots=4)
    ids = prompts(2, device=device)
    run(model, ids, cache)
    with pytest.raises(pyvmem.OutOfMemory, match="lower the batch, the beams"):
        cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 0
    cache.reset()
    assert generate(model, ids, cache).tolist() == reference(model, ids).tolist()


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
def test_offload_and_back(attention, make, device):
    model, ours, theirs = pair("gemma3", attention, make, device)
    theirs.crop(0)
    ours.offload()
    ours.offload()
    assert ours.kv.stats().needed_pages == 0
    same_next(model, ours, theirs, attention, device)
    theirs.crop(0)
    ours.offload()
    ours.prefetch()
    same_next(model, ours, theirs, attention, device)


def test_memory_goes_with_the_cache(device, backend):
    model = tiny_model("llama", device=device)
    cache = VMemCache(model, backend=backend, name=None)
    generate(model, prompts(device=device), cache, "vmem")
    kv = weakref.ref(cache.kv)
    del cache
    gc.collect()
    assert kv() is None


def test_rows_that_are_held_outlive_their_cache(device, backend):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    cache = VMemCache(model, backend=backend, name=None)
    run(model, ids, cache)
    view = cache.layers[0].keys
    before = view.clone()
    del cache
    gc.collect()
    other = VMemCache(model, backend=backend, name=None)
    run(model, prompts(seed=5, device=device), other)
    assert torch.equal(view, before) and not torch.equal(other.layers[0].keys, before)
    other.close()


def test_a_closed_cache_is_closed(make, device):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    for used in (True, False):
        cache = make(model)
        if used:
            generate(model, ids, cache)
        cache.close()
        cache.close()
        assert cache.kv is None and cache.get_seq_length() == 0
        for attention in ("sdpa", "vmem"):
            with pytest.raises(ValueError, match="the cache is closed: create another VMemCache"):
                generate(model, ids, cache, attention)
            cache.reset()


# ---- the attention ------------------------------------------------------------------------------------------------


def test_no_mask_is_built_and_nothing_is_concatenated(make, device, monkeypatch):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    seen = []
    from pyvmem import attention
    from pyvmem.transformers import attention as adapter

    for name in ("decode", "prefill"):
        inner = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *a, inner=inner, **k: seen.append(name) or inner(*a, **k))
    monkeypatch.setattr(adapter, "sdpa_attention_forward", lambda *a, **k: pytest.fail("a mask was used"))
    generate(model, ids, make(model), "vmem", new=3, attention_mask=padding("left").to(device))
    assert len(seen) == 3 * 2


def test_a_soft_cap_of_zero_is_none():
    """Beside sinks, where the attention goes step by step."""
    from pyvmem.transformers.attention import vmem_attention

    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    got, want = (vmem_attention(torch.nn.Module(), q, k, v, None, softcap=cap, s_aux=torch.zeros(2))[0]
                 for cap in (0.0, None))  # fmt: skip
    assert want.isfinite().all() and torch.equal(got, want)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_our_attention_without_a_cache(name, device):
    model, ids = tiny_model(name, device=device), prompts(device=device)
    got = generate(model, ids, None, "vmem", use_cache=False)
    assert got.tolist() == reference(model, ids).tolist()


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_mask_that_shows_what_has_no_row_is_refused(hidden, make, device):
    """Also if it hides as many other tokens, and if it shows everything."""
    model, ids, mask = tiny_model("llama", device=device), prompts(device=device), padding("left").to(device)
    model.set_attn_implementation("vmem")
    cache = make(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        wrong = torch.ones(3, 14, dtype=torch.long, device=device)
        wrong[0, 5:10] = 1 - hidden
        wrong[2, 5:7] = 1 - hidden
        with pytest.raises(ValueError, match="shows column 0 of sequence 0, which has no row"):
            model(ids[:, :1], attention_mask=wrong, past_key_values=cache)
        assert cache.get_seq_length() == 13
        model(ids[:, :1], attention_mask=torch.cat([mask, mask.new_ones(3, 1)], 1), past_key_values=cache)


def test_padding_that_was_stored_by_another_attention_is_masked(make, device):
    """A prompt that sdpa stored with its padding can be continued with our attention."""
    model, ids, mask = tiny_model("llama", device=device), prompts(device=device), padding("left").to(device)
    cache = make(model)
    first = generate(model, ids, cache, "sdpa", new=4, attention_mask=mask)
    mask = torch.cat([mask, mask.new_ones(3, 4)], 1)
    got = generate(model, first, cache, "vmem", new=4, attention_mask=mask)
    assert got.tolist() == reference(model, ids, new=8, attention_mask=padding("left").to(device)).tolist()


def test_other_attention_over_sequences_of_their_own_lengths_is_refused(make, device):
    model, ids, mask = tiny_model("llama", device=device), prompts(device=device), padding("left").to(device)
    cache = make(model)
    generate(model, ids, cache, "vmem", new=2, attention_mask=mask)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="have different lengths"):
        run(model, ids[:, :1], cache)


# ---- bad input ----------------------------------------------------------------------------------------------------


def test_arguments():
    model = tiny_model("llama")
    for name in ("max_tokens", "slots", "budget"):
        with pytest.raises(ValueError, match=f"{name} 0 must be at least 1"):
            VMemCache(model, **{name: 0})
    config = transformers.MambaConfig(num_hidden_layers=2)
    with pytest.raises(ValueError, match="no layers with keys and values|no attention heads"):
        VMemCache(config)
    with pytest.raises(ValueError, match="no attention heads, and so no keys and values .rwkv."):
        VMemCache(transformers.RwkvConfig(num_hidden_layers=2))


def test_limits_are_named(make, device):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    cache = make(model, max_tokens=16)
    run(model, ids, cache)
    with pytest.raises(ValueError, match="max_tokens=16"):
        run(model, ids, cache)
    with pytest.raises(ValueError, match="the batch has 2 sequences, the cache 3"):
        run(model, ids[:2, :1], cache)
    with pytest.raises(IndexError, match="must lie between 0 and the batch, 3"):
        cache.batch_select_indices(torch.tensor([3]))
    with pytest.raises(ValueError, match="does not support autograd"):
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 13
    with pytest.raises(NotImplementedError, match="call the cache.s method"):
        cache.layers[0].reorder_cache(torch.tensor([0]))
    with pytest.raises(ValueError, match="returns no weights"):
        generate(model, ids, make(model), "vmem", output_attentions=True, return_dict_in_generate=True)


def test_cudnns_attention_is_off_while_a_cache_needs_it_off():
    from pyvmem.transformers.memory import cudnn_off

    class Owner:
        pass

    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        first, second = Owner(), Owner()
        let_go = cudnn_off(first)
        cudnn_off(second)
        let_go()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        let_go()
        del second
        gc.collect()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert cudnn_off(first) is False  # the user's own wish stays
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("version", ["5.16.2", "5.25.0.dev0", "6.0.0rc1"])
def test_another_release_of_transformers_is_refused_in_one_line(version, tmp_path, monkeypatch):
    monkeypatch.delenv("VMEM_TRANSFORMERS_FORCE", raising=False)
    (tmp_path / "transformers.py").write_text(f'__version__ = "{version}"\n')
    done = python("import pyvmem.transformers", check=False, env={"PYTHONPATH": str(tmp_path)})
    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0 and version in last and "5.17 to 5.24" in last and "VMEM_TRANSFORMERS_FORCE" in last


def test_a_newer_release_is_judged_by_the_functions_in_use(tmp_path, monkeypatch):
    """It is accepted if they are the same, and otherwise refused with their names."""
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the table is of the newest release that was tried")
    monkeypatch.delenv("VMEM_TRANSFORMERS_FORCE", raising=False)
    here = Path(transformers.__file__).parent
    assert changes(here) == []
    for file in FOLLOWED:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((here / file).read_text())
    newer = SimpleNamespace(__version__="5.31.0", __file__=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "transformers", newer)
    importlib.reload(pyvmem.transformers)
    file = tmp_path / "masking_utils.py"
    file.write_text(file.read_text().replace("    # Potentially pad the 2D mask\n", "    # Pads\n\n"))
    importlib.reload(pyvmem.transformers)  # a comment
    file.write_text(file.read_text().replace("padding_mask = prepare_padding_mask(", "padding_mask = prepare_padding("))
    file = tmp_path / "cache_utils.py"
    file.write_text(file.read_text().replace("    def activate_past_recording(self):", "    def renamed(self):"))
    why = "not 5.31.0, which changes DynamicSlidingWindowLayer, .*: pip"
    with pytest.raises(ImportError, match=why) as refused:
        importlib.reload(pyvmem.transformers)
    renamed = ["DynamicSlidingWindowLayer", "LinearAttentionCacheLayerMixin", "Cache", "EncoderDecoderCache"]
    assert changes(tmp_path) == [*renamed, "sdpa_mask"]
    assert "\n" not in str(refused.value) and "VMEM_TRANSFORMERS_FORCE" in str(refused.value)
