"""The seeded faults of tests/c and tests/vm still have a place in the sources.

SPDX-License-Identifier: MIT
"""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def load(folder, name):
    """A module of a folder beside the others of that folder. tests/c and tests/vm have some of the same names."""
    spec = importlib.util.spec_from_file_location(name, TOP / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(TOP / folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_libvmem():
    """Each fault finds its function and its one place there, and changes it."""
    for mutant in load("tests/c", "mutant_list").MUTANTS:
        path, text = mutant.apply()
        assert text != path.read_text(), mutant.name


def test_uvm_ext():
    """The same of the kernel module's, and no fault lies in another's place: all are compiled into one module."""
    folder = TOP / "uvm_ext"
    found = {}
    for mutant in load("tests/vm", "mutant_list").MUTANTS:
        for file, start, end, _, new in mutant.places():
            assert (folder / file).read_text()[start:end] != new, mutant.name
            found.setdefault(file, []).append((start, end))
    for file, places in found.items():
        places.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places)), file


SOURCE = """
#include "x.h" // f(
struct s { int (*f)(void); };
int f(int a); /* f(a) { b; } */
static int f(int a)
{
    if (a > 1 && g(a, "; }")) // a comment
        a = h(a);
    for (int i = 0; i < a; i++)
        a += i;
    return a > 1 ? f2(a)
                 : 0;
}
"""


@pytest.mark.parametrize(
    "operator, old, new, n, change",
    [
        ("replace", "a > 1", "a > 2", 1, ("if (a > 1 &&", "if (a > 2 &&")),
        ("replace", "f2(a) : 0", "0", 0, ("f2(a)\n                 : 0", "0")),
        ("never", "g(a", "", 0, ('a > 1 && g(a, "; }")', "0")),
        ("always", "a>1", "", 1, ('a > 1 && g(a, "; }")', "1")),
        ("drop", "h", "", 0, ("a = h(a);", ";")),
        ("drop", "+=", "", 0, ("a += i;", ";")),
    ],
)
def test_a_fault_finds_its_place(tmp_path, operator, old, new, n, change):
    mutation = load("tests/c", "mutation")
    path = tmp_path / "x.c"
    path.write_text(SOURCE)
    functions = mutation.functions(path)
    assert list(functions) == ["f"]
    start, end, put = mutation.Fault(operator, old, new, n).span(functions["f"])
    assert SOURCE[:start] + put + SOURCE[end:] == SOURCE.replace(*change, 1)


@pytest.mark.parametrize(
    "operator, old, n", [("replace", "a > 1", 0), ("drop", "gone", 0), ("never", "f2", 0), ("drop", "h", 2)]
)
def test_a_fault_without_one_place_is_an_error(tmp_path, operator, old, n):
    mutation = load("tests/c", "mutation")
    path = tmp_path / "x.c"
    path.write_text(SOURCE)
    with pytest.raises(LookupError):
        mutation.Fault(operator, old, n=n).span(mutation.functions(path)["f"])
