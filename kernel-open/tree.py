# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""A build tree: the parts of NVIDIA's kernel-open that nvidia-uvm.ko needs, with vMem's hooks and sources in place."""

import os
import re
import shutil
from pathlib import Path

from insert import insert

# Which of the driver's interfaces a tree has, for uvm_vmem_compat.h
FEATURES = "uvm_vmem_features.h"

HERE = Path(__file__).resolve().parent
UVM_EXT = HERE.parent / "uvm_ext"

# nvidia/ only for its share of the conftest list; what a build leaves behind is not copied.
_FOLDERS = ("common", "nvidia", "nvidia-uvm")
_LEFT_OUT = shutil.ignore_patterns(
    ".*", "*.o", "*.ko", "*.mod", "*.mod.c", "*_binary", "conftest", "modules.order", "Module.symvers", "uvm_ext"
)
_OURS = ("vmem.mk", "stock-symvers.sh")

# Said to the make that called us, and not meant for Kbuild. MAKELEVEL alone makes a nested `make` print the folders it
# enters, and DKMS takes what it prints for the name of a compiler.
_NOT_KBUILDS = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "KERNEL", "KERNELRELEASE", "UVM_BUILD_TYPE",
                "KBUILD_EXTRA_SYMBOLS", "CC", "CFLAGS", "V")  # fmt: skip


def kbuild_environment():
    """The environment without what was said to the calling make."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_KBUILDS}


def unversioned(log):
    """The line in which vmem.mk says that a module has no symbol versions, None if it has them."""
    return next((line for line in log.splitlines() if "no symbol versions:" in line), None)


def _write(path, text):
    # Untouched when nothing changed, so that make rebuilds only what did.
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def features(nvidia_uvm, listed=UVM_EXT / "features.list"):
    """Text of the feature header for one nvidia-uvm folder, from lines of "NAME file regular-expression"."""
    lines = ["// Generated from features.list and the driver's source.\n", "#pragma once\n"]
    for line in Path(listed).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            name, file, pattern = line.split(None, 2)
            path = Path(nvidia_uvm) / file
            found = path.is_file() and re.search(pattern, path.read_text())
            lines.append(f"#define {name} {int(bool(found))}\n")
    return "".join(lines)


def prepare(src, tree):
    """Make `tree` the build tree of the driver tree `src`; one of a former run is brought up to date."""
    src, tree = Path(src), Path(tree)
    if not (tree / "Kbuild").is_file():
        part = tree.with_name(tree.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for folder in _FOLDERS:
            shutil.copytree(src / folder, part / folder, ignore=_LEFT_OUT)
        for path in src.iterdir():
            if path.is_file() and not _LEFT_OUT(str(src), [path.name]):
                shutil.copy2(path, part / path.name)
        insert(part)
        shutil.rmtree(tree, ignore_errors=True)
        part.rename(tree)
    insert(tree)  # refuses a tree with other hooks than today's

    ours = tree / "nvidia-uvm" / "uvm_ext"
    sources = [path for path in sorted(UVM_EXT.iterdir()) if path.suffix in (".c", ".h", ".Kbuild")]
    for path in sources:
        _write(ours / path.name, path.read_text())
    _write(ours / FEATURES, features(tree / "nvidia-uvm"))
    for path in ours.glob("*.[ch]"):
        if path.name not in {source.name for source in sources} | {FEATURES}:
            path.unlink()
    for name in _OURS:
        _write(tree / name, (HERE / name).read_text())
