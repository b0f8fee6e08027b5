# SPDX-License-Identifier: MIT
"""The cost of a page through pyvmem, libvmem and the driver, on each backend: pushes, invalidates, calls and time.

Runs in the guest. argv: simgpu_uapi.h, then the backends. The counts are what a GPU would see; the time is software's
alone, emulated and with a simulated GPU below it.
"""

import fcntl
import re
import statistics
import struct
import sys
from pathlib import Path
from time import perf_counter_ns

import numpy as np

import pyvmem
from pyvmem.core import KIB, MAP_OP, MIB

PAGES, ROUNDS = 120, 7
HEADER = Path(sys.argv[1]).read_text()
BODY = re.search(r"struct simgpu_counters \{(.*?)\};", HEADER, re.S)[1]
NAMES = re.findall(r"\w+", " ".join(re.findall(r"__u64 ([\w, ]+);", BODY)))
COUNTERS = 3 << 30 | (8 + 8 * len(NAMES)) << 16 | ord("s") << 8 | 8
COUNTED = {
    "pushes": ("pushes",),
    "invalidates": ("inval_all", "inval_targeted"),
    "rm_calls": ("rm_calls", "rm_ioctls"),
}


def counters(device):
    data = bytearray(8 + 8 * len(NAMES))
    fcntl.ioctl(device, COUNTERS, data)
    values = dict(zip(NAMES, struct.unpack_from(f"{len(NAMES)}Q", data, 8)))
    return {name: sum(values[part] for part in parts) for name, parts in COUNTED.items()}


def measure(device, context, name, call):
    before, calls, start = counters(device), context.stats().syscalls, perf_counter_ns()
    call()
    took = perf_counter_ns() - start
    seen = {what: n - before[what] for what, n in counters(device).items()}
    return {**seen, "ioctls": context.stats().syscalls - calls, "ns": took}


def report(backend, what, rounds):
    for name in ("pushes", "invalidates", "rm_calls", "ioctls"):
        found = {r[name] for r in rounds}
        assert len(found) == 1, f"{backend}, {what}: {name} differ from round to round: {sorted(found)}"
        print(f"fig {backend}_{what}_{name} {found.pop()} for {PAGES} pages")
    us = statistics.median(r["ns"] for r in rounds) / 1e3 / PAGES
    print(f"fig {backend}_{what} {us:.1f} us of software a page (simulated)")


def run(device, backend):
    with pyvmem.Context(backend) as context, context.create(64 * KIB, PAGES) as pages:
        for order, step in (("scattered", 2 * MIB), ("consecutive", 64 * KIB)):
            with context.reserve(PAGES * step, backdrop=True) as range_:
                ops = np.empty(PAGES, MAP_OP)
                ops["page"] = pages.handles
                ops["addr"] = range_.addr + np.arange(PAGES, dtype=np.uint64) * step
                mapped, unmapped = [], []
                for i in range(ROUNDS + 1):  # the first opens overlays and page tables
                    one = measure(device, context, "map", lambda: context.map(ops["addr"], ops["page"]))
                    other = measure(device, context, "unmap", range_.unmap)
                    if i:
                        mapped.append(one)
                        unmapped.append(other)
                report(backend, f"map_{order}", mapped)
                report(backend, f"unmap_{order}", unmapped)
    print(f"ok user_cost_{backend}", flush=True)


def main():
    with open("/dev/simgpu", "r+b", buffering=0) as device:
        for backend in sys.argv[2:]:
            run(device, backend)


if __name__ == "__main__":
    main()
