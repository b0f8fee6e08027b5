"""Messages and documentation speak of Python's names: ``replace=True``, not ``VMEM_MAP_REPLACE``.

The walk is over the sources, since no test provokes every message.

SPDX-License-Identifier: MIT
"""

import ast
import inspect
import re
from pathlib import Path

import paper
import pytest

import pyvmem
from pyvmem.errors import _NAMES

TOP = Path(__file__).parent.parent.parent
# Environment variables have one name in every language.
ENVIRONMENT = re.compile(r"\$?VMEM_(BACKEND|CUDA|TRACE|VLLM\w*|SGLANG\w*|TRANSFORMERS_FORCE|TEST\w*)\b")
OF_C = re.compile(r"\b(VMEM_[A-Z]\w+|vmem_kv_\w+|vMem\w+|opts->|cfg->)")


def c_messages():
    """(file, text) of the string literals in libvmem and the binding, those side by side joined."""
    for path in sorted([*TOP.glob("libvmem/src/**/*.[ch]"), *TOP.glob("pyvmem/native/*.[ch]")]):
        source = re.sub(r"//[^\n]*|#include[^\n]*", "", path.read_text())
        for found in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*(?:PRI\w+\s*)?)+', source):
            yield path.name, "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found[0]))


def as_python_says(text):
    for c, python in _NAMES.items():
        text = text.replace(c, python)
    return text


def test_libvmems_messages():
    seen = {text for _, text in c_messages()}
    assert len(seen) > 300 and any("VMEM_MAP_REPLACE" in text for text in seen)
    for name, text in c_messages():
        said = ENVIRONMENT.sub("", as_python_says(text))
        if "NULL" in said:  # no call of Python's passes one
            continue
        assert not OF_C.search(said), f"{name}: {text}"


def test_names_that_are_translated_exist():
    """A flag that libvmem calls by another name now would go through untranslated."""
    texts = "\n".join(text for _, text in c_messages())
    for c in _NAMES:
        assert c in texts if c.endswith(">") else re.search(rf"\b{c}\b", texts), c


def test_python_own_messages():
    for path in sorted(TOP.glob("pyvmem/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    assert not OF_C.search(ENVIRONMENT.sub("", part.value)), f"{path.name}:{part.lineno}"


def public():
    """(name, documentation) of everything public, methods and properties too."""
    from pyvmem.kv import prefix

    things = {name: getattr(module, name) for module in (pyvmem, pyvmem.core, paper) for name in module.__all__}
    things["PrefixCache"] = prefix.PrefixCache
    for name, thing in things.items():
        if isinstance(thing, str | int):  # the version, and layouts of structures
            continue
        yield name, inspect.getdoc(thing)
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property | classmethod)):
                    yield f"{name}.{member}", inspect.getdoc(getattr(thing, member))


def test_documentation():
    pytest.importorskip("torch")
    found = {name: re.findall(r"\bVMEM_[A-Z_]+\b", ENVIRONMENT.sub("", text or "")) for name, text in public()}
    assert {name: flags for name, flags in found.items() if flags} == {}
    assert [name for name, text in public() if not text] == []


def test_a_message_as_it_arrives(context):
    size = min(context.page_sizes)
    with context.reserve(size) as range_, context.create(size) as first, context.create(size) as second:
        range_.map(first)
        with pytest.raises(pyvmem.VmemError, match="replace=True"):
            range_.map(second)
        with pytest.raises(pyvmem.InvalidArgument, match="device"):
            pyvmem.Context(context.backend, device=-1)
