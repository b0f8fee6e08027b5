"""The settings of vLLM on vMem: environment variables, which vLLM's processes inherit.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAYOUTS = ("block", "token", "layer")


@dataclass(frozen=True)
class Settings:
    """The settings in the environment; see docs/vllm.md."""

    on: bool = False
    force: bool = False
    layout: str = "block"
    cache_tokens: int | None = None
    spare_slots: int | None = None
    wait_seconds: int = 60


def _whole(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"{name}={text} must be a whole number of at least 0")
    return number


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", ""):
        raise ValueError(f"{name}={text} must be 0 or 1")
    return text.lower() in ("1", "true")


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment; the defaults where VMEM_VLLM is off, whatever else is set.

    Raises `ValueError` naming the variable.
    """
    if not _flag("VMEM_VLLM", environ.get("VMEM_VLLM", "")):
        return Settings()
    given: dict[str, Any] = {"on": True}
    for name, field, parse in (
        ("VMEM_VLLM_FORCE", "force", _flag),
        ("VMEM_VLLM_CACHE_TOKENS", "cache_tokens", _whole),
        ("VMEM_VLLM_SPARE_SLOTS", "spare_slots", _whole),
        ("VMEM_VLLM_WAIT", "wait_seconds", _whole),
    ):
        if environ.get(name):
            given[field] = parse(name, environ[name])
    layout = environ.get("VMEM_VLLM_LAYOUT") or "block"
    if layout not in LAYOUTS:
        raise ValueError(f"VMEM_VLLM_LAYOUT={layout} must be one of {', '.join(LAYOUTS)}")
    return Settings(layout=layout, **given)
