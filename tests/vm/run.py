#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs vMem's kernel module on a simulated GPU in a QEMU guest: the tests, a shell, or the seeded mutants.

Needs no GPU and touches nothing of the running kernel. What is fetched and built is kept in build/vm, or in
$VMEM_VM_CACHE.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

import kernel as kernels
import modules
import plan
import rootfs
from guest import Guest, command_line, job_script
from kernel import CACHE, HERE, TOP, Missing, Unavailable, digest, need, say

TESTS = HERE / "tests"
DRIVER = TOP / "libvmem" / "src" / "driver"


def test_programs(src, release):
    """Static test binaries for one release's ioctl headers: {path in the guest: path here}."""
    common = [TESTS / "vmtest.c", TESTS / "gpu.c", TESTS / "calls.c"]
    headers = [
        *TESTS.glob("*.h"),
        TOP / "uvm_ext" / "uvm_vmem_ioctl.h",
        HERE / "simgpu" / "simgpu_uapi.h",
        HERE / "simgpu" / "uvm_free.h",
        HERE / "failmem" / "failmem_uapi.h",
        DRIVER / "rm_abi.h",
    ]
    files = {}
    for name in plan.PROGRAMS:
        source = TESTS / f"{name}.c"
        if not source.is_file():
            continue
        out = CACHE / "tests" / f"{name}-{release}-{digest(source, *common, *headers, modules.source_key(src))}"
        if not out.is_file():
            out.parent.mkdir(parents=True, exist_ok=True)
            part = out.with_name(f"{out.name}.{os.getpid()}")
            folders = (
                src / "nvidia-uvm",
                src / "common/inc",
                TOP / "uvm_ext",
                HERE / "simgpu",
                HERE / "failmem",
                DRIVER,
            )
            command = ["cc", "-std=gnu11", "-O1", "-g0", "-Wall", "-static", "-pthread", *(f"-I{d}" for d in folders),
                       "-o", part, source, *common]  # fmt: skip
            if subprocess.run(command).returncode:
                raise Missing(f"compiling {source.name} failed")
            part.rename(out)
        files[f"tests/{name}"] = out
    return files


def gather(release, kernel, variants=modules.VARIANTS, uvm_type="release", source=None):
    """Everything the guest needs for one release, from the driver's tree `source` or one that is found."""
    files, src, release = modules.all_modules(release, kernel, variants, uvm_type, source)
    files |= test_programs(src, release)
    return files, release


def show(result, verbose=False):
    step = result.step
    if step.quiet and result.ok:
        return
    counts = f"{len(result.passed)} passed" + (f", {len(result.skipped)} skipped" if result.skipped else "")
    verdict = "ok  " if result.ok else "FAIL"
    print(f"  {verdict} {step.name:<28} {counts:<24} {result.seconds:6.1f} s", flush=True)
    if not result.ok:
        for line in result.failed:
            print(f"       {line}")
        for line in result.complaints[:8]:
            print(f"       kernel: {line}")
        if not result.failed and not result.complaints:
            print(f"       exit status {result.rc}; its last lines:")
            for line in result.output[-8:]:
                print(f"         {line}")
    if verbose:
        for line in result.skipped:
            print(f"       skipped: {line}")
    for name, (value, unit) in result.figures.items():
        print(f"       {name} = {value:g} {unit}")


def boot(args, kernel, files, steps, *, label, image=None, memory=1536, quiet=False, stop_after=None):
    """Boot one guest and run the steps, or those up to the first that `stop_after` says true of.

    Returns the verdict and the Guest.
    """
    initrd = rootfs.initramfs(CACHE / f"initramfs-{label}-{os.getpid()}.cpio", files, job_script(steps), image=image)
    log_path = CACHE / "logs" / f"{label}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    qemu = command_line(kernel, initrd, memory=memory, cpus=args.cpus, accel=args.accel)
    try:
        with log_path.open("w", buffering=1) as log:
            guest = Guest(qemu, steps, allowed=plan.ALLOWED, boot_timeout=args.boot_timeout, log=log,
                          stop_after=stop_after,
                          on_result=None if quiet else lambda r: show(r, args.verbose))  # fmt: skip
            ok = guest.run()
    finally:
        initrd.unlink()
    if not quiet:
        for result in guest.results:
            if result.rc is None:
                print(f"  FAIL {result.step.name}: not run or not ended")
                break
        if guest.why:
            print(f"  {guest.why}")
        if not ok:
            print(f"  log: {log_path}")
    return ok, guest


