"""One stage of the self-test, in a process of its own: ``python -m pyvmem.selftest.child STAGE BACKEND DEVICE``.

The last line on standard output is the result, as JSON.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyvmem.core import Context
from pyvmem.errors import VmemError
from pyvmem.selftest.agents import DeviceFault, agent
from pyvmem.selftest.stages import STAGES, VICTIM, Failed, Run

UNKNOWN = "PYVMEM_SELFTEST_UNKNOWN_DRIVER"  # 1: also of processes that a stage starts
_ERRORS = (Failed, DeviceFault, VmemError, OSError)


def refused(what: str, seen: object, expected: object) -> dict[str, Any]:
    """The result of what failed."""
    return {"ok": False, "what": what, "seen": str(seen), "expected": str(expected)}


def perform(name: str, backend: str, device: int) -> dict[str, Any]:
    """Run a stage and return what it found."""
    stage = next(s for s in (*STAGES, VICTIM) if s.name == name)
    figures: dict[str, int] = {}
    try:
        with Context(backend, device, unknown_driver=os.environ.get(UNKNOWN) == "1") as context:
            assert stage.run
            stage.run(Run(backend, device, context, agent(device), figures))
    except _ERRORS as error:
        first: BaseException = error  # what follows it, when things are closed, is its consequence
        while isinstance(first.__context__, _ERRORS):
            first = first.__context__
        return refused(*(first.args if isinstance(first, Failed) else (stage.name, first, stage.proves)))
    return {"ok": True, "figures": figures}


def main() -> None:
    """Run the stage that the arguments name. The process ends without destructors: CUDA may be unusable."""
    name, backend, device = sys.argv[1:]
    result = perform(name, backend, int(device))
    print(json.dumps(result), flush=True)
    os._exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
