"""Metrics of a server's engines for Prometheus.

Schedulers and workers publish their numbers in control pages (`control`), which the server reads when it is scraped.

SPDX-License-Identifier: MIT
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from pyvmem.engine import control

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


Server = Callable[[], int]  # the process that serves, which the engines are started by


def engines(server: int) -> list[tuple[control.Engine, control.Page]]:
    """The engines that a process, or one that it started, has started on this machine."""
    return [(e, page) for e, page in control.engines() if control.is_here(page) and started_by(e.pid, server)]


class Collector:
    """A collector for a registry of prometheus_client. prefix: how the metrics' names begin, such as ``engine:``."""

    def __init__(self, prefix: str, server: Server) -> None:
        self._prefix, self._server = f"{prefix}vmem_kv_", server

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for engine, _ in engines(self._server()):
            for name, value in asdict(engine).items():
                if name not in COUNTS and name not in BYTES or value is None:
                    continue
                if name not in families:
                    kind = CounterMetricFamily if name in COUNTS else GaugeMetricFamily
                    unit = "_bytes" if name in BYTES else ""
                    about = f"{name.replace('_', ' ')} of the KV cache on vMem"
                    families[name] = kind(f"{self._prefix}{name}{unit}", about, labels=("engine",))
                families[name].add_metric((str(engine.rank),), value)
        return families.values()


def text(prefix: str, server: Server) -> bytes:
    """The metrics of a server's engines alone, in Prometheus' format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Collector(prefix, server))
    written: bytes = generate_latest(registry)
    return written


def register(prefix: str, server: Server, registry: Any = None) -> None:
    """Add the collector to a registry of prometheus_client's (default: its own), once."""
    from prometheus_client import REGISTRY

    registry = REGISTRY if registry is None else registry
    if not getattr(registry, "vmem", False):
        registry.register(Collector(prefix, server))
        registry.vmem = True
