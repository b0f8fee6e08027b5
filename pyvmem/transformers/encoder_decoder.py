"""A `VMemCache` for models with an encoder and a decoder.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import Cache, DynamicCache, EncoderDecoderCache

from pyvmem.transformers.cache import VMemCache


class VMemEncoderDecoderCache(VMemCache, EncoderDecoderCache):
    """A `VMemCache` of the decoder's rows that is an `EncoderDecoderCache` as well.

    ``VMemCache(model)`` returns one for such models. What the decoder reads of the encoder never grows: it is in a
    cache of transformers' own, `cross_attention_cache`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        VMemCache.__init__(self, *args, **kwargs)
        self._no_encoder()

    def _no_encoder(self) -> None:
        self.cross_attention_cache = DynamicCache()
        self.is_updated: dict[int, bool] = dict.fromkeys(range(len(self.layers)), False)

    @property
    def self_attention_cache(self) -> VMemEncoderDecoderCache:  # type: ignore[override]
        return self

    __repr__ = Cache.__repr__

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """K and V of each layer and None, of the decoder's own rows, then of what it reads of the encoder."""
        encoders: list[Any] = self.cross_attention_cache.layers
        for own, encoder in zip(VMemCache.__iter__(self), encoders):
            yield *own, encoder.keys, encoder.values, None

    def _forget(self) -> None:
        super()._forget()
        self._no_encoder()

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self.cross_attention_cache.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.cross_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        super().batch_select_indices(indices)
        self.cross_attention_cache.batch_select_indices(indices)


# All that asks for lengths, masks and kinds of layers asks for the decoder's rows: as in a Cache.
for _name in vars(EncoderDecoderCache):
    if hasattr(Cache, _name) and not hasattr(object, _name) and _name not in vars(VMemEncoderDecoderCache):
        if _name not in vars(VMemCache):
            setattr(VMemEncoderDecoderCache, _name, inspect.getattr_static(Cache, _name))

VMemCache._of_encoders = VMemEncoderDecoderCache
