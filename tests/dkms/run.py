#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Install the module's DKMS package with the real dkms, follow a new kernel, fail, and take it away again.

Each Debian suite gets a folder tree of its own (debootstrap) under build/dkms, with dkms, compilers and two kernels'
headers; the steps run there under chroot, as root. Nothing is loaded. `make test-dkms` runs bookworm and trixie.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "kernel-open"))

import source  # noqa: E402

PACKAGE = "nvidia-uvm-vmem"
TOOLS = "dkms,linux-headers-amd64,python3,make,gcc,kmod,xz-utils,ca-certificates"

# Plays the driver's own DKMS package: a module that builds in a second, of the driver's name and release.
STOCK = "nvidia-current-open"
STOCK_FILES = {
    "dkms.conf": 'PACKAGE_NAME="{name}"\nPACKAGE_VERSION="{release}"\nAUTOINSTALL="yes"\n'
    'BUILT_MODULE_NAME[0]="stock"\nDEST_MODULE_LOCATION[0]="/updates/dkms"\n'
    'MAKE[0]="make -C /lib/modules/$kernelver/build M=$dkms_tree/{name}/{release}/build modules"\nCLEAN="true"\n',
    "Makefile": "obj-m := stock.o\n",
    "stock.c": '#include <linux/module.h>\nMODULE_LICENSE("GPL");\n',
}


class Failed(Exception):
    """A step did not do what it must."""


