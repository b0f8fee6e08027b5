"""Metrics of a server's engines for Prometheus.

Schedulers and workers publish their numbers in control pages (`control`), which the server reads when it is scraped.

SPDX-License-Identifier: MIT
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from pyvmem.engine import control, pools
from pyvmem.engine.control import State

COUNTS = ("step_maps", "steps", "preempted", "refused")
BYTES = ("limit", "min", "max", "least", "allowed", "used", "cached", "spare", "wanted", "backed", "resident")
# Metrics of a model whose server lets it sleep: (field, name of the metric, what it is, whether it counts).
MODEL = (
    ("running", "running", "requests that the engine has", False),
    ("queued", "queued", "requests that wait for the model to wake", False),
    ("wait", "wait_seconds", "seconds that a request which comes now is expected to wait for the model", False),
    ("room", "room_bytes", "bytes of the pool that the model could have at once", False),
    ("lacks", "lacks_bytes", "bytes that the model lacks to wake", False),
    ("weights", "weights_bytes", "bytes of the weights in the pool", False),
    ("weights_held", "weights_held_bytes", "bytes of these that are on the device", False),
    ("wakes", "wakes", "how often the model has woken", True),
    ("sleeps", "sleeps", "how often the model went to sleep", True),
    ("waking", "waking_seconds", "seconds that the first request of each wake has waited", True),
    ("unserved", "unserved", "requests refused with status 503: the model was drained, or did not wake in time", True),
)


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def started_by(pid: int, ancestor: int) -> bool:
    """Return whether a process is `ancestor` or one of its descendants."""
    while pid not in (0, 1, ancestor):
        pid = parent_of(pid)
    return pid == ancestor


Server = Callable[[], int]  # the process that serves, which the engines are started by


def engines(server: int) -> list[tuple[control.Engine, control.Page]]:
    """The engines that a process, or one that it started, has started on this machine."""
    return [(e, page) for e, page in control.engines() if control.is_here(page) and started_by(e.pid, server)]


class Collector:
    """A collector for a registry of prometheus_client. prefix: how the metrics' names begin, such as ``engine:``.

    Metrics of the KV cache begin with ``vmem_kv_`` behind the prefix, and those of a model that can sleep with
    ``vmem_model_``.
    """

    def __init__(self, prefix: str, server: Server) -> None:
        self._prefix, self._server = prefix, server

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}

        def add(name: str, about: str, counts: bool, labels: dict[str, str], value: float) -> None:
            if name not in families:
                kind = CounterMetricFamily if counts else GaugeMetricFamily
                families[name] = kind(self._prefix + name, about, labels=tuple(labels))
            families[name].add_metric(tuple(labels.values()), value)

        names = pools.names()
        for engine, page in engines(self._server()):
            values, labels = asdict(engine), {"engine": str(engine.rank), "model_name": engine.model}
            for name, value in values.items():
                if (name in COUNTS or name in BYTES) and value is not None:
                    about = f"{name.replace('_', ' ')} of the KV cache on vMem"
                    unit = "_bytes" if name in BYTES else ""
                    add(f"vmem_kv_{name}{unit}", about, name in COUNTS, labels, value)
            if not engine.state:
                continue
            labels["pool"] = names.get(page.pools()[0], "")
            for name, metric, about, counts in MODEL:
                add(f"vmem_model_{metric}", about, counts, labels, values[name])
            for state in (*(state.name.lower() for state in list(State)[1:]), "drained"):
                add("vmem_model_state", "1 for the state in which the model is", False,
                    {**labels, "state": state}, engine.state == state)  # fmt: skip
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
