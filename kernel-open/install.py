#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Hand the patched nvidia-uvm to DKMS as the package nvidia-uvm-vmem, or take it away again.

The package's source is a prepared tree of the installed driver, so it needs neither Python nor this repository to be
built again for a new kernel. Its module is called nvidia-uvm-vmem and stands beside the stock one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import source
from insert import InsertError
from tree import HERE, kbuild_environment, prepare, unversioned

PACKAGE = "nvidia-uvm-vmem"
_MODPROBE = f"etc/modprobe.d/00-{PACKAGE}.conf"


def package(src, release, root="/", after=()):
    """Write the package's source folder, which DKMS calls PACKAGE-RELEASE, and return it.

    after: DKMS packages that must be built first for a new kernel.
    """
    folder = _folder(root, release)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prepare(src, folder)
    conf = (HERE / "dkms.conf.in").read_text().replace("@RELEASE@", release)
    conf += "".join(f'BUILD_DEPENDS[{i}]="{name}"\n' for i, name in enumerate(after))
    (folder / "dkms.conf").write_text(conf)
    shutil.copy2(HERE / "modprobe-uvm.sh", folder)
    return folder


def _folder(root, release):
    return Path(root) / "usr/src" / f"{PACKAGE}-{release}"


def _dkms(root, *args):
    """Run dkms and return what it prints; `source.SourceError` with its own words where it fails."""
    if not shutil.which("dkms"):
        raise source.SourceError("there is no dkms: install the package dkms")
    command = ["dkms", *args]
    if Path(root) != Path("/"):
        command += ["--dkmstree", Path(root) / "var/lib/dkms", "--sourcetree", Path(root) / "usr/src"]
        command += ["--installtree", Path(root) / "lib/modules"]
        (Path(root) / "var/lib/dkms").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, env=kbuild_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        words = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise source.SourceError(f"{' '.join(map(str, command))} exited {done.returncode}:\n{words}{_log(root, args)}")
    return done.stdout


def _log(root, args):
    """The end of the log of a build that failed; DKMS names the file, which goes when the package does."""
    if args[0] != "build":
        return ""
    text = _build_log(root, args[args.index("-v") + 1])
    return "\n" + "\n".join(text.splitlines()[-25:]) if text else ""


def _build_log(root, release):
    logs = (Path(root) / "var/lib/dkms" / PACKAGE / release).glob("**/make.log")
    return "".join(path.read_text(errors="replace") for path in logs)


def _listed(root):
    """(package, version) of all that DKMS knows."""
    return re.findall(r"^([^/,\s]+)[/,]\s*([^,:\s]+)", _dkms(root, "status"), re.M)


def versions(root="/"):
    """Releases for which DKMS has the package."""
    return sorted({version for name, version in _listed(root) if name == PACKAGE})


def _drivers(root, release):
    """DKMS packages of NVIDIA's driver of the release, whose nvidia.ko the module will meet."""
    return sorted({name for name, version in _listed(root)
                   if version == release and name.startswith("nvidia") and name != PACKAGE})  # fmt: skip


def _forget(root, release):
    _dkms(root, "remove", "-m", PACKAGE, "-v", release, "--all")
    shutil.rmtree(_folder(root, release), ignore_errors=True)


def remove(root="/"):
    """Take every version of the package away, with its modules and the boot-time choice."""
    # First the choice: without its module it would only slow modprobe down.
    (Path(root) / _MODPROBE).unlink(missing_ok=True)
    for release in versions(root):
        _forget(root, release)


def _hand_over(root, release, kernel):
    for step in ("add", "build", "install"):
        _dkms(root, step, "-m", PACKAGE, "-v", release, *([] if step == "add" else ["-k", kernel]))


def install(src, release, kernel, boot=False, root="/"):
    """Build and install the package for one kernel; DKMS follows with later ones.

    Should it fail, the package is as it was: versions of other releases go only afterwards, and one of this release
    is put back. Returns a warning, or None.
    """
    before = versions(root)
    folder = _folder(root, release)
    aside = folder.with_name(f".{folder.name}.before")
    shutil.rmtree(aside, ignore_errors=True)
    if release in before:
        _dkms(root, "remove", "-m", PACKAGE, "-v", release, "--all")
        folder.rename(aside)
    try:
        package(src, release, root, _drivers(root, release))
        _hand_over(root, release, kernel)
    except BaseException:
        if release in versions(root):
            _dkms(root, "remove", "-m", PACKAGE, "-v", release, "--all")
        shutil.rmtree(folder, ignore_errors=True)
        if aside.exists():
            aside.rename(folder)
            _hand_over(root, release, kernel)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    for other in before:
        if other != release:
            _forget(root, other)
    if boot:
        conf = Path(root) / _MODPROBE
        conf.parent.mkdir(parents=True, exist_ok=True)
        conf.write_text(
            f"# vMem's nvidia-uvm where the driver is of release {release}, the stock one otherwise.\n"
            f"# Without this file: the stock one.\n"
            f"install nvidia-uvm /bin/sh /{folder.relative_to(root)}/modprobe-uvm.sh {release} $CMDLINE_OPTS\n"
        )
    return unversioned(_build_log(root, release))


def main():
    env = os.environ.get
    parser = source.arguments(__doc__)
    parser.add_argument("action", choices=("install", "remove"))
    parser.add_argument("--boot", action="store_true", default=env("MODULE_BOOT") == "1",
                        help="let `modprobe nvidia-uvm` load the patched module from now on")  # fmt: skip
    args = parser.parse_args()
    root = env("VMEM_ROOT") or "/"
    try:
        if args.action == "remove":
            remove(root)
            return 0
        src, release = source.nvidia(args.src or None, args.release or None, args.cache)
        warning = install(src, release, source.kernel(args.kernel or None), args.boot, root)
        if warning:
            print(warning, file=sys.stderr)
        print(f"{PACKAGE} {release} is installed; `make module-load MODULE=$(modinfo -n {PACKAGE})` loads it now")
        return 0
    except (InsertError, source.SourceError) as e:
        print(f"error: {e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
