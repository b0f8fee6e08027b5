#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Try the hooks on every driver release within reach, and print which of them they fit.

SRC is a git repository of NVIDIA's open kernel modules (every release tag is read, nothing is checked out), or a folder
of unpacked trees.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from hooks import HOOKS
from insert import InsertError, patched, tree_patched

_TAG = re.compile(r"\d+\.\d+(\.\d+)?$")


def _order(release):
    return tuple(int(part) for part in release.split("."))


def _git(repo, *args):
    return subprocess.run(["git", "-C", str(repo), *args], check=True, capture_output=True, text=True).stdout


def _git_reader(repo, tag):
    def read(file):
        try:
            return _git(repo, "show", f"{tag}:kernel-open/{file}")
        except subprocess.CalledProcessError:
            raise KeyError(file) from None

    return read


def check(src):
    """Yield (release, None or the error's text), oldest release first."""
    src = Path(src)
    if (src / ".git").exists() or (src / "HEAD").is_file():
        tags = sorted(filter(_TAG.match, _git(src, "tag").split()), key=_order)
        runs = [(tag, lambda tag=tag: patched(_git_reader(src, tag), tag)) for tag in tags]
    else:
        trees = [path for path in sorted(src.iterdir()) if path.is_dir()]
        trees = [(p.name, p if (p / "nvidia-uvm").is_dir() else p / "kernel-open") for p in trees]
        runs = [(name, lambda tree=tree: tree_patched(tree)) for name, tree in trees if (tree / "nvidia-uvm").is_dir()]
    for name, run in runs:
        try:
            run()
            yield name, None
        except InsertError as e:
            yield name, str(e)


def _report(results):
    branches = {}
    for name, error in results:
        branches.setdefault(name.split(".")[0], []).append((name, error))
    for branch, found in branches.items():
        fit = [name for name, error in found if error is None]
        print(f"{branch}: {len(fit)} of {len(found)} match" + (f": {' '.join(fit)}" if fit else ""))
        reasons = {}
        for name, error in found:
            if error is not None:
                reasons.setdefault(error.replace(name, "*"), []).append(name)
        for reason, names in reasons.items():
            print(f"  {' '.join(names)}:\n    {reason}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("src", help="git repository with release tags, or a folder of trees")
    args = parser.parse_args()
    try:
        results = list(check(args.src))
    except (OSError, subprocess.CalledProcessError) as e:
        print(f"error: {args.src}: neither a git repository nor a folder of trees ({e})", file=sys.stderr)
        return 2
    _report(results)
    fit = sum(error is None for _, error in results)
    print(f"{fit} of {len(results)} releases match all {len(HOOKS)} hooks")
    return 0 if results and fit else 1


if __name__ == "__main__":
    sys.exit(main())
