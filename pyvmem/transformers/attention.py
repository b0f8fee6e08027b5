"""The attention ``"vmem"`` of transformers' `AttentionInterface`: it reads a `VMemCache`'s slots by their lengths.

No mask is built, nothing is concatenated, and K and V are never repeated for grouped queries. Padding has no rows in
the cache, wherever it is, and each sequence has its own length. What the kernels of `pyvmem.attention` do not take
(other mask patterns, attention sinks) goes to torch's scaled_dot_product_attention over views of the same rows.

SPDX-License-Identifier: MIT
"""

import math
from dataclasses import replace
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from pyvmem import attention
from pyvmem.attention.kernel import Shape, capability
from pyvmem.attention.table import KERNELS, choose
from pyvmem.transformers.layers import Handover, VMemLayer
from pyvmem.transformers.plan import Plan

NAME = "vmem"

Int64s = npt.NDArray[np.int64]


def register() -> None:
    """Register the attention with transformers as ``"vmem"``. Importing `pyvmem.transformers` calls this."""
    AttentionInterface.register(NAME, vmem_attention)
    AttentionMaskInterface.register(NAME, vmem_mask)


def vmem_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask for `vmem_attention`.

    None if the pattern is causal (with or without a window) and nothing is padded; the 2D padding mask if something is;
    for any other pattern, a 4D mask as sdpa takes it.
    """
    if _beside_the_window(config, local_size):
        allow_is_causal_skip = False
    if not allow_is_causal_skip or getattr(config, "attention_chunk_size", None):
        dense: torch.Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            local_size=local_size, allow_is_causal_skip=allow_is_causal_skip, **kwargs,
        )  # fmt: skip
        return dense
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask


def _beside_the_window(config: PreTrainedConfig | None, local_size: int | None) -> bool:
    """Whether a model's mask has all rows although its cache has only windows: Moshi's prompts see all of theirs."""
    windows = getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None)
    return bool(windows) and local_size is None


def vmem_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries ``[batch, query_heads, tokens, head_dim]``.

    Returns ``(output, None)``; the output is ``[batch, tokens, query_heads, head_dim]``. key, value: the results of the
    cache's ``update``, or any K and V of a model that runs without a `VMemCache`.
    """
    if torch.compiler.is_compiling():
        untraced: tuple[torch.Tensor, None] = _untraced(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window, softcap, s_aux, position_bias,
            **kwargs,
        )  # fmt: skip
        return untraced
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: the attention vmem returns no weights; use eager")
    s_aux = kwargs.get("sinks") if s_aux is None else s_aux  # Inkling 2: one for each query
    handover = getattr(key, "vmem", None)
    if handover is not None and value is not handover.returned:
        _same_value(handover, value)
    if handover is not None and attention_mask is None and s_aux is None and position_bias is None and not dropout:
        causal = kwargs.get("is_causal")
        out = _step_again(module, handover, query, key, value, scaling, sliding_window, softcap, causal)
        if out is not None:
            return out, None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    extras = (softcap, s_aux, position_bias)
    if handover is None:
        columns = key.shape[2]
        if attention_mask is not None and attention_mask.dim() == 2:
            columns = attention_mask.shape[1]  # the K of a sliding layer does not have all of them
        start, first = columns - query.shape[2], columns - key.shape[2]
        mask = _dense_mask(query, key.shape[2], start, first, sliding_window, attention_mask, causal)
        return _dense(module, query, key, value, mask, dropout, scaling, causal, *extras), None
    layer = handover.layer
    window = layer.window or sliding_window or 0
    by_kernel = _by_kernel(layer, query, key, attention_mask, dropout, window, *extras, causal)
    if by_kernel:
        plan = handover.write(key, attention_mask, by_kernel=layer.appends)
        by_kernel = attention_mask is None or layer.rows.ragged  # otherwise earlier passes stored the padding as well
    else:
        plan = handover.write(key, uniform=True)
    if not by_kernel:
        keys, values = layer.view(handover.start)
        first = layer.length - keys.shape[2]
        mask = _dense_mask(query, keys.shape[2], handover.start, first, window, attention_mask, causal)
        return _dense(module, query, keys, values, mask, dropout, scaling, causal, *extras), None
    if handover.value is not None:
        return _decode(layer, plan, query, key, handover.value, scaling, window, softcap or 0.0), None
    return _by_length(layer, plan, query, scaling, window, softcap or 0.0), None


