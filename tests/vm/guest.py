# SPDX-License-Identifier: MIT
"""Boot a QEMU guest, run a list of steps in it, and judge what its console and its kernel log say.

The guest has two serial ports. The kernel logs to the first; test programs write to the second, where the guest's
init brackets every step with ``@@`` lines, and with lines of its own in the kernel log, since nothing orders the two
ports. A step's verdict is its exit status, the ``not ok`` lines it printed and the kernel's complaints while it ran.
"""

import dataclasses
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

# Lines by which the kernel, the driver and the simulator report an error.
COMPLAINT = re.compile(
    r"\bBUG\b|invalid opcode|unable to handle|WARNING:"
    r"|INFO: possible|INFO: task .* blocked|INFO: rcu|possible (circular|recursive)|suspicious RCU"
    r"|Assert failed|Oops|general protection|KASAN|UBSAN|kmemleak: \d+ new|unreferenced object|Kernel panic"
    r"|soft lockup|hung task|sleeping function called|[Mm]emory leak of|Object remaining|list_(add|del) corruption"
    r"|refcount_t:|stack guard page|simgpu: (error|leak|violation)|page allocation failure"
)

MARK = re.compile(r"vmem step (\d+) (begins|ended): ")

# An emulated guest on a busy machine loses the processor for a while: its timers then look broken, and its watchdogs
# see stalls that are none. A guest that hangs is found by the time limit of its step. KASAN reports more than once.
# The time is the HPET's: the kernel measures the TSC at boot, and a clock was seen to run six times too fast.
PATIENCE = (
    "no_timer_check tsc=reliable clocksource=hpet printk.devkmsg=on rcupdate.rcu_cpu_stall_timeout=300 "
    "watchdog_thresh=60 workqueue.watchdog_thresh=300 sysctl.kernel.hung_task_timeout_secs=600 kasan_multi_shot"
)
# Memory that the kernel has freed is poisoned: a later write is a BUG when it is handed out again.
POISON = "slub_debug=FP,kmalloc-*"


@dataclasses.dataclass(frozen=True)
class Allowed:
    """An assertion that is no failure, as UVM's own tests provoke on purpose. `step`: names of the steps that may."""

    file: str
    function: str
    step: str
    why: str

    def covers(self, step, line):
        return self.file in line and self.function in line and re.search(self.step, step)


@dataclasses.dataclass
class Step:
    """One shell command in the guest. `quiet` steps (module loading) are reported only when they fail."""

    name: str
    command: str
    timeout: int = 60
    quiet: bool = False


@dataclasses.dataclass
class Result:
    """The outcome of one step."""

    step: Step
    rc: int | None = None  # None: it never ended
    seconds: float = 0.0
    output: list = dataclasses.field(default_factory=list)
    complaints: list = dataclasses.field(default_factory=list)

    def lines(self, prefix):
        return [line[len(prefix) :].strip() for line in self.output if line.startswith(prefix)]

    @property
    def passed(self):
        return self.lines("ok ")

    @property
    def failed(self):
        return self.lines("not ok ")

    @property
    def skipped(self):
        return self.lines("skip ")

    @property
    def figures(self):
        """{name: (value, unit)} from the `fig NAME VALUE UNIT` lines."""
        out = {}
        for line in self.lines("fig "):
            name, value, unit = (line.split(None, 2) + [""])[:3]
            out[name] = (float(value), unit)
        return out

    @property
    def ok(self):
        return self.rc == 0 and not self.failed and not self.complaints


def job_script(steps):
    """The steps as the shell lines that the guest's init sources."""
    return "".join(f"step {shlex.quote(s.name)} {s.timeout} {shlex.quote(s.command)}\n" for s in steps)


def accelerator(name):
    """QEMU arguments for `name`; TCG unless another was asked for and a guest was seen to start under it."""
    if name == "tcg":
        # without ERMS the kernel fills and copies memory by words: QEMU emulates "rep stosb" byte by byte
        return ["-accel", "tcg,thread=multi", "-cpu", "max,la57=off,erms=off,fsrm=off"]
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise SystemExit("run.py: --accel kvm needs read and write access to /dev/kvm")
    return ["-accel", name, "-cpu", "host"]


def command_line(kernel, initrd, *, memory=1536, cpus=2, accel="tcg", append=""):
    args = [
        "qemu-system-x86_64",
        *accelerator(accel),
        "-m",
        str(memory),
        "-smp",
        str(cpus),
        "-no-reboot",
        "-nodefaults",
        "-display",
        "none",
        "-device",
        "edu",
        "-device",
        "edu",
        "-kernel",
        str(kernel.image),
        "-initrd",
        str(initrd),
        "-append",
        f"console=ttyS0 panic=-1 oops=panic printk.time=1 {PATIENCE} {POISON} {append}".strip(),
    ]
    return args


