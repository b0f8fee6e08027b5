# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Insert vMem's hooks into a copy of NVIDIA's kernel-open tree.

All anchors are checked before the first file is written, and a tree that already carries the hooks is left alone.
"""

import difflib
import re
from pathlib import Path

from hooks import HOOKS

_RELEASE = re.compile(r'NV_VERSION_STRING=\\"([0-9.]+)\\"')


class InsertError(Exception):
    """The tree is not one that the hooks fit; the text names anchor, file and release."""


def release(tree):
    """Driver release of a tree, from its Kbuild; `InsertError` where there is none."""
    kbuild = Path(tree) / "Kbuild"
    found = _RELEASE.search(kbuild.read_text()) if kbuild.is_file() else None
    if not found:
        raise InsertError(f"{tree}: no NVIDIA kernel module tree (no NV_VERSION_STRING in its Kbuild)")
    return found.group(1)


def _count(text, lines):
    # Whole lines only: the block starts the file or follows a newline.
    return text.startswith(lines) + text.count("\n" + lines)


def _hooked(text, hook):
    """Text with the hook in place, or None where it already is."""
    block = hook.before + hook.anchor + hook.after
    if _count(text, block) == 1 and _count(text, hook.anchor) == 1:
        return None
    for part in (hook.before, hook.after):
        if part and _count(text, part):
            raise InsertError("it carries another version of the hook: start from a fresh copy")
    matches = _count(text, hook.anchor)
    if matches != 1:
        raise InsertError(f"the anchor matches {matches} times, not once")
    start = 0 if text.startswith(hook.anchor) else text.index("\n" + hook.anchor) + 1
    return text[:start] + block + text[start + len(hook.anchor) :]


def patched(tree):
    """{path in the tree: (old text, text with the hooks)}; the two are equal where the hooks were in place already."""
    files, done = {}, 0
    for hook in HOOKS:
        named = f"release {release(tree)}: hook '{hook.name}'"
        try:
            old, new = files.get(hook.file) or ((Path(tree) / hook.file).read_text(),) * 2
        except OSError:
            raise InsertError(f"{named}: there is no {hook.file}") from None
        try:
            text = _hooked(new, hook)
        except InsertError as e:
            raise InsertError(f"{named} in {hook.file}: {e}\n  anchor: {hook.anchor!r}") from None
        done += text is None
        files[hook.file] = (old, new if text is None else text)
    if done not in (0, len(HOOKS)):
        raise InsertError(
            f"release {release(tree)}: {done} of {len(HOOKS)} hooks are in place: start from a fresh copy"
        )
    return files


def insert(tree):
    """Insert the hooks into the tree's files; True if that changed anything."""
    changed = False
    for file, (old, new) in patched(tree).items():
        if new != old:
            (Path(tree) / file).write_text(new)
            changed = True
    return changed


def diff(files):
    """Unified diff of what `patched` returned, and the number of lines it adds."""
    lines = []
    for file, (old, new) in sorted(files.items()):
        lines += difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{file}", f"b/{file}")
    added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
    return "".join(lines), added
