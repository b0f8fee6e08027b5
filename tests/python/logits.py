"""A model's logits over a schedule of passes: a prompt, single tokens, a chunk; for two attentions or two caches.

SPDX-License-Identifier: MIT
"""

import warnings

import torch
import transformers

PASSES = (13, 1, 1, 4, 1)  # a window of 8 or 9 rows is crossed in the prompt, in single steps and in a chunk
SIDES = ("none", "left", "right", "between")


def padding(side, batch=3, tokens=13):
    """A 2D mask, ``[batch, tokens]``, in which the sequences have different numbers of tokens."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    for row, pads in ((0, 5), (2, 2))[: batch - 1]:
        if side == "left":
            mask[row, :pads] = 0
        elif side == "right":
            mask[row, tokens - pads :] = 0
        elif side == "between":
            mask[row, 3 : 3 + pads] = 0
    return mask


def stock(model):
    """The attention of transformers that "vmem" promises the results of: sdpa, or eager if a model has no sdpa."""
    text = model.config.get_text_config(decoder=True)
    capped = getattr(text, "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def run(model, cache, attention, side="none", batch=3, passes=PASSES, vocabulary=96, device="cpu", seen=0, **more):
    """Logits of every token that is not padding, ``[tokens, vocabulary]`` each pass.

    seen: the columns that the cache has already.
    """
    model.set_attn_implementation(attention)
    mask = torch.ones(batch, seen, dtype=torch.long, device=device)
    ids = torch.randint(2, vocabulary, (batch, seen + sum(passes)), generator=torch.Generator().manual_seed(5))
    ids, out, start = ids.to(device), [], seen
    for tokens in passes:
        new = padding(side, batch, tokens).to(device) if not start else mask.new_ones(batch, tokens)
        mask = torch.cat([mask, new], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = model(
                input_ids=ids[:, start : start + tokens], attention_mask=mask, position_ids=positions,
                past_key_values=cache, **more,
            )  # fmt: skip
        out.append(result.logits[new.bool()])
        start += tokens
    return out


def difference(one, two):
    """The largest difference of two lists of logits, relative to the largest logit."""
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-6)) for a, b in zip(one, two, strict=True))


def caches():
    """Every kind of cache of this release: name to a function of a config. Each takes the passes of `run`.

    A kind that this machine or model cannot have raises transformers' own error: a package is missing, or it takes
    layers of full attention only.
    """
    t, more = transformers, transformers.cache_utils
    few = {"residual_length": 4, "nbits": 4}  # rows kept as they are
    kinds = {
        "dynamic": lambda config: t.DynamicCache(config=config),
        "dynamic without a config": lambda config: t.DynamicCache(),
        "static": lambda config: t.StaticCache(config=config, max_cache_len=40),
        "static, as long as needed": lambda config: t.StaticCache(config=config, max_cache_len=sum(PASSES)),
        "quantized, quanto": lambda config: t.QuantizedCache("quanto", config, **few, q_group_size=8),
        "quantized, hqq": lambda config: t.QuantizedCache(
            "hqq", config, **few, axis_key=1, axis_value=1, q_group_size=8
        ),
        "quantized, fp8": lambda config: t.QuantizedCache("fp8", config),
    }
    if torch.cuda.is_available():  # its copies run on a stream of the GPU
        kinds["dynamic, offloaded"] = lambda config: t.DynamicCache(config=config, offloading=True)
        kinds["static, offloaded"] = lambda config: t.StaticCache(config=config, max_cache_len=40, offloading=True)
    for name in ("MtpCache", "DFlashCache"):
        if hasattr(more, name):
            kinds[name] = lambda config, name=name: getattr(more, name)(config=config)
    return kinds