_untraced = torch.compiler.disable(vmem_attention)  # native code cannot be traced


def _same_value(handover: Handover, value: torch.Tensor) -> None:
    """Raises RuntimeError if a model does not attend over what its cache returned."""
    if handover.returned.shape != value.shape or handover.returned.data_ptr() != value.data_ptr():
        handover.layer.rows.pending = None
        raise RuntimeError(
            f"layer {handover.layer.index} changed the values that the cache returned: use another attention than vmem "
            "for this model"
        )


# ---- by lengths ---------------------------------------------------------------------------------------------------


def _shape(phase: str, query_heads: int, key: torch.Tensor, window: int, softcap: float, tile_rows: int = 0) -> Shape:
    device = key.device
    where = capability(device.index if device.type == "cuda" else None)
    heads, dim = key.shape[1], key.shape[3]
    return Shape(phase, query_heads, heads, dim, key.dtype, key.dtype, device.type, where, window, softcap, tile_rows)


def _softcap(config: PreTrainedConfig) -> float:
    return float(getattr(config, "attn_logit_softcapping", None) or 0.0)


def decode_shape(layer: VMemLayer) -> Shape:
    """The `Shape` of a decode step of a `VMemLayer`."""
    key, heads = layer.slot(0)[:, :1].transpose(1, 2), layer.config.num_attention_heads
    return _shape("decode", heads, key, layer.window, _softcap(layer.config), layer.rows.kv.tile_rows)


def tile_rows(key: torch.Tensor, config: PreTrainedConfig, windows: list[int]) -> int:
    """The `tile_rows` that a model's cache needs for the kernels that will be chosen.

    key: ``[batch, heads, tokens, head_dim]``. windows: the windows of the model's layers.
    """
    if key.device.type != "cuda":
        return 1
    softcap = _softcap(config)
    rows = [1]
    for phase in ("decode", "prefill"):
        for window in set(windows):
            shape = _shape(phase, config.num_attention_heads, key, window, softcap)
            try:
                # With whole tiles, one launch of prefill serves prompts of several lengths.
                rows.append(KERNELS[choose(shape).kernel].tile_rows(replace(shape, phase="decode")))
            except ValueError:  # no kernel takes it: the dense path does
                pass
    return math.lcm(*rows)


def _by_kernel(
    layer: VMemLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
) -> bool:
    """Whether the kernels of `pyvmem.attention` can compute this."""
    if (mask is not None and mask.dim() != 2) or sinks is not None or bias is not None or dropout or not causal:
        return False
    asked = (softcap, query.dtype, query.shape[:2])
    if layer.asked != asked:
        layer.asked, layer.taken, layer.appends = asked, query.dtype == key.dtype, False
        try:
            for phase in ("prefill", "decode") if layer.taken else ():
                shape = _shape(phase, query.shape[1], key, window, float(softcap or 0.0), layer.rows.kv.tile_rows)
                shape = replace(shape, requests=query.shape[0], rows=layer.length)
                kernel = KERNELS[choose(shape).kernel]
                layer.appends = kernel.appends
        except ValueError:  # no kernel takes it
            layer.taken = False
    return layer.taken


