"""Runs a command and passes on what it says; at the end, lists what it did not run, and why: `not_run.py COMMAND...`

Every tool that leaves something out says so in one line, which is easily missed among a thousand others. Exit status:
the command's.

SPDX-License-Identifier: MIT
"""

import os
import re
import subprocess
import sys

# A C program or a target (skip NAME: WHY), an installer (skipped: WHY), pytest's summary and its header (a backend).
LEFT_OUT = re.compile(r"skip \S.*|skipped[:,] .*|SKIPPED \[.*|not tested: .*|.*[1-9]\d* skipped$")


def main(command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = b""
    try:
        while part := os.read(process.stdout.fileno(), 65536):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
            said += part
        status = process.wait()
    except KeyboardInterrupt:
        status = process.wait() or 130
    lines = (line.strip() for line in said.decode(errors="replace").splitlines())
    found = list(dict.fromkeys(line for line in lines if LEFT_OUT.fullmatch(line)))
    if found:
        print("\nnot run here, and why:", *found, sep="\n  ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
