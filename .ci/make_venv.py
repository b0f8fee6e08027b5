"""Makes the virtual environment and installs pyvmem into it, editable.

A torch that the running interpreter can import is used as it is: the environment then sees that interpreter's packages,
and nothing is fetched that is there already. Without one, TORCH below is installed. Where no NVIDIA device is, that is
its build for CPUs, of a fifth of a gigabyte instead of five, if pip's own indexes or PyTorch's give one. VMEM_TORCH
names another requirement (such as torch==2.11.0), and VMEM_TORCH_INDEX an index beside pip's own.

    make_venv.py DIRECTORY    make or update it
    make_venv.py --needs      print the THING=PACKAGE pairs for .ci/need

SPDX-License-Identifier: MIT
"""

import glob
import importlib.util
import os
import platform
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
CPU = "https://download.pytorch.org/whl/cpu"  # PyTorch's own index of its CPU builds
TOP = Path(__file__).resolve().parent.parent


def found(module):
    """True if the running interpreter has a module."""
    return importlib.util.find_spec(module) is not None


def own_pip():
    """True if the environment gets a pip of its own: without a torch to use, nothing of the interpreter's is shown."""
    return not (found("torch") and found("pip"))


def needs():
    """Headers and modules of the interpreter that distributions package separately."""
    major_minor = "%d.%d" % sys.version_info[:2]
    paths = sysconfig.get_paths()
    pairs = [f"{paths['include']}/Python.h=python{major_minor}-dev"]
    if own_pip():
        pairs.append(f"{paths['stdlib']}/ensurepip/__init__.py=python{major_minor}-venv")
    return pairs


def package_folders():
    """Folders that hold the running interpreter's packages, in the order of its search."""
    folders = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    folders += site.getsitepackages()
    return [os.path.abspath(f) for f in folders if os.path.isdir(f)]


def make(target):
    if Path(sys.prefix).resolve() == target.resolve():  # run from the environment itself: it stands already
        return
    python = target / "bin" / "python"
    wanted = "%d.%d" % sys.version_info[:2]
    # One without pip was interrupted while it was made.
    have = (
        python.exists()
        and subprocess.run(
            [python, "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        ).stdout.strip()
    )
    if have == wanted:
        return
    venv.create(target, clear=True, symlinks=True, with_pip=own_pip())
    if found("torch"):
        # Not --system-site-packages: where the running interpreter is itself in an environment, that shows the packages
        # of the interpreter under it.
        library = target / "lib" / f"python{wanted}" / "site-packages"
        (library / "reuse.pth").write_text(
            "".join(f"import site; site.addsitedir({folder!r})\n" for folder in package_folders())
        )


def torch_ways():
    """[(pip's words for torch, what to say about it)], to be tried in this order."""
    wanted, index = os.environ.get("VMEM_TORCH"), os.environ.get("VMEM_TORCH_INDEX")
    if index:
        return [(["--extra-index-url", index, wanted or TORCH], f"{wanted or TORCH}, from VMEM_TORCH_INDEX")]
    if wanted:
        return [([wanted], wanted)]
    if platform.machine() != "x86_64":
        return [([TORCH], TORCH)]
    large = [TORCH], f"{TORCH}, which brings 5 GB of CUDA's libraries"
    if glob.glob("/dev/nvidia[0-9]*"):
        return [large]
    # A mirror may have the build or not, and nothing but pip's own index may be in reach.
    patience = ["--retries", "1", "--timeout", "15"]
    small = f"{TORCH}+cpu, since no NVIDIA GPU is here (VMEM_TORCH={TORCH} takes the other)"
    return [([f"{TORCH}+cpu"], small), ([*patience, "--extra-index-url", CPU, f"{TORCH}+cpu"], small), large]


def install_torch(pip, target, broken):
    """broken: what is there, and does not work, is replaced."""
    again = ["--ignore-installed", "--no-deps"] if broken else []
    ways = torch_ways()
    said = None
    for words, what in ways:
        if what != said:
            print(f"installing {what} into {target}", flush=True)
        said, last = what, words is ways[-1][0]
        first = subprocess.run([*pip, *again, *words], check=last, capture_output=not last)
        if not first.returncode:
            if again:
                subprocess.run([*pip, *words], check=True)
            return


def install(target):
    python = str(target / "bin" / "python")
    quiet = [] if os.environ.get("V") else ["-q"]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-warn-script-location", *quiet]
    # Tried, not looked for: an installation that was interrupted has the folder and not all of its libraries.
    tried = subprocess.run([python, "-c", "import torch; torch.zeros(1)"], capture_output=True, text=True)
    if tried.returncode:
        broken = "No module named 'torch'" not in tried.stderr
        if broken:
            why = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
            print(f"torch is there and does not work: {why}")
        install_torch(pip, target, broken)
    print(f"installing pyvmem with its extras top and test into {target}: what is missing is downloaded, and libvmem")
    print("is compiled (half a minute to two minutes)", flush=True)
    subprocess.run([*pip, "setuptools>=77", "cffi>=1.15"], check=True)
    subprocess.run([*pip, "--no-build-isolation", "-e", f"{TOP}[top,test]"], check=True)


if __name__ == "__main__":
    if sys.version_info < (3, 10):
        sys.exit("Python 3.10 or newer is needed: make PYTHON=/path/to/python3")
    if sys.argv[1] == "--needs":
        print(*needs())
    else:
        where = Path(sys.argv[1])
        make(where)
        try:
            install(where)
        except subprocess.CalledProcessError as failed:
            sys.exit(f"could not install pyvmem into {where} (exit {failed.returncode}); V=1 shows more")
