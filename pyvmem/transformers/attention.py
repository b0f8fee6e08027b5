"""The attention ``"vmem"`` of transformers' `AttentionInterface`: it reads a `VMemCache`'s slots by their lengths.

No mask is built, nothing is concatenated, and K and V are never repeated for grouped queries. Padding has no rows in
the cache, wherever it is, and each sequence has its own length. What the kernels of `pyvmem.attention` do not take
(other mask patterns, attention sinks) goes to torch's scaled_dot_product_attention over views of the same rows.

SPDX-License-Identifier: MIT
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask, sliding_window_causal_mask_function
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from pyvmem import attention
from pyvmem.attention.table import KERNELS, choose
from pyvmem.transformers.layers import KVLength, PendingKV, VMemLayer
from pyvmem.transformers.opaque import OpaqueTensor, Padding
from pyvmem.transformers.plan import Plan

NAME = "vmem"


class Extras(NamedTuple):
    """A model's changes of attention; None, or 0: it makes none. sinks: of a head, or of each of its queries."""

    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # of positions

    @property
    def plain(self) -> bool:
        """True if the kernels of `pyvmem.attention` compute it."""
        return self.sinks is None and self.bias is None and not self.dropout


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
    """The mask for `vmem_attention`: sdpa's, unless the rows of a `VMemCache` are read by their lengths.

    They are if the pattern is the one that the lengths and the layer's window give. The mask is then None if nothing is
    padded, and otherwise an `OpaqueTensor`, the 2D mask.
    """

    kind: Any = type(config)
    make = sdpa_mask if config is None or _has_sdpa(kind) else eager_mask

    def dense(**options: Any) -> torch.Tensor | None:
        given = {"config": config, "local_size": local_size, "allow_is_causal_skip": allow_is_causal_skip, **kwargs}
        mask: torch.Tensor | None = make(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, **{**given, **options},
        )  # fmt: skip
        return mask

    # By its class: a compiled step may pass a symbolic integer, of which no attribute can be asked.
    if not isinstance(kv_length, KVLength) or not kv_length.layer.hands_over:
        # Layers that read other layers' rows may trim the queries, which sdpa would align to the top without a mask.
        trimmed = bool(getattr(config, "num_kv_shared_layers", 0))
        return dense(allow_is_causal_skip=allow_is_causal_skip and not trimmed)
    layer = kv_length.layer
    rows = layer.rows
    rows.masked, rows.eager = (q_offset, q_length), make is eager_mask
    # Moshi's prompts see all of their rows, although its cache has only windows.
    if not allow_is_causal_skip or (local_size or 0) != layer.window:
        return dense(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    if getattr(config, "attention_chunk_size", None):
        return dense()
    padded = attention_mask is not None and (rows.ragged or not attention_mask.all())
    if padded or rows.kv is None:  # until then, the layers do not know whether they hand over
        mask = dense(allow_is_causal_skip=not rows.ragged)
        return (
            None if mask is None else OpaqueTensor.of(mask, Padding(attention_mask if padded else None, lambda: mask))
        )
    return None


@functools.cache
def _has_sdpa(kind: Any) -> bool:
    """True if transformers has sdpa for a configuration's model. Others get eager's mask: some add it to scores."""
    for models in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        found: Any = models.get(kind, None)
        if found is not None:
            each = found if isinstance(found, tuple) else (found,)
            return all(bool(model._supports_sdpa) for model in each)
    return True


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
    cache's ``update``, or any K and V of a model that runs without a `VMemCache`. `sliding_window` is ignored, as in
    sdpa: the mask and the cache's layer have it.
    """
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: the attention vmem returns no weights; use eager")
    s_aux = kwargs.pop("sinks", None) if s_aux is None else s_aux  # Inkling 2: one for each query
    extras = Extras(scaling, dropout, softcap or None, s_aux, position_bias)
    pending: PendingKV | None = getattr(key, "vmem", None)
    if pending is None:
        padding: Padding | None = getattr(attention_mask, "vmem", None)
        if padding is not None:
            attention_mask = padding.dense()
        return _dense(module, query, key, value, mask=attention_mask, extras=extras, **kwargs), None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    call = _untraced if torch.compiler.is_compiling() else _of_rows
    return call(module, pending, query, value, attention_mask, extras=extras, causal=causal), None


def _of_rows(
    module: torch.nn.Module,
    pending: PendingKV,
    query: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    extras: Extras,
    causal: bool,
) -> torch.Tensor:
    """Attention over the rows of a `VMemCache`."""
    if getattr(value, "vmem", None) is not pending:
        pending.refuse("attends over other values than the cache returned")
    if attention_mask is None and extras.plain:
        out = _step_again(pending, query, extras)
        if out is not None:
            return out
    layer, rows, key = pending.layer, pending.layer.rows, pending.key
    window, queries = layer.window, query.shape[2]
    if queries > pending.tokens:
        pending.refuse(f"attends from {queries} columns, of which the cache got {pending.tokens}")
    padding: Padding | None = getattr(attention_mask, "vmem", None)
    # Where sdpa has no mask, the module says whether a prompt is causal (PaliGemma's is not). eager always has one.
    both_ways = (
        attention_mask is None and not causal and not rows.eager
        and pending.start == 0 and pending.tokens > 1 and not 0 < window <= pending.tokens
    )  # fmt: skip
    by_kernel = (padding is not None or attention_mask is None) and not both_ways
    by_kernel = by_kernel and extras.plain and _by_kernel(layer, query, key, extras.softcap)
    mask = None if padding is None else padding.mask
    if not by_kernel and padding is None and rows.ragged:
        rows.pending = None
        raise ValueError(
            f"layer {layer.index} reads its rows as one tensor, as with attention sinks or a 4D mask, and the cache "
            "has left padding out: pass the 2D attention_mask, or use another attention than vmem"
        )
    plan = pending.write(key, mask, uniform=not by_kernel, by_kernel=by_kernel and layer.appends)
    # If the cache is not ragged, the padding is stored as well.
    by_kernel = by_kernel and not plan.masked and (mask is None or rows.ragged)
    if not by_kernel:
        keys, values = layer.view(pending.start)
        if padding is not None:
            attention_mask = padding.dense()
        elif attention_mask is None and not both_ways:
            first, start = layer.length - keys.shape[2], pending.start + pending.tokens - queries
            attention_mask = _dense_mask(query, keys.shape[2], start, first, window)
        return _dense(module, query, keys, values, mask=attention_mask, extras=extras, is_causal=not both_ways)
    if pending.value is not None:  # a decode step of the whole batch, in which the kernel stores the new rows
        batch = rows.batch_of(plan)
        assert batch is not None  # nothing is padding
        layer.stepped = rows.version
        return _decode(layer, batch, query, (key, pending.value), extras)
    if queries < pending.tokens:
        plan = rows.narrowed(plan, queries)
    return _by_length(layer, plan, query, extras)


_untraced = torch.compiler.disable(_of_rows)  # native code cannot be traced


# ---- by lengths ---------------------------------------------------------------------------------------------------


def _by_kernel(layer: VMemLayer, query: torch.Tensor, key: torch.Tensor, softcap: float | None) -> bool:
    """True if the kernels of `pyvmem.attention` take these tensors."""
    asked = (softcap, query.dtype, query.shape[:2], key.dtype)
    if layer.asked != asked:
        layer.asked, layer.taken, layer.appends = asked, query.dtype == key.dtype, False
        try:
            for phase in ("prefill", "decode") if layer.taken else ():
                kv, k, cap = layer.rows.kv, layer.kv()[0], float(softcap or 0.0)
                shape = attention.shape_of(phase, kv, k, query.shape[1], query.dtype, window=layer.window, softcap=cap,
                                           requests=query.shape[0], rows=layer.length)  # fmt: skip
                kernel = KERNELS[choose(shape).kernel]
                layer.appends = kernel.appends
        except ValueError:  # no kernel takes it
            layer.taken = False
    return layer.taken


def _step_again(pending: PendingKV, query: torch.Tensor, extras: Extras) -> torch.Tensor | None:
    """A decode step whose first layer has planned the pass, as its last step did; otherwise None.

    An eager step waits for Python, layer by layer. This is what remains to be done in the layers after the first.
    """
    layer = pending.layer
    rows = layer.rows
    plan = rows.plan
    if (
        plan is None or plan.batch is None or plan.kept is not None or pending.plan is not None
        or pending.tokens != 1 or plan.tokens != 1 or plan.start != pending.start
        or not layer.appends or layer.stepped != rows.version
        or layer.asked[0] != extras.softcap or layer.asked[1] is not query.dtype
    ):  # fmt: skip
        return None
    value, pending.value = pending.value, None
    assert value is not None  # the rows are not stored
    rows.pending = None
    pending.plan = plan
    layer.length = pending.start + 1
    return _decode(layer, plan.batch, query, (pending.key, value), extras)


def _decode(
    layer: VMemLayer, batch: attention.Batch, query: torch.Tensor, new: attention.NewRows, extras: Extras
) -> torch.Tensor:
    """A decode step of the whole batch, in which the kernel stores the new rows."""
    return attention.decode(
        query.select(2, 0), layer.rows.kv, layer.kv(), batch, softmax_scale=extras.scaling, window=layer.window,
        softcap=extras.softcap or 0.0, new=(new[0].select(2, 0), new[1].select(2, 0)),
    ).unsqueeze(1)  # fmt: skip


def _by_length(layer: VMemLayer, plan: Plan, query: torch.Tensor, extras: Extras) -> torch.Tensor:
    """Attention over the rows that a pass's lengths include."""
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
    cap = extras.softcap or 0.0
    out = call(q, rows.kv, kv, batch, softmax_scale=extras.scaling, window=layer.window, softcap=cap)
    if plan.sources is not None:
        out = out.new_zeros(n * tokens, heads, dim).index_copy_(0, plan.sources, out)
    out = out.view(n, tokens, heads, dim)
    for row, columns, ends in plan.padding:
        # Padding that follows tokens, over all rows before it. Only generate() with padding on the right reads this: it
        # takes the first new token from the last column, whether that is padding or not. Layers with windows store such
        # padding (`Rows.begin`).
        end = int(ends[-1])
        k, v = (t[rows.slots[row], :end].transpose(0, 1)[None] for t in kv)
        mask = torch.arange(end, device=query.device) < torch.as_tensor(ends, device=query.device)[:, None]
        out[row, columns] = _scored(query[row, :, columns][None], k, v, mask, extras)[0]
    return out


# ---- with a mask --------------------------------------------------------------------------------------------------


def _dense_mask(query: torch.Tensor, kv_length: int, start: int, first: int, window: int) -> torch.Tensor | None:
    """The causal mask for queries from column `start` on, and K and V from column `first` on.

    None for all rows, or for torch's causal mask.
    """
    tokens = query.shape[2]
    windowed = window if kv_length >= window else 0
    if not windowed and (tokens == 1 or tokens == kv_length):
        return None
    pattern = sliding_window_causal_mask_function(windowed) if windowed else causal_mask_function
    dense: torch.Tensor | None = sdpa_mask(
        query.shape[0], tokens, kv_length, start, first, pattern, None, allow_is_causal_skip=False,
        device=query.device,
    )  # fmt: skip
    return dense


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    extras: Extras,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention over K and V as tensors: sdpa's, or step by step for soft caps and sinks, which sdpa does not have."""
    if extras.softcap is None and extras.sinks is None:
        options = {"is_causal": is_causal, "position_bias": extras.bias, **kwargs}
        out, _ = sdpa_attention_forward(module, query, key, value, mask, extras.dropout, extras.scaling, **options)
        return out
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and query.shape[2] > 1 and causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return _scored(query, key, value, mask, extras if module.training else extras._replace(dropout=0.0))


def _scored(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, extras: Extras
) -> torch.Tensor:
    """Attention step by step, as transformers' eager attention computes it: ``[batch, tokens, heads, dim]``."""
    scaling, dropout, softcap, sinks, bias = extras
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sinks = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], 3)
    weights = scores.float().softmax(-1).to(query.dtype)[..., : key.shape[2]]
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ repeat_kv(value, groups)).transpose(1, 2).contiguous()
