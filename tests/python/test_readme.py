"""The Python blocks of README and of the documentation run as they stand, where they need no model of the reader's.

SPDX-License-Identifier: MIT
"""

import codeop
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import forks, python

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


@pytest.mark.parametrize("needs", ["torch", "transformers"])
def test_blocks_run(needs):
    pytest.importorskip(needs)
    # Nothing that a page shows is about to be dropped.
    examples = {"PYTHONPATH": str(TOP / "examples")}
    blocks = {b.id: b.values[0] for b in BLOCKS if "torch_pool" not in b.values[0]}
    blocks = {name: block for name, block in blocks.items() if ("transformers" in block) == (needs == "transformers")}
    assert blocks
    forks(blocks, env={"VMEM_BACKEND": "host", "PYTHONWARNINGS": "error::FutureWarning", **examples})


@pytest.mark.parametrize("block", [b for b in BLOCKS if "torch_pool" in b.values[0]])
def test_a_lease_runs(block):
    if not pytest.importorskip("torch").cuda.is_available():  # PyTorch has no memory pools for CPU tensors
        pytest.skip("a lease needs a GPU")
    python(block)


@pytest.mark.parametrize("page", [TOP / "README.md", *sorted(TOP.glob("docs/*.md"))], ids=lambda page: page.name)
def test_blocks_can_be_pasted_into_an_interpreter(page):
    """Before 3.13, a line that ends a block must follow an empty one there, which must not stand within a block."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        compiler, typed = codeop.CommandCompiler(), []
        for line in block.split("\n"):
            typed.append(line)
            if compiler("\n".join(typed), symbol="single") is not None:
                typed = []
        assert not "".join(typed).strip(), typed


def test_the_tutorial_prints_what_stands_below_each_block(tmp_path):
    pytest.importorskip("torch")
    page = (TOP / "docs/tutorial.md").read_text()
    program, expected = "", ""
    for block, printed in re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page, re.M | re.S):
        program += block
        expected += printed
    assert expected.count("\n") >= 9
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == expected


def test_the_notebook_runs(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path = tmp_path / "tutorial.ipynb"
    subprocess.run([sys.executable, TOP / "docs/notebook.py", path], check=True, capture_output=True)
    cells = json.loads(path.read_text())["cells"]
    outputs = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    assert outputs and not [o for o in outputs if o["output_type"] == "error"]


def test_every_page_is_in_the_manual():
    listed = set(re.findall(r"^([\w/-]+)$", (TOP / "docs/index.md").read_text(), re.M))
    pages = {str(p.relative_to(TOP / "docs").with_suffix("")) for p in TOP.glob("docs/**/*.md")}
    assert {p for p in pages if not p.startswith("reference/")} - {"index"} <= listed


@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_is_python(block):
    compile(block, "documentation", "exec")


def anchors(page):
    """The anchors of a page's headings, as GitHub and the manual make them."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return found


def test_nothing_says_to_install_from_an_index():
    """pyvmem is on none yet: its wheel is installed by its file, or its folder."""
    said = re.compile(r"pip install (?:-\S+ )*pyvmem\b(?!-\*)")
    texts = [*TOP.glob("*.md"), *TOP.glob("docs/**/*.md"), *TOP.glob("pyvmem/**/*.py"), *TOP.glob("examples/*.py")]
    assert [str(p.relative_to(TOP)) for p in texts if said.search(p.read_text())] == []


CLASSES = ("Context", "Reservation", "Pages", "KVCache", "KVPool", "PrefixCache", "Blocks", "VirtualTensor", "Spare")


def test_every_attribute_that_a_page_names_exists():
    """`Context.map`, for instance: a call that was renamed or deleted is so on every page, but where that is told."""
    pytest.importorskip("torch")
    from pyvmem import blocks, core, kv, owned, tensor
    from pyvmem.kv import cache, options, pool, prefix

    places = (blocks, core, kv, owned, tensor, cache, options, pool, prefix)
    found = {name: next(getattr(place, name) for place in places if hasattr(place, name)) for name in CLASSES}
    pages = [*TOP.glob("*.md"), *(p for p in TOP.glob("docs/**/*.md") if "reference" not in p.parts)]
    pages.remove(TOP / "CHANGELOG.md")
    named = {(p.name, *pair) for p in pages for pair in re.findall(r"`(\w+)\.(\w+)[`(]", p.read_text())}
    named = {one for one in named if one[1] in CLASSES}
    assert len(named) > 10
    gone = [one for one in named if not hasattr(found[one[1]], one[2])]
    assert [one for one in gone if one[2] not in getattr(found[one[1]], "__dataclass_fields__", ())] == []


def test_every_link_leads_somewhere():
    pages = [*TOP.glob("*.md"), TOP / "benchmarks/README.md", *TOP.glob("docs/**/*.md")]
    for page in (p for p in pages if "reference" not in p.parts):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            if "://" in target or "reference/" in target:  # which make docs generates
                continue
            led = page.parent / target if target else page
            assert led.exists(), f"{page.name}: {target}"
            assert not anchor or led.suffix != ".md" or anchor in anchors(led), f"{page.name}: {target}#{anchor}"
