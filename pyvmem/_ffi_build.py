"""Builds pyvmem._ffi: libvmem and pyvmem/native compiled into one extension (cffi, API mode).

The declarations come from the headers themselves, so nothing is declared twice.

SPDX-License-Identifier: MIT
"""

import re
from collections.abc import Iterable
from pathlib import Path

from cffi import FFI

TOP = Path(__file__).resolve().parent.parent
INCLUDE = TOP / "libvmem" / "include"
NATIVE = TOP / "pyvmem" / "native"


def declarations(header: str) -> str:
    """The part of a header that cffi can read: no comments or conditionals; constants are left to the compiler."""
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", header), flags=re.S)
    text = text.replace("\\\n", " ")
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif", "", text, flags=re.S)
    text = re.sub(r"^#define[ \t]+(\w+)[ \t]+\S.*$", r"@\1 ...", text, flags=re.M)
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    return text.replace("@", "#define ")


def relative(paths: Iterable[Path]) -> list[str]:
    return sorted(str(p.relative_to(TOP)) for p in paths)


def headers() -> list[Path]:
    """Those that others include come first."""
    first = ["vmem.h", "vmem_kv.h", "vmem_kv_pool.h"]
    public = sorted(INCLUDE.glob("*.h"), key=lambda p: (first.index(p.name) if p.name in first else 3, p.name))
    return public + sorted(NATIVE.glob("*.h"))


builder = FFI()
for path in headers():
    builder.cdef(declarations(path.read_text()))
builder.cdef('extern "Python" int pv_run_handlers(void);')  # pyvmem/errors.py
builder.cdef('extern "Python" int pv_is_capturing(void);')  # pyvmem/tensor.py
builder.set_source(
    "pyvmem._ffi",
    "".join(f'#include "{path.name}"\n' for path in headers()),
    sources=relative((TOP / "libvmem" / "src").rglob("*.c")) + relative(NATIVE.glob("*.c")),
    depends=relative([*TOP.glob("libvmem/**/*.h"), *TOP.glob("uvm_ext/*.h"), *NATIVE.glob("*.h")]),
    include_dirs=["libvmem/include", "libvmem/src", "pyvmem/native"],
    # Errors since GCC 14 and clang 16, here with older ones too.
    extra_compile_args=["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-fvisibility=hidden"]
    + [f"-Werror={w}" for w in ("implicit-function-declaration", "implicit-int", "int-conversion", "return-type")],
    libraries=["dl", "pthread"],
)

if __name__ == "__main__":
    builder.compile(verbose=True)
