"""The Python blocks of README and of the documentation run as they stand, where they need no model of the reader's.

SPDX-License-Identifier: MIT
"""

import re
from pathlib import Path

import pytest
from conftest import python

TOP = Path(__file__).parent.parent.parent
PLACEHOLDERS = re.compile(r"\bmodel\b|\bpreempt\(|^\.\.\.$", re.M)  # what the reader is to fill in


def blocks():
    for page in (TOP / "README.md", *sorted(TOP.glob("docs/*.md"))):
        for n, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)):
            yield pytest.param(block, id=f"{page.name}-{n}")


BLOCKS = [b for b in blocks() if not PLACEHOLDERS.search(b.values[0])]


def test_there_are_blocks():
    assert sum(b.id.startswith("README") for b in BLOCKS) >= 3 and any(b.id.startswith("python.md") for b in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block):
    pytest.importorskip("torch")
    python(block, env={"VMEM_BACKEND": "host"})


@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_is_python(block):
    compile(block, "documentation", "exec")


def test_every_link_leads_somewhere():
    for page in (TOP / "README.md", TOP / "CONTRIBUTING.md", TOP / "CHANGELOG.md", *TOP.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
