"""Attention over a KV cache: unmodified kernels that read K and V where the cache keeps them.

    from pyvmem import attention

    batch = attention.Batch(cache, slots, lengths)                    # once an iteration
    out = attention.decode(q, cache, layer, batch, kernel="fa3")      # in each layer

A kernel is selected by name: "fa3", "triton" or "sdpa"; "best" chooses one. Replacing one kernel by another changes
only that name, as Figure 13 of the vAttention paper shows. The kernels read ``cache.keys`` and ``cache.values`` by
slots and lengths. There is no block table to build, and nothing is copied.

It reads a cache's public attributes alone, and imports a library of kernels only when one is named. Begin with `table`.

SPDX-License-Identifier: MIT
"""

import math
import numbers
from typing import Any, NamedTuple

import numpy as np
import torch

from pyvmem._checks import integer, shown
from pyvmem.attention.batch import Batch, Cache, Ints
from pyvmem.attention.kernel import Call, Kernel, Shape, capability
from pyvmem.attention.table import KERNELS, Choice, choose, require

# A request's slots: a `Batch`, or their numbers. A layer: its number in the cache, or its K and V.
Slots = Batch | Ints
Layer = int | tuple[torch.Tensor, torch.Tensor]
NewRows = tuple[torch.Tensor, torch.Tensor]


class _Options(NamedTuple):
    """The options of `decode` and `prefill`."""

    kernel: str
    softmax_scale: float | None
    window: int
    softcap: float
    num_splits: int


__all__ = ["Batch", "Choice", "Kernel", "Shape", "best", "decode", "prefill", "tile_rows"]


def decode(
    q: torch.Tensor,
    cache: Cache,
    layer: Layer,
    slots: Slots,
    lengths: Ints | None = None,
    *,
    kernel: str = "best",
    softmax_scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    new: NewRows | None = None,
) -> torch.Tensor:
    """Attention of one new token of each request over all rows of its slot.

    Parameters
    ----------
    q : torch.Tensor
        ``[requests, query_heads, head_dim]``, in the order of `slots`.
    cache : KVCache
        The rows of the new tokens must be written already, unless they are given as `new`.
    layer : int or (torch.Tensor, torch.Tensor)
        Number of a layer (``cache.keys[layer]``), or its K and V, each ``[slots, max_tokens, kv_heads, head_dim]``.
    slots : Batch or sequence of int
        A `Batch` serves all layers of an iteration, and CUDA graphs. Plain slots and lengths are checked and uploaded
        at each call.
    lengths : sequence of int, optional
        Rows of each slot, including the new token's. None with a `Batch`.
    kernel : str
        "fa3", "triton", "sdpa", or "best".
    softmax_scale : float, optional
        ``head_dim ** -0.5`` by default. For a quantised cache, fold the scale of K into it.
    window : int
        Tokens that a query sees, including itself; 0 for all.
    softcap : float
        0 for none.
    num_splits : int
        Parts into which one request's rows are split over the GPU; 0 lets the kernel decide. Some kernels always
        decide and ignore it.
    out : torch.Tensor, optional
        Where to write the result; has the shape of the result.
    new : (torch.Tensor, torch.Tensor), optional
        K and V of the new tokens, ``[requests, kv_heads, head_dim]`` each, of the cache's dtype or of q's. They are
        stored in the last row of each request's length. `triton` stores them in the attention kernel itself.

    Returns
    -------
    torch.Tensor
        ``[requests, query_heads, head_dim]``, of q's dtype; bfloat16 for FP8 queries.

    Raises
    ------
    ValueError, TypeError
        One line that says which argument the kernel does not take, and which kernel would.
    """
    batch = _batch(cache, slots, lengths, None)
    if batch.max_query != 1:
        raise ValueError(f"query_lengths of the batch go up to {batch.max_query}: decode takes 1; prefill takes any")
    options = _Options(kernel, softmax_scale, window, softcap, num_splits)
    return _attend("decode", q, cache, layer, batch, options=options, out=out, new=new)


