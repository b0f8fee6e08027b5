# SPDX-License-Identifier: MIT
"""The inserter: what it puts where, and what it refuses by name."""

import subprocess
import sys
from pathlib import Path

import pytest

KERNEL_OPEN = Path(__file__).resolve().parents[2] / "kernel-open"
sys.path.insert(0, str(KERNEL_OPEN))

import insert  # noqa: E402
from hooks import HOOKS  # noqa: E402

FILES = sorted({hook.file for hook in HOOKS})


def vendor_tree(root, release="550.163.01"):
    """A tree with nothing in it but the anchors, between lines of its own."""
    texts = {file: "// first line\n" for file in FILES}
    for hook in HOOKS:
        texts[hook.file] += f"// above {hook.name}\n{hook.anchor}// below {hook.name}\n"
    for file, text in texts.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "Kbuild").write_text(f'ccflags-y += -DNV_VERSION_STRING=\\"{release}\\"\n')
    return root


def snapshot(root):
    return {file: (root / file).read_text() for file in FILES}


@pytest.fixture
def tree(tmp_path):
    return vendor_tree(tmp_path / "tree")


def run(*args):
    return subprocess.run(
        [sys.executable, KERNEL_OPEN / "build.py", "diff", "--src", *args], capture_output=True, text=True
    )


def test_every_hook_stands_at_its_anchor_and_nothing_else_changes(tree):
    before = snapshot(tree)
    assert insert.insert(tree)
    for file, text in snapshot(tree).items():
        for hook in (hook for hook in HOOKS if hook.file == file):
            block = f"// above {hook.name}\n{hook.before}{hook.anchor}{hook.after}// below {hook.name}\n"
            assert text.count(block) == 1, hook.name
            text = text.replace(hook.before + hook.anchor + hook.after, hook.anchor)
        assert text == before[file]


def test_eight_hooks_insert_fewer_than_40_lines_and_each_is_marked(tree):
    text, added = insert.diff(insert.patched(tree))
    assert len(HOOKS) == 8
    assert 0 < added < 40
    assert not [line for line in text.splitlines() if line.startswith("-") and not line.startswith("---")]
    for hook in HOOKS:
        assert "vMem" in hook.before + hook.after, hook.name


def test_a_second_run_changes_nothing(tree):
    insert.insert(tree)
    once = snapshot(tree)
    assert not insert.insert(tree)
    assert snapshot(tree) == once


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_missing_anchor_is_refused_by_hook_file_and_release(tree, hook):
    path = tree / hook.file
    path.write_text(path.read_text().replace(hook.anchor, hook.anchor.replace("\n", " // moved\n", 1)))
    before = snapshot(tree)
    done = run(tree)
    assert done.returncode == 1
    for word in ("550.163.01", f"'{hook.name}'", hook.file, "matches 0 times", hook.anchor.splitlines()[0]):
        assert word in done.stderr
    assert snapshot(tree) == before


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_an_anchor_that_stands_twice_is_refused(tree, hook):
    path = tree / hook.file
    path.write_text(path.read_text() + hook.anchor)
    before = snapshot(tree)
    with pytest.raises(insert.InsertError, match="matches 2 times"):
        insert.insert(tree)
    assert snapshot(tree) == before


def test_an_anchor_inside_a_longer_line_is_no_anchor(tree):
    hook = next(hook for hook in HOOKS if hook.name == "ioctl")
    path = tree / hook.file
    path.write_text(path.read_text().replace(hook.anchor, "    /* " + hook.anchor))
    with pytest.raises(insert.InsertError, match="matches 0 times"):
        insert.insert(tree)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_tree_with_some_of_the_hooks_is_refused(tree, hook):
    insert.insert(tree)
    path = tree / hook.file
    path.write_text(path.read_text().replace(hook.before + hook.anchor + hook.after, hook.anchor))
    before = snapshot(tree)
    with pytest.raises(insert.InsertError, match="fresh copy"):
        insert.insert(tree)
    assert snapshot(tree) == before


def test_a_hook_of_another_version_is_refused(tree):
    insert.insert(tree)
    hook = next(hook for hook in HOOKS if hook.name == "ioctl")
    path = tree / hook.file
    lines = hook.before.splitlines(keepends=True)
    path.write_text(path.read_text().replace(hook.before, "".join(lines[:1] + ["    // an older hook\n"] + lines[1:])))
    with pytest.raises(insert.InsertError, match="fresh copy|hooks are in place"):
        insert.insert(tree)


def test_a_folder_that_is_no_driver_tree_is_refused(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert "no nvidia-uvm/ with a release" in done.stderr


def test_a_missing_file_is_refused_by_name(tree):
    (tree / "nvidia-uvm/uvm_va_space.h").unlink()
    with pytest.raises(insert.InsertError, match="there is no nvidia-uvm/uvm_va_space.h"):
        insert.insert(tree)


def test_diff_prints_and_changes_nothing(tree):
    before = snapshot(tree)
    done = run(tree)
    assert done.returncode == 0
    assert "+++ b/nvidia-uvm/uvm.c" in done.stdout
    assert "550.163.01" in done.stderr
    assert snapshot(tree) == before
