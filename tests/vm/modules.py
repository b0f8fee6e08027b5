# SPDX-License-Identifier: MIT
"""Builds what the guest loads: the simulated GPU's nvidia.ko, and nvidia-uvm.ko, stock and patched, against it."""

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys

from kernel import CACHE, HERE, TOP, Missing, Unavailable, digest, say

sys.path.insert(0, str(TOP / "kernel-open"))
import source as nvidia_source  # noqa: E402
import tree as nvidia_tree  # noqa: E402
from build import QUICK, STAMP, made_of  # noqa: E402
from insert import InsertError  # noqa: E402

RELEASES = ("550.163.01", "535.261.03")
VARIANTS = ("stock", "patched")


def driver_source(release, source=None):
    """NVIDIA's tree of that release, and the release in full. `source`: the tree, or a checkout that holds it."""
    try:
        return nvidia_source.nvidia(source or os.environ.get("NVIDIA_SRC"), release, TOP / "build" / "nvidia")
    except nvidia_source.Unavailable as e:
        raise Unavailable(str(e)) from None
    except nvidia_source.SourceError as e:
        raise Missing(str(e).replace(f"NVIDIA_SRC={source}", f"--source {source}")) from None


# The simulated GPU's architectures, and how the driver's source names them.
ARCHITECTURES = {"turing": "TU100", "ampere": "GA100", "ada": "AD100", "hopper": "GH100", "blackwell": "GB100",
                 "gb20x": "GB200"}  # fmt: skip


def architectures(src):
    """Those of ARCHITECTURES that the driver in tree `src` knows."""
    known = (src / "nvidia-uvm" / "uvm_hal.c").read_text()
    return [name for name, id in ARCHITECTURES.items() if f"ARCH_INFO_ARCHITECTURE_{id}" in known]


def _make(args, cwd, log, what):
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "KERNELRELEASE")}
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    with log.open("w") as out:
        if subprocess.run(["make", jobs, *map(str, args)], cwd=cwd, stdout=out, stderr=out, env=env).returncode:
            raise Missing(f"{what} failed; log: {log}\n" + "\n".join(log.read_text().splitlines()[-15:]))


@contextlib.contextmanager
def build_lock():
    """One build at a time in a cache, whatever else runs."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "build.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def made(name, key, build):
    """The folder of the cache for `name` as `key` tells it apart. `build` fills it if nothing has yet.

    Checkouts share a cache, so what is of other sources lies in another folder. make would go by times, which say
    nothing between two checkouts, and a guest of the other one may be about to load what is there.
    """
    folder = CACHE / "modules" / f"{name}-{key}"
    stamp = folder / ".vmem-stamp"
    if not stamp.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # what was interrupted
        folder.mkdir(parents=True)
        build(folder)
        stamp.touch()
    return folder


@functools.cache
def source_key(src):
    """What tells the driver's tree `src` from another of the same release."""
    parts = [p for folder in ("common", "nvidia", "nvidia-uvm") for p in sorted((src / folder).rglob("*"))]
    return digest(*(p for p in parts if p.suffix in (".c", ".h", ".Kbuild") and p.is_file()))


def simgpu(src, release, kernel):
    """The stand-in nvidia.ko for one release of the interface; returns its folder.

    In it are nvidia.ko, stripped-nvidia.ko and Module.symvers.
    """
    ours = HERE / "simgpu"

    def build(folder):
        say(f"building the simulated GPU for {release}, {kernel.release}")
        _make(["-C", ours, f"NVIDIA_SRC={src}", f"KDIR={kernel.output}", f"OUT={folder}"], folder, folder / "build.log",
              f"building the simulated GPU for {release}")  # fmt: skip
        _strip(folder / "nvidia.ko")

    rm_abi = TOP / "libvmem/src/driver/rm_abi.h"
    return made(f"simgpu-{release}", digest(ours, rm_abi, source_key(src), kernel.key), build)


def simcuda(src, release):
    """The stand-in libcuda.so.1 for one release of the interface; returns its path."""
    ours, sim = HERE / "simcuda", HERE / "simgpu"

    def build(folder):
        _make(["-C", ours, f"NVIDIA_SRC={src}", f"OUT={folder}"], folder, folder / "build.log",
              f"building the simulated CUDA for {release}")  # fmt: skip

    headers = (sim / "simgpu_uapi.h", sim / "uvm_free.h", TOP / "libvmem/src/driver/rm_abi.h")
    return made(f"simcuda-{release}", digest(ours, *headers, source_key(src)), build) / "libcuda.so.1"


