"""docs/glossary.md holds: no word stands where it would mean something else, and what the table points to exists.

SPDX-License-Identifier: MIT
"""

import re
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
LOWER = ["libvmem/src/core", "libvmem/src/driver", "libvmem/src/backend", "uvm_ext"]
# word: where it means nothing, and what there looks like it and is another's
ABSENT = {
    "slot": (LOWER, ""),
    "token": (LOWER, "SEQ_START_TOKEN"),
    "window": (LOWER, ""),
    "unit": (LOWER, "mem_unit|systemd units"),
}


def text(path):
    return (TOP / path).read_text()


def sources(folders):
    listed = subprocess.run(["git", "ls-files", *folders], cwd=TOP, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a checkout")
    return [p for p in listed.stdout.split() if p.endswith((".c", ".h"))]


@pytest.mark.parametrize("word", ABSENT)
def test_a_word_is_only_where_it_has_its_meaning(word):
    folders, others = ABSENT[word]
    found = []
    for path in sources(folders):
        for number, line in enumerate(text(path).splitlines(), 1):
            if re.search(word, re.sub(others, "", line) if others else line, re.I):
                found.append(f"{path}:{number}: {line.strip()}")
    assert found == []


def test_each_word_stands_once_and_its_code_exists():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|([^|\n]*)\|$", text("docs/glossary.md"), re.M)
    rows = [r for r in rows if r[0] != "word" and not r[0].startswith("-")]
    words = [w for row in rows for w in row[0].split(", ")]
    assert len(words) > 40 and len(words) == len(set(words))
    everything = "\n".join(text(p) for p in sources(["libvmem", "uvm_ext", "kernel-open"]))
    names = {n for row in rows for n in re.findall(r"`(?:struct )?([\w.]+)`", row[2])}
    missing = [n for n in names if not all(part in everything for part in n.split("."))]
    assert missing == []


def test_a_structure_is_declared_once():
    """In libvmem and the module. What the driver's ABI names is declared once in all of the tree, tests included."""
    seen = {}
    for path in sources(["libvmem", "uvm_ext", "tests", "pyvmem"]):
        for name in re.findall(r"^struct (\w+) \{", text(path), re.M):
            seen.setdefault((name, Path(path).parts[0]), []).append(path)
            if re.match("rm_|uvm_map|uvm_unmap", name):
                seen.setdefault((name, ""), []).append(path)
    files_own = {"place", "create", "batch", "mapping"}  # of one file each, with static functions
    twice = {n: p for n, p in seen.items() if len(p) > 1 and n[0] not in files_own}
    assert {n: p for n, p in twice.items() if n[1] in ("libvmem", "uvm_ext", "")} == {}