def prefill(
    q: torch.Tensor,
    cache: Cache,
    layer: Layer,
    slots: Slots,
    lengths: Ints | None = None,
    query_lengths: Ints | None = None,
    *,
    kernel: str = "best",
    softmax_scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of several new tokens of each request: a prompt, or a chunk that follows its earlier rows.

    The queries of request i are the last ``query_lengths[i]`` of its ``lengths[i]`` tokens, so the causal mask is
    aligned to the bottom right. Requests with one query may be among them.

    Parameters
    ----------
    q : torch.Tensor
        ``[sum(query_lengths), query_heads, head_dim]``, request after request.
    query_lengths : sequence of int, optional
        Queries of each request. None with a `Batch`.
    cache, layer, slots, lengths, kernel, softmax_scale, window, softcap, num_splits, out
        As in `decode`.

    Returns
    -------
    torch.Tensor
        Of q's shape and dtype; bfloat16 for FP8 queries.

    Raises
    ------
    ValueError, TypeError
        As in `decode`.
    """
    if not isinstance(slots, Batch) and query_lengths is None:
        raise ValueError("query_lengths is missing: the number of queries of each request")
    batch = _batch(cache, slots, lengths, query_lengths)
    options = _Options(kernel, softmax_scale, window, softcap, num_splits)
    return _attend("prefill", q, cache, layer, batch, options=options, out=out)


def best(
    phase: str,
    cache: Cache,
    query_heads: int,
    layer: Layer = 0,
    *,
    q_dtype: torch.dtype | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Choice:
    """Choose a kernel by GPU and shape.

    Parameters
    ----------
    phase : {"decode", "prefill"}
    cache : KVCache
    query_heads : int
        A multiple of the cache's KV heads.
    layer : int or (torch.Tensor, torch.Tensor)
        As in `decode`.
    q_dtype : torch.dtype, optional
        Of the queries; by default the cache's.
    window, softcap
        As in `decode`.

    Returns
    -------
    Choice
        The kernel's name, with the reason.

    Raises
    ------
    ValueError
        No kernel takes the shape.
    """
    k, _ = _layer(cache, layer)
    return choose(shape_of(phase, cache, k, query_heads, q_dtype or k.dtype, window=window, softcap=softcap))


def tile_rows(
    kernel: str,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
) -> int:
    """Return the `tile_rows` that a `KVCache` needs for a kernel, for decode and for prefill.

    Parameters
    ----------
    kernel : str
        As in `decode`, but for "best".
    query_heads, kv_heads, head_dim : int
        Of the model; query_heads is a multiple of kv_heads.
    dtype : torch.dtype
        Of the cache.
    window : int
        Tokens, as in `decode`.

    Returns
    -------
    int
        Rows.

    Raises
    ------
    ValueError, TypeError
        They name the argument.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} must be one of {', '.join(KERNELS)}")
    query_heads, kv_heads = integer("query_heads", query_heads), integer("kv_heads", kv_heads)
    head_dim = integer("head_dim", head_dim)
    if query_heads < 1 or kv_heads < 1 or query_heads % kv_heads or head_dim < 1:
        raise ValueError(f"query_heads {query_heads} must be a multiple of kv_heads {kv_heads}, and head_dim {head_dim}"
                         " at least 1")  # fmt: skip
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r:.60}")
    # No kernel's tiles depend on the GPU.
    shapes = (Shape(phase, query_heads, kv_heads, head_dim, dtype, kv_dtype=dtype, device="cuda",
                    capability=capability(None), window=window) for phase in ("decode", "prefill"))  # fmt: skip
    return math.lcm(*(KERNELS[kernel].tile_rows(shape) for shape in shapes))


