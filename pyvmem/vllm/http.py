"""Limits, sleep and metrics over HTTP: ``vllm serve MODEL --middleware pyvmem.vllm.http.Limits``, or ``.Serve``.

See `pyvmem.engine.http` and `pyvmem.sleep.serve`.

SPDX-License-Identifier: MIT
"""

import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from pyvmem.engine import control, http, metrics
from pyvmem.engine.settings import Settings
from pyvmem.sleep import serve
from pyvmem.vllm import plugin

PREFIX = "vllm:"
QUEUED = {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"}


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


class Limits(http.Limits):
    """ASGI middleware that serves ``/vmem/limit`` and ``/vmem/metrics`` for the engines of this server."""

    prefix = PREFIX
    hint = "VMEM_VLLM must be 1, and VLLM_PLUGINS, where it is set, must include vmem"
    server = staticmethod(server)

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        if "vllm.platforms" in sys.modules:
            plugin.check_platform()  # vLLM loads this although VLLM_PLUGINS may not name vmem

    def keys(self, state: Any) -> Sequence[str]:
        given = getattr(getattr(state, "args", None), "api_key", None) or os.environ.get("VLLM_API_KEY") or []
        return [given] if isinstance(given, str) else given


class Serve(Limits, serve.Serve):
    """ASGI middleware that holds requests while the model sleeps. It serves ``/vmem/state`` and orders, too.

    vLLM cannot tell an order to pause from one to sleep, so the first waits until the model is awake.
    """

    free = ("/sleep", "/wake_up", "/resume", "/is_", "/reset_", "/collective_rpc", "/start_profile",
            "/stop_profile", "/tokenize", "/detokenize", "/abort_requests", "/release_kv_cache_memory")  # fmt: skip

    def settings(self) -> Settings:
        return plugin.settings()

    def queues(self, state: Any, path: str) -> bool:
        """vLLM's engine is paused until it is awake. But it loads adapters at once. Data-parallel engines that step
        together must all have resumed when one gets a request.
        """
        if path not in QUEUED or state is None:
            return False
        config = state.engine_client.vllm_config
        parallel, model = config.parallel_config, config.model_config
        return config.lora_config is None and not (parallel.data_parallel_size > 1 and model.is_moe)

    def number(self) -> int:
        found = re.fullmatch(r"ApiServer_([0-9]+)", multiprocessing.current_process().name)
        number = int(found[1]) if found else 0
        if number >= control.SERVERS:
            raise ValueError(f"--api-server-count must be at most {control.SERVERS} with pyvmem.vllm.http.Serve")
        return number

    def about(self, state: Any) -> tuple[str, int]:
        args = getattr(state, "args", None)
        names = getattr(args, "served_model_name", None) or [getattr(args, "model", "")]
        port = self.standby.port if self.standby is not None else getattr(args, "port", 0)
        return str(names[0]), int(port or 0)

    async def sleep(self, state: Any, freeze: bool) -> None:
        await state.engine_client.sleep(1, "keep" if freeze else "wait")

    async def wake(self, state: Any) -> None:
        await state.engine_client.collective_rpc("vmem_wake")
        if not self.pages.is_wake_in_vain():
            await state.engine_client.wake_up()

    async def sleep_again(self, state: Any) -> None:
        await state.engine_client.collective_rpc("vmem_sleep_again")
