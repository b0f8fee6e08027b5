"""The Python blocks of README and of the documentation run as they stand, where they need no model of the reader's.

SPDX-License-Identifier: MIT
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import python

TOP = Path(__file__).parent.parent.parent
PLACEHOLDERS = re.compile(r"\bmodel\b|\bpreempt\(|^\.\.\.$", re.M)  # what the reader is to fill in


def blocks():
    for page in (TOP / "README.md", *sorted(TOP.glob("docs/**/*.md"))):
        if page.name == "tutorial.md":  # one program: below
            continue
        for n, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)):
            yield pytest.param(block, id=f"{page.name}-{n}")


def code(block):
    """A block without its comments, which may well speak of the reader's model."""
    return re.sub(r"#.*", "", block)


BLOCKS = [b for b in blocks() if "model = " in b.values[0] or not PLACEHOLDERS.search(code(b.values[0]))]


def test_there_are_blocks():
    assert sum(b.id.startswith("README") for b in BLOCKS) >= 3 and any(b.id.startswith("python.md") for b in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block):
    pytest.importorskip("torch")
    if "transformers" in block:
        pytest.importorskip("transformers")
    python(block, env={"VMEM_BACKEND": "host"})


def test_the_tutorial_runs_and_draws_its_pictures(tmp_path):
    """The same program as the page's blocks; the pictures in the repository are what it draws."""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, TOP / "docs/notebook.py", "run", tmp_path], check=True, capture_output=True)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 4
    for path in drawn:
        assert path.read_text() == (TOP / "docs/pictures" / path.name).read_text(), path.name


def test_the_notebook_runs(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path = tmp_path / "tutorial.ipynb"
    subprocess.run([sys.executable, TOP / "docs/notebook.py", "build", path], check=True, capture_output=True)
    cells = json.loads(path.read_text())["cells"]
    outputs = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert sum("image/svg+xml" in o.get("data", {}) for o in outputs) == 4


def test_every_page_is_in_the_manual():
    listed = set(re.findall(r"^([\w/-]+)$", (TOP / "docs/index.md").read_text(), re.M))
    pages = {str(p.relative_to(TOP / "docs").with_suffix("")) for p in TOP.glob("docs/**/*.md")}
    assert {p for p in pages if not p.startswith("reference/")} - {"index"} <= listed


@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_is_python(block):
    compile(block, "documentation", "exec")


def test_every_link_leads_somewhere():
    for page in (TOP / "README.md", TOP / "CONTRIBUTING.md", TOP / "CHANGELOG.md", *TOP.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and "reference/" not in target:  # which make docs generates
                assert (page.parent / target).exists(), f"{page.name}: {target}"