class Root:
    """A Debian tree to run commands in."""

    def __init__(self, folder, suite):
        self.folder, self.suite = folder, suite

    def run(self, command, fails=False):
        """Run a shell line in the tree and return what it prints; it must fail if `fails`, else succeed."""
        # A mount name space of its own: /proc goes with it.
        line = 'mount -t proc proc "$1/proc" && exec chroot "$1" /usr/bin/env -i PATH="$PATH" HOME=/root sh -c "$2"'
        done = subprocess.run(["unshare", "-m", "sh", "-c", line, "sh", self.folder, command],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        if (done.returncode != 0) != fails:
            raise Failed(f"{command}: exit {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def path(self, name):
        return self.folder / name.lstrip("/")


def mirror():
    lines = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
                           check=True, capture_output=True, text=True).stdout.split()  # fmt: skip
    if not lines:
        raise Failed("apt knows no Debian mirror")
    return lines[0]


def make_root(suite, folder):
    """The suite's tree with the tools and the headers of the kernels on offer, two where there are two."""
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={TOOLS}", suite, folder, mirror()],
                       check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        (folder / ".ready").touch()
    return Root(folder, suite)


def repository(root):
    """The repository's files as they are in the work tree, at /vmem."""
    there = root.path("/vmem")
    shutil.rmtree(there, ignore_errors=True)
    listed = subprocess.run(["git", "-C", TOP, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            check=True, capture_output=True, text=True).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (TOP / name).is_file():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, there / name)


def kernels(root):
    # The link to the headers is absolute, so it leads nowhere from outside.
    found = [path.name for path in root.path("/usr/lib/modules").iterdir() if (path / "build").is_symlink()]
    return sorted(found, key=source.order)


def modules(root, kernel):
    return sorted(p.name.split(".")[0] for p in root.path(f"/usr/lib/modules/{kernel}/updates/dkms").glob("*.ko*"))


def expect(what, there):
    if not there:
        raise Failed(what)
    print("  ok", what, flush=True)


def other_kernel(root, have):
    """The name of a second kernel's headers that the suite offers."""
    names = root.run("apt-get update -qq && apt-cache search --names-only '^linux-headers-[0-9].*[0-9]-amd64$'")
    names = [name for name in re.findall(r"^linux-headers-(\S+-amd64)", names, re.M) if name not in have]
    names = [name for name in names if not re.search(r"rt|cloud", name)]
    return sorted(names, key=source.order)[-1] if names else None


def steps(root, release):
    """Run the steps of a user over the package's life, and check each."""
    first = kernels(root)[-1]
    install = f"cd /vmem && make module-install KERNEL={first}"

    broken = root.path("/vmem/uvm_ext/uvm_vmem_query.c")
    text = broken.read_text()
    broken.write_text(text + "\nthis is no C;\n")
    told = root.run(install, fails=True)
    expect("a build that fails shows the compiler's words", "uvm_vmem_query.c" in told and "error:" in told)
    expect("and leaves nothing of the package", PACKAGE not in root.run("dkms status"))
    expect("nor its source", not list(root.path("/usr/src").glob(f"*{PACKAGE}*")))
    broken.write_text(text)

    # make inside make, as from a packager's rules: its folder messages must not reach DKMS.
    root.path("/vmem/outer.mk").write_text("all: ; +$(MAKE) module-install KERNEL=$(KERNEL) MODULE_BOOT=1\n")
    root.run(f"cd /vmem && make -w -f outer.mk KERNEL={first}")
    status = root.run("dkms status")
    expect("installed", re.search(rf"{PACKAGE}/{re.escape(release)}, {re.escape(first)}, \S+: installed", status))
    expect("beside the stock module, under a name of its own", PACKAGE in modules(root, first))
    info = root.run(f"modinfo -k {first} {PACKAGE}")
    expect("it is the patched one", "uvm_vmem_confidential" in info)
    shown = root.run("modprobe --showconfig | grep '^install nvidia.uvm'")
    expect("modprobe nvidia-uvm goes through our script", "modprobe-uvm.sh" in shown)
    conf = root.path(f"/usr/src/{PACKAGE}-{release}/dkms.conf").read_text()
    expect("the driver's own package comes first", f'BUILD_DEPENDS[0]="{STOCK}"' in conf)

    broken.write_text(text + "\nthis is no C;\n")
    root.run(install, fails=True)
    expect("a second install that fails puts the first back", PACKAGE in modules(root, first))
    broken.write_text(text)

    second = other_kernel(root, kernels(root))
    if second:
        told = root.run(f"DEBIAN_FRONTEND=noninteractive apt-get install -y -qq linux-headers-{second}")
        expect(f"a new kernel ({second}) gets both modules", modules(root, second) == [PACKAGE, "stock"])
        expect(
            "the driver's first", told.index("stock.ko") < told.index(f"{PACKAGE}.ko") if "stock.ko" in told else True
        )
    else:
        print("  the suite offers one kernel only: no upgrade was tried", flush=True)

    root.run("cd /vmem && make module-uninstall")
    expect("uninstalled", PACKAGE not in root.run("dkms status"))
    left = [p for k in kernels(root) for p in modules(root, k) if p == PACKAGE]
    left += list(root.path("/usr/src").glob(f"*{PACKAGE}*")) + list(root.path("/etc/modprobe.d").glob(f"*{PACKAGE}*"))
    expect("nothing is left", not left)


def stock_package(root, release):
    folder = root.path(f"/usr/src/{STOCK}-{release}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in STOCK_FILES.items():
        (folder / name).write_text(text.replace("{name}", STOCK).replace("{release}", release))
    kernel = kernels(root)[-1]
    root.run(f"dkms install -m {STOCK} -v {release} -k {kernel}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("suites", nargs="*", default=["bookworm", "trixie"])
    parser.add_argument("--out", default=TOP / "build/dkms", type=Path)
    parser.add_argument("--release", default="550", help="driver release, of Debian's source packages")
    args = parser.parse_args()
    failed = 0
    for suite in args.suites:
        print(suite, flush=True)
        root = make_root(suite, args.out / suite)
        root.run("for m in $(dkms status | sed 's/[,:].*//' | sort -u); do dkms remove $m --all; done; true")
        for folder in root.path("/usr/src").glob("nvidia-*"):
            shutil.rmtree(folder)
        src, release = source.nvidia(want=args.release, cache=TOP / "build/nvidia", root=root.folder)
        shutil.copytree(src, root.path(f"/usr/src/nvidia-{release}"))
        repository(root)
        stock_package(root, release)
        print(" ", root.run("dkms --version").strip(), "driver", release, "kernels", *kernels(root), flush=True)
        try:
            steps(root, release)
        except Failed as e:
            failed += 1
            print("  FAILED", e, flush=True)
    print(f"{len(args.suites) - failed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