def _batch(cache: Cache, slots: Slots, lengths: Ints | None, query_lengths: Ints | None) -> Batch:
    if not isinstance(slots, Batch):
        if lengths is None:
            raise ValueError("lengths is missing: the rows of each slot")
        return Batch(cache, slots, lengths, query_lengths)
    if lengths is not None or query_lengths is not None:
        raise TypeError("slots is a Batch, which has its own lengths: lengths must be None")
    if slots.cache is not cache:
        raise ValueError("slots is a Batch of another cache")
    return slots


def _layer(cache: Cache, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(layer, tuple | list) and len(layer) == 2:
        k, v = layer
        if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
            raise TypeError(f"layer: K and V must be tensors, not {type(k).__name__} and {type(v).__name__}")
    else:
        keys = getattr(cache, "keys", None)
        if keys is None:
            raise ValueError(
                "layer: this cache has no keys and values by layer, or is closed: pass K and V as a pair of tensors"
            )
        if not isinstance(layer, int | np.integer) or not 0 <= layer < len(keys):
            raise ValueError(f"layer {layer!r} must lie between 0 and {len(keys) - 1}")
        k, v = keys[layer], cache.values[layer]
    if k.dim() != 4 or k.shape != v.shape or k.stride(-1) != 1 or v.stride(-1) != 1 or not k.shape[2]:
        raise ValueError(
            f"layer: K {tuple(k.shape)} and V {tuple(v.shape)} must both be [slots, max_tokens, kv_heads,"
            " head_dim], with a contiguous last dimension"
        )
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(f"layer: K is of {k.dtype} on {k.device}, V of {v.dtype} on {v.device}")
    return k, v


def shape_of(
    phase: str,
    cache: Cache,
    k: torch.Tensor,
    query_heads: int,
    q_dtype: torch.dtype,
    window: int,
    softcap: float,
    requests: int = 0,
    rows: int = 0,
) -> Shape:
    """The `Shape` of a call over a layer's K, ``[slots, max_tokens, kv_heads, head_dim]``."""
    if phase not in ("decode", "prefill"):
        raise ValueError(f"phase {phase!r} must be decode or prefill")
    kv_heads = k.shape[2]
    if not isinstance(query_heads, int | np.integer) or query_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"query_heads {query_heads!r} must be a multiple of the cache's {kv_heads} KV heads")
    if not isinstance(window, int | np.integer) or window < 0:
        raise ValueError(f"window {window!r} must be a number of tokens, or 0 for none")
    window = int(window) if window < k.shape[1] else 0  # a slot's rows all lie in it
    if not isinstance(softcap, numbers.Real) or not 0 <= softcap < math.inf:
        raise ValueError(f"softcap {softcap!r} must be positive, or 0 for none")
    return Shape(
        phase, query_heads, kv_heads, k.shape[3], q_dtype, kv_dtype=k.dtype, device=k.device.type,
        capability=capability(k.device.index), window=window, softcap=float(softcap), tile_rows=cache.tile_rows,
        requests=requests, rows=rows,
    )  # fmt: skip


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return float(head_dim**-0.5)
    if not isinstance(softmax_scale, numbers.Real) or not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale {softmax_scale!r:.60} must be a finite number, or None")
    return float(softmax_scale)


def _check_new(new: NewRows, q: torch.Tensor, k: torch.Tensor, batch: Batch) -> None:
    if not isinstance(new, tuple | list) or len(new) != 2:
        raise TypeError(f"new must be a pair of tensors, K and V of the new tokens, not {new!r:.60}")
    for name, x in zip(("K", "V"), new):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"new: {name} must be a tensor, not {type(x).__name__}")
        want = len(batch), *k.shape[2:]
        if tuple(x.shape) != want or x.stride(-1) != 1 or x.device != k.device or x.dtype not in (k.dtype, q.dtype):
            raise ValueError(
                f"new: {name} {tuple(x.shape)} of {x.dtype} on {x.device} must be {want} of {k.dtype} on {k.device},"
                " with a contiguous last dimension"
            )


