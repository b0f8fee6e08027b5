#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Put the patched nvidia-uvm.ko in the place of the loaded one, or the stock module back.

Everything that can be known beforehand is checked before the loaded module is touched. The stock module's file is never
replaced, so the way back, and the next boot, find it where it was. A load that fails loads the stock module again.

`VMEM_ROOT` names a folder to take for "/", for the tests; insmod, rmmod, modprobe, modinfo and mknod come from PATH.
"""

import argparse
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

# Only the patched module has it.
_PARAMETER = "uvm_vmem_confidential"
_NODES = (("nvidia-uvm", 0), ("nvidia-uvm-tools", 1))


# Driver releases, and what is known about the module on each
VERIFIED = Path(__file__).resolve().parent / "verified.list"


class LoadError(Exception):
    """The one fact that stops a load or an unload."""


class System:
    """The machine: /proc, /sys and /dev under a root, and the module tools."""

    def __init__(self, root="/", release=None):
        self.root = Path(root)
        self.kernel = release or os.uname().release

    def path(self, name):
        return self.root / name.lstrip("/")

    def text(self, name):
        """Text of a file of /proc or /sys without surrounding blanks, None where it is absent."""
        try:
            return self.path(name).read_text().strip()
        except OSError:
            return None

    def run(self, *command):
        """Run a module tool; `LoadError` with its own words when it fails."""
        try:
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        except FileNotFoundError:
            raise LoadError(f"there is no {command[0]}: install kmod") from None
        if done.returncode:
            words = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
            raise LoadError(f"{' '.join(str(word) for word in command)}: {words}")
        return done.stdout.strip()

    def modinfo(self, module, field):
        return self.run("modinfo", "-k", self.kernel, "-F", field, module)

    def loaded(self, module):
        return self.path(f"/sys/module/{module}").is_dir()

    def patched(self):
        """True if the loaded nvidia_uvm is the patched one."""
        return self.path(f"/sys/module/nvidia_uvm/parameters/{_PARAMETER}").exists()

    def users(self):
        """(pid, name) of the processes that hold a descriptor of /dev/nvidia-uvm."""
        found = []
        for fd in self.path("/proc").glob("[0-9]*/fd/*"):
            try:
                target = os.readlink(fd)
            except OSError:
                continue  # the process ended
            process = fd.parent.parent
            if target in ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools") and process not in (p for p, _ in found):
                found.append((process, self.text(f"/proc/{process.name}/comm") or "?"))
        return [(int(process.name), name) for process, name in found]


def _is_patched(system, module):
    return any(line.startswith(_PARAMETER + ":") for line in system.modinfo(module, "parm").splitlines())


def stock_module(system):
    """Path of the stock nvidia-uvm.ko of the loaded driver; distributions name and place it in their own ways."""
    loaded = system.text("/sys/module/nvidia/version")
    folder = system.path(f"/lib/modules/{system.kernel}")
    for found in sorted(folder.rglob("nvidia*uvm.ko*")):
        if system.modinfo(found, "version") == loaded and not _is_patched(system, found):
            return found
    raise LoadError(
        f"no stock nvidia-uvm.ko of release {loaded} under {folder}, so there would be no way back: "
        "install the driver's kernel modules first"
    )


def _must_be_free(system):
    users = system.users()
    if users:
        names = ", ".join(f"{name} ({pid})" for pid, name in users)
        raise LoadError(f"/dev/nvidia-uvm is held by {names}: end them first")
    holders = [path.name for path in system.path("/sys/module/nvidia_uvm/holders").glob("*")]
    if holders:
        raise LoadError(f"nvidia_uvm is used by the modules {', '.join(sorted(holders))}: unload them first")
    count = system.text("/sys/module/nvidia_uvm/refcnt") or "0"
    if count != "0":
        raise LoadError(f"nvidia_uvm has {count} users that /proc does not show (another container?): end them first")


def _must_accept_modules(system, module):
    if system.text("/proc/sys/kernel/modules_disabled") == "1":
        raise LoadError("kernel.modules_disabled is 1: this kernel takes no module until it boots again without it")
    lockdown = re.search(r"\[(\w+)\]", system.text("/sys/kernel/security/lockdown") or "")
    enforced = system.text("/sys/module/module/parameters/sig_enforce") == "Y"
    if (enforced or (lockdown and lockdown[1] != "none")) and not system.modinfo(module, "signer"):
        raise LoadError(
            f"this kernel takes signed modules only (Secure Boot), and {module} is not signed.\n"
            f"{_signing(system, module)}"
        )


def _signing(system, module):
    return (
        "Sign it with a key that the machine's firmware knows (a Machine Owner Key):\n"
        "  openssl req -new -x509 -newkey rsa:2048 -nodes -days 3650 -subj /CN=vMem/ "
        "-keyout MOK.key -outform DER -out MOK.der\n"
        "  mokutil --import MOK.der      # then boot once, and enrol the key at the firmware's prompt\n"
        f"  /lib/modules/{system.kernel}/build/scripts/sign-file sha256 MOK.key MOK.der {module}\n"
        "`make module-install` leaves the signing to DKMS, which does the same with its own key."
    )


def _fits(system, module):
    """Release that the module was built for; `LoadError` unless it is the loaded driver's, for this kernel."""
    release = system.modinfo(module, "version")
    loaded = system.text("/sys/module/nvidia/version")
    if loaded is None:
        raise LoadError("nvidia.ko is not loaded: load the driver first (modprobe nvidia)")
    if loaded != release:
        raise LoadError(
            f"{module} is of driver release {release}, the loaded nvidia.ko of {loaded}: they must be the same. "
            f"Build with NVIDIA_RELEASE={loaded}, or NVIDIA_SRC set to that release's tree"
        )
    kernel = (system.modinfo(module, "vermagic").split() or ["?"])[0]
    if kernel != system.kernel:
        raise LoadError(
            f"{module} was built for kernel {kernel}, this is {system.kernel}: build with KERNEL={system.kernel}"
        )
    if not _is_patched(system, module):
        raise LoadError(f"{module} is a stock module: there is no vMem in it")
    return release


