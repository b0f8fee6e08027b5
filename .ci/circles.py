"""Looks whether the calls between the files of a folder of libvmem only go down: no file may be called, through others
or directly, by one that it calls itself. Reads the objects that `make lib` builds, with nm. The KV-cache manager has
floors: a file neither calls a higher one nor includes its header.

SPDX-License-Identifier: MIT
"""

import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
SOURCES = TOP / "libvmem/src"
FOLDERS = ["core", "kv", "pool"]
FLOORS = ["book", "pages", "run", "memory", "request", "thread", "calls"]  # of kv, from below


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


def floor(name):
    return FLOORS.index(name.split("/")[0])


def upward(arrows):
    """What in kv calls a higher floor or includes one."""
    for name, others in arrows.items():
        for other, symbol in others.items():
            if floor(other) > floor(name):
                yield f"{name}.c calls {symbol} in {other}.c"
    for path in sorted((SOURCES / "kv").rglob("*.[ch]")):
        name = str(path.relative_to(SOURCES / "kv"))
        for header in re.findall(r'^#include "kv/(.*)"', path.read_text(), re.M):
            if floor(header) > floor(name):
                yield f"{name} includes {header}"


def main():
    failed = False
    for folder in FOLDERS:
        arrows = calls(objects(folder))
        if not arrows:
            print(f"circles: no objects of {folder} in build: run make lib")
            failed = True
        elif found := circle(arrows):
            failed = True
            print(f"libvmem/src/{folder}: calls in a circle:")
            for name, other in zip(found, found[1:]):
                print(f"  {name}.c calls {arrows[name][other]} in {other}.c")
        for line in upward(arrows) if folder == "kv" else ():
            failed = True
            print(f"libvmem/src/kv: upward: {line}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
