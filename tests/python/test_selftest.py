"""The self-test of the GPU backends, and the stamp that the choice of "uvm" needs, over the fake driver.

The simulated GPU runs the self-test against seeded faults of the module itself (tests/vm). Here, a fault is put into
what the stages call, and the stage that is named for the mechanism must notice.

SPDX-License-Identifier: MIT
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyvmem import selftest

TOP = Path(__file__).parents[2]
FAKE = TOP / "build/fakegpu/libcuda.so.1"

pytestmark = pytest.mark.skipif(not FAKE.is_file(), reason="the fake driver is not built (make test-python-fake)")


def run(code, state, *, patched=True, module="pyvmem", **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VMEM_BACKEND", "FAKEGPU_"))}
    env |= {"LD_LIBRARY_PATH": str(FAKE.parent), "LD_PRELOAD": str(FAKE), "XDG_STATE_HOME": str(state)}
    env["PYTHONPATH"] = str(TOP / "tests/vm/tests")  # selftest_agents.py
    env |= {"FAKEGPU_PATCHED": "1"} if patched else {}
    command = [sys.executable, "-c", code] if isinstance(code, str) else [sys.executable, "-m", module, *code]
    return subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=300)


def said(code, state, **options):
    found = run(code, state, **options)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


CHOSEN = "import pyvmem; print(pyvmem.Context().backend, pyvmem.core.default_context('gpu').backend)"
STAMP = "from pyvmem.selftest import stamp_name, stamp_folders as f; print(f()[-1] / stamp_name('uvm', 0))"


def test_uvm_is_chosen_by_default_only_with_a_stamp(tmp_path):
    assert said(CHOSEN, tmp_path) == "stock stock"
    assert said("import pyvmem; print(pyvmem.Context('uvm').backend)", tmp_path) == "uvm"
    assert said("import pyvmem; print(pyvmem.Context().backend)", tmp_path, VMEM_BACKEND="uvm") == "uvm"
    path = Path(said(STAMP, tmp_path))
    assert path.name.startswith("uvm-580.159.04-sm90-") and tmp_path in path.parents
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert said(CHOSEN, tmp_path) == "uvm uvm"
    assert said(CHOSEN, tmp_path, FAKEGPU_BUILD="7") == "stock stock"  # another build of the module
    assert said(CHOSEN, tmp_path, FAKEGPU_RELEASE="575.64.03") == "stock stock"
    assert said(CHOSEN, tmp_path / "another") == "stock stock"
    path.rename(path.with_name(path.name + ".failed"))
    assert said(CHOSEN, tmp_path) == "stock stock"


def test_probe_tells_why(tmp_path):
    code = "import pyvmem; print(pyvmem.probe('uvm')); print(pyvmem.probe('uvm', by_default=True))"
    works, kept = said(code, tmp_path).splitlines()
    assert works == "None" and "its self-test has not passed here (pyvmem doctor --selftest)" in kept


def test_doctor_tells_in_one_line(tmp_path):
    lines = said(["doctor"], tmp_path).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("uvm"))
    assert lines[at].split()[1] == "works"
    why = "not chosen by default: its self-test has not passed here (pyvmem doctor --selftest)"
    assert lines[at + 2].strip() == why
    assert any(line.split()[:2] == ["stock", "best"] for line in lines)


@pytest.mark.parametrize("backend", ["stock", "uvm"])
def test_it_passes_and_leaves_a_stamp(backend, tmp_path):
    found = run(["doctor", "--selftest", "--backend", backend, "--json"], tmp_path)
    report = json.loads(found.stdout)
    assert found.returncode == 0 and report["passed"] and report["simulated"], found.stdout
    assert len(report["stages"]) == 7
    (stamp,) = (tmp_path / "vmem/selftest").iterdir()
    assert stamp.name == report["stamp"] and json.loads(stamp.read_text())["passed"]
    assert said(CHOSEN, tmp_path) == ("uvm uvm" if backend == "uvm" else "stock stock")


BROKEN = {
    "memory: pages stay": "kept = []; pyvmem.core.Pages.close = lambda self: kept.append(self)",
    "memory: a killed process's pages stay": """
