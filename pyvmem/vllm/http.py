"""Limits over HTTP: ``vllm serve MODEL --middleware pyvmem.vllm.http.Limits``. See `pyvmem.engine.http`.

SPDX-License-Identifier: MIT
"""

from pyvmem.engine import http
from pyvmem.vllm import metrics


class Limits(http.Limits):
    """ASGI middleware that serves ``/vmem/limit`` and ``/vmem/metrics`` for the engines of this server."""

    prefix = metrics.PREFIX
    hint = "VMEM_VLLM must be 1, and VLLM_PLUGINS, where it is set, must include vmem"
    server = staticmethod(metrics.server)
