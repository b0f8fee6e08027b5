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
from pyvmem.selftest.stages import OTHERS, STAGES, Failed, Run


UNKNOWN = "PYVMEM_SELFTEST_UNKNOWN_DRIVER"  # 1: also of processes that a stage starts


def perform(name: str, backend: str, device: int) -> dict[str, Any]:
    """Run a stage and return what it found."""
    stage = next(s for s in (*STAGES, *OTHERS) if s.name == name)
    result: dict[str, Any] = {"ok": False, "what": "", "seen": "", "expected": "", "note": "", "figures": {}}
    try:
        with Context(backend, device, unknown_driver=os.environ.get(UNKNOWN) == "1") as context:
            run = Run(backend, device, context, agent(device))
            try:
                stage.run(run)
                result["ok"] = True
            finally:
                result.update(figures=run.figures, note=run.note)
    except (Failed, DeviceFault, VmemError, OSError) as error:
        if not result["ok"]:
            result.update(_text(error))
    return result


def _text(error: BaseException) -> dict[str, str]:
    """Describe the first failure: what follows it, when things are closed, is its consequence."""
    while isinstance(error.__context__, (Failed, DeviceFault, VmemError, OSError)):
        error = error.__context__
    if isinstance(error, Failed):
        return {"what": error.what, "seen": error.seen, "expected": error.expected}
    if isinstance(error, DeviceFault):
        return {"what": "the GPU", "seen": str(error), "expected": "no fault"}
    return {"what": "a call", "seen": str(error), "expected": "success"}


def main() -> None:
    """Run the stage that the arguments name. The process ends without destructors: CUDA may be unusable."""
    name, backend, device = sys.argv[1:]
    result = perform(name, backend, int(device))
    print(json.dumps(result), flush=True)
    os._exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