import pyvmem.selftest.stages as stages
kept, within = [], stages._within
stages._within = lambda what, free, before, slack, seconds: within(what, free, before, slack, 1)
stages._kill_one = lambda run, seconds: kept.append(run.context.create(2 << 20, 64))""",
    "memory: fresh pages hold something": """
real = pyvmem.core.Reservation.map
def broken(self, pages, *args, **options):
    real(self, pages, *args, **options)
    if self.context.backend != "cuda": self.context.fill(self.addr + 3 * 65536 + 8, 1, 1)
pyvmem.core.Reservation.map = broken""",
    "aliases": """
real = pyvmem.Context.map
def broken(self, addrs, pages, **options):
    swapped = self._handles(pages).copy()
    swapped[-2:] = swapped[-1:-3:-1]
    real(self, addrs, swapped, **options)
pyvmem.Context.map = broken""",
    "replace": """
real = pyvmem.Context.map
def broken(self, addrs, pages, **options):
    broken.n += 1
    if broken.n % 31: real(self, addrs, pages, **options)
broken.n = 0
pyvmem.Context.map = broken""",
    "replace: readers that notice nothing": """
import selftest_agents
selftest_agents._CpuPoll.stop = lambda self: selftest_agents.Seen()""",
    "late writes: stores that reach nothing": """
import selftest_agents
selftest_agents.CpuAgent.store = lambda self, addr, length: selftest_agents.Stopped()""",
    "late writes": """
real = pyvmem.Context.fill
def broken(self, addr, value, length):
    real(self, addr, value, length)
    if value == 0: real(self, addr + length - 4096, 1, 1)
pyvmem.Context.fill = broken""",
    "over-read": """
real = pyvmem.Context.map
def broken(self, addrs, pages, **options):
    real(self, addrs, pages, **options)
    if addrs % (2 << 20) == 0: self.fill(addrs, 1, 1)
pyvmem.Context.map = broken""",
    "everything: a batch that fails": """
real = pyvmem.Context.map
def broken(self, addrs, pages, **options):
    try: real(self, addrs, pages, **options)
    except pyvmem.InvalidArgument:
        real(self, addrs[:1], pages[:1], **options)
        raise
pyvmem.Context.map = broken""",
    "everything: threads": """
import threading
real = pyvmem.Context.map
def broken(self, addrs, pages, **options):
    ours = threading.current_thread() is not threading.main_thread() and len(addrs) > 2
    real(self, addrs[1:] if ours else addrs, pages[1:] if ours else pages, **options)
pyvmem.Context.map = broken""",
    "everything: unmaps too little": """
real = pyvmem.Context.unmap
def broken(self, addrs, lengths):
    real(self, addrs, min(lengths, 2 * 65536))
