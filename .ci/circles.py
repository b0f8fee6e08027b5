"""Looks whether the calls between the files of a folder of libvmem only go down: each calls only files that ORDER lists
before it. Where ORDER lists a folder, its files may call each other, but in no circle. Reads the objects that
`make lib` builds, with nm. The folders above core may include no more of it than core/memory.h. The files
of the kernel module stand in the order of uvm_ext.Kbuild. Their text is read, since they are built elsewhere. No files
of pyvmem import each other in a circle, not even for types or within a function, but for those of MUTUAL.

SPDX-License-Identifier: MIT
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
SOURCES = TOP / "libvmem/src"
# {folder: its files and folders, from below}
ORDER = {
    "driver": ["abi", "libcuda", "rm", "uvm", "kmod", "reserve", "stamp", "kernels"],
    "backend": ["absent", "gpu", "host/fork", "host/memory", "host/host", "cuda/cuda", "stock/pages", "stock/alias",
                "stock/stock", "uvm/batch", "uvm/arena", "uvm/uvm", "backends"],
    "core": ["error", "call", "reservation", "restore", "data", "arena", "batch", "map", "unmap", "drop",
             "account", "page", "commit", "common", "context"],
    "pool": ["table", "claim", "balance", "pool", "hold"],
    "blocks": ["state", "queue", "member", "pages", "worker", "blocks"],
    "kv": ["turn", "layout", "shared", "slot", "pages", "runs", "check", "budget", "gate",
           "reclaim", "request", "worker", "step", "attach", "cache", "member"],
    "torch": ["lease"],
}  # fmt: skip
# Files of pyvmem that know each other, and why.
MUTUAL = {
    ("owned", "core"),  # contexts make pages and reservations, which have a context
    ("sleep.sums_kernel", "sleep.sums"),  # the kernel's constants; its file is imported only where there is a Triton
    ("tools.top_screen", "tools.top"),  # the command, which also goes without a screen, and rich
}


def objects(folder):
    """{file of the folder: its object}."""
    built = TOP / "build/obj/libvmem/src" / folder
    found = {p.relative_to(built).with_suffix(""): p for p in sorted(built.rglob("*.o"))}
    return {str(name): p for name, p in found.items() if (SOURCES / folder / f"{name}.c").is_file()}


def calls(built):
    """{file: {file that it calls: a symbol}}."""
    symbols = {
        n: subprocess.run(["nm", o], check=True, capture_output=True, text=True).stdout for n, o in built.items()
    }
    words = {name: [line.split()[-2:] for line in text.splitlines()] for name, text in symbols.items()}
    where = {symbol: name for name, lines in words.items() for kind, symbol in lines if kind in "TDBRC"}
    return {
        name: {where[s]: s for kind, s in lines if kind == "U" and where.get(s, name) != name}
        for name, lines in words.items()
    }


def circle(arrows):
    """Files in a circle, the first one again at the end; or None."""
    done, path = set(), []

    def walk(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        for other in sorted(arrows[name]):
            if found := walk(other):
                return found
        done.add(path.pop())
        return None

    return next((found for name in sorted(arrows) if (found := walk(name))), None)


def rank(order, name):
    """Where a file is in the order; None: nowhere."""
    return next((i for i, entry in enumerate(order) if name == entry or name.startswith(f"{entry}/")), None)


def faults(folder, arrows):
    """The calls that break the order of a folder."""
    order = ORDER[folder]
    unknown = [name for name in arrows if rank(order, name) is None]
    yield from (f"{name}.c is not in the order" for name in unknown)
    yield from (
        f"{e} is in the order, and nowhere else"
        for i, e in enumerate(order)
        if not any(rank(order, n) == i for n in arrows)
    )
    for name, others in arrows.items():
        for other, symbol in others.items():
            if not {name, other} & set(unknown) and rank(order, other) > rank(order, name):
                yield f"{name}.c calls {symbol} in {other}.c, which comes later"
    if found := circle(arrows):
        yield from (f"{n}.c calls {arrows[n][o]} in {o}.c: a circle" for n, o in zip(found, found[1:]))


def module_upward():
    """The calls and includes in the kernel module of a file that stands later in uvm_ext.Kbuild."""
    folder = TOP / "uvm_ext"
    order = re.search(r"^UVM_VMEM_SOURCES := (.*)$", (folder / "uvm_ext.Kbuild").read_text(), re.M)[1].split()
    files = {path: path.stem.removeprefix("uvm_vmem_") for path in sorted(folder.glob("uvm_vmem_*.[ch]"))}
    for path, name in files.items():
        if path.suffix == ".c" and name not in order:
            yield f"{path.name} is not in uvm_ext.Kbuild"
    where = {}  # {function: the file that defines it}
    for path, name in files.items():
        if name in order:
            for function in re.findall(r"^(?!static)\w[\w *]*?\b(uvm_vmem_\w+)\([^;{]*\)\s*{", path.read_text(), re.M):
                where[function] = name
    for path, name in files.items():
        if name not in order:
            continue
        text = re.sub(r"//.*", "", path.read_text())
        for header in re.findall(r'^#include "uvm_vmem_(\w+)\.h"', text, re.M):
            if header in order and order.index(header) > order.index(name):
                yield f"{path.name} includes uvm_vmem_{header}.h"
        for function in sorted(set(re.findall(r"\b(uvm_vmem_\w+)\(", text))) if path.suffix == ".c" else ():
            if function in where and order.index(where[function]) > order.index(name):
                yield f"{path.name} calls {function} in uvm_vmem_{where[function]}.c"


def private_headers():
    """The files above core that read its fields instead of calling it."""
    for folder in ("blocks", "kv", "pool", "torch"):
        for path in sorted((SOURCES / folder).glob("*.[ch]")):
            if re.search(r'^#include "core/(?!memory\.h|error\.h)', path.read_text(), re.M):
                yield f"{folder}/{path.name} includes more of core than core/memory.h"


def imports():
    """{module of pyvmem: {module of pyvmem that it imports: itself}}."""
    files = {".".join(p.relative_to(TOP).with_suffix("").parts): p for p in sorted((TOP / "pyvmem").rglob("*.py"))}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found = {}
    for name, path in files.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        named = {(node.module, f"{node.module}.{each.name}") for node in nodes for each in node.names}
        others = {inner if inner in files else outer for outer, inner in named} & files.keys() - {name, "pyvmem"}
        found[name] = {other: other for other in others if (name[7:], other[7:]) not in MUTUAL}
    return found


def main():
    failed = False
    if found := circle(imports()):
        failed = True
        print(f"circle of imports: {' -> '.join(found)}")
    for line in private_headers():
        failed = True
        print(f"libvmem/src/{line}")
    for line in module_upward():
        failed = True
        print(f"uvm_ext: upward: {line}")
    for folder in ORDER:
        arrows = calls(objects(folder))
        if not arrows:
            print(f"circles: no objects of {folder} in build: run make lib")
            failed = True
        for line in faults(folder, arrows) if arrows else ():
            failed = True
            print(f"libvmem/src/{folder}: {line}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
