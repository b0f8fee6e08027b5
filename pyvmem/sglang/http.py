"""Limits over HTTP, on SGLang's own server, with VMEM_SGLANG_HTTP=1. See `pyvmem.engine.http`.

SPDX-License-Identifier: MIT
"""

from pyvmem.engine import http


class Limits(http.Limits):
    """ASGI middleware that serves ``/vmem/limit`` and ``/vmem/metrics`` for the engines of this server."""

    prefix = "sglang:"
    hint = "VMEM_SGLANG must be 1, and SGLANG_PLUGINS, where it is set, must include vmem"
