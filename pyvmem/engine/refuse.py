"""Refuses what cannot work on vMem, at start and with one line.

SPDX-License-Identifier: MIT
"""

from collections.abc import Collection


class Refused(ValueError):
    """The engine cannot run on vMem with this configuration. The message says which setting, and what to do."""


def backend(name: str, device: str) -> None:
    """Raise `Refused` if the backend's memory is not that of the engine's device. name: "" for the best that works."""
    if name == "host" and device != "cpu":
        raise Refused("VMEM_BACKEND=host has memory of the CPU only; unset it, or choose uvm, stock or cuda")
    if name not in ("", "host") and device == "cpu":
        raise Refused(f"VMEM_BACKEND={name}: the engine runs on the CPU here, whose memory is that of host; unset it")


def page_size(switch: str, size: int, backend: str, sizes: Collection[int]) -> None:
    """Raise `Refused` if the backend has no pages of the size that the setting names; 0: it is not set."""
    if size and size not in sizes:
        has = ", ".join(str(s) for s in sorted(sizes))
        raise Refused(f"{switch}_PAGE_SIZE={size}: pages of backend {backend} have {has} bytes (or unset "
                      f"{switch}_PAGE_SIZE)")  # fmt: skip
