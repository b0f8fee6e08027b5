"""Sums of memory: equal ones mean that the contents are equal, but for one case in 2**64.

Each word is mixed with its place, by multiplications and shifts, before it is added. A sum of words with weights would
miss what structured data do: experts that change places in two layers, or two signs that flip. The mixer is Degski's
(x ^= x >> 32 between two multiplications). The key is drawn for each object, so no data are known to have equal sums.

On a GPU, a kernel in Triton reads the memory once (`pyvmem.sleep.sums_kernel`). Elsewhere, torch does it. `weights`
calls it; begin with `Sums`.

SPDX-License-Identifier: MIT
"""

import logging
import secrets
from types import ModuleType

import torch

LOG = logging.getLogger(__name__)
PIECE = {"cpu": 1 << 15}  # words that torch mixes at once: here so many that they stay in a core's cache
MOST = 1 << 20  # and elsewhere
STEP, MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd: multiplication loses nothing


def signed(n: int) -> int:
    """The int64 with the lowest 64 bits of n."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)


def _kernel(device: torch.device) -> ModuleType | None:
    if device.type == "cuda":
        try:
            from pyvmem.sleep import sums_kernel

            return sums_kernel
        except ImportError:
            LOG.info("vMem: Triton is not installed, and weights are compared more slowly without it")
    return None


class Sums:
    """Adds up memory of one device, in at most 16 MiB that are taken once: the device may be full."""

    def __init__(self, device: torch.device, key: int = 0) -> None:
        self._device, self._piece = device, PIECE.get(device.type, MOST)
        self._kernel = _kernel(device)
        self.key = key or secrets.randbits(62) | 1 << 62  # 63 bits: Triton has a kernel for each size
        self._room: list[torch.Tensor] = []

    def __call__(self, memory: torch.Tensor) -> torch.Tensor:
        """int64[] of uint8[n] that begins at a multiple of 8 bytes. Raises torch.OutOfMemoryError."""
        n = len(memory) // 8
        words, total = memory[: 8 * n].view(torch.int64), torch.zeros((), dtype=torch.int64, device=self._device)
        if not self._launch(words, total):
            for at in range(0, n, self._piece):
                self._add(words[at : at + self._piece], at, total)
        if len(memory) % 8:
            last = torch.zeros(8, dtype=torch.uint8, device=self._device)
            last[: len(memory) % 8] = memory[8 * n :]
            self._add(last.view(torch.int64), n, total)
        return total

    def _launch(self, words: torch.Tensor, total: torch.Tensor) -> bool:
        """Add words by the kernel. False: there is none, and nothing was added."""
        try:
            if self._kernel is not None and len(words):
                self._kernel.add(words, total, self.key)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton compiles for the host, too, and a machine may have no compiler
            self._kernel = None
            LOG.info("vMem: weights are compared more slowly, as Triton fails here: %s", str(error)[:300])
        return self._kernel is not None

    def _add(self, words: torch.Tensor, at: int, total: torch.Tensor) -> None:
        """Add words, the first of which is at place `at`."""
        if not self._room:
            steps = torch.arange(self._piece, device=self._device).mul_(signed(STEP))
            self._room = [steps, torch.empty_like(steps)]
        steps, mixed = (room[: len(words)] for room in self._room)
        halves = mixed.view(torch.int32).view(-1, 2)  # the lower one first
        torch.add(steps, signed(self.key + at * STEP), out=mixed)
        mixed ^= words
        halves[:, 0] ^= halves[:, 1]
        for _ in range(2):
            mixed *= signed(MIX)
            halves[:, 0] ^= halves[:, 1]
        total += mixed.sum()
