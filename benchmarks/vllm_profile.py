"""The time that an engine's steps spend in vLLM's scheduler, in its worker, and in vMem's part of both.

The profile wraps functions in the engine's process, so the engine must be one process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``, one GPU), as in ``python -m benchmarks vllm``.

SPDX-License-Identifier: MIT
"""

import functools
import importlib
import time
from typing import Any

import numpy as np

# name: (module, function)
TIMED = {
    "engine: step": ("vllm.v1.engine.llm_engine", "LLMEngine.step"),
    "scheduler: schedule": ("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    "scheduler: update": ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    "worker: prepare and launch": ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model"),
    "worker: sample": ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.sample_tokens"),
    "worker: wait for the GPU": ("vllm.v1.worker.gpu.async_utils", "AsyncOutput.get_output"),
}


class Profile:
    """Seconds of every call of the functions in `TIMED` since the last `take`."""

    def __init__(self) -> None:
        self.seconds: dict[str, Any] = {}
        self._updates: list[float] = []  # when each step's tokens were known
        for name, (module, function) in TIMED.items():
            owner = importlib.import_module(module)
            *path, last = function.split(".")
            for part in path:
                owner = getattr(owner, part)
            setattr(owner, last, self._timed(name, getattr(owner, last)))

    def _timed(self, name: str, function: Any) -> Any:
        seconds = self.seconds[name] = []

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)
                if name == "scheduler: update":
                    self._updates.append(begin)

        return timed

    def between(self, first: float, last: float) -> dict[str, Any] | None:
        """Steps between two times of `time.perf_counter`: how many, and ms from one to the next."""
        at = np.asarray([t for t in self._updates if first <= t <= last])
        if len(at) < 3:
            return None
        ms = 1e3 * np.diff(at)
        return dict(steps=len(ms), mean=float(ms.mean()), median=float(np.median(ms)), most=float(ms.max()),
                    p90=float(np.percentile(ms, 90)), p99=float(np.percentile(ms, 99)))  # fmt: skip

    def take(self) -> dict[str, Any]:
        """{name: calls, seconds in all, and of a call in ms: median, 99th percentile, most}"""
        found = {}
        for name, seconds in self.seconds.items():
            if seconds:
                ms = 1e3 * np.asarray(seconds)
                found[name] = dict(calls=len(ms), seconds=float(ms.sum() / 1e3), median=float(np.median(ms)),
                                   p99=float(np.percentile(ms, 99)), most=float(ms.max()))  # fmt: skip
            seconds.clear()
        self._updates.clear()
        return found
