"""Every KV cache of this user for Prometheus, by prometheus_client.

    from prometheus_client import REGISTRY, start_http_server
    from pyvmem.metrics import Collector

    REGISTRY.register(Collector())
    start_http_server(9100)

SPDX-License-Identifier: MIT
"""

from collections.abc import Iterable
from typing import Any

from pyvmem.kv.view import STATS, read_views


class Collector:
    """A collector for a registry of prometheus_client: all statistics of all caches, read when it is scraped.

    The names begin with ``pyvmem_kv_``. Every sample has the labels `name` (the cache's), `pid` and `device` (such as
    ``host:0``).
    """

    def collect(self) -> Iterable[Any]:
        """Yield the metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for view in read_views():
            labels = (view.name, str(view.pid), f"{view.backend}:{view.device}")
            for name, value in view.stats.items():
                if name not in families:
                    kind = GaugeMetricFamily if STATS[name]["gauge"] else CounterMetricFamily
                    text = f"{STATS[name]['text']}."
                    families[name] = kind(f"pyvmem_kv_{name}", text, labels=("name", "pid", "device"))
                families[name].add_metric(labels, value)
        return families.values()

    def describe(self) -> Iterable[Any]:
        """No family has a fixed set of samples; registering reads nothing."""
        return []
