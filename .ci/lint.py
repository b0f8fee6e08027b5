"""Looks at the whole tree with clang-format, ruff and mypy; --fix brings it into form instead.

The releases are pinned, in pyproject.toml's extra "dev": formatter releases format differently. A tool is taken where
that release is found: beside this interpreter, beside the one given by --beside, on PATH. A tool that is not found is
installed beside this interpreter. Where that fails, one line names the tools that are missing, and it is no failure:
without a network `make check` says less, but works.

SPDX-License-Identifier: MIT
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
# A source distribution has no git.
OURS = {"libvmem", "pyvmem", "benchmarks", "uvm_ext", "kernel-open", "tests", "examples"}


def pins():
    """{tool: release} of the extra "dev"."""
    text = (TOP / "pyproject.toml").read_text()
    return dict(re.findall(r'"([a-z-]+)==([0-9.]+)"', re.search(r"^dev = \[(.*?)\]", text, re.M | re.S)[1]))


def find(tool, release, folders):
    """The path of a tool of exactly this release, or None."""
    for folder in folders:
        path = shutil.which(tool, path=folder)
        if path:
            said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            if re.search(rf"(?<![\d.]){re.escape(release)}(?![\d.])", said):
                return path
    return None


def tools(beside):
    """({tool: path}, [what is missing])."""
    folders = [str(Path(sys.executable).parent)]
    if beside and shutil.which(beside):
        folders.append(str(Path(shutil.which(beside)).parent))
    folders += os.environ.get("PATH", "").split(os.pathsep)
    wanted = pins()
    missing = [f"{t}=={r}" for t, r in wanted.items() if not find(t, r, folders)]
    if missing:
        print("installing", *missing, flush=True)
        # A package that this environment sees in another one would count as installed, without its command.
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--ignore-installed"]
        subprocess.run([*pip, *missing], capture_output=True)
    found = {t: find(t, r, folders) for t, r in wanted.items()}
    return {t: p for t, p in found.items() if p}, [f"{t} {wanted[t]}" for t, p in found.items() if not p]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="format instead of looking")
    parser.add_argument("--beside", help="an interpreter whose folder may hold the tools")
    options = parser.parse_args()
    have, missing = tools(options.beside)
    if missing:
        print("skipped, since neither installed nor installable:", ", ".join(missing))

    sources = [str(p.relative_to(TOP)) for p in sorted(TOP.glob("*/**/*.[ch]")) if p.relative_to(TOP).parts[0] in OURS]
    if options.fix:
        commands = {"clang-format": [["-i", *sources]], "ruff": [["format"]]}
    else:
        mypy = ["--config-file", "pyproject.toml", "--cache-dir", "build/mypy", "--python-executable", sys.executable]
        commands = {
            "mypy": [mypy],
            "clang-format": [["--dry-run", "-Werror", *sources]],
            "ruff": [["check"], ["format", "--check"]],
        }

    def run(tool, words):
        done = subprocess.run(
            [have[tool], *words], cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return tool, done

    failed = False
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, tool, words) for tool, lines in commands.items() if tool in have for words in lines]
        for job in jobs:
            tool, done = job.result()
            if done.returncode:
                failed = True
                print(f"{tool}:\n{done.stdout.rstrip()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
