"""The settings of an engine on vMem: environment variables, which the engine's processes inherit.

All begin with the engine's switch, such as VMEM_ENGINE for VMEM_ENGINE_LIMIT.

SPDX-License-Identifier: MIT
"""

import difflib
import logging
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Variables of engines' switches, which read them themselves, and those that others read.
KNOWN = re.compile(r"VMEM_((VLLM|SGLANG|TEST|BENCH)(_\w+)?|BACKEND|CHECK|TRANSFORMERS_FORCE)")
MOST = 10**15 - 1
MOST_BYTES = 1 << 60


class Refused(ValueError):
    """The engine cannot run on vMem with this configuration. The message says which setting, and what to do."""


def cannot(switch: str, reason: str) -> Refused:
    """A `Refused` for an engine that runs on vMem because of its switch. reason: what is wrong, and what to do."""
    return Refused(f"{switch}=1: {reason} (or unset {switch})")


@dataclass(frozen=True)
class Settings:
    """The settings in the environment. switch: the name with which they begin."""

    switch: str
    on: bool = False
    layout: str = ""
    page_size: int = 0
    limit: int | None = None
    minimum: int = 0
    maximum: int = 0
    priority: int = 0
    pool: str = ""
    pool_size: int = 0
    http: bool = False
    sleep: str = "drop"
    weights: bool = False
    idle: float = 0.0
    queue: float = 60.0
    slice: float = 2.0
    common: float = 0.0
    prefixes: int = 0
    standby: tuple[int, ...] = ()

    @property
    def logger(self) -> logging.Logger:
        """Below the engine's own, which shows what it logs."""
        return logging.getLogger(f"{self.switch.removeprefix('VMEM_').lower()}.vmem")


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _wrong(name: str, text: str, must: str) -> ValueError:
    shown = " ".join(text.split())
    return ValueError(f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'} must be {must}")


def _number(name: str, text: str) -> int:
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


def _one_of(options: Sequence[str]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in options:
            raise _wrong(name, text, f"one of {', '.join(options)}")
        return text

    return parse


def _seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", text):
        raise _wrong(name, text, "a number of seconds from 0 to 999999")
    return float(text)


def _name(name: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,59}", text):
        raise _wrong(name, text, "at most 60 letters, digits, _, . and -")
    return text


def _descriptors(name: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]{1,6},[0-9]{1,6}", text):
        raise _wrong(name, text, "what pyvmem.tools.pair sets")
    return tuple(map(int, text.split(",")))


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "page_size": _page,
    "limit": _bytes,
    "minimum": _bytes,
    "maximum": _bytes,
    "priority": _number,
    "pool": _name,
    "pool_size": _pool_size,
    "http": _flag,
    "sleep": _one_of(("drop", "keep")),
    "weights": _flag,
    "idle": _seconds,
    "queue": _seconds,
    "slice": _seconds,
    "common": _seconds,
    "prefixes": _bytes,
    "standby": _descriptors,
}
SLEEPS = ("sleep", "weights", "idle", "queue", "slice")  # fields of engines whose models can sleep
_ALL = [field for field in _PARSERS if field not in (*SLEEPS, "http", "common", "prefixes", "standby")]
_SUFFIXES = {"minimum": "MIN", "maximum": "MAX"}


def _variable(switch: str, field: str) -> str:
    return f"{switch}_{_SUFFIXES.get(field, field.upper())}"


def mistyped(switch: str, environ: Iterable[str]) -> list[tuple[str, str]]:
    """Names in an environment that are nearly those of a setting, each with the setting that may be meant."""
    known = [switch, *(_variable(switch, field) for field in (*_ALL, "layout"))]
    found = []
    for name in environ:
        if name.startswith("VMEM_") and name != switch and not name.startswith(f"{switch}_"):
            right = [f"{switch}{name.removeprefix('VMEM')}"]  # such as VMEM_LIMIT
            near = [full for full in right if full in known] or difflib.get_close_matches(name, known, 1, 0.85)
            found += [(name, near[0])] if near else []
    return found


def warn_if_forgotten(switch: str, engine: str) -> None:
    """Tell who sets up vMem for an engine and leaves it off by mistake; once, and not in each of its processes."""
    given = [name for name in os.environ if name.startswith(f"{switch}_")]
    given += [name for name, _ in mistyped(switch, os.environ)]
    if given and not os.environ.get(switch) and multiprocessing.parent_process() is None:
        Settings(switch).logger.warning("%s has no effect, because %s is not 1: %s runs without vMem", min(given),
                                        switch, engine)  # fmt: skip


def unknown(switch: str, environ: Iterable[str]) -> list[str]:
    """Names in an environment that begin as vMem's do and mean nothing to it, sorted."""
    near = {name for name, _ in mistyped(switch, environ)}
    return sorted(name for name in environ if name.startswith("VMEM_") and not (name in near or KNOWN.fullmatch(name)))


def warn_of_unknown(switch: str) -> None:
    """Name variables that mean nothing to vMem, in one line; once, and not in each of an engine's processes."""
    if (names := unknown(switch, os.environ)) and multiprocessing.parent_process() is None:
        Settings(switch).logger.warning("vMem has no setting of %s: %s", "these names" if names[1:] else "this name",
                                        ", ".join(names))  # fmt: skip


def read(
    switch: str, layouts: Sequence[str], environ: Mapping[str, str] = os.environ, more: Sequence[str] = ()
) -> Settings:
    """The `Settings` of an environment; the defaults where the switch is off, whatever else is set.

    layouts : what SWITCH_LAYOUT may be, the default first; none: there is no such setting. more: fields that only some
        engines have.

    Raises `ValueError` naming the variable.
    """
    layout = layouts[0] if layouts else ""
    if not _flag(switch, _text(environ, switch)):
        return Settings(switch, layout=layout)

    def variable(field: str) -> str:
        return _variable(switch, field)

    fields = {field: _PARSERS[field] for field in (*_ALL, *more)}
    if layouts:
        fields["layout"] = _one_of(layouts)
    known = [switch, *map(variable, fields)]
    for name in environ:
        if name.startswith(f"{switch}_") and name not in known:
            raise ValueError(f"{name} is not a setting of vMem's: these are {', '.join(known)}")
    for name, meant in mistyped(switch, environ):
        raise ValueError(f"{name} is not a setting of vMem's: {meant} may be meant")
    given: dict[str, Any] = {"on": True, "layout": layout}
    for field, parse in fields.items():
        if text := _text(environ, variable(field)):
            given[field] = parse(variable(field), text)
    made = Settings(switch, **given)
    for field, size, other, most in (
        ("minimum", made.minimum, "maximum", made.maximum or None),
        ("minimum", made.minimum, "pool_size", made.pool_size or None),
        ("minimum", made.minimum, "limit", made.limit),
        ("limit", made.limit or 0, "maximum", made.maximum or None),
    ):
        if most is not None and size > most:
            name, above = variable(field), variable(other)
            raise _wrong(name, _text(environ, name), f"at most {above}={_text(environ, above)}")
    for field, needs in (("common", "weights"), ("prefixes", "common")):
        if getattr(made, field) and not getattr(made, needs):
            raise ValueError(
                f"{variable(field)} is set, but {variable(needs)} is {'not 1' if needs == 'weights' else 0}"
            )
    for field in ("minimum", "priority", "pool_size", "weights"):
        if not made.pool and getattr(made, field):
            raise ValueError(f"{variable(field)} is set, but {switch}_POOL names no pool")
    return made
