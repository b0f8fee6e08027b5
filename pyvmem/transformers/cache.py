"""``past_key_values`` of transformers on vMem.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from pyvmem._checks import uint
from pyvmem.kv import KVCache, KVStats
from pyvmem.transformers.layers import (
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
_LONGEST = 131072  # max_tokens where the model names no limit, or a larger one


class VMemCache(Cache):
    """A `transformers.Cache` whose keys and values lie in virtual tensors, backed by pages as sequences grow.

    Pass it to ``generate(past_key_values=...)`` or to the model. Nothing is concatenated as sequences grow, memory is
    taken page by page, beams share pages, and with the attention ``"vmem"`` padding takes no memory.

    Parameters
    ----------
    config : PreTrainedConfig or PreTrainedModel
        The model's: it says which layers attend to everything, which have a sliding window, and which keep a state of
        another kind; those keep the layers that transformers has for them.
    max_tokens : int, optional
        Most tokens of a sequence, padding included: addresses only, no memory. By default the model's
        ``max_position_embeddings``, 131,072 at most.
    budget : int, optional
        Most bytes of pages. By default what is free on the GPU when the cache is first used, or half of the machine's
        memory. Pages are taken when rows need them.
    slots : int, optional
        Sequences to have room for, addresses only. A batch that needs more moves the cache to larger tensors.
    options
        Of `KVCache`: ``context`` (one for several caches), ``backend``, ``page_size``, ``tile_rows``, ``generous``,
        ``check``, ``name`` and others.

    Raises
    ------
    OutOfMemory
        From a forward pass, or from `reorder_cache`: pages would go beyond the budget or the device's memory. The text
        names what to lower. After a forward pass the cache has what it had before it, after `reorder_cache` nothing;
        it can be used on in either case. (Linear-attention layers before the first attention layer may have seen the
        pass: `reset` the cache of such a model.)
    ValueError
        More tokens than `max_tokens`, another batch than the one that the cache holds, or a mask that disagrees
        with it.

    Notes
    -----
    Only for inference: under autograd, use ``torch.no_grad()``.

    Examples
    --------
    >>> cache = VMemCache(model)                                           # doctest: +SKIP
    >>> model.generate(**inputs, past_key_values=cache)                    # doctest: +SKIP
    """

    def __init__(
        self,
        config: PreTrainedConfig | PreTrainedModel,
        max_tokens: int | None = None,
        *,
        budget: int | None = None,
        slots: int = 1,
        **options: Any,
    ) -> None:
        whole: Any = getattr(config, "config", config)
        text: PreTrainedConfig = whole.get_text_config(decoder=True)
        types, kwargs = get_layer_types_and_kwargs(text)
        if max_tokens is None:
            max_tokens = min(getattr(text, "max_position_embeddings", None) or _LONGEST, _LONGEST)
        for name, value in (("max_tokens", max_tokens), ("slots", slots), ("budget", 1 if budget is None else budget)):
            if not uint(name, value):
                raise ValueError(f"{name} 0 must be at least 1")
        ours = [kind for kind in types if kind in _FULL or kind in _SLIDING]
        if not ours:
            raise ValueError(f"the model has no layers with keys and values ({', '.join(sorted(set(types)))})")
        window = int(kwargs.get("sliding_window") or 0)
        states = {"number_of_states": kwargs["number_of_states"]} if "number_of_states" in kwargs else {}
        self.rows = Rows([window if kind in _SLIDING else 0 for kind in ours], max_tokens, slots, budget, options)
        layers: list[Any] = []
        index = 0
        for kind in types:
            extra = states if kind.startswith("hybrid") else {}
            if kind in _FULL:
                layers.append(_FULL[kind](self.rows, index, text, **extra))
            elif kind in _SLIDING:
                layers.append(_SLIDING[kind](self.rows, index, text, window, **extra))
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs))
            index += kind in ours
        self.config = text
        super().__init__(layers=layers)

    @property
    def kv(self) -> KVCache | None:
        """The `KVCache` with the rows (for its statistics), or None before the first forward pass."""
        kv: KVCache | None = self.rows.kv
        return kv

    def stats(self) -> KVStats | None:
        """The `KVStats` of this moment, or None before the first forward pass."""
        return None if self.kv is None else self.kv.stats()

    def _with_rows(self) -> list[VMemLayer]:
        return [layer for layer in self.layers if isinstance(layer, VMemLayer)]

    def _others(self) -> list[Any]:
        """The layers of transformers' own, and the states of hybrid layers."""
        return [layer for layer in self.layers if not isinstance(layer, VMemLayer)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        return keys, values

    @property
    def is_linear(self) -> list[bool]:
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, VMemLayer)
            for layer in self.layers
        ]

    # ---- sequences -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every sequence; the next may be of another number. Pages stay for them (`trim` gives them back)."""
        Cache.reset(self)
        self.rows.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; with a positive number, all but so many; 0 changes nothing.

        Raises RuntimeError where a sliding window has given up rows that the shorter sequences read: a crop can take
        back what the last forward pass added.
        """
        ours = self._with_rows()
        left = [cropped(layer.length, tokens_to_remove) for layer in ours]
        if any(new < layer.length for new, layer in zip(left, ours)):
            self.rows.crop(max(left))
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` is: full pages are shared, the last one is copied."""
        self._select(beam_idx.tolist())
        layers: list[Any] = self.layers
        for layer in layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                LinearAttentionCacheLayerMixin.reorder_cache(layer, beam_idx)
            elif not isinstance(layer, VMemLayer):
                layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, sharing its pages."""
        self._no_states("batch_repeat_interleave")
        self._select([i for i in range(self.rows.batch) for _ in range(repeats)])
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        self._no_states("batch_select_indices")
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select([int(i) + self.rows.batch * (int(i) < 0) for i in indices.tolist()])
        for layer in self._others():
            layer.batch_select_indices(indices)

    def _no_states(self, name: str) -> None:
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers):
            raise NotImplementedError(f"{name}: transformers' linear-attention layers do not have it")

    def _select(self, sources: list[int]) -> None:
        if self.kv is None:
            return
        try:
            self.rows.select(sources, in_order=not self._with_rows()[0].by_length)
        except MemoryError:
            Cache.reset(self)
            raise

    # ---- memory ----------------------------------------------------------------------------------------------

    def offload(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Move the rows to CPU memory and let their pages go; the next pass, or `prefetch`, brings them back.

        All layers go together: the arguments, which transformers' own caches have, are not looked at.
        """
        self.rows.swap_out()

    def prefetch(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Bring the rows back from CPU memory."""
        self.rows.swap_in()

    def trim(self) -> int:
        """Give memory that no sequence needs back to the device; returns the bytes of pages given up."""
        return 0 if self.kv is None else self.kv.reclaim()

    def close(self) -> None:
        """Free all memory, once no kernel reads it. Also happens when the cache is garbage."""
        for layer in self._with_rows():
            layer.is_initialized = False
        Cache.reset(self)
        self.rows.close()

    def __enter__(self) -> VMemCache:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> VMemCache:
        """A cache of its own with copies of the rows, as ``copy.deepcopy(prompt_cache)`` is used for."""
        new = copy.copy(self)
        memo.update({id(self): new, id(self.rows): self.rows.copy(), id(self.config): self.config})
        new.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return new