pyvmem.Context.unmap = broken""",
}


@pytest.mark.parametrize("stage", BROKEN)
def test_the_stage_of_a_broken_mechanism_fails(stage, tmp_path):
    name = stage.partition(":")[0]
    perform = f"from pyvmem.selftest.child import perform; print(perform({name!r}, 'stock', 0)['ok'])"
    assert said(f"import pyvmem\n{BROKEN[stage]}\n{perform}", tmp_path, patched=False) == "False"


FIRST_TWO = """
import pyvmem.selftest as s
s.STAGES = s.STAGES[:2]
{}
print(s.run_selftest('uvm', say=lambda line: None)['stages'][-1])
"""


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ("s._Canary.differs = lambda self: 3", "the canary"),
        ("s.STAGES = (s.Stage('none', None, ''), *s.STAGES)", "the stage"),
        ("s.STAGES = (s.Stage('everything', None, '', 0.2), *s.STAGES)", "no end after"),
    ],
)
def test_the_first_failure_ends_it_and_takes_the_stamp(broken, what, tmp_path):
    said(FIRST_TWO.format(""), tmp_path)
    assert said(CHOSEN, tmp_path) == "uvm uvm"
    assert what in said(FIRST_TWO.format(broken), tmp_path)
    (left,) = (tmp_path / "vmem/selftest").iterdir()
    assert left.name.endswith(".failed") and len(json.loads(left.read_text())["stages"]) == 2
    assert said(CHOSEN, tmp_path) == "stock stock"
    assert "its self-test has FAILED here" in said(["doctor"], tmp_path)


# nvidia-smi's script, whose parent is the process that asks; whether that is in the machine's first PID namespace; and
# how many others it finds, or what it says of why that is unknown
LISTED = {
    "this one alone": ("echo $PPID", True, 0),
    "this one twice, as of two instances": ("echo $PPID; echo $PPID", True, 0),
    "this one and two": ("echo 7; echo $PPID; echo 8", True, 2),
    "two, and not this one": ("echo 7; echo 8", True, 2),
    "one, and not this one": ("echo 7", True, 1),
    "none": ("true", True, "not even this one"),
    "a namespace: one, which may be this one": ("echo 7", False, "namespace"),
    "a namespace: this one's number, which may be another's": ("echo $PPID", False, "namespace"),
    "a namespace: two, of which one may be this one": ("echo 7; echo 8", False, 1),
    "a namespace: none": ("true", False, "namespace"),
    "words": ("echo '[Not Supported]'", True, "[Not Supported]"),
    "words and a number": ("echo 7; echo [N/A]", True, "[N/A]"),
    "bytes": ("printf '\\377\\n'", True, "lists"),
    "a failure": ("echo 'No devices were found'; exit 6", True, "exit status 6: No devices were found"),
    "nothing": (None, True, "No such file"),
}


@pytest.mark.parametrize("case", LISTED)
def test_others_are_counted_only_where_processes_can_be_told_apart(case, tmp_path, monkeypatch):
    script, first, found = LISTED[case]
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(selftest, "_FIRST_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino if first else 0)
    others = selftest._others(bytes(16))
    assert others == found if isinstance(found, int) else found in others


def test_others_are_refused_and_unknown_ones_reported(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 7; echo 8\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    found = run(["doctor", "--selftest", "--backend", "stock"], tmp_path, PATH=str(tmp_path))
    assert found.returncode == 1 and "other processes that compute on this GPU: seen" in found.stdout
    found = run(["doctor", "--selftest", "--backend", "stock"], tmp_path, PATH="/nonexistent")
    assert found.returncode == 0, found.stderr
    assert "preflight    ok" in found.stdout and "other processes: unknown ([Errno 2]" in found.stdout
    (stamp,) = (tmp_path / "vmem/selftest").iterdir()
    assert "nvidia-smi" in json.loads(stamp.read_text())["stages"][0]["unknown"]["other processes"]


def test_options_that_do_not_fit(tmp_path):
    found = run(["doctor", "--shared"], tmp_path)
    assert found.returncode == 1 and "need --selftest" in found.stderr
    found = run(["doctor", "--selftest", "--backend", "uvm"], tmp_path, patched=False)
    assert found.returncode == 1 and "the stock one, without vMem" in found.stdout
    assert not list(tmp_path.rglob("uvm-*"))


def test_the_ioctls_are_timed_themselves(tmp_path):
    out = tmp_path / "records.json"
    arguments = ["vmm", "--quick", "--page-size", "64K", "--direct", "--json", str(out)]
    done = run([*arguments, "--backend", "uvm"], tmp_path, module="benchmarks")
    assert done.returncode == 0, done.stderr
    timed = {(r["metric"], r["page_size"]) for r in json.loads(out.read_text())["records"] if "ioctl" in r["metric"]}
    calls = ("create", "map", "unmap", "release, unmap included")
    assert timed == {(f"{call}, ioctl", size << 10) for call in calls for size in (64, 128, 256, 2048)}
    refused = run([*arguments, "--backend", "stock"], tmp_path, module="benchmarks")
    assert refused.returncode and "--direct times the ioctls of the uvm backend; this is stock" in refused.stderr


def test_a_canary_that_cannot_be_made_is_a_failure(tmp_path):
    code = (
        "from pyvmem import selftest as s; from pyvmem.errors import VmemError\n"
        "def fails(self, device): raise VmemError(14, 'zero: CUDA error 700')\n"
        "s._Canary.__init__ = fails\n"
        "r = s.run_selftest('uvm'); last = r['stages'][-1]\n"
        "print(r['passed'], last['stage'], 'CUDA error 700' in last['seen'])"
    )
    assert said(code, tmp_path).splitlines()[-1] == "False canary True"
