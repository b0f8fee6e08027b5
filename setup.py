"""What pyproject.toml has no field for: the extension, the version's source, the wheel's tag, and the description.

SPDX-License-Identifier: MIT
"""

import re
from pathlib import Path

from setuptools import setup

header = (Path(__file__).parent / "libvmem/include/vmem.h").read_text()
version = ".".join(re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def standing_alone(markdown):
    """The README outside the repository: what its links and pictures lead to is not there."""
    markdown = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", markdown, flags=re.M)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", markdown)


setup(
    version=version,
    long_description=standing_alone((Path(__file__).parent / "README.md").read_text()),
    long_description_content_type="text/markdown",
    cffi_modules=["pyvmem/_ffi_build.py:builder"],
    # cffi compiles against the limited API, so one wheel serves every Python from 3.10 on.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
