"""A VMemCache in torch's modes, one after the other, and both orders of the two calls that set a model up.

SPDX-License-Identifier: MIT
"""

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from generations import generate, make_cache, padding, reference, single_thread  # noqa: E402, F401
from logits import difference, run, stock  # noqa: E402
from test_transformers_graphs import graphs  # noqa: E402
from tiny_models import MODELS, prompts, tiny_model  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem import KVCache, attention, virtual_empty  # noqa: E402
from pyvmem.transformers import VMemCache  # noqa: E402
from pyvmem.transformers.layers import VMemLayer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """A compiled model keeps what it traced until the test ends."""
    yield
    torch._dynamo.reset()


MODES = {
    "no_grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "autocast": lambda device: contextlib.ExitStack(),  # `passes` enters it
    "compile": lambda device: torch.no_grad(),
}


def passes(model, mode, cache, ids, mask, device):
    """The logits of a prompt, or of one more token, in a mode."""
    forward = model.forward
    with contextlib.ExitStack() as stack:
        stack.enter_context(MODES[mode](device))
        stack.enter_context(torch.no_grad())
        if mode == "autocast":
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        if mode == "compile":
            model.forward = torch.compile(forward, backend="eager")  # which keeps what it traced until the test ends
            stack.callback(setattr, model, "forward", forward)
        return model(ids, attention_mask=mask, past_key_values=cache).logits.float().clone()


EAGER = [mode for mode in MODES if mode != "compile"]
CASES = [(a, b, attention) for a in EAGER for b in EAGER for attention in ("sdpa", "vmem")]
# What is compiled takes one way through both attentions (VMemLayer.update), and half a minute each.
CASES += [("compile", "inference", "vmem"), ("compile", "autocast", "vmem")]


@pytest.mark.parametrize(("first", "second", "attention"), CASES)
def test_a_mode_leaves_nothing_behind(first, second, attention, device, backend):
    """A cache in one mode, then its memory in another one: of a later cache, of the same one, and of a copy."""
    model, ids = tiny_model("llama", device=device), prompts(device=device)
    mask = padding("none" if "compile" in (first, second) else "left").to(device)
    model.set_attn_implementation(attention)
    longer = torch.cat([mask, mask.new_ones(3, 1)], 1)

    def steps(caches, first, second):
        prefix = caches()
        out = [passes(model, first, prefix, ids, mask, device)]
        later = copy.deepcopy(prefix)
        for cache in (prefix, later):
            out.append(passes(model, second, cache, ids[:, :1], longer, device))
        cache = prefix if isinstance(prefix, transformers.DynamicCache) else None
        del prefix, later
        for _ in range(2):  # whose memory an earlier one had, and the same one again
            cache = caches() if cache is None or isinstance(cache, transformers.DynamicCache) else cache
            out.append(passes(model, second, cache, ids, mask, device))
            out.append(passes(model, first, cache, ids[:, :1], longer, device))
            if not isinstance(cache, transformers.DynamicCache):  # which in 5.17 cannot be reset in another mode
                cache.reset()
        return [x[longer[:, : x.shape[1]].bool()] if x.shape[1] > 1 else x for x in out]

    ours = steps(lambda: VMemCache(model, backend=backend, name=None, check=True), first, second)
    model.set_attn_implementation("sdpa")
    traced = {"compile": "no_grad"}  # which computes the same, without seconds of tracing
    theirs = steps(lambda: transformers.DynamicCache(config=model.config), *(traced.get(m, m) for m in (first, second)))
    assert difference(ours, theirs) < (3e-2 if "autocast" in (first, second) else 1e-5)


