"""Decode steps as CUDA graphs: the GPU runs a step without waiting for Python to launch its kernels.

A step of an 8B model has about 1,300 kernels. Eager transformers takes twice as long to launch them as the GPU to run
them. The addresses of a `VMemCache`'s rows never change, and the attention ``"vmem"`` reads slots and lengths from the
device. One captured step therefore serves all later ones while pages are mapped and unmapped. Between two steps only a
few integers are uploaded.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pyvmem import attention
from pyvmem.attention.table import KERNELS
from pyvmem.kv.cache import KVCache
from pyvmem.transformers.kernels import softcap_of
from pyvmem.transformers.cache import VMemCache
from pyvmem.transformers.layers import VMemLayer
from pyvmem.transformers.plan import Plan, follow
from pyvmem.transformers.rows import Rows

_SETTINGS = ("use_cache", "return_dict", "logits_to_keep")
_CACHE = ("cache", "past_key_values")  # the cache's name since transformers 5.24, and before
_TAKEN = {"input_ids", "attention_mask", "position_ids", *_CACHE, *_SETTINGS}
_LEAST = 1024  # the fewest rows that a graph's kernels are launched for; further graphs double them


class CudaGraph:
    """Captures the kernels that a function launches, without running them, and replays them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], Any]) -> Any:
        # Not torch.cuda.graph: that gives torch's free memory back first, and every later allocation pays for it.
        current = torch.cuda.current_stream(self._device)
        stream = _capture_stream(current.device_index)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # and so on its device
            # Other threads may call CUDA meanwhile: the cache's own maps pages ahead of need.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the original error is already being raised
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        current.wait_stream(stream)
        return output

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _name_of_cache(kwargs: dict[str, Any]) -> str:
    return next((name for name in _CACHE if kwargs.get(name) is not None), _CACHE[-1])


