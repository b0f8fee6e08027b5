"""The attention "vmem" by logits: what sdpa computes, with every cache of transformers and with ours.

Tokens hide small errors: a query that sees a few rows too many rarely changes the largest logit.

SPDX-License-Identifier: MIT
"""

import inspect
import os
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from families import VOCABULARY, names, small_config, small_model  # noqa: E402
from generations import make_cache, single_thread  # noqa: E402, F401
from logits import SIDES, caches, difference, padding, run, stock  # noqa: E402
from tiny_models import MODELS, prompts, tiny_config, tiny_model  # noqa: E402

from pyvmem.transformers import VMemCache  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

CLOSE = 1e-5  # of the largest logit, in float32: other orders of summation


@pytest.mark.parametrize("kind", caches())
@pytest.mark.parametrize("name", MODELS)
def test_every_cache_of_transformers(name, kind, device):
    """Without a VMemCache, the attention is sdpa's to the last bit.

    Where layers read other layers' rows, no mask is left out, and sdpa's kernel for masks sums in another order.
    """
    model, cache = tiny_model(name, device=device), caches()[kind]
    most = CLOSE if getattr(model.config.get_text_config(), "num_kv_shared_layers", 0) else 0
    if kind == "dynamic without a config" and name in ("qwen3_next", "jamba", "falcon_h1"):
        pytest.skip("transformers needs the config for linear attention")
    if (name, kind) == ("deepseek_v3", "quantized, hqq"):
        pytest.skip("hqq fails with sdpa, too, where K and V have different widths")
    try:
        cache(model.config)
    except (ImportError, ValueError) as error:
        pytest.skip(f"transformers: {error}")
    if "offloaded" in kind and device != "cpu":
        if "prefetch_stream.wait_stream" not in inspect.getsource(transformers.Cache.update):
            pytest.skip("this release reads a layer back before its copy to the CPU has ended, with sdpa, too")
        if all(cache(model.config).is_sliding):
            pytest.skip("transformers offloads no layer with a window, and fails where it finds no other")
    for side in ("none", "left"):
        ours, theirs = (run(model, cache(model.config), a, side, device=device) for a in ("vmem", stock(model)))
        assert difference(ours, theirs) <= most, side


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", MODELS)
def test_our_cache(name, side, make, device):
    model = tiny_model(name, device=device)
    theirs = run(model, transformers.DynamicCache(config=model.config), stock(model), side, device=device)
    for attention in ("vmem", stock(model)):
        ours = run(model, make(model), attention, side, device=device)
        assert difference(ours, theirs) < CLOSE, attention