def _decode(
    layer: VMemLayer,
    plan: Plan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """A decode step of the whole batch in which the kernel stores the new rows."""
    rows = layer.rows
    batch = rows.batch_of(plan)
    assert batch is not None  # the whole batch decodes: nothing is padding
    if layer.again is None or layer.again_version != rows.version:
        layer.again, layer.again_version = attention.Again(rows.kv, layer.kv()), rows.version
    return layer.again(query, key, value, batch, scaling, window, softcap)


def _step_again(
    module: torch.nn.Module,
    handover: Handover,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    causal: bool | None,
) -> torch.Tensor | None:
    """A decode step whose first layer has planned the pass and the launch, as its last step did; otherwise None.

    An eager step waits for Python, layer by layer. This is what remains to be done in the layers after the first.
    """
    layer = handover.layer
    rows = layer.rows
    plan = rows.plan
    if (
        plan is None or plan.batch is None or plan.kept is not None or handover.plan is not None
        or handover.tokens != 1 or plan.tokens != 1 or plan.start != handover.start
        or not layer.appends or layer.again is None or layer.again_version != rows.version
        or layer.asked[0] != softcap or layer.asked[1] is not query.dtype
        or not (getattr(module, "is_causal", True) if causal is None else causal)
    ):  # fmt: skip
        return None
    rows.pending = handover.value = None
    handover.plan = plan
    layer.length = handover.start + 1
    return layer.again(query, key, value, plan.batch, scaling, layer.window or sliding_window or 0, softcap or 0.0)


def _by_length(
    layer: VMemLayer, plan: Plan, query: torch.Tensor, scaling: float | None, window: int, softcap: float
) -> torch.Tensor:
    rows = layer.rows
    batch = rows.batch_of(plan)
    n, heads, tokens, dim = query.shape
    q = query.transpose(1, 2).reshape(-1, heads, dim)
    if batch is None:  # only padding
        return q.new_zeros(n, tokens, heads, dim)
    if plan.sources is not None:
        q = q.index_select(0, plan.sources)
    kv = layer.kv()
    call = attention.decode if batch.max_query == 1 else attention.prefill
    out = call(q, rows.kv, kv, batch, softmax_scale=scaling, window=window, softcap=softcap)
    if plan.sources is not None:
        out = out.new_zeros(n * tokens, heads, dim).index_copy_(0, plan.sources, out)
    out = out.view(n, tokens, heads, dim)
    for row, columns, ends in plan.padding:
        out[row, columns] = _of_padding(query[row, :, columns], kv, rows.slots[row], ends, scaling, window)
    return out


def _of_padding(
    query: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    slot: int,
    ends: Int64s,
    scaling: float | None,
    window: int,
) -> torch.Tensor:
    """The attention of padding that follows tokens, over all rows before it: ``[columns, heads, dim]``.

    Only ``generate()`` with padding on the right reads the result: it takes the first new token from the last column,
    whether that is padding or not.
    """
    end, groups = int(ends[-1]), query.shape[0] // kv[0].shape[2]
    k, v = (t[slot, :end].transpose(0, 1)[None] for t in kv)
    before = torch.as_tensor(ends, device=query.device)[:, None]
    row = torch.arange(end, device=query.device)
    mask = (row < before) & (row >= before - window) if window else row < before
    k, v = (repeat_kv(t, groups) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(query[None], k, v, attn_mask=mask, scale=scaling)
    return out[0].transpose(0, 1)


# ---- with a mask --------------------------------------------------------------------------------------------------


def _dense_mask(
    query: torch.Tensor,
    kv_length: int,
    start: int,
    first: int,
    window: int | None,
    mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor | None:
    """A 4D mask for queries from column `start` on; None for all rows, or for torch's causal mask.

    K and V begin at column `first`. mask: None, the 2D padding mask, or a 4D mask, which is returned unchanged.
    """
    tokens = query.shape[2]
    if not causal or (mask is not None and mask.dim() == 4):
        return mask  # non-causal attention, such as cross-attention, already has the mask that it needs
    windowed = window if window and kv_length >= window else 0
    if mask is None and not windowed and (tokens == 1 or tokens == kv_length):
        return None
    pattern = sliding_window_causal_mask_function(windowed) if windowed else causal_mask_function
    dense: torch.Tensor | None = sdpa_mask(
        query.shape[0], tokens, kv_length, start, first, pattern, mask, allow_is_causal_skip=False,
        device=query.device,
    )  # fmt: skip
    return dense


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if softcap is None and sinks is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal=causal, position_bias=bias
        )
        return out
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is None and query.shape[2] > 1 and causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sinks = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks  # of a head, or of each of its queries
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], 3)
    weights = scores.float().softmax(-1).to(query.dtype)[..., : key.shape[2]]
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return (weights @ repeat_kv(value, groups)).transpose(1, 2).contiguous()
