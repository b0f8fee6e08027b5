"""Metrics of this server's engines in vLLM's own Prometheus endpoint.

Schedulers and workers publish their numbers in control pages (`control`), which the API server reads when it is
scraped.

SPDX-License-Identifier: MIT
"""

import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pyvmem.vllm import control

PREFIX = "vllm:vmem_kv_"
COUNTS = ("step_maps", "steps", "preempted", "refused")
BYTES = ("limit", "min", "max", "least", "allowed", "used", "cached", "spare", "wanted", "backed", "resident")


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def started_by(pid: int, ancestor: int) -> bool:
    """Whether a process is `ancestor`, or was started by it or by one that it started."""
    while pid not in (0, 1, ancestor):
        pid = _parent(pid)
    return pid == ancestor


def server() -> int:
    """The process of `vllm serve`: this one, or the one that started it as one of several API servers.

    Any other parent is the user's own, which may have started other servers, too.
    """
    parent = multiprocessing.parent_process()
    one_of_several = multiprocessing.current_process().name.startswith("ApiServer_")  # vLLM's name for it
    return parent.pid if one_of_several and parent is not None and parent.pid is not None else os.getpid()


def engines() -> list[tuple[control.Engine, control.Page]]:
    """The engines of this server."""
    here = server()
    return [(e, page) for e, page in control.engines() if control.is_here(page) and started_by(e.pid, here)]


class Collector:
    """A collector for a registry of prometheus_client."""

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for engine, _ in engines():
            for name, value in asdict(engine).items():
                if name not in COUNTS and name not in BYTES or value is None:
                    continue
                if name not in families:
                    kind = CounterMetricFamily if name in COUNTS else GaugeMetricFamily
                    unit = "_bytes" if name in BYTES else ""
                    families[name] = kind(f"{PREFIX}{name}{unit}", f"{name.replace('_', ' ')} of the KV cache on vMem",
                                          labels=("engine",))  # fmt: skip
                families[name].add_metric((str(engine.rank),), value)
        return families.values()


def text() -> bytes:
    """The metrics of this server's engines alone, in Prometheus' format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Collector())
    written: bytes = generate_latest(registry)
    return written


def register(registry: Any = None) -> None:
    """Add the collector to a registry of prometheus_client's (default: its own, which vLLM serves), once."""
    from prometheus_client import REGISTRY

    registry = REGISTRY if registry is None else registry
    if not getattr(registry, "vmem", False):
        registry.register(Collector())
        registry.vmem = True