def _resolve(
    phase: str, q: torch.Tensor, cache: Cache, k: torch.Tensor, v: torch.Tensor, batch: Batch, options: _Options,
    new: NewRows | None,
) -> tuple[Kernel, Any, Shape, float]:  # fmt: skip
    """(kernel, plan, shape, scale) of a call. What does not change from layer to layer is done once per batch."""
    key: tuple[Any, ...] = (phase, options, q.shape, q.dtype, q.device, q.stride(-1), k.shape, k.stride(), v.stride(),
                            k.dtype)  # fmt: skip
    if isinstance(new, tuple | list) and all(isinstance(x, torch.Tensor) for x in new):
        key += tuple((x.shape, x.stride(-1), x.dtype, x.device) for x in new)
    found: tuple[Kernel, Any, Shape, float] | None = batch._plans.get(key)
    if found is not None:
        return found
    if q.dim() != 3 or q.shape[0] != batch.total_queries or q.shape[2] != k.shape[3] or q.stride(-1) != 1:
        raise ValueError(
            f"q {tuple(q.shape)} must be [{batch.total_queries} tokens, query_heads, {k.shape[3]}],"
            " with a contiguous last dimension"
        )
    kernel, softmax_scale, window, softcap, num_splits = options
    if not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits {num_splits!r} must be a number of parts, or 0")
    scale = _scale(softmax_scale, q.shape[-1])
    if new is not None:
        _check_new(new, q, k, batch)
    if q.device != k.device:
        raise ValueError(f"q is on {q.device}, the cache on {k.device}")
    if k.shape[0] < cache.slots or k.shape[1] < batch.max_length:
        have, need = f"{k.shape[1]} rows in {k.shape[0]} slots", f"{batch.max_length} rows in {cache.slots} slots"
        raise ValueError(f"layer: K has {have}; the batch goes up to {need}")
    shape = shape_of(phase, cache, k, q.shape[1], q.dtype, window=window, softcap=softcap, requests=len(batch),
                     rows=batch.max_length)  # fmt: skip
    name = choose(shape).kernel if kernel == "best" else kernel
    chosen = require(name, shape)
    with torch.inference_mode(False):  # as in Batch
        call = Call(q, k, v, batch, shape, softmax_scale=scale, num_splits=num_splits, out=None, plan=None)
        found = chosen, chosen.plan(call), shape, scale
    batch._plans[key] = found
    return found


def _attend(
    phase: str, q: torch.Tensor, cache: Cache, layer: Layer, batch: Batch, options: _Options,
    out: torch.Tensor | None, new: NewRows | None = None,
) -> torch.Tensor:  # fmt: skip
    """The attention, after all checks."""
    k, v = _layer(cache, layer)
    if not isinstance(q, torch.Tensor) or not q.dim():
        raise TypeError(f"q must be a tensor, [tokens, query_heads, head_dim], not {shown(q)}")
    chosen, plan, shape, scale = _resolve(phase, q, cache, k, v, batch=batch, options=options, new=new)
    if out is not None:
        want = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        like = (q.shape, want, q.device)
        if not isinstance(out, torch.Tensor) or (out.shape, out.dtype, out.device) != like or not out.is_contiguous():
            raise ValueError(f"out must be contiguous {tuple(q.shape)} of {want} on {q.device}")
    if new is not None and not chosen.appends:
        rows = batch.last_rows()
        for x, row in zip((k, v), new):
            row = row.to(x.dtype)
            if x.dtype.itemsize == 1:  # torch cannot index FP8
                x, row = x.view(torch.uint8), row.view(torch.uint8)
            x.index_put_(rows, row)
        new = None
    return chosen.run(Call(q, k, v, batch, shape, softmax_scale=scale, num_splits=options.num_splits, out=out,
                           plan=plan, new=new))  # fmt: skip
