"""Pictures of the owners of a KV cache's pages: a bar of text for terminals, SVG for notebooks and documents, PNG.

Each of the `PARTS` of a budget has a colour, and a pattern or character, so that no picture depends on colours.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyvmem.kv.types import SlotInfo  # needs torch

# The parts of a cache's budget, in the order in which they are drawn, and the pages that they count.
PARTS = {
    "used": "for the lengths of requests, in pages of their own",
    "shared": "for requests and prefixes, mapped or held more than once",
    "cached": "held by prefixes or blocks, and by no request",
    "ahead": "mapped behind a request's length, for its next tokens",
    "kept": "of free slots, for the next request",
    "unused": "of the budget, not allocated",
}
# Paul Tol's bright scheme, in which colour-blind readers tell any two apart.
COLOURS = {
    "used": "#4477aa", "shared": "#aa3377", "cached": "#228833", "ahead": "#66ccee", "kept": "#ccbb44",
    "unused": "#ffffff",
}  # fmt: skip
CHARACTERS = dict(zip(PARTS, "█▓▒▞░·"))
ASCII = dict(zip(PARTS, "#&%+=."))
_PATTERNS = {
    "used": "",
    "shared": '<path d="M0 0L8 8M8 0L0 8" stroke="#fff" stroke-width="1.2"/>',
    "cached": '<path d="M0 8L8 0" stroke="#fff" stroke-width="1.6"/>',
    "ahead": '<path d="M0 4H8" stroke="#356" stroke-width="1"/>',
    "kept": '<circle cx="4" cy="4" r="1.4" fill="#554"/>',
    "unused": "",
}


def shares(stats: Mapping[str, int]) -> dict[str, int]:
    """Pages of each of `PARTS`, from a cache's statistics. They add up to the budget, or to the pages held above it."""
    left = held = stats["held_pages"]
    found = {}
    for part in ("kept", "ahead", "cached", "shared"):
        counted = stats["prefix_pages" if part == "cached" else f"{part}_pages"]
        found[part] = min(counted, left)  # counters are read one after another, while pages change hands
        left -= found[part]
    found["used"] = left
    found["unused"] = max(stats["budget_pages"] - held, 0)
    return {part: found[part] for part in PARTS}


def cells(parts: Mapping[str, int], width: int) -> list[tuple[str, int]]:
    """How many of `width` cells each part gets: in proportion, and one at least if it is there and a cell is left."""
    total = sum(parts.values())
    if not total or width < 1:
        return []
    exact = {part: count * width / total for part, count in parts.items()}
    given = {part: int(share) for part, share in exact.items()}
    for part in sorted(exact, key=lambda p: given[p] - exact[p])[: width - sum(given.values())]:
        given[part] += 1
    for part, count in parts.items():
        most = max(given, key=lambda p: given[p])
        if count and not given[part] and given[most] > 1:
            given[most] -= 1
            given[part] = 1
    return [(part, given[part]) for part in parts if given[part]]


def size(bytes: int) -> str:
    """Bytes in three digits: 512 MiB, 2.05 GiB."""
    value = float(bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{value:.3g} {unit}"


def svg(stats: Mapping[str, int], infos: Sequence[SlotInfo], most: int, title: str) -> str:
    """The picture as SVG: the budget as one bar, then the pages of the `most` slots that have most, and a legend."""
    width, left, row = 720, 96, 18
    largest = sorted((slot for slot, info in enumerate(infos) if info.pages), key=lambda s: -infos[s].pages)[:most]
    slots = [(slot, infos[slot]) for slot in sorted(largest)]
    parts, page = shares(stats), stats["page_size"]
    held, budget = (size(stats[f"{name}_pages"] * page) for name in ("held", "budget"))
    summary = f"{held} of {budget} held, {stats['active_slots']} of {stats['slots']} slots active"
    out = [f'<text x="0" y="14" font-weight="bold">{escape(title or "KV cache")}</text>',
           f'<text x="{width}" y="14" text-anchor="end">{summary}</text>']  # fmt: skip

    def draw(label: str, y: float, owned: Mapping[str, int], scale: float, note: str = "") -> None:
        out.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
        at = float(left)
        for part, pages in owned.items():
            if pages:
                wide = pages * scale
                out.append(f'<rect x="{at:.2f}" y="{y}" width="{wide:.2f}" height="14" fill="url(#vmem-{part})" '
                           f'stroke="#555" stroke-width=".5"><title>{part}: {pages} pages, {size(pages * page)}'
                           "</title></rect>")  # fmt: skip
                at += wide
        if note:
            out.append(f'<text x="{at + 6:.2f}" y="{y + 11.5}" font-size="10" fill="#555">{escape(note)}</text>')

    y = 26.0
    draw("budget", y, parts, (width - left) / max(sum(parts.values()), 1))
    y += row + 8
    scale = (width - left - 110) / max([info.pages for _, info in slots] + [1])
    for slot, info in slots:
        needed = min(info.needed_pages, info.pages)
        shared = min(info.shared_pages, needed)
        state = "being given up" if info.state == "free" and info.after else info.state
        spare = "kept" if state == "free" else "ahead"
        owned = {"used": needed - shared, "shared": shared, spare: info.pages - needed}
        draw(f"slot {slot}", y, owned, scale, f"{state}, {info.tokens} tokens")
        y += row
    y += 8
    at = 0.0
    for part in PARTS:
        out.append(f'<rect x="{at}" y="{y}" width="14" height="14" fill="url(#vmem-{part})" stroke="#555" '
                   f'stroke-width=".5"/><text x="{at + 19}" y="{y + 11.5}">{part} '
                   f'<tspan fill="#555">{size(parts[part] * page)}</tspan></text>')  # fmt: skip
        at += width / len(PARTS)
    patterns = "".join(
        f'<pattern id="vmem-{part}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{COLOURS[part]}"/>{mark}</pattern>'
        for part, mark in _PATTERNS.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {width + 16} {y + 26:g}" width="{width + 16}" '
        f'height="{y + 26:g}" font-family="sans-serif" font-size="12" role="img" aria-label="{escape(summary)}">'
        f'<defs>{patterns}</defs><rect x="-8" y="-4" width="100%" height="100%" fill="#fff"/>{"".join(out)}</svg>'
    )
