"""The package's annotations: complete, and true to a user's script, as mypy sees them.

SPDX-License-Identifier: MIT
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import python

import pyvmem

HERE = Path(__file__).parent


def test_the_annotations_hold():
    """mypy --strict over the modules that pyproject.toml names, and over a user's script."""
    pytest.importorskip("mypy")
    top = HERE.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", top / "pyproject.toml", "--cache-dir", top / "build/mypy"],
        cwd=top,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_users_script_runs():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, HERE / "typed_user.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True ")


def test_everything_public_is_shown():
    pytest.importorskip("torch")
    import pydoc

    text = pydoc.plain(pydoc.render_doc(pyvmem))
    for name in pyvmem.__all__:
        assert name in dir(pyvmem)
        assert getattr(pyvmem, name) is not None
        assert name in text or name == "__version__"
        assert getattr(pyvmem, name).__doc__


@pytest.mark.parametrize("name, place", [
    ("PrefixCache", "kv.prefix"), ("Pages", "core"),
    ("default_context", "core"),
])  # fmt: skip
def test_a_name_that_has_moved_says_where_it_is(name, place):
    with pytest.raises(AttributeError, match=f"from pyvmem.{place} import {name}$"):
        getattr(pyvmem, name)
    assert name in vars(importlib.import_module(f"pyvmem.{place}"))


def test_help_needs_no_torch():
    """Without torch, dir() leaves out what needs it, and help() works."""
    code = """
    import sys, pydoc
    sys.modules["torch"] = None
    import importlib.util
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
    import pyvmem
    assert "virtual_empty" not in dir(pyvmem) and "Context" in dir(pyvmem)
    assert "class Context" in pydoc.plain(pydoc.render_doc(pyvmem))
    try:
        pyvmem.virtual_empty
    except ModuleNotFoundError as error:
        assert "needs torch" in str(error)
    else:
        raise AssertionError
    """
    python(code)
