# SPDX-License-Identifier: MIT
"""Seeded faults in libvmem, each of which a named program of tests/c must notice.

A mutant is one changed line. Its file is compiled again and linked with the objects of `make check`, and the programs
named for it run until one fails. A mutant that survives all of them is an error, and so is one whose text is no longer
in the source once: then it has to follow the source. A mutant that hangs counts as noticed. `mutants.py NAME...` runs a
part, `-l` lists them.
"""

import concurrent.futures
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mutant_list import MUTANTS

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
BUILD = TOP / "build" / "tests-c" / "plain"
CC = os.environ.get("CC", "cc")
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", f"-I{TOP}/libvmem/include", f"-I{TOP}/libvmem/src", "-O1"]
WRAPPED = "malloc calloc realloc munmap sysinfo fallocate vmem__host_memory"
WRAP = "-Wl," + ",".join(f"--wrap={name}" for name in WRAPPED.split())
LIMIT = 30  # seconds; the programs named here take a few


def mutated(mutant):
    """The text of the mutant's file with the fault in it."""
    text = (TOP / "libvmem" / "src" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant {mutant.name}: its text is {text.count(mutant.old)} times in {mutant.file}, not once")
    return text.replace(mutant.old, mutant.new)


def run(mutant):
    """The program that noticed the mutant, or None."""
    objects = {p.relative_to(BUILD / "libvmem" / "src"): p for p in (BUILD / "libvmem" / "src").rglob("*.o")}
    # Objects of sources that are gone may lie there still.
    objects = {name: p for name, p in objects.items() if (TOP / "libvmem" / "src" / name.with_suffix(".c")).is_file()}
    with tempfile.TemporaryDirectory(prefix="mutant") as tmp:
        source, obj = Path(tmp, Path(mutant.file).name), Path(tmp, "mutant.o")
        source.write_text(mutated(mutant))
        subprocess.run([CC, *FLAGS, "-w", "-c", source, "-o", obj], check=True)
        objects[Path(mutant.file).with_suffix(".o")] = obj
        for program in mutant.programs.split():
            exe = Path(tmp, program)
            kernels = [BUILD / "kernels.o"] if program == "test_kv_fences" else []
            parts = [BUILD / f"{program}.o", *objects.values(), BUILD / "checked.o", *kernels]
            subprocess.run([CC, WRAP, *parts, "-pthread", "-ldl", "-o", exe], check=True)
            try:
                code = subprocess.run([exe, "host"], timeout=LIMIT, capture_output=True, cwd=tmp).returncode
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
            print(f"{m.name:44} {m.file:24} {m.programs}")
        return 0
    chosen = [m for m in MUTANTS if not names or m.name in names]
    for m in chosen:
        mutated(m)
    programs = sorted({p for m in chosen for p in m.programs.split()})
    make = ["make", "--no-print-directory", "-C", HERE, "run", "KIND=plain", f"T={' '.join(programs)}"]
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
