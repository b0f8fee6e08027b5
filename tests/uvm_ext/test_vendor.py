# SPDX-License-Identifier: MIT
"""Our ioctl numbers and status values beside NVIDIA's headers: argv is test_abi's path, then trees of the driver.

Exits 77, saying why, when there is no tree.
"""

import re
import subprocess
import sys
from pathlib import Path

TYPE = 0xBA
PLAIN = re.compile(r"^#define\s+(UVM_(?:DE)?INITIALIZE)\s+(0x[0-9A-Fa-f]+)\s*$", re.M)
TEST_BASE = re.compile(r"^#define\s+UVM_TEST_IOCTL_BASE\(i\)\s+UVM_IOCTL_BASE\((\d+)\s*\+\s*i\)", re.M)
STATUS = re.compile(r"^NV_STATUS_CODE\((\w+),\s*(0x[0-9A-Fa-f]+)", re.M)


def vendor_numbers(uvm):
    """{name: number} of every ioctl that UVM declares."""
    test_header = (uvm / "uvm_test_ioctl.h").read_text()
    base = int(TEST_BASE.search(test_header)[1])
    numbers = {}
    for name in ("uvm_ioctl.h", "uvm_linux_ioctl.h", "uvm_test_ioctl.h"):
        text = (uvm / name).read_text()
        for match in re.finditer(r"^#define\s+(\w+)\s+UVM_(TEST_)?IOCTL_BASE\((\d+)\)", text, re.M):
            numbers[match[1]] = int(match[3]) + (base if match[2] else 0)
        numbers.update((n, int(v, 16)) for n, v in PLAIN.findall(text))
    return numbers


def check(tree, calls, statuses):
    """Number of upstream ioctls looked at; a list of what is wrong."""
    uvm = tree / "nvidia-uvm"
    theirs = vendor_numbers(uvm)
    wrong = [
        f"{name} is upstream's {other}"
        for name, value in calls.items()
        for other, number in theirs.items()
        if number == value
    ]
    # Not only the numbers of today: the whole block is ours.
    wrong += [f"upstream's {name} 0x{n:x} lies in our block" for name, n in theirs.items() if (n >> 8) & 0xFF == TYPE]
    codes = {n: int(v, 16) for n, v in STATUS.findall((tree / "common/inc/nvstatuscodes.h").read_text())}
    wrong += [f"{name} is 0x{codes.get(name, -1):x} upstream" for name, v in statuses.items() if codes.get(name) != v]
    if len(theirs) < 60:
        wrong.append(f"found only {len(theirs)} ioctls: the headers are not what this test reads")
    return len(theirs), wrong


def main():
    lines = [line.split() for line in subprocess.check_output([sys.argv[1]], text=True).splitlines()]
    calls = {name: int(value, 16) for kind, name, value in lines if kind == "call"}
    statuses = {name: int(value, 16) for kind, name, value in lines if kind == "status"}
    trees = [Path(p) for p in sys.argv[2:] if (Path(p) / "nvidia-uvm" / "uvm_ioctl.h").is_file()]
    if not trees:
        print("test_vendor: skipped: no source tree of the driver (NVIDIA_SRC, /usr/src/nvidia-*, build/nvidia)")
        return 77
    failed = False
    for tree in trees:
        count, wrong = check(tree, calls, statuses)
        print(f"test_vendor: {tree}: {count} ioctls and {len(statuses)} status values", "WRONG" if wrong else "agree")
        for text in wrong:
            print(f"  {text}")
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
