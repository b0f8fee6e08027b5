"""Memory for a model's activations, which torch caches outside the pool.

An engine that sleeps gives it to the driver. Its first step after the sleep would allocate it again, and end the engine
if other models had taken it meanwhile. So a model that wakes has torch cache as much as before, or goes on sleeping.
`sleeper` calls it; begin with `Activations.take`.

SPDX-License-Identifier: MIT
"""

import errno
import time
from collections.abc import Callable

import torch

from pyvmem.errors import OutOfMemory
from pyvmem.sleep.weights import Weights

TRY = 0.1  # seconds in which the other members of the pool give what is missing, until that is told again


class Activations:
    """The memory that torch caches on a worker's device.

    Parameters
    ----------
    weights : Weights
        Of the worker, through whose place in the pool the other members are asked.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights, self._device = weights, weights.device
        self._before = 0  # bytes that torch had from the driver before the sleep

    def note(self) -> None:
        """The engine is about to give up what torch caches."""
        self._before = self._reserved()

    def take(self, seconds: float, lacks: Callable[[int], None]) -> None:
        """Have torch cache as many bytes as when they were noted.

        lacks : called with the bytes that are missing, if the device has too little.

        Raises OutOfMemory, whose ``missing`` is these bytes, if the other members do not give them in so many seconds.
        """
        end = time.monotonic() + seconds
        while (missing := self._before - self._reserved()) > 0 and not self._cache(missing):
            lacks(missing)
            if time.monotonic() >= end:
                error = OutOfMemory(errno.ENOMEM, f"the device lacks {missing >> 20} MiB for the model's activations")
                error.missing = missing  # type: ignore[attr-defined]
                raise error
            self._weights.make_room(missing, min(seconds, TRY), lacks)

    def drop(self) -> None:
        """The model goes on sleeping: what torch caches is the driver's again."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _cache(self, size: int) -> bool:
        """Allocate and free so many bytes; returns whether the device had them."""
        try:
            torch.empty(size, dtype=torch.int8, device=self._device)
        except torch.OutOfMemoryError:
            return False
        return True
