# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""The feature header: which of the driver's interfaces a tree has, found by looking for them in its source."""

import re
from pathlib import Path

HEADER = "uvm_vmem_features.h"


def header(nvidia_uvm, features):
    """Text of the header for one nvidia-uvm folder.

    `features` is the list of what to look for: lines of "NAME file regular-expression", of which each becomes a macro
    that is 1 where the expression matches in the folder's file and 0 elsewhere.
    """
    lines = ["// Generated from features.list and the driver's source.\n", "#pragma once\n"]
    for line in Path(features).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            name, file, pattern = line.split(None, 2)
            path = Path(nvidia_uvm) / file
            found = path.is_file() and re.search(pattern, path.read_text())
            lines.append(f"#define {name} {int(bool(found))}\n")
    return "".join(lines)
