# The binding that cffi builds: see _ffi_build.py.
from typing import Any

ffi: Any
lib: Any
