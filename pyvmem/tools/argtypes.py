"""Sizes as text, and types of command-line arguments, which report an invalid one before anything runs.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def size_text(bytes: int | None) -> str:
    """A size in bytes as text, such as 64K, 2M or 12T."""
    if bytes is None:
        return ""
    for shift, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if bytes >= 1 << shift and bytes % (1 << shift) == 0:
            return f"{bytes >> shift}{unit}"
    return str(bytes)


def three_digits(bytes: int) -> str:
    """Bytes in three digits: 512 MiB, 2.05 GiB."""
    value = float(bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{value:.3g} {unit}"


def parse_size(text: str) -> int:
    """The bytes that a text such as 64K, 2M, 12TiB or 4096 means. Raises ValueError."""
    shift = {"K": 10, "M": 20, "G": 30, "T": 40}
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    try:
        if number and number[-1] in shift:
            return int(float(number[:-1]) * (1 << shift[number[-1]]))
        return int(number)
    except (OverflowError, ValueError):
        raise ValueError(f"{text!r} must be a size such as 64K, 2M or 1G") from None


def size(text: str) -> int:
    """A number of bytes, such as 64K; at least 1."""
    try:
        bytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least one byte")
    return bytes


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A type for whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} must lie between {least} and {most}")
        return value

    return number


def _float(text: str) -> float:
    """The number in a text, or nan, which lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str, least: float = 0, most: float = 1000000) -> float:
    """A time in seconds, such as 0.5."""
    value = _float(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds between {least} and {most}")
    return value


def positive(text: str) -> float:
    """A number over 0, such as 7.5."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number over 0")
    return value


def device(parser: argparse._ActionsContainer) -> None:
    """Add the argument that chooses a GPU."""
    parser.add_argument("--device", type=whole(0), default=0, metavar="N", help="CUDA device ordinal (0)")
