#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Build nvidia-uvm.ko with vMem inside, from the source of the driver that is installed.

Prints the module's path last. The build folder keeps one tree per release and build type.

The room brings vMem into NVIDIA's module, and the module into a system. It imports nothing of pyvmem, and calls the
system's tools alone, so that root can run it without an environment. Begin here, then hooks.py, which says what is
inserted where; source.py finds the driver's source, install.py makes a DKMS package, and load.py exchanges the modules.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import source
from insert import InsertError, diff, patched
from tree import HERE, kbuild_environment, prepare, unversioned

STAMP = ".vmem-made-of"
QUICK = ("KCFLAGS=-g0", "CONFIG_DEBUG_INFO_BTF_MODULES=")  # without debug information


@contextlib.contextmanager
def _locked(tree):
    """Keep a second build out of the tree: it would remove or rebuild files under the first."""
    lock = tree.with_name(tree.name + ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise source.SourceError(
                f"another build is at work in {tree}: wait for it, or name another --out"
            ) from None
        yield


def made_of(src, kernel):
    """What the stamp of a tree says: one of another driver's tree, or begun for another kernel, is not gone on with."""
    return f"{kernel} {Path(src).resolve()}"


def build(src, release, kernel, args):
    """Prepare the tree, build the module in it, return the module's path."""
    tree = Path(args.out).resolve() / f"{release}-{args.type}{'-checked' if args.check else ''}"
    with _locked(tree):
        return _build(src, release, kernel, args, tree)


def _build(src, release, kernel, args, tree):
    stamp = tree / STAMP
    if tree.exists() and (not stamp.is_file() or stamp.read_text() != made_of(src, kernel)):
        shutil.rmtree(tree)
    try:
        prepare(src, tree)
    except InsertError:
        shutil.rmtree(tree)  # made by other hooks than today's
        prepare(src, tree)
    stamp.write_text(made_of(src, kernel))
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    command = ["make", jobs, "-f", "vmem.mk", f"KERNEL_UNAME={kernel}", f"UVM_BUILD_TYPE={args.type}"]
    if args.symvers:
        command.append(f"KBUILD_EXTRA_SYMBOLS={Path(args.symvers).resolve()}")
    if args.check:
        for path in (tree / "nvidia-uvm" / "uvm_ext").glob("*.o"):
            path.unlink()  # the checker runs where the compiler does
        command += ["C=1", f"CHECK={HERE / 'sparse-ours.sh'}", *QUICK]
    log = tree / "build.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=tree, env=kbuild_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            out.write(line)
            if args.verbose:
                print(line, end="")
    text = log.read_text()
    ours = [line for line in text.splitlines() if "uvm_ext/" in line and ("warning:" in line or "error:" in line)]
    if process.wait():
        tail = "\n".join(ours or text.splitlines()[-25:])
        raise source.SourceError(f"building nvidia-uvm.ko {release} for {kernel} failed; log: {log}\n{tail}")
    said = [*ours, *filter(None, [unversioned(text)])]
    print("\n".join(said), file=sys.stderr, end="\n" if said else "")
    if args.check and ours:
        raise source.SourceError(f"{len(ours)} warnings in vMem's files; log: {log}")
    module = tree / "nvidia-uvm.ko"
    missing = _unresolved(module, kernel, args.symvers)
    if missing:
        raise source.SourceError(f"nvidia-uvm.ko {release} needs what nobody exports: {' '.join(missing)}")
    return module


def _unresolved(module, kernel, symvers):
    """Symbols that the module needs and neither the kernel nor nvidia.ko has; modpost only warns of the first few."""
    exported = Path(f"/lib/modules/{kernel}/build/Module.symvers").read_text()
    if symvers:
        exported += Path(symvers).read_text()
    known = {line.split("\t")[1] for line in exported.splitlines()}
    listed = subprocess.run(["nm", "-u", module], check=True, capture_output=True, text=True).stdout
    needed = {line.split()[-1] for line in listed.splitlines()}
    return sorted(name for name in needed - known if symvers or not name.startswith("nvUvmInterface"))


def main():
    env = os.environ.get
    parser = source.arguments(__doc__)
    parser.add_argument("action", choices=("build", "diff"), nargs="?", default="build")
    parser.add_argument("--type", default=env("UVM_BUILD_TYPE") or "release", choices=("release", "develop", "debug"))
    parser.add_argument("--symvers", default=env("KBUILD_EXTRA_SYMBOLS"), help="nvidia.ko's Module.symvers")
    parser.add_argument("--out", default="build/module", help="build folder")
    parser.add_argument("--check", action="store_true", help="run sparse; fail on any warning in vMem's files")
    parser.add_argument("--verbose", action="store_true", help="show the build as it runs")
    args = parser.parse_args()
    try:
        src, release = source.nvidia(args.src or None, args.release or None, args.cache)
        if args.action == "diff":
            text, added = diff(patched(src))
            print(text, end="", flush=True)
            print(f"{release}: {added} lines inserted in NVIDIA's files", file=sys.stderr)
            return 0
        kernel = source.kernel(args.kernel or None)
        print(f"nvidia-uvm.ko {release} ({args.type}) for {kernel}, source {src}", file=sys.stderr)
        print(build(src, release, kernel, args))
        return 0
    except source.Unavailable as e:
        print(f"error: {e}", file=sys.stderr)
        return 77  # as a test that cannot run here
    except (InsertError, source.SourceError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
