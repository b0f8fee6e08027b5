"""Modules for the simulated GPU's guest, in a cache that two checkouts share: each gets what its own sources make.

The compilers are stand-ins: a module is the text of the file that it was made of.

SPDX-License-Identifier: MIT
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
RELEASE = "550.163.01"
MADE = "$(OUT)/nvidia.ko: {here}/sim.c\n\tcp $< $@\n\techo crcs > $(OUT)/Module.symvers\n"


class Checkout:
    """The parts of a checkout that modules are made of, and a driver's source beside them."""

    def __init__(self, top):
        self.top, self.sim = top, top / "tests/vm/simgpu"
        self.src = top / "nvidia/kernel-open"
        self.write("tests/vm/simgpu/sim.c", "first")
        self.write("tests/vm/simgpu/Makefile", MADE.format(here=self.sim))
        self.write("tests/vm/simgpu/simgpu_uapi.h", "first")
        self.write("tests/vm/simgpu/uvm_free.h", "first")
        self.write("tests/vm/simcuda/sim.c", "first")
        self.write("tests/vm/simcuda/Makefile", "all:\n")
        self.write("tests/vm/failmem/failmem.c", "first")
        self.write("headers/Makefile", "modules:\n\ttouch $(M)/failmem.ko\n")
        self.write("libvmem/src/driver/rm_abi.h", "first")
        shutil.copytree(TOP / "kernel-open", top / "kernel-open")
        self.write("uvm_ext/uvm_vmem.c", "first")
        for folder in "common", "nvidia", "nvidia-uvm":
            self.write(f"nvidia/kernel-open/{folder}/file.h", "first")
        self.write("headers/.config", "first")

    def write(self, path, text):
        (self.top / path).parent.mkdir(parents=True, exist_ok=True)
        (self.top / path).write_text(text)


@pytest.fixture
def vm(tmp_path, monkeypatch):
    """modules.py over an empty cache. vm.at(checkout) makes it that checkout's."""
    names = ("kernel", "modules", "source", "tree", "insert", "hooks")
    monkeypatch.setattr(sys, "path", [str(TOP / "tests/vm"), *sys.path])
    monkeypatch.setenv("VMEM_VM_CACHE", str(tmp_path / "cache"))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import modules

    def strip(module):
        return Path(shutil.copy(module, module.with_name(f"stripped-{module.name}")))

    def compiled(tree, *_):
        return Path(shutil.copy(tree / "uvm_vmem.c", tree / "nvidia-uvm.ko"))

    def uvm_tree(src, release, variant, *_):
        tree = modules.CACHE / f"tree-{variant}"
        tree.mkdir(parents=True, exist_ok=True)
        shutil.copy(modules.TOP / "uvm_ext/uvm_vmem.c", tree)
        return tree

    def at(checkout):
        modules.TOP, modules.HERE = checkout.top, checkout.top / "tests/vm"

    monkeypatch.setattr(modules, "_strip", strip)
    monkeypatch.setattr(modules, "_compile", compiled)
    monkeypatch.setattr(modules, "uvm_tree", uvm_tree)
    modules.at = at
    yield modules
    for name in names:
        sys.modules.pop(name, None)


def kernel(checkout):
    import kernel

    return kernel.Kernel("6.1.0", None, checkout.top / "headers", None)


def simgpu(vm, checkout):
    vm.at(checkout)
    return vm.simgpu(checkout.src, RELEASE, kernel(checkout))


def uvm(vm, checkout, variant="patched"):
    sim = simgpu(vm, checkout)
    return vm.uvm(checkout.src, RELEASE, variant, kernel(checkout), sim)


def test_each_checkout_has_its_own_simulated_gpu(vm, tmp_path):
    old, new = Checkout(tmp_path / "old"), Checkout(tmp_path / "new")
    new.write("tests/vm/simgpu/sim.c", "second")
    os.utime(old.sim / "sim.c", (1, 1))  # which make would take for made already
    first = simgpu(vm, new)
    assert (first / "nvidia.ko").read_text() == "second"
    assert (simgpu(vm, old) / "nvidia.ko").read_text() == "first"
    assert (first / "nvidia.ko").read_text() == "second"  # which the other's guest may be about to load
    assert simgpu(vm, new) == first


def test_each_checkout_has_its_own_module(vm, tmp_path):
    old, new = Checkout(tmp_path / "old"), Checkout(tmp_path / "new")
    new.write("uvm_ext/uvm_vmem.c", "second")
    first = uvm(vm, new)
    assert uvm(vm, old).read_text() == "first"
    assert first.read_text() == "second"
    assert uvm(vm, new) == first


def test_what_was_interrupted_is_made_again(vm, tmp_path):
    checkout = Checkout(tmp_path / "one")
    half = "all:\n\techo half > $(OUT)/nvidia.ko; touch -d 2100-01-01 $(OUT)/nvidia.ko; false\n"
    checkout.write("tests/vm/simgpu/Makefile", half)
    with pytest.raises(vm.Missing):
        simgpu(vm, checkout)
    checkout.write("tests/vm/simgpu/Makefile", MADE.format(here=checkout.sim))
    assert (simgpu(vm, checkout) / "nvidia.ko").read_text() == "first"


PARTS = {
    "tests/vm/simgpu/sim.c": "simgpu",
    "libvmem/src/driver/rm_abi.h": "simgpu simcuda",
    "tests/vm/simgpu/simgpu_uapi.h": "simgpu simcuda",
    "tests/vm/simcuda/sim.c": "simcuda",
    "tests/vm/failmem/failmem.c": "failmem",
    "nvidia/kernel-open/common/file.h": "simgpu simcuda patched stock",
    "nvidia/kernel-open/nvidia/file.h": "simgpu simcuda patched stock",
    "nvidia/kernel-open/nvidia-uvm/file.h": "simgpu simcuda patched stock",
    "headers/.config": "simgpu failmem patched stock",
    "kernel-open/vmem.mk": "patched stock",
    "kernel-open/stock-symvers.sh": "patched stock",
    "kernel-open/hooks.py": "patched",
    "kernel-open/insert.py": "patched",
    "kernel-open/tree.py": "patched",
    "uvm_ext/uvm_vmem.c": "patched",
}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_module_is_made_of_tells_it_apart(vm, tmp_path, part):
    checkout = Checkout(tmp_path / "one")

    def made():
        vm.source_key.cache_clear()  # of a process in which nothing changes
        out = {variant: uvm(vm, checkout, variant) for variant in ("patched", "stock")}
        return out | {"simgpu": simgpu(vm, checkout), "simcuda": vm.simcuda(checkout.src, RELEASE),
                      "failmem": vm.failmem(kernel(checkout))}  # fmt: skip

    before = made()
    assert made() == before
    checkout.write(part, "changed")
    after = made()
    assert {name for name in before if before[name] != after[name]} == set(PARTS[part].split())
