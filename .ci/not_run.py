"""Runs a command and passes on what it says; at the end, lists what it did not run, and why.

    not_run.py COMMAND...           fails, too, if something was left out that not_run.txt does not list
    not_run.py --none COMMAND...    fails if anything was left out

Every tool that leaves something out says so in one line, which is easily missed among a thousand others, and what every
environment leaves out is tested nowhere. not_run.txt says for each such line what runs it instead. VMEM_HAS names the
kinds of that list, with commas, that this environment has: their lines are failures here.

SPDX-License-Identifier: MIT
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# A C program or a target (skip NAME: WHY), an installer (skipped: WHY), pytest's summary and its header (a backend).
LEFT_OUT = re.compile(r"skip \S.*|(test_\w+: )?skipped[:,] .*|SKIPPED \[.*|not tested: .*")
COUNT = re.compile(r".*[1-9]\d* skipped$")  # of lines that say why
LIST = Path(__file__).resolve().with_suffix(".txt")


def entries(path=LIST):
    """[(kind, what runs it instead, pattern)]"""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split("|", 2)) for line in lines]


def unlisted(lines, has=()):
    """Those that no entry fits, but for entries of the kinds that this environment has."""
    patterns = [re.compile(pattern) for kind, _, pattern in entries() if kind not in has]
    return [line for line in lines if not any(pattern.fullmatch(line) for pattern in patterns)]


def main(command):
    none = command[0] == "--none"
    process = subprocess.Popen(command[none:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = b""
    try:
        while part := os.read(process.stdout.fileno(), 65536):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
            said += part
        status = process.wait()
    except KeyboardInterrupt:
        status = process.wait() or 130
    lines = dict.fromkeys(line.strip() for line in said.decode(errors="replace").splitlines())
    found = [line for line in lines if LEFT_OUT.fullmatch(line)]
    if found:
        counts = [line for line in lines if COUNT.fullmatch(line) and line not in found]
        print("\nnot run here, and why:", *found, *counts, sep="\n  ", flush=True)
    wrong = found if none else unlisted(found, os.environ.get("VMEM_HAS", "").split(","))
    if wrong:
        print("\nmust not be left out here (.ci/not_run.txt):", *wrong, sep="\n  ", flush=True)
    return status or int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
