# SPDX-License-Identifier: MIT
"""The guest's kernel: Debian's own image for the headers that are installed, or one built with every checker on."""

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
# Shared by checkouts when set: kernels and modules are keyed by content.
CACHE = Path(os.environ.get("VMEM_VM_CACHE") or TOP / "build" / "vm").resolve()


class Missing(Exception):
    """The guest cannot be made; the text says why."""


class Unavailable(Missing):
    """Something of the system's is absent and cannot be fetched: tests are skipped. The text says what to install."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    release: str
    image: Path  # what QEMU boots
    output: Path  # headers or build tree, for external modules
    source: Path

    @property
    def key(self):
        """What tells modules for this kernel from those for another."""
        return f"{self.release}-{digest(self.output / '.config')}"


def say(text):
    print(text, file=sys.stderr, flush=True)


def need(*pairs):
    """Install what is missing as root, else name it in one line. Each pair is "command-or-file=package"."""
    if subprocess.run([TOP / ".ci" / "need", *pairs]).returncode:
        raise Unavailable("the system lacks packages that the guest needs, named above")


def digest(*parts):
    """Short content hash of strings and files; a folder stands for all its files."""
    h = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            files = sorted(p for p in part.rglob("*") if p.is_file()) if part.is_dir() else [part]
            for file in files:
                h.update(str(file.relative_to(part) if part.is_dir() else file.name).encode() + b"\0")
                h.update(file.read_bytes())
        else:
            h.update(str(part).encode())
        h.update(b"\1")
    return h.hexdigest()[:16]


def apt_download(package, into):
    """Fetch a package with apt-get, through lists and caches of our own; the system's are never touched."""
    state = CACHE / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    into.mkdir(parents=True, exist_ok=True)
    options = [
        "-q",
        "-o",
        f"Dir::State::lists={state / 'lists'}",
        "-o",
        f"Dir::Cache={state / 'cache'}",
        "-o",
        "APT::Sandbox::User=root",
        "-o",
        "Acquire::Retries=3",
    ]
    for attempt in (0, 1):
        if attempt or not any((state / "lists").glob("*Packages*")):
            subprocess.run(["apt-get", *options, "update"], stdout=subprocess.DEVNULL)
        download = ["apt-get", *options, "download", package]
        if not subprocess.run(download, cwd=into, stdout=subprocess.DEVNULL).returncode:
            return next(into.glob(f"{package}_*.deb"))
    raise Unavailable(f"apt-get could not download {package}")


def _order(text):
    return tuple(int(part) for part in re.findall(r"\d+", text))


def installed_headers():
    """Kernels with headers under /lib/modules, newest first. Debian's cloud kernel, where there, boots fastest."""
    found = [p.name for p in Path("/lib/modules").glob("*") if (p / "build" / "Makefile").is_file()]
    return sorted(found, key=lambda r: ("cloud" in r, _order(r)), reverse=True)


def debian():
    """The kernel of the newest installed headers, its image fetched from Debian where the system has none."""
    if not installed_headers():
        need("/lib/modules/*/build/Makefile=linux-headers-cloud-amd64")
    if not installed_headers():
        raise Unavailable("no kernel headers: install linux-headers-cloud-amd64")
    release = installed_headers()[0]
    image = Path("/boot") / f"vmlinuz-{release}"
    if not os.access(image, os.R_OK):
        image = CACHE / f"kernel-{release}" / f"vmlinuz-{release}"
    if not image.is_file():
        say(f"fetching linux-image-{release}")
        folder = CACHE / "apt" / "image"
        deb = apt_download(f"linux-image-{release}", folder)
        subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
        image.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "boot" / image.name, image)
        shutil.rmtree(folder)
    modules = Path("/lib/modules") / release
    output = (modules / "build").resolve()
    source = (modules / "source").resolve()
    if not (source / "Makefile").is_file():
        # Debian's headers name their common part in a one-line Makefile.
        named = re.search(r"^include (\S+)/Makefile$", (output / "Makefile").read_text(), re.M)
        source = Path(named.group(1)) if named else output
    return Kernel(release, image, output, source)


def debug(jobs=2):
    """A kernel from Debian's linux-source with KASAN, lockdep, kmemleak and atomic-sleep checks; built once."""
    config = HERE / "debug.config"
    version = ".".join(debian().release.split(".")[:2])
    folder = CACHE / f"debug-kernel-{digest(version, config)}"
    source, output = folder / f"linux-source-{version}", folder / "o"
    image = folder / "bzImage"
    if not image.is_file():
        need(
            "flex=flex",
            "bison=bison",
            "bc=bc",
            "/usr/include/libelf.h=libelf-dev",
            "/usr/bin/xz=xz-utils",
            "/usr/include/openssl/ssl.h=libssl-dev",
        )
        folder.mkdir(parents=True, exist_ok=True)
        if not (source / "Makefile").is_file():
            say(f"fetching linux-source-{version}")
            deb = apt_download(f"linux-source-{version}", folder / "deb")
            subprocess.run(["dpkg-deb", "-x", deb, folder / "deb"], check=True)
            archive = folder / f"deb/usr/src/linux-source-{version}.tar.xz"
            subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
            shutil.rmtree(folder / "deb")
        say(f"building the debug kernel in {folder}; once, half an hour on two cores")
        output.mkdir(exist_ok=True)

        def make(*args):
            with (folder / "build.log").open("a") as log:
                command = ["nice", "-n", "19", "make", "-C", source, f"O={output}", f"-j{jobs}", *args]
                if subprocess.run(command, stdout=log, stderr=log).returncode:
                    raise Missing(f"building the debug kernel failed; log: {folder / 'build.log'}")

        make("tinyconfig")
        merge = [source / "scripts/kconfig/merge_config.sh", "-m", "-O", output, output / ".config", config]
        subprocess.run(merge, check=True, cwd=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        make("olddefconfig")
        have = (output / ".config").read_text()
        for line in config.read_text().splitlines():
            if line.startswith("CONFIG_") and not line.endswith("=n") and line not in have:
                raise Missing(f"the debug kernel's configuration lost {line}")
        make("bzImage", "modules_prepare")
        # External modules link against what vmlinux exports; no module of the kernel's own is built.
        shutil.copy(output / "vmlinux.symvers", output / "Module.symvers")
        shutil.copy(output / "arch/x86/boot/bzImage", image)
    release = (output / "include/config/kernel.release").read_text().strip()
    return Kernel(release, image, output, source)
