# SPDX-License-Identifier: MIT
"""The guest's file system: an initramfs with our build and, for the Python suites, this machine's Python."""

import importlib.metadata
import importlib.util
import marshal
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

from kernel import CACHE, HERE, Missing, Unavailable, digest, need, say

# Distributions the Python image carries, with all they require.
PACKAGES = ("numpy", "cffi", "pytest", "hypothesis", "rich")


def busybox():
    found = shutil.which("busybox")
    if not found:
        need("busybox=busybox-static")
        found = shutil.which("busybox")
    if subprocess.run(["ldd", found], capture_output=True, text=True).stdout.count("=>"):
        raise Unavailable("busybox is linked dynamically: install busybox-static")
    return Path(found)


class Cpio:
    """Writes a newc archive; QEMU loads it uncompressed, since unpacking under TCG costs more than reading."""

    def __init__(self):
        self.parts, self.seen, self.inode = [], set(), 1

    def _entry(self, name, mode, data=b"", rdev=(0, 0)):
        head = [self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, *rdev, len(name) + 1, 0]
        self.inode += 1
        block = b"070701" + b"".join(b"%08X" % v for v in head) + name.encode() + b"\0"
        block += b"\0" * (-len(block) % 4) + data
        self.parts.append(block + b"\0" * (-len(block) % 4))

    def folder(self, name):
        if name and name != "." and name not in self.seen:
            self.folder(os.path.dirname(name))
            self.seen.add(name)
            self._entry(name, stat.S_IFDIR | 0o755)

    def file(self, name, data, mode=0o755):
        if name not in self.seen:
            self.folder(os.path.dirname(name))
            self.seen.add(name)
            self._entry(name, stat.S_IFREG | mode, data)

    def tree(self, name, path):
        for p in sorted(Path(path).rglob("*")):
            if p.is_file() and "__pycache__" not in p.parts:
                self.file(f"{name}/{p.relative_to(path)}", p.read_bytes(), p.stat().st_mode & 0o777)

    def write(self, path, after=None):
        """The archive; `after`: the part that `write_part` made of another."""
        self._entry("dev/console", stat.S_IFCHR | 0o600, rdev=(5, 1))
        self._entry("TRAILER!!!", 0)
        part = self.write_part(path.with_suffix(f".part{os.getpid()}"), after)
        part.rename(path)
        return path

    def write_part(self, path, after=None):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as f:
            if after:
                with after.open("rb") as first:
                    shutil.copyfileobj(first, f, 1 << 20)
            f.writelines(self.parts)
        return path


def initramfs(path, files, job, shell="", image=None):
    """Write the initramfs. `files`: {path in the guest: file or folder here}; `job`: the steps as shell lines; `image`:
    what `python_image` made."""
    cpio = Cpio()
    cpio.folder("dev")
    cpio.file("bb/busybox", busybox().read_bytes())
    cpio.file("init", (HERE / "init").read_bytes())
    cpio.file("functions", (HERE / "functions").read_bytes())
    cpio.file("job", job.encode())
    cpio.file("shell", shell.encode())
    for name, here in files.items():
        if isinstance(here, (str, bytes)):
            cpio.file(name, here if isinstance(here, bytes) else here.encode())
        elif here.is_dir():
            cpio.tree(name, here)
        else:
            cpio.file(name, here.read_bytes())
    return cpio.write(path, image)


def _requirements(names):
    """The distributions named and all that they require here, without extras."""
    todo, found = list(names), {}
    while todo:
        name = todo.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the suites skip by name what is absent
        for line in found[key].requires or ():
            if "extra ==" not in line:
                todo.append(re.match(r"[A-Za-z0-9._-]+", line).group())
    return found


def _libraries(files):
    """Shared objects that the files need, by ldd, with their loader."""
    out = set()
    todo = [f for f in files if f.suffix == ".so" or ".so." in f.name or os.access(f, os.X_OK)]
    for i in range(0, len(todo), 200):
        text = subprocess.run(["ldd", *todo[i : i + 200]], capture_output=True, text=True).stdout
        out |= {Path(p) for p in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", text, re.M)}
    return out


def _bytecode(file):
    """The file's bytecode. Compiling at each start would take an emulated guest half a minute."""
    data = file.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = compile(data, str(file), "exec", dont_inherit=True)
        except SyntaxError:  # a template, or a file for another version
            return None
    # PEP 552: never compared with the source, as the guest keeps no times
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(data)
    return head + marshal.dumps(code)


def python_image(tools=()):
    """This interpreter, its standard library, PACKAGES and `tools`, at the paths they have here: part of an archive.

    It goes into the initramfs, so that the guest's kernel needs no driver of a disk or file system. Returns the part's
    path, the interpreter's and the folders of the packages.
    """
    base = Path(sys.base_prefix)
    found = _requirements(PACKAGES)
    versions = sorted(f"{k} {d.version}" for k, d in found.items())
    packages = sorted({Path(d.locate_file("")).resolve() for d in found.values()})
    paths = [shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") for tool in tools]
    if None in paths:
        raise Missing(f"there is no {tools[paths.index(None)]} in PATH")
    key = digest(sys.version, str(base), *map(str, packages), *versions, *paths, Path(__file__))
    image = CACHE / f"python-{key}.cpio"
    real = Path(os.path.realpath(sys._base_executable))
    if image.is_file():
        return image, real, packages
    say("gathering Python for the guest: " + ", ".join(versions))
    stdlib = Path(sysconfig.get_paths(vars={"base": str(base)})["stdlib"])
    left_out = {
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtledemo",
        "ensurepip",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
    files = {real, *map(Path, paths)}
    for folder, folders, names in os.walk(stdlib):
        folders[:] = [d for d in folders if d not in left_out and not d.startswith("config-")]
        files |= {Path(folder) / n for n in names if not n.endswith(".a")}
    for dist in found.values():
        for file in dist.files or ():
            path = Path(os.path.normpath(dist.locate_file(file)))
            if path.is_file() and not {"__pycache__", "tests"} & set(path.parts):
                files.add(path)
    files |= _libraries(files)
    cpio = Cpio()
    for file in sorted(files):
        cpio.file(str(file).lstrip("/"), file.read_bytes(), file.stat().st_mode & 0o777)  # a link as what it leads to
        if file.suffix == ".py" and (code := _bytecode(file)):
            cpio.file(importlib.util.cache_from_source(str(file)).lstrip("/"), code, 0o644)
    return cpio.write_part(image.with_suffix(".part")).rename(image), real, packages