class _Step:
    """One captured decode step of a batch, for lengths up to `limit`. Its inputs are in buffers at fixed addresses."""

    def __init__(self, rows: Rows, batch: int, limit: int, recorder: Any) -> None:
        self.limit = limit
        self.recorder = recorder
        with torch.inference_mode(False):  # later steps, which write here, may run in another mode
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=rows.device)
            self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=rows.device)
            self.targets = torch.zeros(2, batch, dtype=torch.int64, device=rows.device)
        self.batch = attention.Batch(rows.kv, list(range(batch)), [1] * batch, max_length=limit, check=False)
        self.output: Any = None

    def load(self, rows: Rows, plan: Plan, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Copy a pass's inputs to where the graph reads them."""
        self.ids.copy_(ids)
        if positions is None:
            self.positions.fill_(plan.start)
        else:
            self.positions.copy_(positions)
        where = torch.from_numpy(np.array([rows.slots, [n - 1 for n in plan.lengths]]))
        self.targets.copy_(where.pin_memory() if rows.device.type == "cuda" else where, non_blocking=True)
        follow(self.batch, rows.slots, plan.lengths)
        # The pass's rows go through these buffers, whether or not the graph computes it.
        plan.uniform, plan.batch = False, self.batch
        plan.targets, plan.sources = tuple(self.targets), None


class DecodeGraphs:
    """Replaces a model's decode steps with a `VMemCache` by captured ones, until `close`.

    Parameters
    ----------
    model : PreTrainedModel
        Steps are captured only if its attention is ``"vmem"``.
    recorder : callable
        Creates the object that captures and replays on a device; `CudaGraph` by default, whose two methods it has.

    Attributes
    ----------
    captured, replayed : int
        Steps captured so far, and steps replayed.
    refused : str or None
        Why the most recent uncaptured step was not captured.

    Notes
    -----
    All other calls go to the model as before: prompts, other caches, models with linear-attention layers, steps whose
    tokens are padding, and calls that ask for hidden states. So do models whose step cannot be captured: it waits for
    the GPU (some mixtures of experts), or no kernel of `pyvmem.attention` takes it (sinks, latents, chunks).

    Examples
    --------
    >>> with DecodeGraphs(model):                                          # doctest: +SKIP
    ...     model.generate(**inputs, past_key_values=VMemCache(model))
    """

    def __init__(self, model: PreTrainedModel, recorder: Callable[[torch.device], Any] = CudaGraph) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a model of transformers, not {type(model).__name__}")
        if "forward" in vars(model):
            raise ValueError(
                "model: another DecodeGraphs, or torch.compile, already runs its forward passes; end that first"
            )
        self.model: PreTrainedModel | None = model
        self.captured = self.replayed = 0
        self.refused: str | None = None
        self._recorder = recorder
        self._forward = model.forward
        self._kv: weakref.ref[KVCache] | None = None  # weak: graphs belong to one KVCache
        self._steps: dict[Any, _Step] = {}
        self._seen: set[Any] = set()
        self._failed: str | None = None  # why a capture failed: no other is tried

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        model.forward = forward

    def close(self) -> None:
        """Restore the model's own forward, and free the captured steps."""
        if self.model is not None:
            del self.model.forward
            self.model = None
        self._drop()

    def _drop(self) -> None:
        self._steps.clear()
        self._kv = None

    def __enter__(self) -> DecodeGraphs:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # ---- a call ----------------------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.refused = self._stops(args, kwargs)
        if self.refused is not None:
            return self._forward(*args, **kwargs)
        cache, ids, mask = kwargs[_name_of_cache(kwargs)], kwargs["input_ids"], kwargs.get("attention_mask")
        rows, start = cache.rows, cache.layers[0].length
        if mask is not None:
            mask = mask.to(rows.device, torch.bool)
            if not rows.ragged and mask.all():
                mask = None
        plan = rows.begin(start, 1, len(ids), mask)
        if plan.kept is not None or plan.masked or (mask is not None and not rows.ragged):
            self.refused = "padding that is new, or that was stored"
            return self._forward(*args, **kwargs)
        step = self._step(cache, rows, len(ids), max(plan.lengths), kwargs)
        if step is None:
            return self._forward(*args, **kwargs)
        step.load(rows, plan, ids, kwargs.get("position_ids"))
        if step.output is None and not self._capture(step, cache, start, kwargs):
            plan.batch = plan.targets = None
            return self._forward(*args, **kwargs)
        step.recorder.replay()
        for layer in cache.layers:
            layer.length = start + 1
        self.replayed += 1
        output = type(step.output)(step.output)  # the next step overwrites the logits
        output["logits"] = output["logits"].clone()
        return output

    def _stops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call cannot be a captured step; None if it can."""
        cache, ids = kwargs.get(_name_of_cache(kwargs)), kwargs.get("input_ids")
        if self._failed is not None:
            return self._failed
        if args or not isinstance(cache, VMemCache) or ids is None:
            return "not called by name with input_ids and a VMemCache"
        extra = [name for name, value in kwargs.items() if value is not None and name not in _TAKEN]
        if extra or kwargs.get("return_dict") is False or kwargs.get("use_cache") is False:
            return f"asked for {', '.join(extra) or 'no cache, or a tuple'}"
        if not all(isinstance(each, VMemLayer) and each.supports_early_init for each in cache.layers):
            return "layers that are not attention"
        layer: Any = cache.layers[0]
        if ids.shape[1] != 1 or not layer.is_initialized or not layer.length or not layer.by_length:
            return "not a decode step with the attention vmem"
        if len(ids) != cache.rows.batch or torch.is_grad_enabled() or ids.device != cache.rows.device:
            return "another batch, autograd, or tokens on another device"
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
            return "a mask that is not 2D"
        return None

    def _step(self, cache: VMemCache, rows: Rows, batch: int, length: int, kwargs: dict[str, Any]) -> _Step | None:
        """The `_Step` to use, captured or not yet; None in the first step of its kind, which runs eagerly."""
        if self._kv is None or self._kv() is not rows.kv:
            self._drop()
            self._kv = weakref.ref(rows.kv)
        limit = _LEAST
        while limit < length:
            limit *= 2
        limit = min(limit, rows.max_tokens)
        key = (batch, limit, kwargs.get("logits_to_keep"))
        if key not in self._steps:
            # The first step compiles kernels and allocates library workspaces, which must not be captured.
            kind = (batch, rows.dtype)
            if kind not in self._seen:
                self._seen.add(kind)
                self.refused = "the first step of its kind"
                return None
            layers: list[Any] = cache.layers
            for layer in layers:
                try:
                    heads, softcap = layer.config.num_attention_heads, softcap_of(layer.config)
                    found = attention.best("decode", rows.kv, heads, layer.kv(), window=layer.window, softcap=softcap)
                except ValueError as error:
                    self.refused = str(error)
                    return None
                if self._recorder is CudaGraph and not KERNELS[found.kernel].capturable:
                    self.refused = f"kernel {found.kernel} cannot be captured"
                    return None
            self._steps[key] = _Step(rows, batch, limit, self._recorder(rows.device))
        return self._steps[key]

    def _capture(self, step: _Step, cache: VMemCache, start: int, kwargs: dict[str, Any]) -> bool:
        given = {name: kwargs[name] for name in _SETTINGS if name in kwargs}
        given[_name_of_cache(kwargs)] = cache
        cache.rows.capturing = True
        try:
            step.output = step.recorder.capture(
                lambda: self._forward(input_ids=step.ids, position_ids=step.positions, attention_mask=None, **given)
            )
        except RuntimeError as error:  # CUDA refuses an operation during capture
            if self._recorder is CudaGraph and "captur" not in str(error):
                raise
            self._failed = self.refused = f"the model's step could not be captured: {str(error).splitlines()[0]}"
            self._drop()
        finally:
            cache.rows.capturing = False
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.length = start
        cache.rows.pending = None
        if step.output is None:
            return False
        self.captured += 1
        return True