def drivers(args):
    """The drivers to test: [(release or its beginning, tree or None)]."""
    if not args.source:
        return [(release, None) for release in args.release or modules.RELEASES]
    trees = [modules.driver_source(None, source) for source in args.source]
    out = []
    for want in args.release or [release for _, release in trees]:
        found = [(release, src) for src, release in trees if f"{release}.".startswith(f"{want}.")]
        if not found:
            have = ", ".join(release for _, release in trees)
            raise Missing(f"--release {want}: the trees that --source names are of {have}")
        out += found
    return out


def architectures(args, src, release):
    """The architectures to test on a driver: those that were asked for, which it must know."""
    known = modules.architectures(src)
    wanted = args.arch or [plan.DEFAULT_ARCH]
    if "all" in wanted:
        return known
    for arch in wanted:
        if arch not in known:
            raise Missing(f"--arch {arch}: driver {release} knows {', '.join(known)}")
    return wanted


def test(args):
    debug = args.tier == "debug"
    kernel = kernels.debug() if debug else kernels.debian()
    bad = []
    for want, source in drivers(args):
        src, release = modules.driver_source(want, source)
        archs = architectures(args, src, release)
        steps = plan.steps(args.tier, args.only, archs)
        variants = [v for v in modules.VARIANTS if any(s.name.startswith(f"load {v}") for s in steps)]
        files, release = gather(release, kernel, variants, args.uvm_type or ("debug" if debug else "release"), src)
        print(f"simulated GPU ({', '.join(archs)}), driver {release}, kernel {kernel.release}, {args.tier} tier",
              flush=True)  # fmt: skip
        t0 = time.monotonic()
        which = [] if archs == [plan.DEFAULT_ARCH] else archs
        label = "-".join([args.tier, release, *which, *(args.only or ())]).replace(" ", "_")[:120]  # names files
        ok, _ = boot(args, kernel, files, steps, label=label, memory=3072 if debug else 1536)
        print(f"  {'passed' if ok else 'FAILED'} in {time.monotonic() - t0:.0f} s", flush=True)
        bad += [] if ok else [release]
    return 1 if bad else 0


def script(args):
    """One boot that runs the given shell lines, each as a step."""
    kernel = kernels.debug() if args.tier == "debug" else kernels.debian()
    want, source = drivers(args)[0]
    files, release = gather(want, kernel, uvm_type=args.uvm_type or "release", source=source)
    steps = [plan.Step(line, line, 600) for line in args.lines]
    ok, guest = boot(args, kernel, files, steps, label="script")
    for result in guest.results:
        print("\n".join(f"    {line}" for line in result.output))
    return 0 if ok else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=("test", "shell", "python", "mutants", "script"))
    parser.add_argument("lines", nargs="*", help="script: shell lines to run; mutants: their names")
    parser.add_argument("--tier", choices=sorted(plan.SIZES), default="short")
    parser.add_argument("--release", action="append", help="driver release, as 550; default: all")
    parser.add_argument("--source", action="append", help="a tree of the driver's source, or a checkout with one; "
                        "default: what the system has, or Debian's packages")  # fmt: skip
    parser.add_argument("--arch", action="append", choices=(*modules.ARCHITECTURES, "all"),
                        help=f"architecture of the simulated GPU; default: {plan.DEFAULT_ARCH}; all: those that the "
                        "driver knows")  # fmt: skip
    parser.add_argument("--only", action="append", help="only the steps whose names contain this")
    parser.add_argument("--uvm-type", choices=("release", "develop", "debug"), help="build type of nvidia-uvm.ko")
    parser.add_argument("--accel", choices=("tcg", "kvm"), default=os.environ.get("VM_ACCEL", "tcg"))
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--boot-timeout", type=int, default=900)
    parser.add_argument("--verbose", action="store_true", help="name the skipped cases")
    args = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a guest ends with this, too
    try:
        need("qemu-system-x86_64=qemu-system-x86", "busybox=busybox-static", "cc=gcc", "make=make", "strip=binutils")
        if args.action == "test":
            return test(args)
        if args.action == "script":
            return script(args)
        if args.action == "mutants":
            import mutants

            src, release = modules.driver_source(*drivers(args)[0])
            return mutants.main(args, boot, gather, src, release, architectures(args, src, release)[0])
        import python_tier

        return python_tier.main(args, boot, gather)
    except Missing as e:
        say(f"error: {e}")
        return 77 if isinstance(e, Unavailable) else 1


if __name__ == "__main__":
    sys.exit(main())
