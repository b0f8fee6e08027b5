"""Looks whether the calls between the files of a folder of libvmem only go down: no file may be called, through others
or directly, by one that it calls itself. Reads the archive that `make lib` builds, with nm.

SPDX-License-Identifier: MIT
"""

import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
FOLDERS = ["core"]


def calls(objects):
    """{file: {file that it calls: a symbol}}."""
    symbols = {o.stem: subprocess.run(["nm", o], check=True, capture_output=True, text=True).stdout for o in objects}
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


def main():
    failed = False
    for folder in FOLDERS:
        objects = sorted((TOP / "build/obj/libvmem/src" / folder).rglob("*.o"))
        arrows = calls([o for o in objects if (TOP / "libvmem/src" / folder / f"{o.stem}.c").is_file()])
        if not arrows:
            print(f"circles: no objects of {folder} in build: run make lib")
            failed = True
        elif found := circle(arrows):
            failed = True
            print(f"libvmem/src/{folder}: calls in a circle:")
            for name, other in zip(found, found[1:]):
                print(f"  {name}.c calls {arrows[name][other]} in {other}.c")
    return failed


if __name__ == "__main__":
    sys.exit(main())
