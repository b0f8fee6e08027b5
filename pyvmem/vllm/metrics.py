"""Metrics of this server's KV caches in vLLM's own Prometheus endpoint.

Workers publish their statistics in files (`pyvmem.kv_view`), which the API server reads when it is scraped.

SPDX-License-Identifier: MIT
"""

import multiprocessing
import os
from collections.abc import Iterable
from typing import Any

from pyvmem.kv_view import GAUGES, View, read_views

PREFIX = "vllm:vmem_kv_"


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _server() -> int:
    """The process that the user started: this one, or the one that started it as one of several API servers."""
    parent = multiprocessing.parent_process()
    return os.getpid() if parent is None or parent.pid is None else parent.pid


def own_views(pid: int | None = None) -> list[View]:
    """Views of KV caches named "vllm" in process `pid` (default: this one) and in processes that it started."""
    pid = os.getpid() if pid is None else pid
    found = []
    for view in read_views():
        ancestor = view.pid
        while ancestor not in (0, 1, pid):
            ancestor = _parent(ancestor)
        if view.name == "vllm" and ancestor == pid:
            found.append(view)
    return found


class Collector:
    """A collector for a registry of prometheus_client."""

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {}
        for view in own_views(_server()):
            labels = (str(view.pid), f"{view.backend}:{view.device}")
            for name, value in view.stats.items():
                if name not in families:
                    kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
                    families[name] = kind(PREFIX + name, f"{name.replace('_', ' ')} of the KV cache on vMem",
                                          labels=("pid", "device"))  # fmt: skip
                families[name].add_metric(labels, value)
        return families.values()


def register(registry: Any = None) -> None:
    """Add the collector to a registry of prometheus_client's (default: its own, which vLLM serves), once."""
    from prometheus_client import REGISTRY

    registry = REGISTRY if registry is None else registry
    if not getattr(registry, "vmem", False):
        registry.register(Collector())
        registry.vmem = True
