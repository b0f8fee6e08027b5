# SPDX-License-Identifier: MIT
"""Loading and unloading the module, against a folder that plays the machine and module tools that play the kernel."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL_OPEN = Path(__file__).resolve().parents[2] / "kernel-open"
_spec = importlib.util.spec_from_file_location("load_module", KERNEL_OPEN / "load.py")
load_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(load_module)
KERNEL = "6.1.0-test"
RELEASE = "550.163.01"
PARAMETER = "uvm_vmem_confidential:allow with confidential computing (bool)"

# A module is a text file of "field: value" lines. insmod refuses one with a line "refused: WHY", and loads one with a
# line "hides: yes" without its parameters; what it loads shows up under /sys/module. Each call leaves a log line.
TOOL = r"""#!/bin/sh
tool=$(basename "$0")
root=$VMEM_ROOT
sys=$root/sys/module/nvidia_uvm
echo "$tool $*" >>"$root/log"
field() { sed -n "s/^$2: *//p" "$1"; }
case $tool in
modinfo)
    while [ $# -gt 1 ]; do
        case $1 in -F) name=$2; shift 2 ;; -k) shift 2 ;; *) shift ;; esac
    done
    field "$1" "$name" ;;
modprobe)
    [ "$1" = --showconfig ] && cat "$root/modprobe.conf" 2>/dev/null
    exit 0 ;;
rmmod)
    [ -d "$sys" ] || { echo "rmmod: ERROR: Module $1 is not loaded" >&2; exit 1; }
    rm -r "$sys" ;;
insmod)
    [ -d "$sys" ] && { echo "insmod: ERROR: File exists" >&2; exit 1; }
    why=$(field "$1" refused)
    [ -n "$why" ] && { echo "insmod: ERROR: could not insert module $1: $why" >&2; exit 1; }
    mkdir -p "$sys/parameters" "$sys/holders"
    echo 0 >"$sys/refcnt"
    field "$1" srcversion >"$sys/srcversion"
    [ "$(field "$1" hides)" = yes ] || for name in $(field "$1" parm | sed 's/:.*//'); do
        : >"$sys/parameters/$name"
    done
    printf 'Character devices:\n195 nvidia\n%s nvidia-uvm\n' "$(cat "$root/major")" >"$root/proc/devices" ;;
