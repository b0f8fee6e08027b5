#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Hand the patched nvidia-uvm to DKMS as the package nvidia-uvm-vmem, or take it away again.

The package's source is a prepared tree of the installed driver, so it needs neither Python nor this repository to be
built again for a new kernel. Its module is called nvidia-uvm-vmem and stands beside the stock one.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import source
from insert import InsertError
from tree import HERE, prepare

PACKAGE = "nvidia-uvm-vmem"
_MODPROBE = f"etc/modprobe.d/00-{PACKAGE}.conf"


def package(src, release, root="/"):
    """Write the package's source folder, which DKMS calls PACKAGE-RELEASE, and return it."""
    folder = Path(root) / "usr/src" / f"{PACKAGE}-{release}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prepare(src, folder)
    (folder / "dkms.conf").write_text((HERE / "dkms.conf.in").read_text().replace("@RELEASE@", release))
    shutil.copy2(HERE / "modprobe-uvm.sh", folder)
    return folder


def _dkms(root, *args, **kwargs):
    if not shutil.which("dkms"):
        raise source.SourceError("there is no dkms: install the package dkms")
    command = ["dkms", *args]
    if Path(root) != Path("/"):
        command += ["--dkmstree", Path(root) / "var/lib/dkms", "--sourcetree", Path(root) / "usr/src"]
        command += ["--installtree", Path(root) / "lib/modules"]
        (Path(root) / "var/lib/dkms").mkdir(parents=True, exist_ok=True)
    return subprocess.run(command, check=True, text=True, **kwargs)


def versions(root="/"):
    """Releases for which DKMS has the package."""
    listed = _dkms(root, "status", "-m", PACKAGE, capture_output=True).stdout
    return sorted(set(re.findall(rf"^{PACKAGE}[/,]\s*([\d.]+)", listed, re.M)))


def remove(root="/"):
    """Take every version of the package away, with its modules and the boot-time choice."""
    for release in versions(root):
        _dkms(root, "remove", "-m", PACKAGE, "-v", release, "--all")
        shutil.rmtree(Path(root) / "usr/src" / f"{PACKAGE}-{release}", ignore_errors=True)
    (Path(root) / _MODPROBE).unlink(missing_ok=True)


def install(src, release, kernel, boot=False, root="/"):
    """Build and install the package for one kernel; DKMS follows with later ones."""
    remove(root)
    folder = package(src, release, root)
    for step in ("add", "build", "install"):
        _dkms(root, step, "-m", PACKAGE, "-v", release, *([] if step == "add" else ["-k", kernel]))
    if boot:
        conf = Path(root) / _MODPROBE
        conf.parent.mkdir(parents=True, exist_ok=True)
        conf.write_text(
            f"# vMem's nvidia-uvm where the driver is of release {release}, the stock one otherwise.\n"
            f"# Without this file: the stock one.\n"
            f"install nvidia-uvm /bin/sh /{folder.relative_to(root)}/modprobe-uvm.sh {release} $CMDLINE_OPTS\n"
        )


def main():
    env = os.environ.get
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=("install", "remove"))
    parser.add_argument("--src", default=env("NVIDIA_SRC"), help="NVIDIA's tree; default: the installed driver's")
    parser.add_argument("--release", default=env("NVIDIA_RELEASE"), help="driver release or its beginning, as 550")
    parser.add_argument("--kernel", default=env("KERNEL"), help="kernel to build for; default: the running one")
    parser.add_argument("--cache", default="build/nvidia", help="where Debian's package is unpacked to")
    parser.add_argument("--boot", action="store_true", default=env("MODULE_BOOT") == "1",
                        help="let `modprobe nvidia-uvm` load the patched module from now on")  # fmt: skip
    args = parser.parse_args()
    root = env("VMEM_ROOT") or "/"
    try:
        if args.action == "remove":
            remove(root)
            return 0
        src, release = source.nvidia(args.src or None, args.release or None, args.cache)
        install(src, release, source.kernel(args.kernel or None), args.boot, root)
        print(f"{PACKAGE} {release} is installed; `make module-load MODULE=$(modinfo -n {PACKAGE})` loads it now")
        return 0
    except (InsertError, source.SourceError) as e:
        print(f"error: {e}", file=sys.stderr)
    except subprocess.CalledProcessError as e:
        print(f"error: {' '.join(map(str, e.cmd))} exited {e.returncode}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
