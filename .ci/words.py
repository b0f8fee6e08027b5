"""Looks for retired words in the names of libvmem and of pyvmem: retired.md lists them, with those in use.

SPDX-License-Identifier: MIT
"""

import re
import sys
import tokenize
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def retired():
    """({retired word: the words in use} of libvmem, the same of pyvmem), of the tables of retired.md."""
    tables = Path(__file__).with_name("retired.md").read_text().split("\n## In Python\n")
    rows = [re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.M) for table in tables]
    return [{word: now for words, now in table for word in re.findall(r"`(\w+)`", words)} for table in rows]


def names_of_c(words):
    """(file, line, word) of each retired word: a whole name, or a part of one between underscores."""
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(words)})(?![A-Za-z])")
    for path in sorted((TOP / "libvmem").rglob("*.[ch]")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for m in pattern.finditer(re.sub(r"//.*", "", line)):
                yield path, number, m[1]


def names_of_python(words):
    """The same of whole names."""
    for path in sorted((TOP / "pyvmem").rglob("*.py")):
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type == tokenize.NAME and token.string in words:
                    yield path, token.start[0], token.string


def main():
    c, python = retired()
    found = [(c, *one) for one in names_of_c(c)] + [(python, *one) for one in names_of_python(python)]
    for words, path, number, word in found:
        print(f"{path.relative_to(TOP)}:{number}: `{word}` is retired; in use: {words[word]}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
