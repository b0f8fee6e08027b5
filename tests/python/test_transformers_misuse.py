"""A VMemCache that another model, another batch or another attention than its own uses.

SPDX-License-Identifier: MIT
"""

import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from generations import generate, make_cache, padding, reference, single_thread  # noqa: E402, F401
from tiny_models import _BASE, prompts, tiny_model  # noqa: E402

from pyvmem import KVCache, KVCacheOptions, OutOfMemory  # noqa: E402
from pyvmem.kv.options import Spare  # noqa: E402
from decode_graphs import DecodeGraphs  # noqa: E402

from pyvmem.transformers import VMemCache  # noqa: E402
from pyvmem.transformers.attention import vmem_attention  # noqa: E402
from pyvmem.transformers.opaque import OpaqueTensor  # noqa: E402


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4", "deepseek_v3"])
def test_beams_where_our_attention_reads_all_sequences_as_one_tensor(name, make, device):
    """Soft caps on a CPU, sinks, chunks and latents: sequence i must be in slot i."""
    model, ids = tiny_model(name, device=device), prompts(2, device=device)
    got = generate(model, ids, make(model), "vmem", num_beams=3)
    assert got.tolist() == reference(model, ids, num_beams=3).tolist()


def test_beams_of_prompts_shorter_than_a_chunk(make, device):
    """Their first passes are read by length; the pass in which they exceed the chunk is not."""
    model = tiny_model("llama4", device=device)
    for seed in range(4):
        ids = prompts(3, 2, seed, device=device)
        got = generate(model, ids, make(model), "vmem", num_beams=4)
        assert got.tolist() == reference(model, ids, num_beams=4).tolist()


@pytest.mark.parametrize("name", ["jamba", "falcon_h1", "qwen3_next"])
def test_another_batch_after_a_reset_of_linear_attention(name, make, device):
    model, cache = tiny_model(name, device=device), None
    cache = make(model)
    for batch in (3, 2, 4):
        ids = prompts(batch, device=device)
        assert generate(model, ids, cache).tolist() == reference(model, ids).tolist()
        cache.reset()


def test_a_model_that_changes_the_values_is_refused(make, device):
    """DiffLlama attends over each half of the values by itself."""
    torch.manual_seed(1)
    config = transformers.DiffLlamaConfig(**_BASE)
    model, ids = transformers.DiffLlamaForCausalLM(config).to(device).eval(), prompts(device=device)
    cache = make(model)
    with pytest.raises(RuntimeError, match="layer 0: the model computes with .* use another attention than vmem"):
        generate(model, ids, cache, "vmem")
    cache.reset()
    assert generate(model, ids, cache).tolist() == reference(model, ids).tolist()


def test_a_model_that_computes_with_the_keys_or_the_mask_is_refused(make, device):
    """Doge makes a mask of the values behind the cache, of which "vmem" sees only the new ones, and of the mask."""
    torch.manual_seed(1)
    config = transformers.DogeConfig(**_BASE)
    model, ids = transformers.DogeForCausalLM(config).to(device).eval(), prompts(device=device)
    for side in ("none", "left", "right"):
        mask = padding(side).to(device)
        with pytest.raises(RuntimeError, match="layer 0: the model computes with .* use another attention than vmem"):
            generate(model, ids, make(model), "vmem", attention_mask=mask)
        # Without a VMemCache there is nothing to leave out.
        theirs = transformers.DynamicCache(config=config)
        got = generate(model, ids, theirs, "vmem", attention_mask=mask)
        assert got.tolist() == reference(model, ids, attention_mask=mask).tolist()


