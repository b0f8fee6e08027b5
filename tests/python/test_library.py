"""The library as others link it: what it exports, what its archive adds to a program's names, and how its rooms stand.

SPDX-License-Identifier: MIT
"""

import re
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
SOURCE = TOP / "libvmem" / "src"


@pytest.fixture(scope="module")
def built():
    """The folder of libvmem.a and libvmem.so, up to date."""
    subprocess.run(["make", "-s", "lib"], cwd=TOP, check=True)
    return TOP / "build"


def without_comments(text):
    return re.sub(r"//.*|/\*[\s\S]*?\*/", "", text)


def declared():
    """Every function that the public headers declare."""
    text = "".join(without_comments(p.read_text()) for p in sorted((TOP / "libvmem/include").glob("*.h")))
    return set(re.findall(r"^[a-z][\w \*]*?\b(vMem\w+|vmem_\w+)\(", text, re.M))


def names(*command):
    """What nm says: {name: kind}."""
    out = subprocess.run(["nm", *command], capture_output=True, text=True, check=True).stdout
    return {m[2]: m[1] for m in re.finditer(r"^[0-9a-f]{16} ([A-Z]) (\S+)$", out, re.M)}


def test_what_is_declared_is_exported_and_nothing_else(built):
    listed = re.findall(r"^\s+(\w+);$", (TOP / "libvmem/libvmem.map").read_text(), re.M)
    exported = names("-D", "--defined-only", built / "libvmem.so")
    functions = {name.split("@")[0] for name, kind in exported.items() if kind == "T"}
    assert len(listed) == len(set(listed))
    assert set(listed) == declared()
    assert functions == declared()


def test_every_symbol_of_the_archive_has_the_prefix(built):
    assert [n for n in names("-g", "--defined-only", built / "libvmem.a") if not re.match("vmem_|vMem|kv_", n)] == []


def test_each_room_knows_only_the_one_below_it():
    """kv, core, backend, driver, from the top; error.h is everybody's. No backend includes another."""
    below = {"kv": "core", "core": "backend", "backend": "driver", "driver": None}
    wrong = []
    for path in sorted(SOURCE.rglob("*.[ch]")):
        room = path.relative_to(SOURCE).parent
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            other = Path(name).parent
            if not (SOURCE / name).is_file() or other.parts[0] == ".." or name == "core/error.h":
                continue  # a public header, the kernel's, everybody's
            if other not in (room, Path(room.parts[0]), Path(below[room.parts[0]] or room.parts[0])):
                wrong.append(f"{path.relative_to(SOURCE)} includes {name}")
    assert wrong == []


def test_the_kernel_header_is_declared_once():
    """No file of ours but the header gives one of its names a value."""
    header = without_comments((TOP / "uvm_ext/uvm_vmem_ioctl.h").read_text())
    status = without_comments((TOP / "uvm_ext/uvm_vmem_status.h").read_text())
    own = set(re.findall(r"#define (UVM_VMEM_\w+)", header)) - {"UVM_VMEM_IOCTL_H"}
    own |= set(re.findall(r"struct (uvm_vmem_\w+) \{", header)) | set(re.findall(r"(NV_ERR_\w+) =", status))
    again = []
    for path in [*SOURCE.rglob("*.[ch]"), *(TOP / "pyvmem").rglob("*.[ch]")]:
        text = without_comments(path.read_text())
        for name in re.findall(r"#define (\w+)|struct (\w+) \{|^\s*(\w+) = 0x", text, re.M):
            again += [f"{path.relative_to(TOP)}: {n}" for n in name if n in own]
    assert own and again == []