@pytest.mark.parametrize("turns", ["inference no_grad", "no_grad inference no_grad", "inference reset no_grad"])
@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "falcon_h1"])
def test_states_beside_rows_belong_to_no_mode(name, turns, make, device):
    """transformers makes them in a pass, and writes to them in the next, which may run in another mode."""
    model, ids = tiny_model(name, device=device), prompts(device=device)
    both = []
    for cache in (make(model), transformers.DynamicCache(config=model.config)):
        ours, out, tokens = not isinstance(cache, transformers.DynamicCache), [], ids
        model.set_attn_implementation(stock(model))
        for turn in turns.split():
            if turn == "reset":
                cache, tokens = cache if ours else transformers.DynamicCache(config=model.config), ids
                cache.reset() if ours else None
                continue
            with torch.inference_mode() if ours and turn == "inference" else torch.no_grad():
                out.append(model(tokens, past_key_values=cache).logits.clone())
            tokens = ids[:, :1]
        both.append([x if not x.is_inference() else torch.tensor(x.tolist(), device=device) for x in out])
    assert difference(*both) < 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_that_comes_or_goes(name, attention, make, device):
    """Some models then give keys of another dtype than before: those whose keys no rotary embedding widens."""
    model, ids = tiny_model(name, device=device), prompts(device=device)
    attention = stock(model) if attention == "sdpa" else attention
    for before in (False, True):
        both = []
        for kind, cache in ((stock(model), transformers.DynamicCache(config=model.config)), (attention, make(model))):
            model.set_attn_implementation(kind)
            both.append([])
            for on, tokens in ((before, ids), (not before, ids[:, :1]), (before, ids[:, :1])):
                with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=on):
                    both[-1].append(model(tokens, past_key_values=cache).logits.float())
        assert difference(*both) < (1e-5 if device == "cpu" else 5e-2), before  # bfloat16 on a GPU


def test_autocast_with_padding(make, device):
    """Under autocast, Llama gives keys of float32 and values of bfloat16."""
    model, ids, mask = tiny_model("llama", device=device), prompts(device=device), padding("left").to(device)
    with torch.autocast(device, torch.bfloat16):
        got = generate(model, ids, make(model), "vmem", attention_mask=mask)
        want = reference(model, ids, attention_mask=mask)
    assert (got == want).float().mean() > 0.8  # a GPU's kernels sum in another order


def test_a_compiled_step_after_padding_was_left_out_is_refused(make, device):
    model, ids, mask = tiny_model("llama", device=device), prompts(device=device), padding("left").to(device)
    model.set_attn_implementation("vmem")
    cache = make(model)
    passes(model, "no_grad", cache, ids, mask, device)
    with pytest.raises(ValueError, match="reset.. the cache before another attention or torch.compile uses it"):
        passes(model, "compile", cache, ids[:, :1], torch.cat([mask, mask.new_ones(3, 1)], 1), device)


def test_tensors_that_are_made_in_inference_mode_are_ordinary(device, backend):
    """Those of a cache, of a batch and of a virtual tensor: their memory outlives the mode."""
    with torch.inference_mode():
        tensor = virtual_empty((4, 8), torch.float32, device, context=pyvmem.Context(backend))
        cache = KVCache.for_model(1, 2, 16, 2, 64, budget=1 << 24, dtype=torch.float32, backend=backend)
        slots = [cache.alloc(), cache.alloc()]
        cache.step([5, 3])
        batch = attention.Batch(cache, slots, [5, 3])
        attention.decode(torch.zeros(2, 4, 16, device=device), cache, 0, batch)
    tensor.commit()
    tensor.tensor.fill_(1.0)
    for each in (cache.keys[0], cache.values[0], *cache.tensors, cache.flat(0)):
        assert not each.is_inference()
    cache.keys[0][0, :5] = 0
    cache.values[0][0, :5] = 0
    cache.step([6, 4])
    batch.advance()
    batch.update(slots, [6, 4])
    assert batch.lengths_t.tolist() == [6, 4]
    cache.close()


def test_captured_steps_in_another_mode(make, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, ids = tiny_model("llama", device=device, dtype=dtype), prompts(device=device)
    want = generate(model, ids, make(model), "vmem").tolist()
    cache = make(model)
    with graphs(model, device) as captured:
        with torch.inference_mode():
            assert generate(model, ids, cache, "vmem").tolist() == want
        cache.reset()
        assert generate(model, ids, cache, "vmem").tolist() == want
        assert captured.replayed > 11


# ---- the two calls that set a model up ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["model", "config"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_both_orders_of_setting_the_attention_and_making_the_cache(name, late, given, make, device):
    model = tiny_model(name, device=device)
    theirs = run(model, transformers.DynamicCache(config=model.config), stock(model), "left", device=device)
    model.set_attn_implementation(stock(model) if late else "vmem")
    cache = make(model if given == "model" else model.config)
    model.set_attn_implementation("vmem")
    ours = [layer for layer in cache.layers if isinstance(layer, VMemLayer)]
    assert all(layer.by_length for layer in ours)
    assert difference(run(model, cache, "vmem", "left", device=device), theirs) < 1e-5
    model.set_attn_implementation(stock(model))
    assert not any(layer.by_length for layer in ours)
