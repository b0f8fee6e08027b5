# SPDX-License-Identifier: MIT
"""Seeded faults in libvmem, each of which a named program of tests/c must notice.

A mutant is a function with one fault (mutation.py). Its file is compiled again and linked with the objects of `make
check`, and the programs named for it run until one fails. A mutant that survives all of them is an error, and so is one
whose function or tokens are gone: then it has to follow the source. A mutant that hangs counts as noticed. `mutants.py
NAME...` runs a part: names of mutants, or of folders such as kv. `-l` lists them.
"""

import concurrent.futures
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mutant_list import MUTANTS
from mutation import SRC

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
BUILD = TOP / "build" / "tests-c" / "plain"
CC = os.environ.get("CC", "cc")
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", f"-I{TOP}/libvmem/include", f"-I{TOP}/libvmem/src", "-O1"]
WRAPPED = "malloc calloc realloc munmap sysinfo fallocate vmem__host_memory"
WRAP = "-Wl," + ",".join(f"--wrap={name}" for name in WRAPPED.split())
LIMIT = 30  # seconds, and five times what the program takes without a mutant: a slow machine is no hang


def limit(program):
    """The seconds after which it hangs, by those that run.sh has just taken."""
    _, seconds = (BUILD / f"{program}.host.rc").read_text().split()
    return LIMIT + 5 * int(seconds)


def run(mutant):
    """The program that noticed the mutant, or None."""
    objects = {p.relative_to(BUILD / "libvmem" / "src"): p for p in (BUILD / "libvmem" / "src").rglob("*.o")}
    # Objects of sources that are gone may lie there still.
    objects = {name: p for name, p in objects.items() if (SRC / name.with_suffix(".c")).is_file()}
    path, text = mutant.apply()
    with tempfile.TemporaryDirectory(prefix="mutant") as tmp:
        source, obj = Path(tmp, path.name), Path(tmp, "mutant.o")
        source.write_text(text)
        subprocess.run([CC, *FLAGS, "-w", "-c", source, "-o", obj], check=True)
        objects[path.relative_to(SRC).with_suffix(".o")] = obj
        for program in mutant.programs.split():
            exe = Path(tmp, program)
            kernels = [BUILD / "kernels.o"] if program == "test_kv_fences" else []
            parts = [BUILD / f"{program}.o", *objects.values(), BUILD / "checked.o", *kernels]
            subprocess.run([CC, WRAP, *parts, "-pthread", "-ldl", "-o", exe], check=True)
            try:
                code = subprocess.run([exe, "host"], timeout=limit(program), capture_output=True, cwd=tmp).returncode
            except subprocess.TimeoutExpired:
                return f"{program} (hung)"
            if code == 77:
                raise SystemExit(f"{program} cannot run here")
            if code:
                return program
    return None


def main(names):
    if names == ["-l"]:
        for m in MUTANTS:
            print(f"{m.name:54} {m.where:32} {m.programs}")
        return 0
    chosen = [m for m in MUTANTS if not names or m.name in names or m.where.split("/")[0] in names]
    try:
        for m in chosen:
            m.apply()
    except LookupError as error:
        sys.exit(str(error))
    programs = sorted({p for m in chosen for p in m.programs.split()})
    make = ["make", "--no-print-directory", "-C", HERE, "run", "KIND=plain", "BACKENDS=host", f"T={' '.join(programs)}"]
    subprocess.run(make, check=True)
    alive = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for m, by in zip(chosen, pool.map(run, chosen)):
            print(f"{m.name:44} {by or 'SURVIVED'}", flush=True)
            alive += [] if by else [m.name]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants noticed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
