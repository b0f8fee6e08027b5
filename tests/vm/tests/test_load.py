# SPDX-License-Identifier: MIT
"""kernel-open/load.py on a real kernel: the stock module out, the patched one in, and back; and every way to fail.

Runs in the guest as root, with the simulated nvidia.ko loaded and no nvidia_uvm. argv: load.py, the stock module and
the patched one. The kernel and the module tools are real; only the driver below them is simulated.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

LOAD, STOCK, PATCHED = (Path(p) for p in sys.argv[1:4])
INSTALLED = Path("/lib/modules") / os.uname().release / "updates/dkms/nvidia-current-uvm.ko"
MODULE = Path("/sys/module/nvidia_uvm")
NODE = Path("/dev/nvidia-uvm")
OTHER = Path("/tmp/other.ko")
QUERY = 0xBA01  # UVM_VMEM_QUERY: _IO(0xBA, 1)


def load_py(*args):
    """(exit status, everything it said) of load.py."""
    done = subprocess.run([sys.executable, LOAD, *map(str, args)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def loaded():
    """The module that answers on /dev/nvidia-uvm now: "stock", "patched", or None."""
    if not MODULE.is_dir():
        return None
    with NODE.open("r+b", buffering=0) as file:  # fails on a node with another module's number
        try:
            fcntl.ioctl(file, QUERY, bytearray((168).to_bytes(4, sys.byteorder) + bytes(164)))
        except OSError as e:
            assert e.errno == errno.EINVAL, e
            return "stock"
        return "patched"


def identity():
    """Differs between two loads of one module."""
    return (MODULE / "srcversion").read_text(), os.stat(MODULE).st_ctime_ns, os.stat(MODULE).st_ino


def start():
    """Have the stock module loaded, whatever the test before left."""
    if MODULE.is_dir():
        subprocess.run(["rmmod", "nvidia_uvm"], check=True)
    subprocess.run(["insmod", INSTALLED], check=True)
    NODE.unlink(missing_ok=True)
    major = re.search(r"^\s*(\d+) nvidia-uvm$", Path("/proc/devices").read_text(), re.M)[1]
    os.mknod(NODE, stat.S_IFCHR | 0o666, os.makedev(int(major), 0))


def altered(pattern, replacement):
    """The patched module with some bytes of the same number replaced: OTHER."""
    text = PATCHED.read_bytes()
    assert text.count(pattern) >= 1 and len(pattern) == len(replacement), pattern
    OTHER.write_bytes(text.replace(pattern, replacement))
    return OTHER


def refuses(before, *args):
    """load.py fails and leaves the very module that was there; returns what it said."""
    was = identity()
    rc, said = load_py(*args)
    assert rc == 1 and said.startswith("error: "), (rc, said)
    assert loaded() == before and identity() == was, said
    return said


def test_load_and_back():
    start()
    assert loaded() == "stock"
    rc, said = load_py("load", PATCHED)
    assert rc == 0 and "make module-unload" in said and str(INSTALLED) in said, said
    assert loaded() == "patched"
    rc, said = load_py("unload")
    assert rc == 0, said
    assert loaded() == "stock"
    assert INSTALLED.read_bytes() == STOCK.read_bytes()


def test_load_with_parameters():
    start()
    assert load_py("load", PATCHED, "uvm_vmem_confidential=1")[0] == 0
    assert (MODULE / "parameters/uvm_vmem_confidential").read_text().strip() == "Y"


def test_held_device_is_refused():
    start()
    with NODE.open("r+b", buffering=0):
        said = refuses("stock", "load", PATCHED)
    assert f"({os.getpid()})" in said, said
    assert load_py("load", PATCHED)[0] == 0
    with NODE.open("r+b", buffering=0):
        said = refuses("patched", "unload")
    assert f"({os.getpid()})" in said, said
    assert load_py("unload")[0] == 0


def test_module_of_another_release():
    start()
    release = Path("/sys/module/nvidia/version").read_text().strip()
    other = release[:-1] + ("9" if release[-1] != "9" else "8")
    said = refuses("stock", "load", altered(f"\0version={release}\0".encode(), f"\0version={other}\0".encode()))
    assert release in said and other in said, said


def test_module_of_another_kernel():
    start()
    kernel = os.uname().release
    other = "9" + kernel[1:]
    said = refuses("stock", "load", altered(f"vermagic={kernel} ".encode(), f"vermagic={other} ".encode()))
    assert other in said, said


def fails_and_falls_back(*args):
    """The load gets as far as the kernel, which refuses; the stock module is loaded again."""
    rc, said = load_py("load", *args)
    assert rc == 1 and "insmod" in said and "The stock module is loaded again" in said, said
    assert loaded() == "stock"


def test_module_that_the_kernel_refuses():
    start()
    fails_and_falls_back(altered(b" SMP preempt ", b" SMP prelude "))


def test_module_that_cannot_be_linked():
    start()
    fails_and_falls_back(altered(b"\0nvUvmInterfaceRegisterGpu\0", b"\0nvUvmInterfaceRegisterCpu\0"))


def test_parameter_that_the_module_refuses():
    start()
    fails_and_falls_back(PATCHED, "uvm_vmem_confidential=much")


def main():
    INSTALLED.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(STOCK, INSTALLED)
    failed = 0
    for name, test in [(n, t) for n, t in globals().items() if n.startswith("test_")]:
        try:
            test()
            print(f"ok {name}", flush=True)
        except Exception as e:
            failed += 1
            print(f"not ok {name} - {type(e).__name__}: {e}", flush=True)
    if MODULE.is_dir():
        subprocess.run(["rmmod", "nvidia_uvm"], check=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