def test_what_is_carried_says_what_read_it():
    class Owner:
        def read(self, what):
            raise RuntimeError(what)

    opaque = OpaqueTensor.of(torch.zeros(2, 3), Owner())
    for read, what in ((lambda x: x + 1, "add"), (lambda x: torch.cat([x, x]), "cat"),
                       (lambda x: x[0], "__getitem__"), (len, "__len__"), (lambda x: x.sum(), "sum"),
                       (bool, "__bool__"), (lambda x: x.numpy(), "numpy"), (lambda x: x.data, "data")):  # fmt: skip
        with pytest.raises(RuntimeError, match=what):
            read(opaque)
    assert opaque.shape == opaque.size() == (2, 3) and opaque.ndim == opaque.dim() == 2  # T5 asks for K's length
    assert opaque.to("cpu") is opaque and opaque.contiguous() is opaque
    with pytest.raises(RuntimeError, match="to"):
        opaque.to(torch.bfloat16)
    assert opaque.dtype is torch.float32 and opaque.device.type == "cpu" and "OpaqueTensor" in repr(opaque)


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
def test_another_models_rows_are_refused(attention, make, device):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    cache = make(model)
    generate(model, ids, cache, attention)
    cache.reset()
    wide = tiny_model("llama", device=device, head_dim=32)
    with pytest.raises(ValueError, match="2 heads of 32; the cache has torch.float32, 2 heads of 16: create another"):
        generate(wide, ids, cache, attention)
    cache.reset()
    with pytest.raises(ValueError, match="keys of torch.bfloat16, .* the cache has torch.float32"):
        generate(tiny_model("llama", device=device, dtype=torch.bfloat16), ids, cache, attention)
    cache.reset()
    with pytest.raises(ValueError, match="layer 2: the cache was created for a model of 2 layers"):
        with torch.no_grad():
            cache.update(torch.zeros(1, 2, 1, 16, device=device), torch.zeros(1, 2, 1, 16, device=device), 2)
    cache.reset()
    assert generate(model, ids, cache, attention).tolist() == reference(model, ids).tolist()


def test_arguments_of_other_kinds():
    for wrong in (None, "llama", {}):
        with pytest.raises(TypeError, match="config must be a model of transformers or its configuration"):
            VMemCache(wrong)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="nope"):
        generate(model, prompts(), VMemCache(model, backend="nope"))
    with VMemCache(model, backend="host", name=None) as cache:
        generate(model, prompts(), cache)
        with pytest.raises(ValueError, match="repeats 0"):
            cache.batch_repeat_interleave(0)
        with pytest.raises(TypeError, match="repeats must be an integer"):
            cache.batch_repeat_interleave(1.5)
        assert cache.rows.batch == 3


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
def test_a_compiled_model_leaves_native_code_untraced(attention, make, device):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    want = reference(model, ids, new=4).tolist()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        assert generate(model, ids, make(model), attention, new=4).tolist() == want
    finally:
        torch._dynamo.reset()


def test_what_a_cache_or_graphs_cannot_be_made_with_is_named_at_once():
    model = tiny_model("llama")
    with pytest.raises(TypeError, match="unknown KVCache option bakend"):
        VMemCache(model, bakend="host")
    with pytest.raises(TypeError, match="overlap must be True or False"):
        VMemCache(model, spare=Spare(overlap=1))
    with pytest.raises(TypeError, match="options must be KVCacheOptions"):
        VMemCache(model, options={"overlap": False})
    VMemCache(model, options=KVCacheOptions(spare=Spare(overlap=False))).close()
    with pytest.raises(TypeError, match="model must be a model of transformers, not LlamaConfig"):
        DecodeGraphs(model.config)


def test_an_offload_without_cpu_memory_leaves_the_cache_usable(make, device, monkeypatch):
    """Some of the sequences were moved by then."""
    model, ids = tiny_model("llama", device=device), prompts(3, device=device)
    cache, other = make(model), make(model)
    allocate, slots = torch.empty_like, []

    def allocate_once(rows, **options):
        slots.append(rows.data_ptr())
        if len(slots) > len(cache.kv.tensors):  # the second sequence's
            raise RuntimeError("no pinned memory")
        return allocate(rows, **options)

    with torch.no_grad():
        for each in (cache, other):
            model(ids, past_key_values=each)
        monkeypatch.setattr(torch, "empty_like", allocate_once)
        with pytest.raises(OutOfMemory, match="no CPU memory for the .* bytes of slot 1's rows: no pinned memory"):
            cache.offload()
        monkeypatch.undo()
        assert [cache.kv.slot(slot).state for slot in range(3)] == ["swapped", "active", "active"]
        again = model(ids[:, :1], past_key_values=cache).logits
        assert torch.equal(again, model(ids[:, :1], past_key_values=other).logits)
        cache.offload()
        cache.prefetch()
        assert [cache.kv.slot(slot).state for slot in range(3)] == ["active"] * 3


