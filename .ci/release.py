"""Checks that a release is one: the version is the same everywhere, and, of a tag that is being published, its name.

    release.py         in the release workflow, and by tests/python/test_builds.py

SPDX-License-Identifier: MIT
"""

import os
import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
# Where the version stands besides libvmem/include/vmem.h, which the build reads.
PLACES = {
    "CITATION.cff": r"^version: (\S+)",
    "CHANGELOG.md": r"^## (\S+)",
    "packaging/debian/changelog": r"^vmem \((\S+)\)",
    "packaging/conda/recipe.yaml": r"^  version: (\d\S+)",
}


def version():
    header = (TOP / "libvmem/include/vmem.h").read_text()
    return ".".join(re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def disagreements(ref=""):
    """The reasons that prevent a release, in words. ref: the tag that is published."""
    found = {"the tag": ref.removeprefix("refs/tags/v")} if ref.startswith("refs/tags/") else {}
    for file, pattern in PLACES.items():
        found[file] = re.search(pattern, (TOP / file).read_text(), re.M)[1]
    said = [f"{place} says {other}, vmem.h {version()}" for place, other in found.items() if other != version()]
    heading = re.search(r"^## .*", (TOP / "CHANGELOG.md").read_text(), re.M)[0]
    if "the tag" in found and "not released" in heading:
        said.append(f"CHANGELOG.md still says {heading!r}: write the date")
    if "the tag" in found and "UNRELEASED" in (TOP / "packaging/debian/changelog").read_text().partition("\n")[0]:
        said.append("packaging/debian/changelog still says UNRELEASED: write unstable")
    return said


if __name__ == "__main__":
    sys.exit("\n".join(disagreements(os.environ.get("GITHUB_REF", ""))) or None)
