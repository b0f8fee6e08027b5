"""The settings of vLLM on vMem: environment variables, which vLLM's processes inherit.

SPDX-License-Identifier: MIT
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAYOUTS = ("auto", "vllm", "slots")
MOST = 10**15 - 1
MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class Settings:
    """The settings in the environment; see docs/vllm.md."""

    on: bool = False
    strict: bool = False
    layout: str = "auto"
    page_size: int = 0
    limit: int | None = None
    minimum: int = 0
    maximum: int = 0
    priority: int = 0
    pool: str = ""
    pool_size: int = 0


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _wrong(name: str, text: str, must: str) -> ValueError:
    shown = " ".join(text.split())
    return ValueError(f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'} must be {must}")


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(f"[0-9]{{1,{len(str(MOST))}}}", text):  # int() may refuse long texts in words of its own
        raise _wrong(name, text, f"a whole number from 0 to {MOST}")
    return int(text)


def _bytes(name: str, text: str) -> int:
    size = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) *([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if size is None:
        raise _wrong(name, text, "a size in bytes, such as 16G")
    given = int(float(size[1]) * (1 << 10 * " KMGT".index(size[2].upper() or " ")))
    if given > MOST_BYTES:
        raise _wrong(name, text, f"at most {MOST_BYTES >> 40}T")
    return given


def _page(name: str, text: str) -> int:
    size = _bytes(name, text)
    if size.bit_count() != 1:
        raise _wrong(name, text, "a power of two, such as 256K")
    return size


def _pool_size(name: str, text: str) -> int:
    size = _bytes(name, text)
    if not size:
        raise _wrong(name, text, "at least 1")
    return size


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", ""):
        raise _wrong(name, text, "0 or 1")
    return text.lower() in ("1", "true")


def _name(name: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,59}", text):
        raise _wrong(name, text, "at most 60 letters, digits, _, . and -")
    return text


def _layout(name: str, text: str) -> str:
    if text not in LAYOUTS:
        raise _wrong(name, text, f"one of {', '.join(LAYOUTS)}")
    return text


_FIELDS = (
    ("VMEM_VLLM_STRICT", "strict", _flag),
    ("VMEM_VLLM_LAYOUT", "layout", _layout),
    ("VMEM_VLLM_PAGE_SIZE", "page_size", _page),
    ("VMEM_VLLM_LIMIT", "limit", _bytes),
    ("VMEM_VLLM_MIN", "minimum", _bytes),
    ("VMEM_VLLM_MAX", "maximum", _bytes),
    ("VMEM_VLLM_PRIORITY", "priority", _whole),
    ("VMEM_VLLM_POOL", "pool", _name),
    ("VMEM_VLLM_POOL_SIZE", "pool_size", _pool_size),
)


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment; the defaults where VMEM_VLLM is off, whatever else is set.

    Raises `ValueError` naming the variable.
    """
    if not _flag("VMEM_VLLM", _text(environ, "VMEM_VLLM")):
        return Settings()
    known = ["VMEM_VLLM", *(name for name, _, _ in _FIELDS)]
    for name in environ:
        if name.startswith("VMEM_VLLM_") and name not in known:
            raise ValueError(f"{name} is not a setting of vMem's: these are {', '.join(known)}")
    given: dict[str, Any] = {"on": True}
    for name, field, parse in _FIELDS:
        if text := _text(environ, name):
            given[field] = parse(name, text)
    made = Settings(**given)
    for name, size, other, most in (
        ("VMEM_VLLM_MIN", made.minimum, "VMEM_VLLM_MAX", made.maximum),
        ("VMEM_VLLM_MIN", made.minimum, "VMEM_VLLM_POOL_SIZE", made.pool_size),
        ("VMEM_VLLM_LIMIT", made.limit or 0, "VMEM_VLLM_MAX", made.maximum),
    ):
        if most and size > most:
            raise _wrong(name, _text(environ, name), f"at most {other}={_text(environ, other)}")
    for name, field, _ in _FIELDS:
        if not made.pool and field in ("pool_size", "minimum", "priority") and getattr(made, field):
            raise ValueError(f"{name} is set, but VMEM_VLLM_POOL names no pool")
    return made
