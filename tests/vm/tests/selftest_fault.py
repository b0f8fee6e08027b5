# SPDX-License-Identifier: MIT
"""The self-test on a simulated GPU with a fault: argv is a bit of SIMGPU_MODE, and the stage that must fail.

Runs in the guest.
"""

import fcntl
import os
import struct
import sys

os.environ["XDG_STATE_HOME"] = "/tmp/fault"  # no stamp of the system's goes

from pyvmem import selftest  # noqa: E402

MODE = 3 << 30 | 16 << 16 | ord("s") << 8 | 15


def mode(set, clear):
    with open("/dev/simgpu", "r+b", buffering=0) as device:
        fcntl.ioctl(device, MODE, struct.pack("<IIII", 0, set, clear, 0))


def main():
    bit, stage = int(sys.argv[1], 0), sys.argv[2]
    child = selftest._child

    def beside_a_fault(of, *rest):
        """Only in that stage: memory that others hold, the canary's too, must be right."""
        if of.name != stage:
            return child(of, *rest)
        mode(bit, 0)
        try:
            return child(of, *rest)
        finally:
            mode(0, bit)

    selftest._child = beside_a_fault
    report = selftest.run_selftest("uvm")
    failed = [row["stage"] for row in report["stages"] if not row["ok"]]
    if report["passed"] or failed != [stage]:
        print(f"not ok selftest_fault - {failed or 'no stage'} failed, not {stage}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