def _strip(module):
    """The module without debug information: the guest's memory and boot time are short."""
    to = module.with_name("stripped-" + module.name)
    subprocess.run(["strip", "-g", "-o", to, module], check=True)
    return to


def _compile(tree, kernel, uvm_type, symvers):
    _make(["-f", "vmem.mk", f"KERNEL_UNAME={kernel.release}", f"OUTPUT={kernel.output}", f"SOURCES={kernel.source}",
           f"UVM_BUILD_TYPE={uvm_type}", f"KBUILD_EXTRA_SYMBOLS={symvers}",
           *QUICK], tree, tree / "build.log",  # the guest has no room for debug information
          f"building nvidia-uvm.ko in {tree}")  # fmt: skip
    return tree / "nvidia-uvm.ko"


def uvm_tree(src, release, variant, kernel, uvm_type="release"):
    """Prepare (or bring up to date) the build tree of one nvidia-uvm.ko; returns its folder."""
    tree = CACHE / "modules" / f"tree-{variant}-{release}-{uvm_type}-{digest(source_key(src), kernel.key)}"
    if variant == "patched":
        checked = TOP / "build" / "module" / f"{release}-{uvm_type}-checked"  # of `make test-module`: the same objects
        if (checked / STAMP).is_file() and (checked / STAMP).read_text() == made_of(src, kernel.release):
            tree = checked
        for attempt in (0, 1):
            try:
                nvidia_tree.prepare(src, tree)
                return tree
            except InsertError as e:
                if attempt:
                    raise Missing(str(e)) from None
                shutil.rmtree(tree)  # made by other hooks than today's
    if not (tree / "Kbuild").is_file():
        tree.mkdir(parents=True, exist_ok=True)
        for folder in ("common", "nvidia", "nvidia-uvm"):
            shutil.copytree(src / folder, tree / folder, ignore=shutil.ignore_patterns("*_binary"), dirs_exist_ok=True)
        for path in src.iterdir():
            if path.is_file():
                shutil.copy2(path, tree / path.name)
    for name in ("vmem.mk", "stock-symvers.sh"):
        shutil.copyfile(TOP / "kernel-open" / name, tree / name)
    return tree


def uvm(src, release, variant, kernel, sim, uvm_type="release"):
    """nvidia-uvm.ko, linked against the simulated GPU in folder `sim`; returns the path of the stripped module."""
    ours = [TOP / "kernel-open" / name for name in ("vmem.mk", "stock-symvers.sh")]
    if variant == "patched":
        ours += [TOP / "uvm_ext", *(TOP / "kernel-open" / name for name in ("hooks.py", "insert.py", "tree.py"))]

    def build(folder):
        say(f"building nvidia-uvm.ko {release} ({variant}, {uvm_type}) for {kernel.release}")
        tree = uvm_tree(src, release, variant, kernel, uvm_type)  # whose objects make the next build a short one
        shutil.copyfile(_strip(_compile(tree, kernel, uvm_type, sim / "Module.symvers")), folder / "nvidia-uvm.ko")

    key = digest(variant, uvm_type, source_key(src), kernel.key, sim / "Module.symvers", *ours)
    return made(f"uvm-{variant}-{release}", key, build) / "nvidia-uvm.ko"


def rebuild(tree, kernel, sim, uvm_type="release"):
    """Compile what changed in a tree and relink; for mutants. Returns the stripped module."""
    return _strip(_compile(tree, kernel, uvm_type, sim / "Module.symvers"))


def all_modules(release, kernel, variants=VARIANTS, uvm_type="release", source=None):
    """Everything the guest loads for one release: {path in the guest: path here}, and the driver's source tree."""
    src, release = driver_source(release, source)
    with build_lock():
        sim = simgpu(src, release, kernel)
        files = {"mod/nvidia.ko": sim / "stripped-nvidia.ko", "mod/failmem.ko": failmem(kernel)}
        for variant in variants:
            files[f"mod/{variant}/nvidia-uvm.ko"] = uvm(src, release, variant, kernel, sim, uvm_type)
    return files, src, release


def failmem(kernel):
    """The module that fails allocations of nvidia-uvm.ko."""
    ours = HERE / "failmem"

    def build(folder):
        for file in ours.iterdir():
            shutil.copyfile(file, folder / file.name)
        _make(["-C", kernel.output, f"M={folder}", "modules"], folder, folder / "build.log", "building failmem.ko")
        _strip(folder / "failmem.ko")

    return made("failmem", digest(ours, kernel.key), build) / "stripped-failmem.ko"
