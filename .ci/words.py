"""Looks for retired words in the names of libvmem: docs/glossary.md lists them, with those in use.

SPDX-License-Identifier: MIT
"""

import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def retired():
    """{retired word: the words in use}, of the last table of the glossary."""
    table = (TOP / "docs/glossary.md").read_text().split("\n## Retired words\n")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.M)
    return {word: now for words, now in rows for word in re.findall(r"`(\w+)`", words)}


def main():
    words = retired()
    # A word is a whole name, or a part of one between underscores.
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(words)})(?![A-Za-z])")
    found = [
        f"{path.relative_to(TOP)}:{number}: `{m[1]}` is retired; in use: {words[m[1]]}"
        for path in sorted((TOP / "libvmem").rglob("*.[ch]"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for m in pattern.finditer(re.sub(r"//.*", "", line))
    ]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
