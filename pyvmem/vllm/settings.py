"""The settings of vLLM on vMem: environment variables, which vLLM's processes inherit.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAYOUTS = ("block", "token", "layer")
ATTENTIONS = ("slots", "fused", "table")
MOST = 10**15 - 1


@dataclass(frozen=True)
class Settings:
    """The settings in the environment; see docs/vllm.md."""

    on: bool = False
    force: bool = False
    layout: str = "block"
    attention: str = "slots"
    cache_tokens: int | None = None
    spare_slots: int | None = None
    wait_seconds: int = 60


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _wrong(name: str, text: str, must: str) -> ValueError:
    shown = " ".join(text.split())
    return ValueError(f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'} must be {must}")


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MOST)):  # int() may refuse long texts in words of its own
        raise _wrong(name, text, f"a whole number from 0 to {MOST}")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", ""):
        raise _wrong(name, text, "0 or 1")
    return text.lower() in ("1", "true")


def _one_of(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise _wrong(name, text, f"one of {', '.join(choices)}")
    return text


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment; the defaults where VMEM_VLLM is off, whatever else is set.

    Raises `ValueError` naming the variable.
    """
    if not _flag("VMEM_VLLM", _text(environ, "VMEM_VLLM")):
        return Settings()
    given: dict[str, Any] = {"on": True}
    for name, field, parse in (
        ("VMEM_VLLM_FORCE", "force", _flag),
        ("VMEM_VLLM_CACHE_TOKENS", "cache_tokens", _whole),
        ("VMEM_VLLM_SPARE_SLOTS", "spare_slots", _whole),
        ("VMEM_VLLM_WAIT", "wait_seconds", _whole),
    ):
        if text := _text(environ, name):
            given[field] = parse(name, text)
    for name, field, choices in (
        ("VMEM_VLLM_LAYOUT", "layout", LAYOUTS),
        ("VMEM_VLLM_ATTENTION", "attention", ATTENTIONS),
    ):
        if text := _text(environ, name):
            given[field] = _one_of(name, text, choices)
    return Settings(**given)
