"""Builds the source distribution and, from it, the manylinux wheel; tries the wheel where nothing else is installed.

    make_wheel.py DIST [MACHINE]    writes both to the folder DIST

MACHINE is x86_64 or aarch64. A wheel for a machine other than this one is checked in the same way, but not tried.

The wheel serves every Python from 3.10 on (limited API) and every Linux with glibc 2.28 or newer. zig's clang compiles
against that release's symbols, whatever this machine has. auditwheel and abi3audit check both promises. Two builds of
one commit are the same bytes: SOURCE_DATE_EPOCH is the commit's time, if it is not given.

The wheel is tried in an environment with no torch and no compiler. What is tried: a context on host memory, the
command, and the error that names torch where tensors are asked for. A free-threaded interpreter gets a wheel of its
own.

SPDX-License-Identifier: MIT
"""

import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from release import version

TOP = Path(__file__).resolve().parent.parent
GLIBC = (2, 28)  # RHEL 8, Debian 10, Ubuntu 18.10
HERE = os.uname().machine
MACHINE = sys.argv[2] if len(sys.argv) > 2 else HERE
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
TAG = "cp310-abi3" if LIMITED else "cp{0}{1}-cp{0}{1}t".format(*sys.version_info)
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{MACHINE}"
TOOLS = ("build", "auditwheel", "abi3audit", "twine", "check-wheel-contents", "ziglang>=0.15")
TRY = """
import pyvmem
with pyvmem.Context("host") as ctx, ctx.reserve(1 << 30) as r:
    r.map(ctx.create(64 << 10, 3))
try:
    pyvmem.virtual_empty
except ModuleNotFoundError as e:
    assert "pip install torch" in str(e) and "\\n" not in str(e)
else:
    raise SystemExit("torch is here: this environment shows nothing")
"""


def environment(folder, *packages):
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    if packages:
        subprocess.run([python, "-m", "pip", "-q", "--disable-pip-version-check", "install", *packages], check=True)
    return python


def multiarch(folder):
    """A folder with what Debian's pyconfig.h includes as <TRIPLE/pythonX.Y/pyconfig.h>, and none of the system's libc.

    Those headers are where the system's compiler looks, and one for another system does not. The limited API depends on
    no difference between the machines.
    """
    name = Path(sysconfig.get_paths()["include"]).name
    own = Path("/usr/include", sysconfig.get_config_var("MULTIARCH") or "none", name)
    for machine in (HERE, MACHINE):
        place = folder / f"{machine}-linux-gnu" / name
        if own.is_dir() and not place.exists():
            place.parent.mkdir(parents=True)
            place.symlink_to(own)
    return folder


def check(wheel):
    """Check a wheel: for every Python 3 from 3.10 on, stripped, without sources of C, described in full."""
    assert wheel.name == f"pyvmem-{version()}-{TAG}-{PLATFORM}.whl", wheel.name
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        about = email.message_from_bytes(z.read(next(n for n in names if n.endswith("/METADATA"))))
        extension = z.read(next(n for n in names if n.startswith("pyvmem/_ffi.") and n.endswith(".so")))
    assert not [n for n in names if n.endswith((".c", ".h"))] and "pyvmem/py.typed" in names
    assert not [n for n in names if n.startswith("benchmarks")]
    assert b".debug_info" not in extension
    needed = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+(?:\.\d+)?)", extension)}
    assert needed and max(needed) <= GLIBC, max(needed)
    for field in "License-Expression", "Author", "Summary", "Keywords", "Requires-Python", "Description-Content-Type":
        assert about[field], field
    assert not re.search(r"\]\((?!https?:)", about.get_payload()), "a link of the description leads nowhere"
    assert not [r for r in about.get_all("Requires-Dist") if "torch" in r and "extra ==" not in r]


def check_source(archive, work):
    """The source distribution has what its users build, test and read, and its library builds without Python."""
    with tarfile.open(archive) as t:
        names = {n.partition("/")[2] for n in t.getnames()}
        t.extractall(work, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    listed = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True).stdout.split()
    missing = [n for n in listed if n not in names and not n.startswith(".git")]
    assert not missing, missing
    folder = work / f"pyvmem-{version()}"
    subprocess.run(["make", "-s", "lib", "PYTHON=/nonexistent"], cwd=folder, check=True)


def try_out(wheel, folder, home):
    """The wheel works where only what it requires is installed."""
    python = environment(folder, wheel)
    bare = {"PATH": str(folder / "bin"), "HOME": home, "TMPDIR": home}
    subprocess.run([python, "-c", TRY], check=True, env=bare, cwd=home)
    for command in (["--version"], ["doctor"], ["top", "--once"]):
        subprocess.run([folder / "bin/pyvmem", *command], check=True, env=bare, cwd=home)


def main(dist):
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        python = environment(work / "tools", *TOOLS)
        bin = work / "tools/bin"
        env = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"}
        if not env.get("SOURCE_DATE_EPOCH"):
            time = ["git", "log", "-1", "--format=%ct"]
            said = subprocess.run(time, cwd=TOP, capture_output=True, text=True).stdout.strip()
            env["SOURCE_DATE_EPOCH"] = said or str(int((TOP / "libvmem/include/vmem.h").stat().st_mtime))
        compiler = work / "zigcc"
        target = f"{MACHINE}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
        # zig's clang checks undefined behaviour at run time unless told otherwise.
        more = f"-fno-sanitize=all -idirafter {multiarch(work / 'include')}"
        compiler.write_text(f'#!/bin/sh\nexec {python} -m ziglang cc -target {target} {more} "$@"\n')
        compiler.chmod(0o755)
        # Debugging information is nine tenths of the extension.
        env |= {"CC": str(compiler), "LDSHARED": f"{compiler} -shared", "LDFLAGS": "-s", "CFLAGS": "-g0"}
        env |= {"ZIG_GLOBAL_CACHE_DIR": f"{work}/zig", "ZIG_LOCAL_CACHE_DIR": f"{work}/zig"}
        tag = f"--config-setting=--build-option=--plat-name={PLATFORM}"
        build = [python, "-m", "build", tag, "-o", work / "built", TOP]
        subprocess.run(build, check=True, env=env, stdout=subprocess.DEVNULL)
        wheel, source = next((work / "built").glob("*.whl")), next((work / "built").glob("*.tar.gz"))

        check(wheel)
        # The oldest platform that has all libraries and symbols that the wheel needs.
        said = subprocess.run([python, "-m", "auditwheel", "show", wheel], check=True, capture_output=True, text=True)
        least = re.search(rf'"manylinux_(\d+)_(\d+)_{MACHINE}"', said.stdout)
        assert least and tuple(map(int, least.groups())) <= GLIBC, said.stdout
        if LIMITED:
            subprocess.run([bin / "abi3audit", "--strict", wheel], check=True, env=env)
        subprocess.run([bin / "check-wheel-contents", wheel], check=True)
        subprocess.run([bin / "twine", "check", "--strict", wheel, source], check=True)
        check_source(source, work / "source")
        if MACHINE == HERE:
            try_out(wheel, work / "try", temporary)

        shutil.rmtree(dist, ignore_errors=True)  # of other versions
        dist.mkdir(parents=True)
        for path in wheel, source:
            shutil.copy2(path, dist)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            print(dist / path.name, f"{path.stat().st_size >> 10} KiB, sha256 {digest}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