def _masks(tokens=7):
    """{name: (mask of the prompt, mask of the next token, position_ids)}, as users hand them over."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    packed, prefix, tree = causal.clone(), causal.clone(), causal.clone()
    packed[3:, :3] = False  # two documents in one row
    prefix[:4, :4] = True  # a prefix that sees itself
    tree[6, 5] = False  # two drafts of one token
    all_rows = torch.ones(1, tokens + 1, dtype=torch.bool)
    some_rows = all_rows.clone()
    some_rows[0, 2] = False
    again = torch.cat([torch.arange(3), torch.arange(tokens - 3)])
    ones = torch.ones(2, tokens + 1, dtype=torch.long)
    return {
        "causal": (causal, all_rows, None),
        "packed": (packed, all_rows, again),
        "prefix": (prefix, all_rows, None),
        "tree": (tree, all_rows, None),
        "rows left out later": (causal, some_rows, None),
        "positions that begin again": (None, None, again),
        "the same, with a 2D mask": (ones[:, :-1], ones, again),
    }


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("what", _masks())
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3"])
def test_masks_and_positions_of_the_caller(name, what, kind, make, device):
    """4D masks that are not causal, and packed sequences: what sdpa computes from them."""
    model, (*masks, again) = tiny_model(name, device=device), _masks()[what]
    if kind == "float" and (masks[0] is None or masks[0].dtype != torch.bool):
        pytest.skip("no 4D mask")

    def whole(mask):
        if mask is None or mask.dtype != torch.bool:
            return None if mask is None else mask.to(device)
        if kind == "float":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        return mask[None, None].repeat(2, 1, 1, 1).to(device)

    positions = (
        [None, None] if again is None else [again.expand(2, -1).to(device), torch.full((2, 1), 4, device=device)]
    )
    ids = torch.randint(2, 90, (2, 8), generator=torch.Generator().manual_seed(1)).to(device).split([7, 1], 1)

    def logits(attention, cache):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return [
                model(input_ids=i, attention_mask=whole(m), position_ids=p, past_key_values=cache).logits
                for i, m, p in zip(ids, masks, positions)
            ]

    theirs = logits(stock(model), transformers.DynamicCache(config=model.config))
    for attention, cache in (("vmem", None), (stock(model), make(model)), ("vmem", make(model))):
        cache = transformers.DynamicCache(config=model.config) if cache is None else cache
        assert difference(logits(attention, cache), theirs) < CLOSE, (attention, type(cache))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3", "gpt2"])
def test_generate_with_a_static_cache(name, device):
    """``cache_implementation="static"``: K is as wide as the longest sequence from the first step on."""
    model, ids = tiny_model(name, device=device), prompts(device=device)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    both = []
    for attention in ("vmem", stock(model)):
        model.set_attn_implementation(attention)
        both.append(model.generate(ids, cache_implementation="static", **options).logits)
    assert difference(*both) <= (0 if device == "cpu" else CLOSE)  # on a GPU, a captured step may use another kernel


@pytest.mark.parametrize(("name", "dynamic"), [("llama", None), ("gemma3", True)])
def test_a_compiled_decode_step_with_a_static_cache(name, dynamic, device):
    """As generate() does on a GPU: one graph without a break, K of a fixed width, a mask of a fixed shape.

    dynamic: sizes are symbolic integers, as some releases of torch make them without being asked.
    """
    model = tiny_model(name, device=device)
    both = []
    for attention in ("vmem", "sdpa"):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        run(model, cache, attention, passes=(13,), device=device)
        forward, model.forward = (
            model.forward,
            torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=dynamic),
        )
        try:
            both.append(run(model, cache, attention, passes=(1, 1, 1), device=device, seen=13))
        finally:
            model.forward = forward
            torch._dynamo.reset()
    assert difference(*both) == 0


# ---- chats --------------------------------------------------------------------------------------------------------

CHATS = [("none", "none", "left"), ("left", "left", "right"), ("left", "right", "left"), ("right", "between", "left")]


def chat(model, attention, cache, sides, device):
    """Logits of several turns, padded on a side each. After a turn, the mask hides the ends of two sequences.

    So does a chat in which sequences end early: generate() goes on adding tokens to them.
    """
    model.set_attn_implementation(attention)
    generator, mask, out = torch.Generator().manual_seed(3), torch.ones(3, 0, dtype=torch.long, device=device), []
    for turn, side in enumerate(sides):
        for new in (padding(side, tokens=9 if turn else 13), *[torch.ones(3, 1, dtype=torch.long)] * 4):
            mask = torch.cat([mask, new.to(device)], 1)
            tokens = new.shape[1]
            ids = torch.randint(2, 90, (3, tokens), generator=generator).to(device)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens:]
            with torch.no_grad():
                logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            out.append(logits[new.bool()])
        mask[0, -2:] = mask[2, -1:] = 0
    return out


@pytest.mark.parametrize("sides", CHATS, ids=lambda sides: "-".join(sides))
@pytest.mark.parametrize("name", MODELS)
def test_a_chat_with_padded_turns(name, sides, make, device):
    model = tiny_model(name, device=device)
    theirs = chat(model, stock(model), transformers.DynamicCache(config=model.config), sides, device)
    assert difference(chat(model, "vmem", make(model), sides, device), theirs) < CLOSE


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_tokens_that_a_later_mask_hides(name, make, device):
    """In the middle of a sequence and for a while, as some methods of pruning do."""
    model, both = tiny_model(name, device=device), []
    for attention, cache in ((stock(model), transformers.DynamicCache(config=model.config)), ("vmem", make(model))):
        model.set_attn_implementation(attention)
        ids, mask, out = prompts(device=device), padding("left").to(device), []
        for hidden in (slice(0), slice(6, 9), slice(0), slice(10, 12), slice(0)):
            seen = mask.clone()
            seen[1:, hidden] = 0
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            with torch.no_grad():
                logits = model(ids, attention_mask=seen, position_ids=positions, past_key_values=cache).logits
            out.append(logits[mask[:, -ids.shape[1] :].bool()])
            ids, mask = ids[:, :1], torch.cat([mask, mask.new_ones(3, 1)], 1)
        both.append(out)
    assert difference(*both) < CLOSE


# ---- settings that change which layers cache what -------------------------------------------------------------------


def flags():
    """(model, setting, value) of every setting of the table's configurations that changes what a layer caches."""
    found = []
    for name in MODELS:
        config = tiny_config(name)
        for setting, value in config.to_dict().items():
            for other in others(setting, value, config.num_hidden_layers):
                try:
                    changed = layers_of(tiny_config(name, **{setting: other}))
                except Exception:  # its configuration refuses the value
                    continue
                if changed != layers_of(config):
                    found.append((name, setting, other))
    return found


def others(setting, value, layers):
    """Other values of a setting."""
    if isinstance(value, bool):
        return [not value]
    if setting == "layer_types" and isinstance(value, list):
        kinds = list(dict.fromkeys(value))
        return [[kind] * layers for kind in kinds] + ([value[::-1]] if len(kinds) > 1 else [])
    if isinstance(value, int) and any(word in setting for word in ("layer", "window", "chunk", "interval", "period")):
        if "window" in setting:
            return [0, 2]  # with a window of 1, DynamicCache keeps all rows, which Moshi then reads
        return [] if setting in ("num_hidden_layers", "n_layer") else [0, 1, 2]
    return [8] if value is None and ("window" in setting or "chunk" in setting) else []


