"""Installs SGLang for CPUs below build/sglang-cpu, and runs pyvmem's tests against it.

    sglang_cpu.py test [PYTEST ARGUMENTS]    SGLang itself on host memory; SGLANG_CPU=0.5.22: another release
    sglang_cpu.py quick                      the tests of it that tell most
    sglang_cpu.py releases [RELEASE ..]      what pyvmem relies on in several releases, and the scheduler of each

It is SGLang's own wheel, without the packages that serve GPUs alone. What SGLang imports of them at the top is a stub
(`sglang_stubs.py`), which fails if it is called. If the registry cannot be reached, one line says so.
"""

import os
import sys
from pathlib import Path

from cpu_engine import NO_TEST, ROOT, install, never, pytest, run, site_of, sources, versions

VERSION, TORCH = os.environ.get("SGLANG_CPU") or "0.5.23", "2.13.0"
FOLDER = ROOT / "build" / "sglang-cpu" / VERSION
PYTHON = FOLDER / "bin" / "python"
TESTS = ROOT / "tests" / "sglang"
FIRST, RELEASES = (0, 5, 21), 4
# Until 0.5.21, SGLang's pages of several tokens need a GPU's kernels.
OLD = "(limits_that_move and gqa and pages) or refused"
QUICK = "(limits_that_move and [gqa]) or seeded_fault or refused or flush or chunks_goes_on"
STUBS = ("torchvision", "torchaudio", "sgl_kernel", "cutlass", "quack")
TVM_FFI = "apache-tvm-ffi==0.1.11"
OVERRIDES = [TVM_FFI, *never(
    "torchvision", "torchaudio", "torchcodec", "cuda-python", "cuda-tile", "flash-attn-4", "flashinfer_python",
    "humming-kernels",
    "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm",
    "sgl-flash-mla", "sglang-kernel", "tilelang", "timm", "torch_memory_saver", "modelscope",
)]  # fmt: skip


def make() -> None:
    """Install SGLang with its stubs, unless it is whole."""
    if install(FOLDER, "sglang", VERSION, TORCH, OVERRIDES, "dill", TVM_FFI, "datasets"):
        site = site_of(PYTHON)
        (site / "sglang_stubs.py").write_text((ROOT / ".ci" / "sglang_stubs.py").read_text())
        (site / "zz_sglang_stubs.pth").write_text(f"import sglang_stubs; sglang_stubs.install{STUBS!r}\n")
        (FOLDER / ".ready").write_text(VERSION)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def newest() -> list[str]:
    """The newest releases that pyvmem supports."""
    found = [v for v in versions(PYTHON, "sglang") if _numbers(v) >= FIRST]
    return found[:RELEASES]


def main(what: str, *arguments: str) -> int:
    make()
    if what == "quick":
        return pytest(PYTHON, TESTS, ["tests/sglang/test_steps.py"], [], "-k", QUICK)
    if what == "test":
        # The scheduler's tests fork from a process that has imported SGLang and started no thread.
        fork = [f"tests/sglang/test_{name}.py" for name in ("steps", "ranks", "sleep", "pause", "hicache")]
        parts = [fork, ["tests/sglang", *(f"--ignore={file}" for file in fork)]]
        ended = [pytest(PYTHON, TESTS, part, [], *arguments) for part in parts]
        return 0 if 0 in ended and set(ended) <= {0, NO_TEST} else max(ended)
    failed = 0
    for version in arguments or newest():
        folder = sources(PYTHON, "sglang", version, ("",))
        print(f"SGLang {version}", flush=True)
        failed += bool(run(PYTHON, "-m", "pyvmem.sglang.check", folder / "sglang", cwd=ROOT,
                           env=dict(os.environ, PYTHONPATH=str(ROOT))))  # fmt: skip
        chosen = OLD if _numbers(version) < (0, 5, 22) else QUICK
        failed += bool(pytest(PYTHON, TESTS, ["tests/sglang/test_steps.py"], [Path(folder)], "-k", chosen))
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
