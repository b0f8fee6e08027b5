"""Reads an engine's source files, to recognise what a plugin relies on, without importing them.

SPDX-License-Identifier: MIT
"""

import ast
import hashlib
from pathlib import Path
from typing import Any


class Source:
    """The parsed files of one release, below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module] = {}

    def find(self, file: str, path: str) -> Any:
        """The definition of a function or class; None if there is none."""
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse((self._folder / file).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                self._trees[file] = ast.Module([], [])
        node: Any = self._trees[file]
        for name in path.split("."):
            node = next((n for n in getattr(node, "body", ()) if getattr(n, "name", None) == name), None)
        return node


def parameters(arguments: ast.arguments) -> str:
    """The parameters as they are written, without annotations."""
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(arguments)


def _shape(node: Any) -> str:
    """A definition as text that is the same in every release of Python, without docstrings and annotations."""
    if isinstance(node, list):
        return "[" + ",".join(map(_shape, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and value and isinstance(value[0], ast.Expr):
            first = value[0].value
            value = value[1:] if isinstance(first, ast.Constant) and isinstance(first.value, str) else value
        if name in ("annotation", "returns", "type_comment", "type_params", "ctx", "kind") or value in (None, []):
            continue
        parts.append(f"{name}={_shape(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def fingerprint(node: Any) -> str:
    """16 hex digits of a definition; "absent" if there is none."""
    return hashlib.sha256(_shape(node).encode()).hexdigest()[:16] if node is not None else "absent"
