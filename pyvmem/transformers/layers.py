"""The layers of a `VMemCache`: views of the rows for stock attention, and a hand-over for the attention ``"vmem"``.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn, cast

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from pyvmem.transformers.kernels import tile_rows
from pyvmem.transformers.opaque import OpaqueTensor
from pyvmem.transformers.plan import Plan
from pyvmem.transformers.rows import Rows


class PendingKV:
    """K and V of one layer on their way to the attention ``"vmem"``. Only that attention knows the padding.

    The `OpaqueTensor` that `VMemLayer.update` returns as K and as V has it as its attribute ``vmem``.
    """

    __slots__ = ("layer", "start", "tokens", "key", "value", "plan")

    def __init__(self, layer: VMemLayer, start: int, tokens: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.layer = layer
        self.start = start
        self.tokens = tokens
        self.key = key
        self.value: torch.Tensor | None = value  # None: its rows are stored
        self.plan: Plan | None = None

    def opaque(self, columns: int) -> OpaqueTensor:
        """A tensor of the shape that K and V have for other attentions. It has no memory of its own."""
        batch, heads, _, dim = self.key.shape
        return OpaqueTensor.of(self.layer.rows.blank.expand(batch, heads, columns, dim), self)

    def read(self, what: str) -> NoReturn:
        """Raises RuntimeError: `what` reads K or V before the attention."""
        self.refuse(f"computes with the keys or values that the cache returned ({what})")

    def refuse(self, does: str) -> NoReturn:
        """Raises RuntimeError: the model `does` what this attention cannot follow."""
        self.layer.rows.pending = None
        raise RuntimeError(
            f"layer {self.layer.index}: the model {does}: use another attention than vmem for this model"
        )

    def write(
        self, key: torch.Tensor, mask: torch.Tensor | None = None, uniform: bool = False, by_kernel: bool = False
    ) -> Plan:
        """Store the rows, once, and return the pass's `Plan`.

        mask: as in `Rows.begin`. uniform: padding is stored as well, unless the cache has left out some. by_kernel: the
        attention kernel may store a decode step's rows; `PendingKV.value` is then not None.
        """
        if self.plan is None:
            layer, rows = self.layer, self.layer.rows
            rows.pending = None
            plan = rows.begin(self.start, self.tokens, key.shape[0], None if uniform and not rows.ragged else mask)
            self.plan = plan
            by_kernel = by_kernel and not plan.masked and (mask is None or rows.ragged)
            if by_kernel and self.tokens == 1 and plan.kept is None:
                layer.length = self.start + 1
                return plan
            assert self.value is not None  # until the rows are stored
            layer.store(plan, key, self.value)
        self.value = None
        return self.plan


class KVLength(int):
    """The length of K for a mask. `layer` tells `vmem_mask` that a `VMemCache` asked for it."""

    layer: VMemLayer

    @staticmethod
    def of(length: int, layer: VMemLayer) -> KVLength:
        marked = KVLength(length)
        marked.layer = layer
        return marked


class VMemLayer(CacheLayerMixin):
    """An attention layer whose rows are slots of a `KVCache`. `rows` is shared by the layers of a cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    window = 0

    def __init__(self, rows: Rows, index: int, config: PreTrainedConfig, settings: dict[str, Any]) -> None:
        self.rows = rows
        self.index = index  # counts only layers that keep rows
        self.config = config
        self._settings = settings  # of the configuration in which the model's attention is set
        self.length = 0  # columns, including padding
        self.viewed = False  # whether a pass read the rows as one tensor, which needs the slots in order
        self.is_initialized = False
        self.asked: Any = None  # the last shape that the kernels were asked to take,
        self.taken = self.appends = False  # whether they take it, and whether decode stores the rows
        self.stepped = -1  # the version of `rows` in which a decode step stored its rows in the kernel
        self._like: tuple[int, ...] = ()  # the KV heads of its rows, and their dimension
        self._equal = True  # whether K and V have one head_dim, as far as is known

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    @property
    def device(self) -> Any:
        return self.rows.device

    @property
    def batch_size(self) -> int:
        return self.rows.batch

    @property
    def by_length(self) -> bool:
        """True if the model's attention is ``"vmem"``. It may change between passes."""
        # The config's property takes microseconds in every layer, because it looks the name up in several tables.
        return self._settings.get("_attn_implementation_internal") == "vmem"

    @property
    def hands_over(self) -> bool:
        """True if the attention ``"vmem"`` gets this layer's rows as a `PendingKV`, as far as is known."""
        return self.by_length and not self.rows.as_tensors

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.by_length:
            self.rows.open(self.index, key_states, value_states, tile_rows(key_states, self.config, self.rows.windows))
        else:
            self.rows.open(self.index, key_states, value_states)
        self._like = key_states.shape[1::2]
        # Latents of two widths (MLA) are expanded later, so the attention never sees them.
        self._equal = key_states.shape[3] == value_states.shape[3]
        self.rows.as_tensors = self.rows.as_tensors or not self._equal
        self.is_initialized = True

    def _other_rows(self, key: torch.Tensor) -> NoReturn:
        heads, dim = self._like
        raise ValueError(
            f"layer {self.index} gives keys of {key.dtype}, {key.shape[1]} heads of {key.shape[3]}; the cache has "
            f"{self.rows.dtype}, {heads} heads of {dim}: create another VMemCache for this model"
        )

    def _cast(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in the cache's dtype. Under autocast, passes and K and V differ: the widest dtype holds all."""
        rows = self.rows
        rows.autocast = rows.autocast or torch.is_autocast_enabled(rows.device.type)
        if rows.autocast:
            rows.widen(torch.promote_types(key.dtype, value.dtype))
        elif key.dtype is not rows.dtype:
            self._other_rows(key)
        return key.to(rows.dtype), value.to(rows.dtype)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the rows of `tokens` more columns: K and V, ``[batch, heads, tokens, head_dim]``.

        Returns views of K and V of every column that the pass reads. For the attention ``"vmem"``, which stores the new
        rows and reads them in place, it returns tensors of these views' shape that nothing else may read.
        """
        if torch.compiler.is_compiling():
            untraced: tuple[torch.Tensor, torch.Tensor] = _update_untraced(self, key_states, value_states)
            return untraced
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.requires_grad and torch.is_grad_enabled():
            raise ValueError("VMemCache does not support autograd: call the model under torch.no_grad()")
        start, tokens, rows = self.length, key_states.shape[2], self.rows
        if key_states.shape[1::2] != self._like:
            self._other_rows(key_states)
        if key_states.dtype is not rows.dtype or value_states.dtype is not rows.dtype:
            key_states, value_states = self._cast(key_states, value_states)
        if rows.masked == (start, tokens) and self.by_length and self._equal:
            lost, rows.pending = rows.pending, None
            if lost is not None:
                raise RuntimeError(
                    f"layer {lost.layer.index} did not pass the keys that the cache returned to transformers' "
                    "AttentionInterface, so they were not stored: if the last pass was interrupted, reset() the cache; "
                    "otherwise use another attention than vmem for this model"
                )
            pending = rows.pending = PendingKV(self, start, tokens, key_states, value_states)
            opaque = pending.opaque(start + tokens - self._first(start))
            return opaque, opaque
        plan = rows.begin(start, tokens, key_states.shape[0])
        if rows.ragged:
            raise ValueError(
                "the sequences of this cache have different lengths, because padding has no rows, which only the "
                "attention vmem can read, uncompiled: reset() the cache before another attention or torch.compile "
                "uses it"
            )
        rows.for_stock_attention()
        self.store(plan, key_states, value_states)
        return self.view(start)

    def store(self, plan: Plan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the rows of a pass to the places in its plan."""
        start, tokens = plan.start, plan.tokens
        if plan.uniform:
            for rows, new in zip(self._in_order(), (key, value)):
                rows.narrow(2, start, tokens).copy_(new)
        else:
            self.rows.locate(plan)
            for rows, new in zip(self.kv(), (key, value)):
                new = new.transpose(1, 2).reshape(-1, new.shape[1], new.shape[3])
                if plan.sources is not None:
                    new = new.index_select(0, plan.sources)
                rows.index_put_(plan.targets, new)
        self.length = start + tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> VMemLayer:
        new = copy.copy(self)
        memo[id(self)] = new
        kept = {**self.__dict__, "_settings": None}  # the model's own, which is not copied
        new.__dict__ = {name: copy.deepcopy(value, memo) for name, value in kept.items()}
        new._settings = self._settings
        return new

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, ``[slots, max_tokens, heads, head_dim]`` each. They are backed up to the lengths."""
        return self.rows.pairs[self.index]

    def _in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the batch, ``[batch, heads, max_tokens, head_dim]``. Its slots must be in order."""
        k, v = (t[: self.rows.batch].transpose(1, 2) for t in self.kv())
        return k, v

    def view(self, start: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, as stock attention takes them, of the columns that a pass after `start` columns reads.

        By default the columns that the next pass reads. They are views of the rows, or copies if the sequences differ
        in length or are not in the order of their slots. In a copy, columns without a row repeat another row.
        """
        if self.rows.capturing:
            raise RuntimeError(
                f"layer {self.index} reads rows as one tensor: its length would be fixed in a captured step"
            )
        self.viewed = True
        first = self._first(self.length if start is None else start)
        if not self.rows.in_order:
            where = self.rows.columns.places(first, self.length, self.rows.slots)
            k, v = (t[where].transpose(1, 2) for t in self.kv())
            return k, v
        k, v = (t.narrow(2, first, self.length - first) for t in self._in_order())
        return k, v

    keys = property(lambda self: self.view()[0] if self.is_initialized else None)
    values = property(lambda self: self.view()[1] if self.is_initialized else None)

    def _first(self, start: int) -> int:
        """The first column that a pass after `start` columns reads."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first(self.length)
        columns = self.length + query_length - first
        if torch.compiler.is_compiling():
            return columns, first
        return KVLength.of(columns, self), first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.rows.max_tokens

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """As in transformers' layers: a negative number of tokens to remove, or a positive number of tokens to keep.

        Changes only the layer's own count. `VMemCache.crop` also frees the pages.
        """
        self.length = cropped(self.length, tokens_to_remove)

    def reset(self) -> None:
        self.length = 0
        self.viewed = False

    def _of_the_cache(self, *args: Any) -> NoReturn:
        raise NotImplementedError("the layers of a VMemCache share their slots: call the cache's method instead")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _of_the_cache  # type: ignore[assignment]
    offload = prefetch = _of_the_cache


def cropped(length: int, tokens_to_remove: int | torch.Tensor) -> int:
    """The length that remains after `crop`."""
    tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a tensor on the device
    if tokens_to_remove > 0:
        return min(length, tokens_to_remove)
    return max(0, length + tokens_to_remove)


# Under torch.compile: pages are mapped by native code, which cannot be traced.
_update_untraced = torch.compiler.disable(VMemLayer.update)


class VMemSlidingLayer(VMemLayer):
    """A layer with a sliding window (or chunks). Rows that no later token reads are given up.

    A crop of the last forward pass is always possible, whether or not recording was requested.
    """

    is_sliding = True

    def __init__(self, rows: Rows, index: int, config: PreTrainedConfig, settings: dict[str, Any], window: int) -> None:
        super().__init__(rows, index, config, settings)
        self.window = self.sliding_window = window

    def activate_past_recording(self) -> None:
        """Nothing to do: the rows that a crop of the last pass needs are always kept."""

    def _first(self, start: int) -> int:
        return max(0, start - self.window + 1)

    def get_max_length(self) -> int:
        return self.window


class StateLayer(LinearAttentionLayer):
    """A linear-attention state, as transformers keeps it, that passes in any mode may write to.

    Under ``torch.inference_mode()``, transformers makes states that nothing may write to outside of it.
    """

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        with torch.inference_mode(False):
            super().lazy_initialization(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        states: torch.Tensor = super().update_conv_state(*args, **kwargs)
        if self.record_past and not torch.compiler.is_compiling():  # the state is what the pass made
            with torch.inference_mode(False):
                for i, state in self.conv_states.items():
                    if state is not None and state.is_inference():
                        self.conv_states[i] = state.clone()
        return states


class _LinearAndRows(StateLayer):
    """The base of the two hybrid layers: a linear-attention state beside rows.

    Both parents have methods of these names, and each does its part.
    """

    is_compileable = False
    supports_early_init = False
    is_croppable = LinearAttentionLayer.is_croppable
    dtype = device = None  # of the states; `rows` has its own

    def __init__(self, *args: Any, number_of_states: int = 1) -> None:
        layer: Any = type(self).__bases__[1]
        layer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # Only `update` passes positional arguments, K and V. States are passed by name.
        if args:
            VMemLayer.lazy_initialization(cast("VMemLayer", self), *args)
        else:
            StateLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        VMemLayer.reset(cast("VMemLayer", self))

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        LinearAttentionLayer.crop(self, int(tokens_to_remove))
        VMemLayer.crop(cast("VMemLayer", self), tokens_to_remove)

    offload = prefetch = VMemLayer._of_the_cache


class VMemHybridLayer(_LinearAndRows, VMemLayer):
    """A linear-attention state beside full attention."""

    get_max_length = VMemLayer.get_max_length


class VMemHybridSlidingLayer(_LinearAndRows, VMemSlidingLayer):
    """A linear-attention state beside attention with a sliding window."""

    activate_past_recording = LinearAttentionLayer.activate_past_recording
    get_max_length = VMemSlidingLayer.get_max_length
