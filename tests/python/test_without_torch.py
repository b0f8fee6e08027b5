"""pyvmem without torch, which only tensors need: contexts, the command, the benchmarks.

SPDX-License-Identifier: MIT
"""

from conftest import python

BLOCK = """
import sys
import importlib.util
sys.modules["torch"] = None
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""
LIST = """
from benchmarks.registry import all_benchmarks
print(*(b.name for b in all_benchmarks()))
"""


def test_a_context():
    python(
        BLOCK
        + """
import pyvmem
with pyvmem.Context("host") as ctx, ctx.reserve(1 << 30) as r:
    r.map(ctx.create(64 << 10, 3))
    assert ctx.stats().mapped == 3 * (64 << 10)
assert "torch" not in sys.modules or sys.modules["torch"] is None
"""
    )


def test_the_command_and_the_benchmarks():
    """Every benchmark is listed with torch and without; one that needs none runs."""
    assert python(BLOCK + LIST).stdout == python(LIST).stdout != "\n"
    said = python(
        BLOCK
        + """
from pyvmem.tools.cli import main
from benchmarks.__main__ import run
assert not main(["doctor"])
raise SystemExit(main(["vmm", "--backend", "host", "--quick"], run))
"""
    ).stdout
    assert "map" in said


def test_a_tensor_names_what_is_missing():
    python(
        BLOCK
        + """
import pyvmem
try:
    pyvmem.virtual_empty
except ModuleNotFoundError as error:
    assert "pip install torch" in str(error) and "\\n" not in str(error)
else:
    raise AssertionError
"""
    )