def layers_of(config):
    types, settings = transformers.cache_utils.get_layer_types_and_kwargs(config)
    return types, settings, getattr(config, "kv_sharing_modes", None)


@pytest.mark.parametrize(("name", "setting", "value"), flags(), ids=str)
def test_a_setting_that_changes_which_layers_cache(name, setting, value, make, device):
    theirs = {}
    for side in ("none", "left"):
        try:
            model = tiny_model(name, device=device, **{setting: value})
            cache = transformers.DynamicCache(config=model.config)
            theirs[side] = run(model, cache, stock(model), side, device=device)
        except Exception as error:
            pytest.skip(f"transformers alone: {type(error).__name__}: {str(error):.80}")
        try:
            cache = make(model)
        except ValueError as error:
            assert "no layers with keys and values" in str(error)
            return
        assert difference(run(model, cache, "vmem", side, device=device), theirs[side]) < CLOSE, side
        assert difference(run(model, make(model), stock(model), side, device=device), theirs[side]) < CLOSE, side


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("kind", ["ours", "dynamic", "static"])
@pytest.mark.parametrize("side", SIDES)
def test_layers_whose_queries_are_trimmed(side, kind, keep, make, device):
    """Gemma 4's layers that read other layers' rows compute the last tokens alone: as many as logits are kept."""
    model = tiny_model("gemma4_shared", device=device)
    kinds = {
        "ours": make,
        "dynamic": lambda model: transformers.DynamicCache(config=model.config),
        "static": lambda model: transformers.StaticCache(config=model.config, max_cache_len=40),
    }
    ids, mask = prompts(device=device), padding(side).to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    both, seen = [], mask[:, -keep:].bool()
    for attention, cache in ((stock(model), kinds["dynamic"](model)), ("vmem", kinds[kind](model))):
        model.set_attn_implementation(attention)
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        with torch.no_grad():
            logits = model(ids, **options, logits_to_keep=keep if attention == "vmem" else 0).logits
        both.append([logits[:, -keep:][seen]])
    assert difference(*both) < CLOSE


# ---- every family of the release --------------------------------------------------------------------------------

SOME = ("bart", "big_bird", "bigbird_pegasus", "bloom", "diffllama", "doge", "falcon", "git", "gpt_neo", "gptj",
        "mimo_v2_flash", "mpt", "opt", "paligemma", "t5gemma", "xglm")  # fmt: skip
ALL = os.environ.get("VMEM_TEST_FAMILIES") == "all"
REFUSED = (
    "use another attention|no layers with keys and values|no attention heads"
    "|view size is not compatible"  # gpt_neox_japanese, which views keys that are not contiguous: torch's own error
)


@pytest.mark.parametrize("family", [f for f in names() if ALL or f[1] in SOME], ids=lambda f: f[2])
def test_a_family_is_equal_or_refused(family, make, device):
    """Each model, with transformers' caches and with ours: the stock attention's logits, or an error of one line."""
    model, wanted, why = None, {}, ""
    for side in ("none", "left", "right"):
        try:
            model = model or small_model(*family[1:]).to(device)
            own, attention = transformers.DynamicCache, stock(model)
            if model.config.is_encoder_decoder:
                pytest.skip("test_encoder_and_decoder tries these")
            theirs = run(model, own(config=model.config), attention, side, vocabulary=VOCABULARY, device=device)
        except Exception as error:  # of transformers alone: RecurrentGemma of 5.18 to 5.22, say, takes no padding
            why = f"{type(error).__name__}: {str(error):.80}"
            continue
        if not any(bool(x.isnan().any()) for x in theirs):  # else a query sees nothing
            wanted[side] = theirs
    if not wanted:
        pytest.skip(f"no small model of this family with transformers alone: {why}")
    tried = 0
    for side, theirs in wanted.items():
        for cache, kind in ((own(config=model.config), "vmem"), (None, attention), (None, "vmem")):
            try:
                cache = make(model) if cache is None else cache
                ours = run(model, cache, kind, side, vocabulary=VOCABULARY, device=device)
            except (ValueError, RuntimeError, TypeError) as error:
                assert re.search(REFUSED, str(error)) and isinstance(cache, VMemCache | None), error
            else:
                assert difference(ours, theirs) < CLOSE, (side, type(cache), kind)
            tried += 1
    assert tried


def test_most_families_have_a_small_model():
    """Otherwise the test above skips them."""
    built = 0
    for _, model_type, name in names():
        try:
            with torch.device("meta"):
                getattr(transformers, name)(small_config(model_type))
            built += 1
        except Exception:
            continue
        if not ALL and built == 40:
            return
    assert built > 0.6 * len(names())
