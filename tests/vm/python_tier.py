# SPDX-License-Identifier: MIT
"""libvmem and pyvmem in the guest: loading the module, the C and Python suites on the uvm and stock backends, and a
shell.

User space is this machine's: the same build that runs here, with a stand-in libcuda.so.1 in front of the simulated GPU.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kernel as kernels
import modules
import rootfs
from guest import Step, command_line
from kernel import CACHE, HERE, TOP, Missing

BACKENDS = ("uvm", "stock")
MEMORY = 1536  # MiB of the simulated GPU, which are the guest's memory
# This machine's programs that load.py and the suite run.
TOOLS = ("insmod", "rmmod", "modprobe", "modinfo", "mknod", "bash")
# Faults of the simulated hardware (SIMGPU_MODE_BREAK_*), and the stage of the self-test that must fail
# Membars are not among them: the simulated CUDA's stores are in memory at once, so none can come late.
FAULTS = (("no invalidate", 1 << 0, "replace"),)
# What the guest has not: torch (only one with CUDA makes tensors on the device, and the C suite has the KV cache, too),
# the documents, which two files read when they are imported, and tools to build modules for the machine at hand.
_LACKS = re.compile(r"^(import torch$|from pyvmem import .*KVCache|import pyvmem\.(kv|sglang|vllm))", re.MULTILINE)
_READ_DOCUMENTS = {"test_models_file", "test_readme"}


def _left_out():
    """Names of files of tests/python: those that lack something, and those that import them."""
    texts = {p.stem: p.read_text() for p in (TOP / "tests/python").glob("*.py")}
    builds = {name for name in texts if name.startswith("test_kernel_open_")}
    out = _READ_DOCUMENTS | builds | {name for name, text in texts.items() if _LACKS.search(text)}
    while more := {
        name for name, text in texts.items()
        if name not in out and any(re.search(rf"^(from|import) {other}\b", text, re.MULTILINE) for other in out)
    }:  # fmt: skip
        out |= more
    return tuple(f"{name}.py" for name in sorted(out))


LEFT_OUT = _left_out()


def _run(*command, cwd=TOP):
    if subprocess.run(command, cwd=cwd, stdout=sys.stderr).returncode:
        raise Missing(f"{' '.join(map(str, command))} failed")


def build(release):
    """Our user space, as the guest sees it: {path there: path here}."""
    src, release = modules.driver_source(release)
    _run("make", "-s", "lib", "venv")
    _run("make", "-s", "-C", "tests/c", "KIND=plain", "OUT=../../build/tests-c/plain",
         *(f"../../build/tests-c/plain/{p.stem}" for p in sorted((TOP / "tests/c").glob("test_*.c"))))  # fmt: skip
    with modules.build_lock():
        cuda = modules.simcuda(src, release)
    files = {"vmem/lib/libcuda.so.1": cuda, "vmem/build/libvmem.so": TOP / "build/libvmem.so",
             "vmem/kernel-open/load.py": TOP / "kernel-open/load.py"}  # fmt: skip
    files["vmem/hour/failing_map.py"] = TOP / "tests/hour/failing_map.py"
    files["bin/bash"] = Path(shutil.which("bash") or "/bin/bash")  # where the suite asks for it
    for name in ("test_load.py", "selftest_fault.py"):
        files[f"vmem/vm/{name}"] = HERE / "tests" / name
    files["vmem/selftest_agents.py"] = (
        HERE / "tests/selftest_agents.py"
    )  # where every Python program of the guest looks
    for path in sorted((TOP / "build/tests-c/plain").glob("test_*")):
        if path.suffix == "" and (TOP / "tests/c" / f"{path.name}.c").is_file():
            files[f"vmem/tests-c/{path.name}"] = path
    files["vmem/build/libbench.so"] = TOP / "build/libbench.so"
    for path in sorted(p for folder in ("pyvmem", "benchmarks") for p in (TOP / folder).rglob("*")):
        if path.is_file() and path.suffix in (".py", ".so", ".json"):
            files[f"vmem/{path.relative_to(TOP)}"] = path
    files["vmem/examples/paper.py"] = TOP / "examples/paper.py"  # which the suite calls by name
    for path in sorted((TOP / "tests/python").glob("*.py")):
        if path.name not in LEFT_OUT:
            files[f"vmem/tests/python/{path.name}"] = path
    return files


def environment(python, packages):
    return "\n".join([
        "export LD_LIBRARY_PATH=/vmem/lib",
        f"export PYTHONPATH={':'.join(['/vmem', *map(str, packages)])} HOME=/tmp",
        f"export PATH=$PATH:{python.parent}",
        # random courses as long as an emulated guest has the time for
        "export HYPOTHESIS_PROFILE=brief VMEM_TEST_OPERATIONS=40 VMEM_TEST_STEPS=12000",
        f"pyvmem() {{ {python} -m pyvmem \"$@\"; }}",
        f"python() {{ {python} \"$@\"; }}",
        "",
    ])  # fmt: skip


def steps(python, c_tests):
    """Limits are an end for a hang, not a measure of speed."""
    env = ". /functions; . /env; "
    out = [Step("load the GPU", f"load_gpu fb_mb={MEMORY}", 60, quiet=True)]
    # kmod's tools in front of busybox'
    out.append(Step("module-load, module-unload", env + "PATH=/usr/sbin:/sbin:/usr/bin:$PATH "
                    f"{python} /vmem/vm/test_load.py /vmem/kernel-open/load.py /mod/stock/nvidia-uvm.ko "
                    "/mod/patched/nvidia-uvm.ko", 600))  # fmt: skip
    out.append(Step("load patched", "load_uvm patched", 60, quiet=True))
    out.append(
        Step(
            "doctor",
            env + "pyvmem doctor > /tmp/doctor; cat /tmp/doctor; grep -q '^uvm *works' /tmp/doctor && "
            "grep -q '^stock *best' /tmp/doctor && grep -q 'has not passed here' /tmp/doctor && echo ok doctor",
            240,
        )
    )
    out.append(Step("failing maps", env + "python /vmem/hour/failing_map.py && echo ok failing_map", 240))
    for backend in ("stock", "uvm"):
        run = f"pyvmem doctor --selftest --backend {backend} && echo ok selftest"
        out.append(Step(f"selftest {backend}", env + run, 1800))
    # A hardware that ignores what it is told: the stage that is named for the mechanism must notice.
    for fault, bit, stage in FAULTS:
        run = f"python /vmem/vm/selftest_fault.py {bit:#x} '{stage}' && echo ok selftest_fault"
        out.append(Step(f"selftest beside a fault: {fault}", env + run, 1800))
    out.append(Step("doctor after the self-test", env + "pyvmem doctor | grep '^uvm *best' && echo ok doctor", 240))
    for backend in BACKENDS:
        for test in c_tests:
            # 77: this program has nothing to test on this backend, which itself must work
            more = "20250401 600" if test == "test_model" else ""  # seed, steps
            run = f"/vmem/tests-c/{test} {backend} {more} > /tmp/said 2>&1; rc=$?; cat /tmp/said; "
            skip = (
                f"[ $rc = 77 ] && ! grep -q '^skipped: {backend}:' /tmp/said && "
                f'echo skip {test} "$(tail -n 1 /tmp/said)" && exit 0; '
            )
            out.append(Step(f"C {test} {backend}", env + run + skip + f"[ $rc = 0 ] && echo ok {test}; exit $rc", 1200))
    pytest = f"{python} -m pytest -q -p no:cacheprovider --color=no -rs --durations=8 tests/python"
    for backend in BACKENDS:
        run = f"cd /vmem && VMEM_TEST_BACKENDS={backend} {pytest} && echo ok python_suite"
        out.append(Step(f"Python suite {backend}", env + run, 3600))
    out.append(Step("unload patched", "unload_all", 60, quiet=True))
    return out


def main(args, boot, gather):
    """The action "python" runs the suites, "shell" gives a prompt."""
    release = (args.release or modules.RELEASES)[0]
    kernel = kernels.debian()
    load_only = args.only and not any(o in "module-load, module-unload" for o in args.only)
    files, release = gather(release, kernel, ("patched",) if load_only else modules.VARIANTS)
    files |= build(release)
    image, python, packages = rootfs.python_image(tools=TOOLS)
    files["env"] = environment(python, packages)
    if args.action == "shell":
        return shell(args, kernel, files, image, release)
    c_tests = [Path(f).name for f in files if f.startswith("vmem/tests-c/")]
    # one module serves both backends: the stock one uses the driver's own calls alone
    todo = steps(python, c_tests)
    if args.only:
        todo = [s for s in todo if s.quiet or any(o in s.name for o in args.only)]
    print(f"user space on the simulated GPU, driver {release}, kernel {kernel.release}", flush=True)
    print(f"  left out of the Python suite: {', '.join(sorted(LEFT_OUT))}", flush=True)
    ok, _ = boot(args, kernel, files, todo, label=f"python-{release}", image=image, memory=MEMORY + 2560)
    print(f"  {'passed' if ok else 'FAILED'}")
    return 0 if ok else 1


def shell(args, kernel, files, image, release):
    greeting = [
        f"load_gpu fb_mb={MEMORY} && load_uvm patched || echo 'loading failed: see dmesg'",
        f"echo 'nvidia-uvm.ko {release} with vMem on a simulated GPU. pyvmem doctor, python -m benchmarks vmm, python; "
        "load_uvm stock|patched, unload_uvm; exit ends it.'",
        # the interactive shell is another process: functions reach it by a file of their own
        "echo '. /functions; . /env' > /tmp/rc; export ENV=/tmp/rc",
        "cd /vmem",
    ]
    path = CACHE / f"initramfs-shell-{os.getpid()}.cpio"
    initrd = rootfs.initramfs(path, files, "", "\n".join(greeting) + "\n", image)
    command = command_line(kernel, initrd, memory=MEMORY + 2560, cpus=args.cpus, accel=args.accel,
                           append="quiet vmem.shell")  # fmt: skip
    try:
        return subprocess.run([*command, "-serial", "mon:stdio"]).returncode
    finally:
        initrd.unlink(missing_ok=True)
