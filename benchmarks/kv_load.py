"""Shared parts of the KV-cache benchmarks: model shapes, a server without a model, and attention to run meanwhile.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyvmem.core import MIB
from pyvmem.tools import argtypes

if TYPE_CHECKING:
    from benchmarks.traces import Trace
    from pyvmem.core import Context
    from pyvmem.kv.cache import KVCache


@dataclass(frozen=True)
class Model:
    """The shape of a model's KV cache: layers, KV heads (of all workers together), elements of a head, query heads."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int = 128
    query_heads: int = 32
    element_bytes: int = 2

    def row_bytes(self, workers: int = 1) -> int:
        """Bytes of one token's K (or V) in one layer on one worker."""
        return self.kv_heads // workers * self.head_dim * self.element_bytes


# Table 4 of the vAttention paper.
MODELS = {
    m.name: m
    for m in (
        Model("Yi-6B", 32, 4),
        Model("Llama-3-8B", 32, 8),
        Model("Yi-34B", 60, 8, query_heads=56),
    )
}


def model_options(parser: argparse._ActionsContainer, slots: str) -> None:
    """Add the arguments of a benchmark that runs a model's cache. slots: the help text for --kv-slots."""
    layers, batch = argtypes.whole(1), argtypes.whole(1, 65536)
    parser.add_argument("--model", choices=sorted(MODELS), default="Llama-3-8B", help="model shape (Llama-3-8B)")
    parser.add_argument("--kv-layers", type=layers, metavar="N", help="layers (all on a GPU, otherwise 1)")
    parser.add_argument("--kv-slots", type=batch, default=256, metavar="B", help=slots)


class Server:
    """Continuous batching without a model: requests in the order of a trace, admitted while slots and memory last.

    When a step finds no memory, the request admitted last is preempted and queued again in front, as vLLM does. Its
    tokens are computed again.
    """

    def __init__(self, cache: KVCache, trace: Trace) -> None:
        self.cache = cache
        self.trace = trace
        self.lengths = np.zeros(cache.slots, np.int32)
        self.goal = np.zeros(cache.slots, np.int64)
        self.request = np.full(cache.slots, -1)
        self.admitted = np.zeros(cache.slots, np.int64)
        self.queue = list(range(len(trace) - 1, -1, -1))  # the next request is the last
        self.preempted = self._clock = 0

    @property
    def active(self) -> Any:
        """How many requests are running."""
        return int(np.count_nonzero(self.goal))

    def _end(self, slot: int) -> None:
        self.cache.free(int(slot))
        self.lengths[slot] = self.goal[slot] = 0
        self.request[slot] = -1

    def retire(self) -> int:
        """End the requests that have all their tokens. Returns how many."""
        done = np.flatnonzero((self.goal > 0) & (self.lengths >= self.goal))
        for slot in done:
            self._end(int(slot))
        return len(done)

    def admit(self) -> list[int]:
        """Give slots to waiting requests while their prompts and the first new tokens fit. Returns the slots."""
        new: list[int] = []
        while self.queue:
            request = self.queue[-1]
            prompt = int(self.trace.prompt[request])
            slot = self.cache.alloc(prompt) if self.active < self.cache.slots else None
            if slot is None:
                break
            prefill = np.zeros_like(self.lengths)
            prefill[slot] = prompt + 1
            fits = self.cache.step(prefill, dry=True)
            prefill[slot] = prompt
            if not fits or not self.cache.step(prefill):
                self.cache.free(slot)
                break
            self.queue.pop()
            self._clock += 1
            self.lengths[slot], self.goal[slot] = prompt, prompt + int(self.trace.output[request])
            self.request[slot], self.admitted[slot] = request, self._clock
            new.append(slot)
        return new

    def decode(self) -> None:
        """One iteration: every request grows by a token. Preempts requests until there is memory."""
        while True:
            lengths = np.where(self.goal > 0, self.lengths + 1, 0).astype(np.int32)
            if self.cache.step(lengths):
                self.lengths = lengths
                return
            victim = int(np.argmax(np.where(self.goal > 0, self.admitted, -1)))
            self.queue.append(int(self.request[victim]))
            self._end(victim)
            self.preempted += 1


class Attention:
    """Decode attention of every layer over a cache with Triton's kernel, which also writes the new rows."""

    def __init__(self, cache: KVCache, model: Model) -> None:
        import torch

        self.torch = torch
        self.cache = cache
        slots, _, heads, dim = cache.keys[0].shape
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": cache.keys[0].device}
        self.query = torch.randn(slots, model.query_heads * heads // model.kv_heads, dim, **like)
        self.row = torch.randn(slots, heads, dim, **like)
        self.events: list[Any] = [None, None]

    def prefill(self, slot: int, length: int) -> None:
        """Write a prompt's rows, as prefill would."""
        for rows in (*self.cache.keys, *self.cache.values):
            rows[slot, :length].fill_(0.01)

    def run(self, lengths: npt.NDArray[np.int32]) -> None:
        """Launch one iteration for the slots with a length. Waits only for the iteration before the last."""
        from pyvmem import attention

        slots = np.flatnonzero(lengths)
        batch = attention.Batch(self.cache, slots, lengths[slots], check=False)
        query, row = self.query[: len(slots)], self.row[: len(slots)]
        for layer in range(len(self.cache.keys)):
            attention.decode(query, self.cache, layer, batch, kernel="triton", new=(row, row))
        event = self.torch.cuda.Event()
        event.record()
        self.events = [self.events[1], event]

    def wait(self, everything: bool = False) -> None:
        """Wait for the iteration before the last, or for all iterations."""
        event = self.events[1 if everything else 0]
        if event is not None:
            event.synchronize()


def memory_for(context: Context, fraction: float) -> int:
    """A budget in bytes: a fraction of the device's free memory."""
    return int(context.memory_free * fraction) // (2 * MIB) * 2 * MIB
