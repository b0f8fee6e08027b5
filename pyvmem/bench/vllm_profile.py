"""The time that an engine's steps spend in vLLM's scheduler, in its worker, and in vMem's part of both.

The profile wraps functions in the engine's process, so the engine must be one process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``, one GPU), as in ``pyvmem bench vllm``.

SPDX-License-Identifier: MIT
"""

import collections
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


def pauses(events: list[tuple[int, int, str]], most: int = 30) -> dict[str, Any]:
    """When a GPU did nothing, between which kernels. events: of each kernel or copy, begin and end in ns, and its name.

    {names of the kernels before and after: times, ms in all, us of one: median, most}, of those that took longest.
    """
    found, end, last = collections.defaultdict(list), 0, ""
    for begins, ends, name in sorted(events):
        if last and begins > end:
            found[f"{last[:80]} > {name[:80]}"].append((begins - end) / 1e3)
        if ends >= end:
            end, last = ends, name
    longest = sorted(found, key=lambda name: -sum(found[name]))[:most]
    return {
        name: dict(times=len(us), ms=sum(us) / 1e3, median=float(np.median(us)), most=max(us))
        for name, us in ((n, found[n]) for n in longest)
    }


class Kernels:
    """The GPU's kernels while it is entered: how often each ran, for how long, and the pauses between them."""

    def __enter__(self) -> "Kernels":
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._profile.__exit__(None, None, None)

    def _events(self) -> list[tuple[int, int, str]]:
        profiler: Any = self._profile.profiler
        return [
            (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
            for event in profiler.kineto_results.events()
            if event.device_type().name == "CUDA"
        ]

    def pauses(self) -> dict[str, Any]:
        """See `pauses`."""
        return pauses(self._events())

    def take(self, most: int = 30) -> dict[str, Any]:
        """{name: calls, ms in all, us of a call: median, 99th percentile}, of those that took longest."""
        found = collections.defaultdict(list)
        for begins, ends, name in self._events():
            found[name[:160]].append((ends - begins) / 1e3)
        longest = sorted(found, key=lambda name: -sum(found[name]))[:most]
        return {
            name: dict(calls=len(us), ms=sum(us) / 1e3, median=float(np.median(us)), p99=float(np.percentile(us, 99)))
            for name, us in ((n, found[n]) for n in longest)
        }
