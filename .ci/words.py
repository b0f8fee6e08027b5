"""Looks for retired words in the names of libvmem and of pyvmem: retired.md lists them, with those in use.

A position in a list of arguments is no name: a call of pyvmem's functions has at most five without one.

SPDX-License-Identifier: MIT
"""

import ast
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


def crowded():
    """(file, line, function) of each call of a function of pyvmem with more than five positional arguments."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((TOP / "pyvmem").rglob("*.py"))}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    own = {node.name for _, node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    own -= {node.name for _, node in nodes if isinstance(node, ast.FunctionDef) and node.args.vararg}
    for path, node in nodes:
        if isinstance(node, ast.Call) and len(node.args) > 5:
            *of, name = ast.unparse(node.func).split(".")
            if name in own and of[-1:] != ["logger"] or name in ("cls", "__init__"):
                yield path, node.lineno, name


def main():
    c, python = retired()
    found = [(c, *one) for one in names_of_c(c)] + [(python, *one) for one in names_of_python(python)]
    for words, path, number, word in found:
        print(f"{path.relative_to(TOP)}:{number}: `{word}` is retired; in use: {words[word]}")
    many = list(crowded())
    for path, number, name in many:
        print(f"{path.relative_to(TOP)}:{number}: `{name}` gets more than five positional arguments")
    return bool(found or many)


if __name__ == "__main__":
    sys.exit(main())
