"""Copies of pinned host memory to the device: by the device's copy engine, or by a kernel that reads the host's memory.

While a copy engine is busy, mappings of the driver may take a millisecond each: a GiB of blocks of 2 MiB came in 542
instead of 14 ms in one run, in 32 instead of 22 ms in another (H200, driver 580, stock). Beside a kernel of 4 programs,
which copies at 92 % of the engine's rate, it came in 23 ms. A model that wakes has much to map, so the kernel copies.
It needs the device to itself: beside kernels of other processes, each gets the device in turn.

`weights` calls it; begin with `ToDevice`. The kernel is in `pyvmem.sleep.to_device_kernel`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import logging
from types import ModuleType

import torch

LOG = logging.getLogger(__name__)


class ToDevice:
    """Copies to one device, behind the work of the current stream. What is copied must stay until that is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernel: ModuleType | None = None

    @property
    def has_kernel(self) -> bool:
        return self._kernel is not None

    def prepare(self) -> None:
        """Compile the kernel, which takes a second when it is done first. Without it, the copy engine copies."""
        if self._device.type != "cuda":
            return
        try:
            from pyvmem.sleep import to_device_kernel

            to = torch.zeros(1, dtype=torch.int64, device=self._device)
            to_device_kernel.copy(to, torch.ones(1, dtype=torch.int64, pin_memory=True))
            if int(to) == 1:
                self._kernel = to_device_kernel
        except ImportError:
            LOG.info("vMem: Triton is not installed, and models wake more slowly without it")
        except Exception as error:  # Triton finds no compiler, or the device is full
            LOG.info("vMem: models wake more slowly, as there is no kernel that copies: %s", str(error)[:300])

    def __call__(self, to: torch.Tensor, source: torch.Tensor, by_kernel: bool) -> None:
        """Copy uint8[n], a multiple of 8 bytes that begins at one. by_kernel: if there is one."""
        if by_kernel and self._kernel is not None:
            with contextlib.suppress(RuntimeError):  # of Triton or torch: the device is full
                self._kernel.copy(to.view(torch.int64), source.view(torch.int64))
                return
        to.copy_(source, non_blocking=True)
