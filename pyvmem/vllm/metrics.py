"""Metrics of this server's engines in vLLM's own Prometheus endpoint.

SPDX-License-Identifier: MIT
"""

import multiprocessing
import os
from typing import Any

from pyvmem.engine import control, metrics

PREFIX = "vllm:"


def server() -> int:
    """The process of `vllm serve`: this one, or the one that started it as one of several API servers.

    Any other parent is the user's own, which may have started other servers, too.
    """
    parent = multiprocessing.parent_process()
    one_of_several = multiprocessing.current_process().name.startswith("ApiServer_")  # vLLM's name for it
    return parent.pid if one_of_several and parent is not None and parent.pid is not None else os.getpid()


def engines() -> list[tuple[control.Engine, control.Page]]:
    """The engines of this server."""
    return metrics.engines(server())


def register(registry: Any = None) -> None:
    """Add the collector to a registry of prometheus_client's (default: its own, which vLLM serves), once."""
    metrics.register(PREFIX, server, registry)
