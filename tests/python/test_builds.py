"""Builds: every C file is compiled by `make lint`, and sources build the same with the compilers at hand.

SPDX-License-Identifier: MIT
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import pyvmem

TOP = Path(__file__).resolve().parents[2]


@pytest.fixture
def compile():
    sys.path.insert(0, str(TOP / ".ci"))
    try:
        import compile

        yield compile
    finally:
        sys.path.pop(0)
        sys.modules.pop("compile", None)


def test_every_c_file_is_in_a_group(compile):
    skipped = {"build", ".venv", ".git", f"pyvmem-{pyvmem.__version__}"}  # the last: a distribution in the making
    every = {str(p.relative_to(TOP)) for p in TOP.rglob("*.c") if p.relative_to(TOP).parts[0] not in skipped}
    grouped = [f for files in compile.groups().values() for f in files]
    assert len(grouped) == len(set(grouped)) and set(grouped) == every - {"pyvmem/_ffi.c"}


@pytest.mark.parametrize("group", ["library", "binding", "programs"])
@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_a_call_of_an_undeclared_function_is_an_error(compile, group, cc, tmp_path):
    """Whatever the compiler's age: GCC 14 and clang 16 refuse it by themselves."""
    if not shutil.which(cc):
        pytest.skip(f"not installed: {cc}")
    (tmp_path / "bad.c").write_text("int f(void);\nint f(void) { return g(); }\n")
    (tmp_path / "good.c").write_text("int f(void);\nint f(void) { return 0; }\n")
    for name, expected in ("bad.c", 1), ("good.c", 0):
        command = [cc, "-fsyntax-only", "-std=gnu11", *compile.flags(group), *compile.STRICT, tmp_path / name]
        assert bool(subprocess.run(command, cwd=TOP, capture_output=True).returncode) == expected


def need_a_package(tmp_path, **environment):
    """Run .ci/need as root with an apt-get that only notes its call: what it said, and whether it was called."""
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\necho > {tmp_path}/called\n")
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    for name in "apt-get", "id":
        (tmp_path / name).chmod(0o755)
    need = ["/bin/sh", TOP / ".ci/need", "no-such-command=some-package"]
    done = subprocess.run(need, env={"PATH": str(tmp_path), **environment}, capture_output=True, text=True)
    assert done.returncode == 77 and "some-package" in done.stderr
    return done, (tmp_path / "called").exists()


def test_root_installs_what_is_missing_and_says_so(tmp_path):
    done, called = need_a_package(tmp_path)
    assert called and done.stdout == "installing some-package (VMEM_INSTALL=0 avoids it)\n"


def test_nothing_is_installed_where_it_is_not_wanted(tmp_path):
    done, called = need_a_package(tmp_path, VMEM_INSTALL="0")
    assert not called and not done.stdout


def test_two_source_distributions_are_the_same_bytes(tmp_path):
    pytest.importorskip("setuptools")
    for name in "first", "second":
        subprocess.run(
            [sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path / name],
            cwd=TOP, env={"SOURCE_DATE_EPOCH": "1700000000", "PATH": "/usr/bin:/bin"}, check=True, capture_output=True,
        )  # fmt: skip
    first, second = (next((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as t:
        names = {n.partition("/")[2] for n in t.getnames()}
        assert {e.mtime for e in t} == {1700000000}
    for name in "Makefile", ".ci/need", "tests/c/test_map.c", "docs/engine.md", "examples/engine.c", "uvm_ext":
        assert name in names, name


def test_the_version_is_the_same_wherever_it_stands(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOP / ".ci"))
    import release

    assert release.disagreements() == []
    assert release.disagreements("refs/tags/v9.9.9")[0] == f"the tag says 9.9.9, vmem.h {pyvmem.__version__}"
    for file in ("libvmem/include/vmem.h", *release.PLACES):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        text = (TOP / file).read_text()
        (tmp_path / file).write_text(text.replace(pyvmem.__version__, "8.8.8") if file == "CITATION.cff" else text)
    monkeypatch.setattr(release, "TOP", tmp_path)
    assert release.disagreements() == [f"CITATION.cff says 8.8.8, vmem.h {pyvmem.__version__}"]
    heading = f"## {pyvmem.__version__} (not released)\n"
    (tmp_path / "CHANGELOG.md").write_text(heading)
    debian = tmp_path / "packaging/debian/changelog"
    debian.write_text(f"vmem ({pyvmem.__version__}) UNRELEASED; urgency=medium\n")
    wrong = release.disagreements(f"refs/tags/v{pyvmem.__version__}")
    assert [one.split(":")[1] for one in wrong[1:]] == [" write the date", " write unstable"]
    debian.write_text(debian.read_text().replace("UNRELEASED", "unstable"))
    assert "write the date" in release.disagreements(f"refs/tags/v{pyvmem.__version__}")[-1]