mknod) ;;
esac
"""


class Machine:
    """A driver of RELEASE with its stock nvidia-uvm loaded, and a patched module ready to be loaded."""

    def __init__(self, folder):
        self.root = folder / "root"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("modinfo", "modprobe", "rmmod", "insmod", "mknod"):
            (self.bin / name).write_text(TOOL)
            (self.bin / name).chmod(0o755)
        self.write("sys/module/nvidia/version", RELEASE + "\n")
        self.write("proc/devices", "")
        self.write("dev/nvidia-uvm", "")
        self.write("major", "511\n")
        self.stock = self.module(f"lib/modules/{KERNEL}/updates/dkms/nvidia-current-uvm.ko", srcversion="STOCK")
        self.patched = self.module("build/nvidia-uvm.ko", srcversion="PATCHED", parm=PARAMETER)
        self.insmod(self.stock)
        (self.root / "log").unlink()

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def module(self, name, **fields):
        fields = {"version": RELEASE, "vermagic": f"{KERNEL} SMP preempt mod_unload modversions", **fields}
        return self.write(name, "".join(f"{field}: {value}\n" for field, value in fields.items()))

    @property
    def env(self):
        path = f"{self.bin}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "VMEM_ROOT": str(self.root), "VMEM_KERNEL": KERNEL}

    def insmod(self, module):
        subprocess.run([self.bin / "insmod", module], check=True, env=self.env)

    def run(self, *args):
        command = [sys.executable, KERNEL_OPEN / "load.py", *args]
        return subprocess.run(command, capture_output=True, text=True, env=self.env)

    def load(self, *parameters, module=None):
        return self.run("load", module or self.patched, *parameters)

    def unload(self):
        return self.run("unload")

    @property
    def loaded(self):
        path = self.root / "sys/module/nvidia_uvm/srcversion"
        return path.read_text().strip() if path.exists() else None

    @property
    def log(self):
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def changes(self):
        """Calls that changed what is loaded."""
        return [line for line in self.log if line.split()[0] in ("insmod", "rmmod")]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def refused(machine, done, *words, loaded="STOCK"):
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr
    assert machine.loaded == loaded
    assert machine.changes == []


def test_load_takes_the_stock_modules_place_and_keeps_its_file(machine):
    stock = machine.stock.read_bytes()
    done = machine.load()
    assert done.returncode == 0, done.stderr
    assert machine.changes == ["rmmod nvidia_uvm", f"insmod {machine.patched}"]
    assert machine.loaded == "PATCHED"
    assert machine.stock.read_bytes() == stock
    assert str(machine.stock) in done.stdout and "module-unload" in done.stdout


def test_load_says_what_is_known_about_the_release(machine, tmp_path):
    done = machine.load()
    assert done.returncode == 0 and "driver 550.163.01:" in done.stderr
    assert "not in kernel-open/verified.list" in load_module.known("9.99")
    assert "pyvmem doctor --selftest" in load_module.known("9.99")
    text = "# comment\n1.2.3 simulated turing abc how it was\n1.2.4 compiles - abc how\n"
    text += "1.2.3 self-tested sm90 abc an H200\n"
    (tmp_path / "verified.list").write_text(text)
    assert load_module.known("1.2.3", tmp_path / "verified.list").endswith("has passed on sm90 (an H200)")
    assert "only compiled" in load_module.known("1.2.4", tmp_path / "verified.list")
    claims = [line.split()[1] for line in load_module.VERIFIED.read_text().splitlines() if line[:1].isdigit()]
    assert claims and set(claims) <= {"compiles", "simulated", "self-tested"}


def test_unload_brings_the_stock_module_back(machine):
    machine.load()
    done = machine.unload()
    assert done.returncode == 0, done.stderr
    assert machine.loaded == "STOCK"
    assert machine.changes[-2:] == ["rmmod nvidia_uvm", f"insmod {machine.stock}"]


def test_load_where_no_nvidia_uvm_was_loaded(machine):
    subprocess.run([machine.bin / "rmmod", "nvidia_uvm"], check=True, env=machine.env)
    (machine.root / "log").unlink()
    assert machine.load().returncode == 0
    assert machine.changes == [f"insmod {machine.patched}"]


def test_loading_the_same_module_again_does_nothing(machine):
    machine.load()
    before = machine.changes
    done = machine.load()
    assert done.returncode == 0 and "already" in done.stdout
    assert machine.changes == before


def test_a_newer_build_takes_the_place_of_an_older_one(machine):
    machine.load()
    newer = machine.module("build/newer.ko", srcversion="NEWER", parm=PARAMETER)
    assert machine.load(module=newer).returncode == 0
    assert machine.loaded == "NEWER"


def test_unload_of_the_stock_module_does_nothing(machine):
    done = machine.unload()
    assert done.returncode == 0 and "already" in done.stdout
    assert machine.changes == []


def test_module_parameters_and_modprobes_options_are_handed_on(machine):
    options = "options nvidia-uvm uvm_disable_hmm=1\noptions nvidia-current-uvm a=2\noptions nvidia b=3\n"
    machine.write("modprobe.conf", options)
    assert machine.load("uvm_vmem_confidential=1").returncode == 0
    assert machine.changes[-1] == f"insmod {machine.patched} uvm_disable_hmm=1 a=2 uvm_vmem_confidential=1"
    machine.unload()
    assert machine.changes[-1] == f"insmod {machine.stock} uvm_disable_hmm=1 a=2"


@pytest.mark.parametrize("why", ["Exec format error", "Key was rejected by service", "Unknown symbol in module"])
def test_a_failed_load_leaves_the_stock_module_loaded(machine, why):
    bad = machine.module("build/bad.ko", srcversion="BAD", parm=PARAMETER, refused=why)
    done = machine.load(module=bad)
    assert done.returncode == 1
    assert machine.loaded == "STOCK"
    assert why in done.stderr and "stock module is loaded again" in done.stderr
    assert ("mokutil" in done.stderr) == (why == "Key was rejected by service")


def test_a_module_that_loads_as_something_else_is_taken_out_again(machine):
    odd = machine.module("build/odd.ko", srcversion="ODD", parm=PARAMETER, hides="yes")
    done = machine.load(module=odd)
    assert done.returncode == 1
    assert machine.loaded == "STOCK"


def test_another_release_is_refused(machine):
    other = machine.module("build/other.ko", version="535.261.03", parm=PARAMETER)
    refused(machine, machine.load(module=other), "535.261.03", RELEASE, f"NVIDIA_RELEASE={RELEASE}")


def test_another_kernel_is_refused(machine):
    other = machine.module("build/other.ko", vermagic="6.9.9-other SMP", parm=PARAMETER)
    refused(machine, machine.load(module=other), "6.9.9-other", KERNEL)


def test_a_stock_module_is_refused(machine):
    refused(machine, machine.load(module=machine.stock), "stock module")


def test_a_missing_module_is_refused(machine):
    refused(machine, machine.load(module=machine.root / "nowhere.ko"), "does not exist", "make module")


def test_without_nvidia_ko_it_is_refused(machine):
    (machine.root / "sys/module/nvidia/version").unlink()
    refused(machine, machine.load(), "nvidia.ko is not loaded")


def test_without_a_stock_module_there_is_no_way_back_and_it_is_refused(machine):
    machine.stock.unlink()
    refused(machine, machine.load(), "no way back")


def test_a_stock_module_of_another_release_is_no_way_back(machine):
    machine.module(machine.stock.relative_to(machine.root), version="545.29.06")
    refused(machine, machine.load(), "no way back")


def test_a_patched_module_in_the_stock_ones_place_is_no_way_back(machine):
    machine.module(machine.stock.relative_to(machine.root), parm=PARAMETER)
    refused(machine, machine.load(), "no way back")


@pytest.mark.parametrize("action", ["load", "unload"])
def test_a_process_that_holds_the_device_is_named(machine, action):
    if action == "unload":
        machine.load()
        (machine.root / "log").unlink()
    held = machine.loaded
    fds = machine.root / "proc/4242/fd"
    fds.mkdir(parents=True)
    (fds / "3").symlink_to("/dev/null")
    (fds / "7").symlink_to("/dev/nvidia-uvm")
    (fds / "8").symlink_to("/dev/nvidia-uvm")
    machine.write("proc/4242/comm", "python3\n")
    done = machine.load() if action == "load" else machine.unload()
    refused(machine, done, "python3 (4242)", loaded=held)
    assert done.stderr.count("4242") == 1


def test_users_that_proc_does_not_show_are_refused_too(machine):
    machine.write("sys/module/nvidia_uvm/refcnt", "2\n")
    refused(machine, machine.load(), "2 users")


def test_a_module_that_uses_nvidia_uvm_is_named(machine):
    machine.write("sys/module/nvidia_uvm/refcnt", "1\n")
    machine.write("sys/module/nvidia_uvm/holders/nvidia_fs", "")
    refused(machine, machine.load(), "nvidia_fs")


def test_a_kernel_that_takes_no_modules_is_left_alone(machine):
    machine.write("proc/sys/kernel/modules_disabled", "1\n")
    refused(machine, machine.load(), "modules_disabled")


@pytest.mark.parametrize(
    "name, text", [("sys/kernel/security/lockdown", "none [integrity] confidentiality\n"),
                   ("sys/module/module/parameters/sig_enforce", "Y\n")]
)  # fmt: skip
def test_under_secure_boot_an_unsigned_module_is_refused_with_what_to_do(machine, name, text):
    machine.write(name, text)
    refused(machine, machine.load(), "Secure Boot", "sign-file", "mokutil --import", str(machine.patched))
    signed = machine.module("build/signed.ko", srcversion="SIGNED", parm=PARAMETER, signer="vMem")
    assert machine.load(module=signed).returncode == 0
    assert machine.loaded == "SIGNED"


def test_lockdown_none_asks_for_no_signature(machine):
    machine.write("sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
    assert machine.load().returncode == 0


def test_a_device_node_with_an_old_number_is_made_anew(machine):
    # In the folder the node is a plain file: as wrong as one with an old number.
    (machine.root / "dev/nvidia-uvm").chmod(0o660)
    machine.write("major", "509\n")
    assert machine.load().returncode == 0
    node = machine.root / "dev/nvidia-uvm"
    assert f"mknod --mode=660 {node} c 509 0" in machine.log
    assert not [line for line in machine.log if "nvidia-uvm-tools" in line]
