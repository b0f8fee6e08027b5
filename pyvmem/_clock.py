"""Times and starts of processes that other processes of the machine read: by the machine's clocks.

In a time namespace, as a container may have, the kernel's monotonic and boot clocks are ahead of the machine's or
behind. What a process publishes is therefore without that difference.

SPDX-License-Identifier: MIT
"""

import functools
import os
import time
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")  # of /proc, a second


@functools.lru_cache(1)
def _ahead(pid: int) -> dict[str, int]:
    """Nanoseconds by which the clocks of this process are ahead of the machine's. pid: its number, as forks move."""
    try:
        lines = [line.split() for line in Path("/proc/self/timens_offsets").read_text().splitlines()]
        return {clock: int(seconds) * 10**9 + int(ns) for clock, seconds, ns in lines}
    except (OSError, ValueError):  # the kernel has no such namespaces
        return {}


def now_us() -> int:
    """Microseconds of the machine's monotonic clock."""
    return (time.monotonic_ns() - _ahead(os.getpid()).get("monotonic", 0)) // 1000


def started(pid: str) -> str | None:
    """When a process was started, in ticks since the machine's boot; None if it has ended."""
    try:
        fields = Path("/proc", pid, "stat").read_bytes().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    ahead = _ahead(os.getpid()).get("boottime", 0) * _TICK // 10**9
    return None if fields[0] in "XZ" else str(int(fields[19]) - ahead)