def test_a_crop_without_memory_says_so_and_can_be_repeated(make, device, monkeypatch):
    model, ids = tiny_model("llama", device=device), prompts(2, device=device)
    cache = make(model)
    generate(model, ids, cache, "vmem")
    length = cache.get_seq_length()
    monkeypatch.setattr(KVCache, "truncate", lambda *_: False)
    with pytest.raises(OutOfMemory, match="crop: 0 pages are missing"):
        cache.crop(length - 2)
    monkeypatch.undo()
    cache.crop(length - 2)
    assert cache.get_seq_length() == length - 2 == cache.kv.slot(cache.rows.slots[0]).tokens


def test_sinks_of_each_query():
    """As Inkling 2 of transformers 5.23 has them: ``[batch, heads, tokens, 1]``."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 16) for _ in range(3))
    sinks = torch.randn(2, 4, 5, 1)
    out, _ = vmem_attention(torch.nn.Module(), q, k, v, None, scaling=0.25, sinks=sinks)
    scores = (q @ k.transpose(2, 3) * 0.25).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = torch.cat([scores, sinks], 3).softmax(3)[..., :-1] @ v
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_sinks_in_some_layers_only(make, device):
    """As in MiMo-V2-Flash. The first layer runs by lengths, the second one reads its rows as one tensor."""
    model, ids = tiny_model("gpt_oss", device=device), prompts(device=device)
    model.model.layers[0].self_attn.sinks = None
    got = generate(model, ids, make(model), "vmem")
    theirs = generate(model, ids, transformers.DynamicCache(config=model.config), "vmem")
    assert got.tolist() == theirs.tolist()
    mask = padding("left").to(device)
    got = generate(model, ids, make(model), "vmem", attention_mask=mask)
    theirs = generate(model, ids, transformers.DynamicCache(config=model.config), "vmem", attention_mask=mask)
    assert got.tolist() == theirs.tolist()
    model.set_attn_implementation("vmem")
    cache = make(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="layer 1 reads its rows as one tensor.*pass the 2D attention_mask"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
@pytest.mark.parametrize("where", ["between layers", "in the attention"])
def test_after_an_interrupt_the_cache_says_that_reset_comes_first(where, attention, make, device):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    model.set_attn_implementation(attention)
    cache, layers = make(model), model.model.layers

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        model(ids, past_key_values=cache)
        stops = layers[0].mlp if where == "between layers" else layers[1].self_attn.v_proj
        hook = stops.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
        hook.remove()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the last pass was interrupted.*reset.. the cache"):
                model(ids[:, :1], past_key_values=cache)
        cache.crop(13)  # as the message says
        assert cache.get_seq_length() == 13
        cache.reset()
    assert generate(model, ids, cache, attention).tolist() == reference(model, ids).tolist()


def test_generates_output_is_not_pickled(make, device):
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    out = generate(model, ids, make(model), return_dict_in_generate=True)
    with pytest.raises(TypeError, match="a VMemCache cannot be pickled.*set the cache in generate..'s output to None"):
        pickle.dumps(out)


def test_more_sequences_than_a_prefilled_cache_has(make, device):
    model, ids = tiny_model("llama", device=device), prompts(1, device=device)
    cache = make(model)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    options = {"attention_mask": torch.ones_like(ids), "num_beams": 3, "num_return_sequences": 3}
    with pytest.raises(ValueError, match="has 3 sequences, the cache 1: .* batch_repeat_interleave.3. it, first"):
        generate(model, ids, cache, **options)
    cache.batch_repeat_interleave(3)
    assert generate(model, ids, cache, **options).tolist() == reference(model, ids, **options).tolist()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_cache_is_iterated_as_transformers_own(name, make, device):
    model, ids = tiny_model(name, device=device), prompts(device=device)
    ours, theirs = make(model), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (ours, theirs):
            model(ids, past_key_values=cache)
    for (k, v, more), (k_theirs, v_theirs, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close((k, v), (k_theirs, v_theirs))
        assert more is None


def test_generate_batch_does_not_ignore_a_cache(make):
    """It would: it takes any keyword."""
    model = tiny_model("llama")
    for name in ("cache", "past_key_values"):
        with pytest.raises(ValueError, match=f"{name}: generate_batch.. has a paged cache of its own"):
            model.generate_batch([[5, 6, 7]], max_new_tokens=2, **{name: make(model)})
