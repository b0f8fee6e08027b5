"""Recognises releases of an engine by its source files, without importing them.

1. **Signatures** of the functions that a plugin hooks, extends or calls. Any difference refuses the release.
2. **Fingerprints** of the bodies that it relies on. An unknown one is reported, and refused if the settings are strict.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyvmem.engine.refuse import Refused


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


def installed(package: str, engine: str, switch: str) -> Path:
    """The folder of the package that this process would import. Raises `Refused`."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise Refused(f"{switch}=1: {engine} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def other_signatures(source: Source, signatures: Iterable[Sequence[str]]) -> Iterator[str]:
    """What differs from (file, function, parameters without annotations; releases may differ)."""
    for file, path, *wanted in signatures:
        node = source.find(file, path)
        if node is None or not hasattr(node, "args"):
            yield f"{path} is not in {file}"
        elif (found := parameters(node.args)) not in wanted:
            yield f"{path} takes ({found}), not ({wanted[-1]})"


def fingerprints(folder: Path, bodies: Iterable[tuple[str, str]]) -> dict[str, str]:
    """{function: fingerprint} of (file, function), of the engine in a folder."""
    source = Source(folder)
    return {path: fingerprint(source.find(file, path)) for file, path in bodies}


def unknown(found: Mapping[str, str], known: Mapping[str, Collection[str]]) -> list[str]:
    """Functions whose fingerprints are of no release that a plugin was checked with."""
    return [path for path, value in found.items() if value not in known.get(path, ())]


def verdict(engine: str, switch: str, differences: Iterable[str], changed: Collection[str], strict: bool) -> str | None:
    """A line to log about a release, or None. Raises `Refused` for one on which a plugin cannot work.

    engine : its name and release. changed: what `unknown` says.
    """
    for difference in differences:
        page = f"docs/{engine.partition(' ')[0].lower()}.md"
        raise Refused(f"{switch}=1: vMem does not know {engine}: {difference}; {page} names the releases that it runs "
                      f"on (or unset {switch})")  # fmt: skip
    if not changed:
        return None
    what = f"vMem was not checked with {engine}, where these have changed: {', '.join(changed)}"
    if strict:
        raise Refused(f"{switch}_STRICT=1: {what}")
    return f"{what}. It goes on, since all signatures are as it needs ({switch}_STRICT=1 refuses)"


def main(
    folders: Iterable[str],
    differences: Callable[[Path], Iterable[str]],
    bodies: Iterable[tuple[str, str]],
    known: Mapping[str, Collection[str]],
) -> int:
    """Print what is said of the release in each folder, and its fingerprints; returns how many differ."""
    wrong = 0
    for name in folders:
        found = fingerprints(Path(name), bodies)
        differ = [*differences(Path(name)), *(f"new: {one}" for one in unknown(found, known))]
        print(name, "; ".join(differ) or "fits")
        for path, value in found.items():
            print(f"    {path} {value}")
        wrong += bool(differ)
    return wrong
