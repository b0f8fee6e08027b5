"""The common part of the installers of serving engines for CPUs (`vllm_cpu.py`, `sglang_cpu.py`)."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_INDEX = os.environ.get("VMEM_TORCH_INDEX")  # PyTorch's index of CPU builds, where pip does not find one
NO_TEST = 5  # how pytest ends if none was chosen


def run(*command: object, **more: object) -> int:
    return subprocess.run([str(part) for part in command], **more).returncode  # type: ignore[call-overload]


def skip(reason: str) -> None:
    print(f"skipped: {reason}")
    sys.exit(0)


def never(*packages: str) -> list[str]:
    """Overrides for uv: packages that an engine names but a CPU does not use."""
    return [f'{name}; sys_platform == "never"' for name in packages]


def install(folder: Path, engine: str, version: str, torch: str, overrides: list[str], *more: str) -> bool:
    """Make an environment with an engine in `folder`, unless it is whole. Returns whether it was made now.

    pip knows where torch's builds for CPUs are; the other packages are resolved by uv, which takes overrides.
    """
    done = folder / ".ready"
    if done.exists() and done.read_text() == version:
        return False
    if sysconfig.get_platform() != "linux-x86_64":
        skip(f"{engine} {version} with torch {torch}+cpu is for x86-64")
    print(f"installing {engine} {version} into {folder.relative_to(ROOT)} (2 GB)", flush=True)
    if run(sys.executable, "-m", "venv", "--clear", folder):
        skip("this Python has no venv")
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheels, chosen = folder / "wheels", folder / "overrides.txt"
    wheels.mkdir()
    index = ["--extra-index-url", TORCH_INDEX] if TORCH_INDEX else []
    if run(*pip, "install", "uv", "pytest", "openai"):
        skip(f"{engine}: the registry does not give uv, pytest and openai")
    if run(*pip, "download", "--no-deps", "-d", wheels, f"torch=={torch}+cpu", *index):
        here = torch_here(torch)
        if here is None:
            skip(f"{engine}: the registry does not give torch=={torch}+cpu, and `make` has installed another release")
            raise AssertionError
        print(f"instead of torch=={torch}+cpu, the one that `make` has installed: {here}", flush=True)
        (site_of(python) / "torch-of-make.pth").write_text(f"{here}\n")  # behind the environment's own packages
        chosen.write_text("\n".join([*never("torch"), *overrides]))
    else:
        chosen.write_text("\n".join([f"torch=={torch}+cpu", *overrides]))
    # uv has certificates of its own, and takes the system's, as pip does, only if it is told: a proxy's are there.
    environment = os.environ | {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}  # the second in older releases
    if run(python, "-m", "uv", "pip", "install", "-q", "--python", python, "--find-links", wheels,
           "--override", chosen, f"{engine}=={version}", "cffi", *more, env=environment):  # fmt: skip
        skip(f"the registry does not give {engine}=={version}")
    return True


def torch_here(release: str) -> Path | None:
    """The folder of the torch of this interpreter, which `make` has installed, if it is of this release."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.distribution("torch")
        if torch.version.partition("+")[0] == release:
            return Path(str(torch.locate_file("torch"))).parent
    return None


def site_of(python: Path) -> Path:
    """Where an environment has its packages."""
    told = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    return Path(told.stdout.strip())


def pytest(python: Path, tests: Path, paths: list[str], before: list[Path], *arguments: str) -> int:
    """Run tests by an environment's Python; `before` comes first on its path. tests: where `entry_point.py` is."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(tests))
        from entry_point import write

        path = os.pathsep.join(map(str, [*before, write(Path(folder)), ROOT]))
        # A server is four processes, each of which would compile all of its engine's sources.
        environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1",
                           PYTHONPYCACHEPREFIX=str(ROOT / "build" / "pycache"))  # fmt: skip
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return run(python, "-m", "pytest", "-q", *paths, *arguments, cwd=ROOT, env=environment)


def versions(python: Path, package: str) -> list[str]:
    """The releases of a package on the registry, newest first."""
    told = subprocess.run([python, "-m", "pip", "index", "versions", package], capture_output=True, text=True)
    found = re.search(r"Available versions: (.*)", told.stdout)
    if not found:
        skip(f"the registry does not list the releases of {package}")
        raise AssertionError
    return [version for version in found[1].split(", ") if re.fullmatch(r"[0-9.]+", version)]


def sources(python: Path, package: str, version: str, ends: tuple[str, ...]) -> Path:
    """The files of a release whose names end so, below build/."""
    folder = ROOT / "build" / package / version
    if not (folder / ".ready").exists():
        with tempfile.TemporaryDirectory() as wheels:
            if run(python, "-m", "pip", "-q", "download", "--no-deps", "-d", wheels, f"{package}=={version}"):
                skip(f"the registry does not give {package} {version}")
            (wheel,) = Path(wheels).glob(f"{package}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if n.endswith(ends)])
        (folder / ".ready").touch()
    return folder
