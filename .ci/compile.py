"""Compiles every C file of the repository, with warnings as errors; writes nothing but cffi's generated source.

The errors of current compilers (GCC 14, clang 16) are errors here with any compiler. Such are a call of an undeclared
function, an implicit int, pointers and integers that are mixed up. The files differ in what they include, hence the
groups:

    library   libvmem/src
    binding   pyvmem/native, and the module that cffi makes from the headers
    programs  tests, examples, the fake driver
    guest     tests/vm: programs that include headers of NVIDIA's driver; skipped, by name, where no source tree is here
    kernel    uvm_ext, the simulated GPU: built by the kernel's own build (`make module-check`, `make test-vm`)

    compile.py [--cc CC] [--only GROUP]...

SPDX-License-Identifier: MIT
"""

import argparse
import concurrent.futures
import contextlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
STRICT = ["-Wall", "-Wextra", "-Wpointer-arith", "-Wvla", "-Wstrict-prototypes", "-Werror"]
# Errors since GCC 14 and clang 16; with an older compiler not all are part of -Wall.
STRICT += [f"-Werror={w}" for w in ("implicit-function-declaration", "implicit-int", "int-conversion",
                                    "incompatible-pointer-types", "return-type")]  # fmt: skip
INCLUDE = ["-D_GNU_SOURCE", "-Ilibvmem/include", "-Ilibvmem/src"]
GENERATED = "build/lint/_ffi.c"

# The first pattern that fits a file names its group.
GROUPS = {
    "libvmem/src/**/*.c": "library",
    "benchmarks/*.c": "library",
    "pyvmem/native/*.c": "binding",
    "tests/vm/simgpu/*.c": "kernel",
    "tests/vm/failmem/*.c": "kernel",
    "tests/vm/simcuda/*.c": "guest",
    "tests/vm/tests/*.c": "guest",
    "uvm_ext/*.c": "kernel",
    "tests/**/*.c": "programs",
    "examples/*.c": "programs",
}


def groups():
    """{group: [files]}; every C file is in one."""
    found, seen = {}, set()
    for pattern, group in GROUPS.items():
        for path in sorted(TOP.glob(pattern)):
            if path not in seen:
                seen.add(path)
                found.setdefault(group, []).append(str(path.relative_to(TOP)))
    return found


def driver_tree():
    """A source tree of NVIDIA's driver that is here already, or None."""
    named = [Path(os.environ["NVIDIA_SRC"])] if os.environ.get("NVIDIA_SRC") else []
    for folder in named + sorted(TOP.glob("build/nvidia/*")) + sorted(Path("/usr/src").glob("nvidia-*")):
        for header in [folder / "nvidia-uvm/uvm_linux_ioctl.h", *sorted(folder.glob("*/nvidia-uvm/uvm_linux_ioctl.h"))]:
            if header.is_file():
                return header.parent.parent
    return None


def generate():
    """The source that cffi makes of the headers."""
    sys.path.insert(0, str(TOP / "pyvmem"))
    os.chdir(TOP)
    from _ffi_build import builder

    Path(GENERATED).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(None):
        builder.emit_c_code(GENERATED)


def flags(group):
    if group == "library":
        return [*INCLUDE, "-Wmissing-prototypes"]
    if group == "binding":
        return [*INCLUDE, "-Ipyvmem/native", f"-I{sysconfig.get_paths()['include']}"]
    if group == "programs":
        return [*INCLUDE, "-Iuvm_ext", "-Itests/c"]
    tree = driver_tree()
    local = ["-Ilibvmem/src/driver", "-Iuvm_ext", "-Itests/vm/simgpu", "-Itests/vm/failmem", "-Itests/vm/tests"]
    return [*local, "-Ilibvmem/include", "-isystem", f"{tree}/nvidia-uvm", "-isystem", f"{tree}/common/inc"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cc", default=os.environ.get("CC") or "cc", help="the compiler, with its options (CC, or cc)")
    parser.add_argument("--only", action="append", choices=sorted(set(GROUPS.values())), help="only these groups")
    options = parser.parse_args()
    files = groups()
    chosen = [g for g in files if g != "kernel" and (not options.only or g in options.only)]
    if "guest" in chosen and not driver_tree():
        if options.only:
            sys.exit("guest: no source tree of NVIDIA's driver is here (NVIDIA_SRC names one)")
        chosen.remove("guest")
    if "binding" in chosen:
        generate()

    def compile(group):
        # cffi's generated code is its own: what matters is that a current compiler takes it.
        own = [[[], files[group]]]
        if group == "binding":
            own.append([["-Wno-all", "-Wno-extra", "-Wno-unused-function"], [GENERATED]])
        for more, sources in own:
            command = [*shlex.split(options.cc), "-fsyntax-only", "-std=gnu11", *flags(group), *STRICT, *more, *sources]
            done = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                return f"{group}:\n{done.stdout.rstrip()}"
        return None

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        failures = [f for f in pool.map(compile, chosen) if f]
    print("\n".join(failures), end="\n" if failures else "")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
