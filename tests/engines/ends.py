"""What tests start ends with them, in whatever way they end: engines that are left alone go on computing.

SPDX-License-Identifier: MIT
"""

import ctypes
import os
import signal
import subprocess
from pathlib import Path

_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_told = None  # the watcher's pipe


def fork_ends_with_parent():
    """Have this fork end with the process that made it."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)


def start(*command, **options):
    """Start a program in a session of its own, which ends with this process. options: of `subprocess.Popen`."""
    if _told is None:
        _begin_to_watch()
    made = subprocess.Popen(command, start_new_session=True, **options)
    os.write(_told, f"{made.pid} {_about(made.pid)[1]}\n".encode())
    return made


def run(*command, input=None, timeout=None, **options):
    """As `subprocess.run` has it, with text and captured output."""
    with start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
               **options) as made:  # fmt: skip
        try:
            told, said = made.communicate(input, timeout)
        except BaseException:
            _end(str(made.pid), _about(made.pid)[1])
            raise
    return subprocess.CompletedProcess(command, made.returncode, told, said)


def processes(session):
    """The processes of a session."""
    found = [(int(entry.name), _about(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid, about in found if about and about[0] == str(session)]


def _begin_to_watch():
    """Fork the process that waits for this one's end, and then ends the sessions that it was told of."""
    global _told
    told, _told = os.pipe()
    parent, signals = os.getpid(), {signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if os.fork():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        os.close(told)
        return
    try:
        os.setsid()
        _libc.prctl(_PDEATHSIG, signal.SIGUSR1)
        for fd in range(3):  # who reads what the tests print waits for their end alone
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        if os.getppid() == parent:
            signal.sigwait(signals)
        os.set_blocking(told, False)
        for line in os.read(told, 1 << 20).decode().splitlines():
            _end(*line.split())
    finally:
        os._exit(0)


def _about(pid):
    """The session and the start of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[3], fields[19]


def _end(session, began):
    """Kill all processes of a session, unless another process has its number now."""
    leader = _about(session)
    if leader and leader[1] != began:
        return
    for pid in processes(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
