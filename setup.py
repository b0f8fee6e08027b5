# SPDX-License-Identifier: MIT
from setuptools import setup

setup(cffi_modules=["pyvmem/_ffi_build.py:builder"])  # pyproject.toml has no field for it
