"""``past_key_values`` for transformers on vMem.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from pyvmem._checks import uint
from pyvmem.kv.cache import KVCache
from pyvmem.kv.options import options_of
from pyvmem.transformers.layers import (
    StateLayer,
    VMemHybridLayer,
    VMemHybridSlidingLayer,
    VMemLayer,
    VMemSlidingLayer,
    cropped,
)
from pyvmem.transformers.rows import Rows

_FULL = {"full_attention": VMemLayer, "hybrid": VMemHybridLayer}
_SLIDING = {
    "sliding_attention": VMemSlidingLayer,
    "chunked_attention": VMemSlidingLayer,
    "hybrid_sliding": VMemHybridSlidingLayer,
}
_LONGEST = 131072  # max_tokens if the model has no limit, or a larger one


class VMemCache(Cache):
    """A `transformers.Cache` whose keys and values are in virtual tensors, backed by pages as sequences grow.

    Pass it to ``generate(past_key_values=...)`` or to the model. Nothing is concatenated as sequences grow, memory is
    allocated page by page, beams share pages, and with the attention ``"vmem"`` padding takes no memory.

    Parameters
    ----------
    config : PreTrainedConfig or PreTrainedModel
        The model or its configuration, which says which layers have full attention, which have a sliding window, and
        which keep another kind of state. The latter keep transformers' own layers.
    max_tokens : int, optional
        The most tokens of a sequence, including padding. It takes addresses only, no memory. By default the model's
        ``max_position_embeddings``, at most 131,072.
    budget : int, optional
        The most bytes of pages. By default the free memory of the GPU when the cache is first used, or half of the
        machine's memory; in a pool, the pool's budget. Pages are allocated when rows need them.
    slots : int, optional
        Sequences for which addresses are reserved. A larger batch moves the cache to larger tensors.
    options
        Options of `KVCache`: ``pool`` and ``pool_min`` (a `KVPool`: one budget for several models, which moves to the
        one that generates), ``context``, ``backend``, ``page_size``, ``tile_rows``, ``check``, ``name`` and others.
        A forward pass in a pool waits up to five seconds for memory that other members give back.

    Raises
    ------
    OutOfMemory
        From a forward pass or from `reorder_cache`, if the pages would exceed the budget or the device's memory. The
        message says what to lower. After a forward pass the cache is unchanged; after `reorder_cache` it is empty. It
        stays usable in either case. (Linear-attention layers before the first attention layer may have seen the pass:
        `reset` the cache of such a model.)
    ValueError
        More tokens than `max_tokens`, a batch of another size than the cache's, or a mask that shows what an earlier
        one hid.
    RuntimeError
        The last pass was interrupted between two layers, by Ctrl-C for example: `reset` the cache.

    Notes
    -----
    For inference only: call the model under ``torch.no_grad()``.

    Examples
    --------
    >>> cache = VMemCache(model)                                           # doctest: +SKIP
    >>> model.generate(**inputs, past_key_values=cache)                    # doctest: +SKIP
    """

    _of_encoders: ClassVar[type[VMemCache]]  # which `encoder_decoder` sets

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is VMemCache and getattr(getattr(config, "config", config), "is_encoder_decoder", False):
            cls = VMemCache._of_encoders
        return super().__new__(cls)

    def __init__(
        self,
        config: PreTrainedConfig | PreTrainedModel,
        max_tokens: int | None = None,
        *,
        budget: int | None = None,
        slots: int = 1,
        **options: Any,
    ) -> None:
        full: Any = getattr(config, "config", config)
        if not isinstance(full, PreTrainedConfig):
            raise TypeError(f"config must be a model of transformers or its configuration, not {type(config).__name__}")
        text: PreTrainedConfig = full.get_text_config(decoder=True)
        if not hasattr(text, "num_attention_heads"):
            raise ValueError(f"the model has no attention heads, and so no keys and values ({text.model_type})")
        types, found = get_layer_types_and_kwargs(text)
        # One dictionary for all layers until transformers 5.18, then one for each.
        each: list[dict[str, Any]] = found if isinstance(found, list) else [found] * len(types)
        if max_tokens is None:
            max_tokens = min(getattr(text, "max_position_embeddings", None) or _LONGEST, _LONGEST)
        for name, value in (("max_tokens", max_tokens), ("slots", slots), ("budget", 1 if budget is None else budget)):
            if not uint(name, value):
                raise ValueError(f"{name} 0 must be at least 1")
        # Now: the first forward pass, which creates the KVCache, would be late for the error.
        options_of(options.get("options"), {name: value for name, value in options.items() if name != "options"})
        ours = [kind for kind in types if kind in _FULL or kind in _SLIDING]
        if not ours:
            raise ValueError(f"the model has no layers with keys and values ({', '.join(sorted(set(types)))})")
        windows = [int(kwargs.get("sliding_window") or 0) for kwargs in each]
        with_rows = [0 if kind in _FULL else window for kind, window in zip(types, windows) if kind in ours]
        self.rows = Rows(with_rows, max_tokens, slots, budget, options)
        # For a model with an encoder, `text` may be a copy, which does not follow set_attn_implementation.
        settings = vars(text if full.get_text_config(decoder=True) is text else full)
        layers: list[Any] = []
        index = 0
        for kind, window, kwargs in zip(types, windows, each):
            hybrid = kind.startswith("hybrid") and "number_of_states" in kwargs
            extra = {"number_of_states": kwargs["number_of_states"]} if hybrid else {}
            if kind in _FULL:
                layers.append(_FULL[kind](self.rows, index, text, settings, **extra))
            elif kind in _SLIDING:
                layers.append(_SLIDING[kind](self.rows, index, text, settings, window, **extra))
            else:
                theirs = DYNAMIC_LAYER_TYPE_MAPPING[kind]
                layers.append((StateLayer if theirs is LinearAttentionLayer else theirs)(**kwargs))
            index += kind in ours
        # Their K is read with sdpa's mask, which the layers of a kind share.
        self.rows.as_tensors = any(
            isinstance(each, CacheLayerMixin) and not isinstance(each, VMemLayer) for each in layers
        )
        self.config = text
        # Chunked attention reads all rows as one tensor as soon as a sequence exceeds a chunk, but not before.
        self._in_order = bool(getattr(text, "attention_chunk_size", None))
        Cache.__init__(self, layers=layers)

    @property
    def kv(self) -> KVCache | None:
        """The `KVCache` with the rows, for its statistics and `reclaim`; None before the first forward pass."""
        kv: KVCache | None = self.rows.kv
        return kv

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """K and V of each layer, and None, as `DynamicCache` has them for layers without a fixed window."""
        layers: list[Any] = self.layers
        for layer in layers:
            yield getattr(layer, "keys", None), getattr(layer, "values", None), None

    def _with_rows(self) -> list[VMemLayer]:
        return [layer for layer in self.layers if isinstance(layer, VMemLayer)]

    def _others(self) -> list[Any]:
        """transformers' own layers, and the states of hybrid layers."""
        return [layer for layer in self.layers if not isinstance(layer, VMemLayer)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new rows of a layer. Models call it.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            ``[batch, kv_heads, tokens, head_dim]`` each.
        layer_idx : int
            The number of the layer in the model.
        *args, **kwargs
            Passed to the layer.

        Returns
        -------
        (torch.Tensor, torch.Tensor)
            K and V of every column that the pass reads. The attention ``"vmem"`` alone may read its own.

        Raises
        ------
        OutOfMemory, ValueError, RuntimeError
            As in the class.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(f"layer {layer_idx}: the cache was created for a model of {len(self.layers)} layers")
        layer: Any = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        return keys, values

    @property
    def is_linear(self) -> list[bool]:
        """True if each layer has a linear-attention state and no rows."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, VMemLayer)
            for layer in self.layers
        ]

    # ---- sequences -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Discard every sequence. The next batch may have another size; its pages are kept (``kv.reclaim()``)."""
        self._forget()
        self.rows.reset()

    def _forget(self) -> None:
        """Empty the layers. transformers' own keep states for the batch that they had; the next may be another."""
        self.rows.masked = None
        Cache.reset(self)
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                recording = layer.record_past
                LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)
                layer.record_past = recording

    def crop(self, tokens_to_remove: int) -> None:
        """Discard the last tokens of every sequence.

        A crop of what the last forward pass added is always possible.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: how many to discard. Positive: how many to keep. 0 changes nothing.

        Raises
        ------
        RuntimeError
            A sliding window has given up rows that the shorter sequences read.
        """
        ours = self._with_rows()
        left = [cropped(layer.length, tokens_to_remove) for layer in ours]
        if any(new < layer.length for new, layer in zip(left, ours)):
            self.rows.crop(max(left))
        Cache.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make sequence i a copy of sequence ``beam_idx[i]``: full pages are shared, the last page is copied.

        Parameters
        ----------
        beam_idx : torch.Tensor
            int64 ``[batch]``.

        Raises
        ------
        OutOfMemory
            There is no memory for the copies. The cache is empty then.
        """
        self._select(beam_idx.tolist())
        layers: list[Any] = self.layers
        for layer in layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                with torch.inference_mode(False):  # later passes may run in another mode
                    LinearAttentionCacheLayerMixin.reorder_cache(layer, beam_idx)
            elif not isinstance(layer, VMemLayer):
                layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence. The repetitions share its pages.

        Parameters
        ----------
        repeats : int
            At least 1.
        """
        self._no_states("batch_repeat_interleave")
        if not uint("repeats", repeats):
            raise ValueError("repeats 0 must be at least 1")
        self._select([i for i in range(self.rows.batch) for _ in range(repeats)])
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order.

        Parameters
        ----------
        indices : torch.Tensor
            int64, or bool ``[batch]``.
        """
        self._no_states("batch_select_indices")
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select([int(i) + self.rows.batch * (int(i) < 0) for i in indices.tolist()])
        for layer in self._others():
            layer.batch_select_indices(indices)

    def _no_states(self, name: str) -> None:
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers):
            raise NotImplementedError(f"{name}: transformers' linear-attention layers do not support it")

    def _select(self, sources: list[int]) -> None:
        if self.kv is None:
            return
        try:
            # With the attention "vmem", too, some layers read their rows as one tensor: latents, sinks, chunks.
            in_order = self._in_order or any(layer.viewed or not layer.by_length for layer in self._with_rows())
            self.rows.select(sources, in_order)
        except MemoryError:
            self._forget()
            raise

    # ---- memory ----------------------------------------------------------------------------------------------

    def offload(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Move the rows to CPU memory and free their pages. The next pass, or `prefetch`, moves them back.

        Parameters
        ----------
        layer_idx, only_non_sliding
            As in transformers' caches. They are ignored: all layers move together.
        """
        self.rows.swap_out()

    def prefetch(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Move the rows back from CPU memory.

        Parameters
        ----------
        layer_idx, only_non_sliding
            Ignored, as in `offload`.

        Raises
        ------
        OutOfMemory
            There is too little memory. `prefetch` again once there is more.
        """
        self.rows.swap_in()

    def close(self) -> None:
        """Free all memory once no kernel reads it. Garbage collection of the cache does the same.

        A closed cache raises ValueError if it is used.
        """
        for layer in self._with_rows():
            layer.is_initialized = False
        self._forget()
        self.rows.close()

    def __enter__(self) -> VMemCache:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> VMemCache:
        """A separate cache with copies of the rows, for ``copy.deepcopy(prompt_cache)``."""
        new = copy.copy(self)
        memo.update({id(self): new, id(self.rows): self.rows.copy(), id(self.config): self.config})
        new.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return new


def _refusing(generate_batch: Any) -> Any:
    """``model.generate_batch()`` takes any keyword and ignores those that it does not know: not a `VMemCache`."""

    @functools.wraps(generate_batch)
    def refusing(model: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if isinstance(value, VMemCache):
                raise ValueError(
                    f"{name}: generate_batch() has a paged cache of its own, and would ignore a VMemCache: pass it to "
                    "generate()"
                )
        return generate_batch(model, *args, **kwargs)

    return refusing


for _kind in GenerationMixin.__mro__:
    if "generate_batch" in vars(_kind):
        setattr(_kind, "generate_batch", _refusing(vars(_kind)["generate_batch"]))