def _options(system):
    """The parameters that modprobe's configuration gives nvidia-uvm. insmod does not read them."""
    words = []
    for line in system.run("modprobe", "--showconfig").splitlines():
        option = re.match(r"options nvidia[-_](?:current[-_])?(?:open[-_])?uvm\s+(.*)", line)
        words += option[1].split() if option else []
    return words


def _nodes(system):
    # The device number is handed out anew at each load; a node with the old one leads nowhere.
    majors = re.search(r"^\s*(\d+) nvidia-uvm$", system.text("/proc/devices") or "", re.M)
    for name, minor in _NODES:
        node = system.path(f"/dev/{name}")
        if not majors or not os.path.lexists(node):
            continue
        info = os.lstat(node)
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == os.makedev(int(majors[1]), minor):
            continue
        node.unlink()
        system.run("mknod", f"--mode={stat.S_IMODE(info.st_mode):o}", node, "c", majors[1], minor)
        if os.path.lexists(node) and os.geteuid() == 0:
            os.chown(node, info.st_uid, info.st_gid)


def _load_stock(system, stock):
    system.run("insmod", stock, *_options(system))
    _nodes(system)


def known(release, verified=VERIFIED):
    """The line that tells a user who loads the module how far verified.list covers the release."""
    lines = verified.read_text().splitlines() if verified.is_file() else []
    rows = [line.split(None, 4) for line in lines if line.strip() and not line.startswith("#")]
    mine = [row for row in rows if row[0] == release]
    tested = [f"{gpus} ({how})" for _, claim, gpus, _, how in mine if claim == "self-tested"]
    if tested:
        return f"driver {release}: the self-test has passed on {', '.join(tested)}"
    what = {"simulated": "it ran on a simulated GPU only", "compiles": "it was only compiled"}
    said = next((what[row[1]] for row in mine if row[1] in what), "it is not in kernel-open/verified.list")
    return (
        f"warning: driver {release}: nobody has reported a self-test of the module on a GPU; {said}. "
        "Run `pyvmem doctor --selftest` before you use it; libvmem uses stock until it has passed"
    )


def load(system, module, parameters=()):
    """Load the patched module in the stock one's place; returns what to tell the user."""
    module = Path(module).resolve()
    if not module.is_file():
        raise LoadError(f"{module} does not exist: build it with `make module`")
    release = _fits(system, module)
    _must_accept_modules(system, module)
    stock = stock_module(system)
    was_loaded = system.loaded("nvidia_uvm")
    if was_loaded:
        srcversion = system.modinfo(module, "srcversion")
        if system.patched() and system.text("/sys/module/nvidia_uvm/srcversion") == srcversion:
            return f"the patched nvidia-uvm {release} is loaded already"
        _must_be_free(system)
        system.run("rmmod", "nvidia_uvm")
    try:
        system.run("insmod", module, *_options(system), *parameters)
        if not system.patched():
            raise LoadError(f"{module} is loaded, but has no parameter {_PARAMETER}")
        _nodes(system)
    except LoadError as e:
        if system.loaded("nvidia_uvm"):
            system.run("rmmod", "nvidia_uvm")
        told = str(e)
        if "Key was rejected" in told or "Required key" in told or "Operation not permitted" in told:
            told += f"\n{_signing(system, module)}"
        if not was_loaded:
            raise LoadError(told) from None
        _load_stock(system, stock)
        raise LoadError(f"{told}\nThe stock module is loaded again.") from None
    return f"patched nvidia-uvm {release} loaded; the way back: make module-unload (stock module: {stock})"


def unload(system):
    """Put the stock module back; returns what to tell the user."""
    if not system.patched():
        return "the stock nvidia-uvm is loaded already" if system.loaded("nvidia_uvm") else "nvidia-uvm is not loaded"
    stock = stock_module(system)
    _must_be_free(system)
    system.run("rmmod", "nvidia_uvm")
    _load_stock(system, stock)
    return f"stock nvidia-uvm loaded ({stock})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    loading = actions.add_parser("load", help="load the patched module")
    loading.add_argument("module", help="the patched nvidia-uvm.ko")
    loading.add_argument("parameters", nargs="*", help="module parameters, name=value")
    actions.add_parser("unload", help="load the stock module again")
    args = parser.parse_args()
    system = System(os.environ.get("VMEM_ROOT") or "/", os.environ.get("VMEM_KERNEL") or None)
    try:
        if system.root == Path("/") and os.geteuid() != 0:
            raise LoadError("only root can load modules")
        if args.action == "unload":
            print(unload(system))
            return 0
        print(load(system, args.module, args.parameters))
        print(known(system.text("/sys/module/nvidia/version")), file=sys.stderr)
        return 0
    except LoadError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
