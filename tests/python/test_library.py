"""The library as others link it: what it exports, what its archive adds to a program's names, and how its rooms stand.

SPDX-License-Identifier: MIT
"""

import re
import subprocess
from pathlib import Path

import pytest

import pyvmem
from conftest import python

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
    """The output of nm: {name: kind}."""
    out = subprocess.run(["nm", *command], capture_output=True, text=True, check=True).stdout
    return {m[2]: m[1] for m in re.finditer(r"^[0-9a-f]{16} ([A-Z]) (\S+)$", out, re.M)}


def test_what_is_declared_is_exported_and_nothing_else(built):
    exported = names("-D", "--defined-only", built / "libvmem.so")
    functions = {name.split("@")[0] for name, kind in exported.items() if kind == "T"}
    assert functions == declared()


def test_every_symbol_of_the_archive_has_the_prefix(built):
    assert [n for n in names("-g", "--defined-only", built / "libvmem.a") if not re.match("vmem_|vMem", n)] == []


def test_each_room_knows_only_the_one_below_it():
    """torch, blocks and kv, pool, core, backend, driver, from the top. No backend includes another.

    A pool's members, which are caches, blocks and leases, call it, and it calls them by the table in member.h alone.
    .ci/circles.py looks at the order of the files.
    """
    below = {
        "torch": ["pool", "core"],
        "blocks": ["pool", "core"],
        "kv": ["pool", "core"],
        "pool": ["core"],
        "core": ["backend"],
        "backend": ["driver"],
    }
    everybodys = {"core/error.h"}
    wrong = []
    for path in sorted(SOURCE.rglob("*.[ch]")):
        name_of = path.relative_to(SOURCE).as_posix()
        room = path.relative_to(SOURCE).parent
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            other = Path(name).parent
            if not (SOURCE / name).is_file() or other.parts[:1] == ("..",) or name in everybodys:
                continue  # a public header, the kernel's, everybody's
            known = [room, *map(Path, room.parts[:1]), *(Path(b) for r in room.parts[:1] for b in below.get(r, []))]
            lease = name_of == "torch/lease.c" and name == "driver/kernels.h"
            if other not in known and not lease:
                wrong.append(f"{name_of} includes {name}")
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


PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "vmem.h"
int main(void)
{
    struct { struct vmem_options o; uint64_t guard; } in = {.o = {.size = sizeof in.o, .backend = "host"}, .guard = 7};
    struct { struct vmem_stats s; uint64_t guard; } out = {.s = {.size = sizeof out.s}, .guard = 7};
    vmem_context *ctx;
    vmem_page page;
    if (vmem_context_create(&in.o, &ctx) || vMemCreate(ctx, VMEM_PAGE_64K, 1, 0, &page)
            || vmem_context_stats(ctx, &out.s)) {
        printf("%s\n", vmem_last_error());
        return 1;
    }
    printf("%u %u %llu %llu", out.s.size == sizeof out.s, vmem_version() == VMEM_VERSION,
           (unsigned long long)out.s.created, (unsigned long long)out.guard);
#ifdef NEWER
    printf(" %llu", (unsigned long long)out.s.newer);
#endif
    vmem_context_destroy(ctx);
    return 0;
}
"""


@pytest.mark.parametrize("caller", ["same", "older", "newer"])
def test_a_program_compiled_with_another_header(built, tmp_path, caller):
    """The library takes and gives structures of an earlier and of a later version, and the versions can be compared."""
    header = (TOP / "libvmem/include/vmem.h").read_text()
    if caller == "older":
        header, n = re.subn(r"    uint64_t budget; +// most bytes.*\n", "", header)
        header, m = re.subn(r"    uint64_t absent; .*\n", "", header)
        assert n == m == 1
    elif caller == "newer":
        for last in (r"    uint64_t budget; +// most bytes.*\n", r"    uint64_t absent; .*\n"):
            header, n = re.subn(rf"({last})", r"\1    uint64_t newer, newest;\n", header)
            assert n == 1
    if caller != "same":
        header = re.sub(r"(VMEM_VERSION_PATCH) \d+", r"\1 77", header)
    (tmp_path / "vmem.h").write_text(header)
    (tmp_path / "program.c").write_text(PROGRAM)
    flags = ["-DNEWER"] if caller == "newer" else []
    libs = ["-L", built, "-lvmem", f"-Wl,-rpath,{built}"]
    subprocess.run(["cc", "-Wall", "-Werror", *flags, "program.c", "-o", "program", *libs], cwd=tmp_path, check=True)
    said = subprocess.run(["./program"], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    assert said.stdout.split() == ["1", str(int(caller == "same")), "65536", "7", *(["0"] if caller == "newer" else [])]


def test_pyvmem_refuses_another_version_of_the_library():
    code = """
    import importlib.util, pathlib, sys, types
    folder = importlib.util.find_spec("pyvmem").submodule_search_locations[0]
    path = next(pathlib.Path(folder).glob("_ffi*.so"))
    spec = importlib.util.spec_from_file_location("pyvmem._ffi", path)
    real = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real)

    class Other:
        vmem_version = staticmethod(lambda: 0x010203)

        def __getattr__(self, name):
            return getattr(real.lib, name)

    other = types.ModuleType("pyvmem._ffi")
    other.lib, other.ffi = Other(), real.ffi
    sys.modules["pyvmem._ffi"] = other
    try:
        import pyvmem
    except ImportError as error:
        assert "but runs libvmem 1.2.3" in str(error), error
    else:
        raise AssertionError
    """
    python(code)


def test_python_has_every_call_of_the_kv_cache():
    """Each call of C has its counterpart in pyvmem: the one of its name, or what docs/engine.md names."""
    files = [*(TOP / "pyvmem").rglob("*.py"), *(TOP / "pyvmem/native").glob("*.c")]
    text, page = "".join(p.read_text() for p in files), (TOP / "docs/engine.md").read_text()
    table = page[page.index("## C and Python") :]
    for name in (name for name in declared() if name.startswith("vmem_kv_")):
        assert re.search(rf"\b{name}\b", text), name
        short = name.removeprefix("vmem_kv_")
        assert f"`{short}`" in table or callable(getattr(pyvmem.KVCache, short, None)), name
