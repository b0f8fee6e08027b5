"""Settings that pyproject.toml has no field for: the extension, the version's source, the wheel's tag, the description.

SPDX-License-Identifier: MIT
"""

import gzip
import os
import re
import sysconfig
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

header = (Path(__file__).parent / "libvmem/include/vmem.h").read_text()
version = ".".join(re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def standing_alone(markdown):
    """The README outside the repository: what its links and pictures lead to is not there."""
    markdown = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", markdown, flags=re.M)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", markdown)


class Sdist(sdist):
    """A source distribution that is the same bytes at every build, if SOURCE_DATE_EPOCH gives its time."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if format != "gztar" or not epoch:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(entry):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = int(epoch), 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        path = f"{base_name}.tar.gz"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file, gzip.GzipFile("", "wb", mtime=int(epoch), fileobj=file) as packed:
            with tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive:
                for name in sorted([base_dir, *map(str, Path(base_dir).rglob("*"))]):
                    archive.add(name, recursive=False, filter=plain)
        return path


# cffi compiles against the limited API, so one wheel serves every Python from 3.10 on. A free-threaded interpreter has
# no such API, and gets a wheel of its own.
limited = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    version=version,
    long_description=standing_alone((Path(__file__).parent / "README.md").read_text()),
    long_description_content_type="text/markdown",
    cffi_modules=["pyvmem/_ffi_build.py:builder"],
    cmdclass={"sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {},
)
