# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Where NVIDIA's source and the kernel's headers come from: what the system has, else Debian's packages."""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

from insert import InsertError, release

# Debian's contrib carries one open driver release per suite.
_SUITES = ("bookworm", "trixie")
_PACKAGE = "nvidia-open-kernel-source"
_IN_PACKAGE = "./usr/src/nvidia-open-kernel.tar.xz"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class SourceError(Exception):
    """No source or no headers; the text says what was looked for and what to install or set."""


class Unavailable(SourceError):
    """The system has none, and none can be fetched: a test that needs it is skipped."""


def arguments(description):
    """A parser of the options that say what to build from, and for which kernel."""
    env = os.environ.get
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("--src", default=env("NVIDIA_SRC"), help="NVIDIA's tree; default: the installed driver's")
    parser.add_argument("--release", default=env("NVIDIA_RELEASE"), help="driver release or its beginning, as 550")
    parser.add_argument(
        "--kernel", default=env("KERNEL"), help="kernel to build for, or newest; default: the running one"
    )
    parser.add_argument("--cache", default="build/nvidia", help="where Debian's package is unpacked to")
    return parser


def order(text):
    """Sort key of a release such as "550.163.01"."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _matches(have, want):
    return not want or have == want or have.startswith(want + ".")


def _tree(path):
    """The folder under `path` that holds nvidia-uvm/, with its release; None where there is none."""
    for tree in (Path(path), Path(path) / "kernel-open"):
        if (tree / "nvidia-uvm" / "uvm.c").is_file():
            try:
                return tree, release(tree)
            except InsertError:
                return None
    return None


def _installed(root):
    trees = []
    for path in sorted((root / "usr/src").glob("nvidia-*")):
        # Our own DKMS packages carry hooks; they are made from these trees, not the other way round.
        if path.is_dir() and not path.name.startswith("nvidia-uvm-vmem-"):
            trees += filter(None, [_tree(path)])
    return sorted(trees, key=lambda found: order(found[1]))


def nvidia(src=None, want=None, cache="build/nvidia", root="/"):
    """Find the driver's kernel-open tree.

    Parameters
    ----------
    src : path, optional
        A tree or a checkout that holds one; nothing else is looked at.
    want : str, optional
        A release or its beginning ("550"). Default: the release of the loaded driver; where no driver is loaded, the
        newest tree under /usr/src. A module of any other release than the loaded one could not be loaded.
    cache : path
        Where Debian's package is unpacked to when the system has no tree.
    root : path
        What to take for "/".

    Returns
    -------
    (path, str)
        The tree and its release.
    """
    if src:
        found = _tree(src)
        if not found:
            raise SourceError(f"NVIDIA_SRC={src}: no nvidia-uvm/ with a release there")
        if not _matches(found[1], want):
            raise SourceError(f"NVIDIA_SRC={src} is release {found[1]}, NVIDIA_RELEASE asks for {want}")
        return found
    root = Path(root)
    loaded = root / "sys/module/nvidia/version"
    running = loaded.read_text().strip() if loaded.is_file() and not want else None
    want = want or running
    trees = _installed(root)
    installed = [found for found in trees if _matches(found[1], want)]
    if installed:
        return installed[-1]
    if running and trees:
        raise SourceError(
            f"the loaded driver is {running}, and the source under /usr/src is of {', '.join(t[1] for t in trees)}: "
            f"set NVIDIA_SRC to a tree of {running}, or NVIDIA_RELEASE to build for another release"
        )
    unpacked = sorted(filter(None, map(_tree, Path(cache).glob("*/"))), key=lambda found: order(found[1]))
    unpacked = [found for found in unpacked if _matches(found[1], want)]
    if unpacked and want:
        return unpacked[-1]
    with _alone(Path(cache)):
        return _fetch_debian(want, Path(cache))


@contextlib.contextmanager
def _alone(cache):
    """Wait until no other command fetches into this folder: one `make` builds for two releases at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _apt(folder, *args, tool="apt-get", **kwargs):
    # Sources, lists and archives of our own: the system's are never touched.
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Retries": "3",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return subprocess.run([tool, "-q", *flags, *args], check=True, text=True, **kwargs)