class Guest:
    """One run: boots, follows both consoles, fills in a Result per step."""

    def __init__(self, qemu_args, steps, *, allowed=(), boot_timeout=900, on_result=None, stop_after=None, log=None):
        self.args, self.allowed, self.boot_timeout = qemu_args, tuple(allowed), boot_timeout
        self.results = [Result(s) for s in steps]
        self.on_result, self.stop_after, self.log = on_result, stop_after, log
        self.stopped = False
        self.klog, self.done, self.why = [], False, ""
        self._at = self._kernel_at = -1  # index of the step that runs, by each port; -1: none yet
        self._kernel_ended = -1  # index of the last step whose end is in the kernel log
        self._unreported = []  # ended by the tests' port, not yet by the kernel's
        self._deadline = time.monotonic() + boot_timeout
        self._between = []  # complaints outside any step

    def run(self):
        """Returns True when every step passed and the guest shut down by itself."""
        with tempfile.TemporaryDirectory(prefix="vmem-vm-") as tmp:
            paths = [Path(tmp) / n for n in ("kernel", "tests")]
            listeners = []
            for path in paths:
                s = socket.socket(socket.AF_UNIX)
                s.bind(str(path))
                s.listen(1)
                s.settimeout(1.0)
                listeners.append(s)
            args = list(self.args)
            for i, path in enumerate(paths):
                args += ["-chardev", f"socket,id=c{i},path={path}", "-serial", f"chardev:c{i}"]
            qemu = subprocess.Popen(args, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
            try:
                consoles = [self._console(s, qemu) for s in listeners]
                if all(consoles):
                    self._follow(qemu, consoles)
                else:
                    self.why = "QEMU opened no console"
            finally:
                for s in listeners:
                    s.close()
                if qemu.poll() is None:
                    os.killpg(qemu.pid, signal.SIGKILL)
                qemu.wait()
                said = qemu.stderr.read().decode(errors="replace").strip()
                qemu.stderr.close()
                if said and not self.klog:
                    self.why = f"QEMU: {said}"
        self._report(all_of_them=True)
        if not self.done and not self.why and not self.stopped:
            self.why = "the guest ended before its last step" + self._panic()
        if self._between:
            self.why = (self.why + "; " if self.why else "") + "outside any step: " + self._between[0]
        return self.done and not self.why and all(r.ok for r in self.results)

    def _console(self, listener, qemu):
        """QEMU's end of a serial port; None where it ended, or opened none in time."""
        while time.monotonic() < self._deadline:
            ended = qemu.poll() is not None
            try:
                return listener.accept()[0]
            except TimeoutError:
                if ended:
                    break
        return None

    def _panic(self):
        for line in reversed(self.klog):
            if "Kernel panic" in line or "BUG:" in line or "RIP:" in line:
                return ": " + line.strip()
        return ""

    def _follow(self, qemu, socks):
        sel = selectors.DefaultSelector()
        buffers = {}
        for sock, handler in zip(socks, (self._kernel_line, self._test_line)):
            sock.setblocking(False)
            sel.register(sock, selectors.EVENT_READ, handler)
            buffers[sock] = b""
        while buffers and not self.stopped:
            ready = sel.select(1.0)
            # Lines that the guest wrote in time count, even if this process lost its core meanwhile.
            if not ready and time.monotonic() > self._deadline:
                name = self.results[self._at].step.name if self._at >= 0 else "boot"
                self.why = f"{name}: no answer within its time"
                break
            for key, _ in ready:
                data = key.fileobj.recv(65536)
                if not data:
                    sel.unregister(key.fileobj)
                    del buffers[key.fileobj]
                    continue
                *lines, buffers[key.fileobj] = (buffers[key.fileobj] + data).split(b"\n")
                for line in lines:
                    key.data(line.decode(errors="replace").rstrip("\r"))
        for sock in socks:
            sock.close()

    def _kernel_line(self, line):
        self.klog.append(line)
        if self.log:
            self.log.write(line + "\n")
        mark = MARK.search(line)
        if mark:
            self._kernel_at = int(mark[1])
            if mark[2] == "ended":
                self._kernel_ended = self._kernel_at
                self._report()
        elif COMPLAINT.search(line):
            if self._kernel_at < 0:
                self._between.append(line)
                return
            result = self.results[self._kernel_at]
            if not any(a.covers(result.step.name, line) for a in self.allowed):
                result.complaints.append(line)

    def _report(self, all_of_them=False):
        """Report the steps that ended on both ports, or whose end the kernel log lost."""
        while self._unreported and (all_of_them or self._unreported[0] <= self._kernel_ended):
            result = self.results[self._unreported.pop(0)]
            if self.on_result:
                self.on_result(result)
            self.stopped |= bool(self.stop_after and self.stop_after(result))

    def _test_line(self, line):
        if self.log:
            self.log.write("| " + line + "\n")
        if not line.startswith("@@ "):
            if self._at >= 0:
                self.results[self._at].output.append(line)
            return
        word, *rest = line[3:].split()
        if word == "begin":
            self._at = int(rest[0])
            # the guest kills the step itself when its time is over: this deadline is for a guest that hangs
            self._deadline = time.monotonic() + self.results[self._at].step.timeout * 1.5 + 30
        elif word == "end":
            result = self.results[int(rest[0])]
            result.rc, result.seconds = int(rest[1]), float(rest[2])
            self._deadline = time.monotonic() + self.boot_timeout
            self._unreported.append(int(rest[0]))
            self._report()
        elif word == "done":
            self.done = True
