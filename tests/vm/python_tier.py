# SPDX-License-Identifier: MIT
"""libvmem and pyvmem in the guest: the C and Python suites on the uvm and stock backends, the benchmarks, and a shell.

User space is this machine's: the same build that runs here, with a stand-in libcuda.so.1 in front of the simulated GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import kernel as kernels
import modules
import plan
import rootfs
from guest import Step, command_line
from kernel import CACHE, HERE, TOP, Missing, say

BACKENDS = ("uvm", "stock")
# What no backend under the simulator can show: they test the build for the machine at hand, or need a file of another kind.
HOST_ONLY = tuple(p.name for p in (TOP / "tests/python").glob("test_kernel_open_*.py"))


def _run(*command, cwd=TOP):
    if subprocess.run(command, cwd=cwd, stdout=sys.stderr).returncode:
        raise Missing(f"{' '.join(map(str, command))} failed")


def build(release):
    """Our user space, as the guest sees it: {path there: path here}."""
    src, release = modules.driver_source(release)
    _run("make", "-s", "lib", "venv")
    _run("make", "-s", "-C", "tests/c", "KIND=plain", "OUT=../../build/tests-c/plain",
         *(f"../../build/tests-c/plain/{p.stem}" for p in sorted((TOP / "tests/c").glob("test_*.c"))))  # fmt: skip
    cuda = CACHE / "modules" / f"simcuda-{release}"
    _run("make", "-s", "-C", HERE / "simcuda", f"NVIDIA_SRC={src}", f"OUT={cuda}")
    files = {"lib/simcuda/libcuda.so.1": cuda / "libcuda.so.1", "vmem/build/libvmem.so": TOP / "build/libvmem.so"}
    for path in sorted((TOP / "build/tests-c/plain").glob("test_*")):
        if path.suffix == "" and (TOP / "tests/c" / f"{path.name}.c").is_file():
            files[f"vmem/tests-c/{path.name}"] = path
    for path in sorted((TOP / "pyvmem").rglob("*")):
        if path.is_file() and path.suffix in (".py", ".so", ".json"):
            files[f"vmem/{path.relative_to(TOP)}"] = path
    for path in sorted((TOP / "tests/python").glob("*.py")):
        if path.name not in HOST_ONLY:
            files[f"vmem/tests/python/{path.name}"] = path
    return files


def environment(python):
    return "\n".join([
        "export LD_LIBRARY_PATH=/lib/simcuda",
        "export PYTHONPATH=/vmem PYTHONDONTWRITEBYTECODE=1 HOME=/tmp",
        f"export PATH=/usr/local/bin:{python.parent}:$PATH",
        f"pyvmem() {{ {python} -m pyvmem \"$@\"; }}",
        f"python() {{ {python} \"$@\"; }}",
        "",
    ])  # fmt: skip


def steps(python, files, c_tests):
    out = [Step("load patched", "load_gpu && load_uvm patched", 60, quiet=True)]
    env = ". /functions; . /env; "
    out.append(Step("doctor", env + "pyvmem doctor", 120))
    for backend in BACKENDS:
        for test in c_tests:
            # 77: this program has nothing to test on this backend
            run = f"/vmem/tests-c/{test} {backend}; rc=$?; "
            out.append(Step(f"C {test} {backend}", env + run + f"[ $rc = 77 ] && echo skip {test} - exit 77 && exit 0; "
                            f"[ $rc = 0 ] && echo ok {test}; exit $rc", 300))  # fmt: skip
        out.append(Step(f"Python suite {backend}", env + f"cd /vmem && VMEM_TEST_BACKENDS={backend} {python} -m pytest -q "
                        "-p no:cacheprovider -rs tests/python && echo ok python_suite", 1500))  # fmt: skip
    # no --json FILE in the read-only guest: the records come back over the console
    for bench in ("vmm", "bandwidth"):
        for backend in BACKENDS:
            out.append(Step(f"bench {bench} {backend}", env + f"cd /tmp && pyvmem bench {bench} --quick --backend {backend} "
                            f"--json /tmp/{bench}.json && echo '@json' && cat /tmp/{bench}.json && echo && echo ok bench", 600))
    out.append(Step("unload patched", "unload_all", 60, quiet=True))
    return out


def main(args, boot, gather):
    """The action "python" runs the suites and benchmarks, "shell" gives a prompt."""
    release = (args.release or modules.RELEASES)[0]
    kernel = kernels.debian()
    # one module serves both backends: the stock one uses the driver's own calls alone
    files, release = gather(release, kernel, modules.VARIANTS if args.action == "shell" else ("patched",))
    files |= build(release)
    image, python = rootfs.python_image()
    files["env"] = environment(python)
    if args.action == "shell":
        return shell(args, kernel, files, image, release)
    c_tests = [Path(f).name for f in files if f.startswith("vmem/tests-c/")]
    todo = steps(python, files, c_tests)
    if args.only:
        todo = [s for s in todo if s.quiet or any(o in s.name for o in args.only)]
    print(f"user space on the simulated GPU, driver {release}, kernel {kernel.release}", flush=True)
    ok, guest = boot(args, kernel, files, todo, label=f"python-{release}", image=image, memory=3072)
    benches(guest, release, kernel)
    print(f"  {'passed' if ok else 'FAILED'}")
    return 0 if ok else 1


def benches(guest, release, kernel):
    """Keep the benchmarks' records, marked as simulated."""
    records = []
    for result in guest.results:
        if result.step.name.startswith("bench") and "@json" in result.output:
            text = "\n".join(result.output[result.output.index("@json") + 1 :]).rsplit("ok bench", 1)[0]
            try:
                found = json.loads(text)
            except ValueError:
                say(f"{result.step.name}: its JSON cannot be read")
                continue
            for record in found if isinstance(found, list) else found.get("records", []):
                records.append({**record, "simulated": True, "driver": release, "kernel": kernel.release})
    if records:
        path = CACHE / "results" / f"bench-{release}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(records, indent=1) + "\n")


def shell(args, kernel, files, image, release):
    greeting = [
        "load_gpu && load_uvm patched || echo 'loading failed: see dmesg'",
        f"echo 'nvidia-uvm.ko {release} with vMem on a simulated GPU. pyvmem doctor, pyvmem bench vmm, python; "
        "load_uvm stock|patched, unload_uvm; exit ends it.'",
        "cd /vmem",
    ]
    initrd = rootfs.initramfs(CACHE / f"initramfs-shell-{os.getpid()}.cpio", files, "", "\n".join(greeting) + "\n")
    command = command_line(kernel, initrd, image=image, memory=3072, cpus=args.cpus, accel=args.accel,
                           append="quiet vmem.shell")  # fmt: skip
    try:
        return subprocess.run([*command, "-serial", "mon:stdio"]).returncode
    finally:
        initrd.unlink(missing_ok=True)