def _fetch_debian(want, cache):
    if not shutil.which("apt-get"):
        raise Unavailable(
            f"no driver source{f' of release {want}' if want else ''} under /usr/src/nvidia-*, and this is no Debian: "
            "set NVIDIA_SRC to NVIDIA's open-gpu-kernel-modules tree of the driver release that is installed"
        )
    apt = (cache / "apt").resolve()
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    mirrors = [line.split() for line in shown.splitlines()]
    # The archive's own mirror, not its security or updates sections.
    uris = [words[2] for words in mirrors if len(words) == 3 and words[0] in _SUITES and words[1] == "main"]
    if not uris:
        raise Unavailable("apt knows no Debian mirror: set NVIDIA_SRC")
    own = next(words[0] for words in mirrors if words[0] in _SUITES)
    signed = f"[signed-by={_KEYRING}] " if os.path.exists(_KEYRING) else ""
    lines = [f"deb {signed}{uris[0]} {suite} contrib\n" for suite in _SUITES]
    (apt / "sources.list").write_text("".join(lines))
    try:
        _apt(apt, "update", stdout=subprocess.DEVNULL)
        listed = _apt(apt, "madison", _PACKAGE, tool="apt-cache", capture_output=True).stdout
        # "package | version | mirror suite/contrib arch Packages"
        offers = [[word.strip() for word in line.split("|")] for line in listed.splitlines()]
        offers = [(version, where.split()[1].split("/")[0]) for _, version, where in offers]
        offers = [(version, suite) for version, suite in offers if _matches(version.split("-")[0], want)]
        if not want:
            offers = [offer for offer in offers if offer[1] == own] or offers
        if not offers:
            raise Unavailable(
                f"Debian's {_PACKAGE} has no release {want}: set NVIDIA_SRC to that release's tree, or NVIDIA_RELEASE "
                "to build for another"
            )
        version = max((version for version, _ in offers), key=order)
        tree = cache / version.split("-")[0]
        if not _tree(tree):
            _apt(apt, "download", f"{_PACKAGE}={version}", cwd=apt, stdout=subprocess.DEVNULL)
            _unpack(next(apt.glob(f"{_PACKAGE}_{version}_*.deb")), tree)
    except subprocess.CalledProcessError as e:
        raise Unavailable(f"fetching {_PACKAGE} failed: {' '.join(map(str, e.cmd[:1] + e.cmd[-2:]))} "
                          f"exited {e.returncode}") from None  # fmt: skip
    return _tree(tree)


def _unpack(package, tree):
    part = tree.with_name(tree.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    # The RM's binary is nine tenths of the tree and no part of nvidia-uvm.ko.
    script = (
        'dpkg-deb --fsys-tarfile "$1" | tar -xO "$2" | '
        "tar -xJ -C \"$3\" --strip-components=2 --exclude='*_binary' modules/nvidia-open-kernel"
    )
    subprocess.run(["bash", "-o", "pipefail", "-ec", script, "unpack", package, _IN_PACKAGE, part], check=True)
    part.rename(tree)
    package.unlink()


def kernel(want=None, root="/", install=True):
    """Name of the kernel to build for: `want`, else the running one. "newest": the newest one with headers installed.

    A module for any other kernel than the running one has to be asked for: it could not be loaded here. On Debian, as
    root, "newest" installs the headers of the default kernel where there are none at all.
    """
    modules = Path(root) / "lib/modules"

    def headers():
        found = [path.name for path in modules.glob("*") if (path / "build" / "Makefile").is_file()]
        return sorted(found, key=order)

    found = headers()
    if want and want != "newest":
        if want not in found:
            raise SourceError(f"KERNEL={want}: no headers at {modules / want / 'build'}: install linux-headers-{want}")
        return want
    if not want:
        running = os.uname().release
        if running in found:
            return running
        have = f"; headers are there for {', '.join(found)}: KERNEL={found[-1]} builds for that one" if found else ""
        raise SourceError(f"no headers of the running kernel: install linux-headers-{running}{have}")
    asked = install and os.environ.get("VMEM_INSTALL") != "0"
    if not found and asked and os.geteuid() == 0 and shutil.which("apt-get"):
        arch = subprocess.run(["dpkg", "--print-architecture"], check=True, capture_output=True, text=True)
        # Where that fails, the system has its own words for it, and the headers are looked for all the same.
        subprocess.run(["apt-get", "-q", "update"], stdout=subprocess.DEVNULL)
        subprocess.run(["apt-get", "-qy", "install", "--no-install-recommends", f"linux-headers-{arch.stdout.strip()}"])
        found = headers()
    if not found:
        raise Unavailable(
            "KERNEL=newest: no kernel headers under /lib/modules: install linux-headers-amd64, or run make as root"
        )
    return found[-1]
