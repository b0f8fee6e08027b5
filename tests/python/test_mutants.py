"""The seeded faults of tests/c and tests/vm still have a place in the sources: their text is there exactly once.

SPDX-License-Identifier: MIT
"""

import importlib.util
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]


def mutants(folder):
    spec = importlib.util.spec_from_file_location("mutant_list", TOP / folder / "mutant_list.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTANTS


def places(source, old):
    return (TOP / source).read_text().count(old)


def test_libvmem():
    found = {m.name: places(f"libvmem/src/{m.file}", m.old) for m in mutants("tests/c")}
    assert {name: n for name, n in found.items() if n != 1} == {}


def test_uvm_ext():
    edits = [(m.name, file, old) for m in mutants("tests/vm") for file, old, _ in m.edits]
    assert [(name, file) for name, file, old in edits if places(f"uvm_ext/{file}", old) != 1] == []
