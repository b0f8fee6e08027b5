"""What pyproject.toml has no field for: the extension, the version's source, and the wheel's tag.

SPDX-License-Identifier: MIT
"""

import re
from pathlib import Path

from setuptools import setup

header = (Path(__file__).parent / "libvmem/include/vmem.h").read_text()
version = ".".join(re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))

setup(
    version=version,
    cffi_modules=["pyvmem/_ffi_build.py:builder"],
    # cffi compiles against the limited API, so one wheel serves every Python from 3.10 on.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
