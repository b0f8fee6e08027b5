"""Recognises releases of an engine by its source files, without importing them.

1. **Signatures** of the functions that a plugin hooks, extends or calls, and **names** that it reads of the engine's
   classes. Any difference refuses the release.
2. **Fingerprints** of the bodies that it relies on. An unknown one is reported.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyvmem.engine.settings import Refused


class Source:
    """The parsed files of one release, below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module] = {}

    def find(self, file: str, path: str) -> Any:
        """The definition of a function or class, or the whole "module"; None if there is none."""
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse((self._folder / file).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                self._trees[file] = ast.Module([], [])
        node: Any = self._trees[file]
        for name in path.split(".") if path != "module" else ():
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


def names_of(kind: Any) -> set[str]:
    """The attributes that a class defines: in its body, and of `self` in its functions. A module's: its names."""
    names = {getattr(node, "name", "") for node in getattr(kind, "body", ())}
    imported = (node for node in getattr(kind, "body", ()) if isinstance(node, ast.ImportFrom))
    names.update(alias.asname or alias.name for node in imported for alias in node.names)
    for node in ast.walk(kind) if kind is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    for node in getattr(kind, "body", ()):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _number(folder: Path) -> tuple[int, ...]:
    """The release in a folder, such as (0, 33, 0); a later one than all if it does not say."""
    try:
        found = re.search(r"^__version__ = .*?'([0-9.]+)", (folder / "_version.py").read_text(), re.M)
    except OSError:
        found = None
    return _parts(found[1]) if found else (sys.maxsize,)


@dataclass(frozen=True)
class Needs:
    """The parts of an engine that a plugin relies on. Files are below the folder of the engine's package."""

    engine: str  # the engine's name
    package: str  # of it
    switch: str  # with which the settings begin
    signatures: Iterable[Sequence[str]]  # (file, function, parameters without annotations, of which releases differ ..)
    # {class: (file, attributes that the class, or the "module", defines)}. Behind a blank, the key may tell it from
    # another one of its name. NAME>=0.30: releases before that do not have it; NAME<0.31: those since do not.
    names: Mapping[str, tuple[str, str]]
    # {(file, function or class): fingerprints of the releases that the plugin was checked with}
    bodies: Mapping[tuple[str, str], Sequence[str]]

    def installed(self) -> Path:
        """The folder of the package that this process would import. Raises `Refused`."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise Refused(f"{self.switch}=1: {self.engine} is not installed")
        return Path(next(iter(spec.submodule_search_locations)))

    def differences(self, folder: Path) -> Iterator[str]:
        """Signatures and names of the engine in a folder that are not as the plugin needs them."""
        source, number = Source(folder), _number(folder)
        for file, path, *wanted in self.signatures:
            node = source.find(file, path)
            if node is None or not hasattr(node, "args"):
                yield f"{path} is not in {file}"
            elif (found := parameters(node.args)) not in wanted:
                yield f"{path} takes ({found}), not ({wanted[-1]})"
        for kind, (file, names) in self.names.items():
            there = names_of(source.find(file, kind.partition(" ")[0]))
            for name, sign, since in re.findall(r"(\w+)(>=|<)?([0-9.]*)", names):
                if name not in there and (not sign or (number >= _parts(since)) == (sign == ">=")):
                    yield f"{kind} in {file} has no {name}"

    def fingerprints(self, folder: Path) -> dict[tuple[str, str], str]:
        """The fingerprints of the bodies, of the engine in a folder."""
        source = Source(folder)
        return {body: fingerprint(source.find(*body)) for body in self.bodies}

    def unknown(self, found: Mapping[tuple[str, str], str]) -> list[str]:
        """Functions whose fingerprints are of no release that the plugin was checked with."""
        return [body[1] for body, value in found.items() if value not in self.bodies[body]]

    def release(self, version: str) -> str | None:
        """Check the installed engine. Returns a line to log, or None. Raises `Refused`: the plugin cannot work on it.

        version : what the engine says of itself.
        """
        folder, engine, switch = self.installed(), f"{self.engine} {version}", self.switch
        for difference in self.differences(folder):
            raise Refused(f"{switch}=1: vMem does not know {engine}: {difference}; docs/{self.package}.md names the "
                          f"releases that it runs on (or unset {switch})")  # fmt: skip
        changed = self.unknown(self.fingerprints(folder))
        if not changed:
            return None
        return (f"vMem was not checked with {engine}, where these have changed: {', '.join(changed)}. It goes on, "
                "since all signatures are as it needs")  # fmt: skip

    def main(self, folders: Iterable[str]) -> int:
        """Print what is said of the release in each folder, and its fingerprints; returns how many differ."""
        wrong = 0
        for name in folders:
            found = self.fingerprints(Path(name))
            differ = [*self.differences(Path(name)), *(f"new: {one}" for one in self.unknown(found))]
            print(name, "; ".join(differ) or "fits")
            for (_, path), value in found.items():
                print(f"    {path} {value}")
            wrong += bool(differ)
        return wrong
