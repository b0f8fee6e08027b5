"""The settings of vLLM on vMem, which are environment variables that vLLM's processes inherit, and those of vLLM's own
that cannot work. See docs/vllm.md.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pyvmem.engine import settings
from pyvmem.engine.refuse import Refused
from pyvmem.engine.settings import Settings

SWITCH = "VMEM_VLLM"
LAYOUTS = ("auto", "vllm", "slots")


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment, as `pyvmem.engine.settings.read` has them."""
    return settings.read(SWITCH, LAYOUTS, environ, sleeps=True)


def _connector(c: Any) -> str | None:
    """The KV connector of a configuration, and which of its settings goes beyond copies of single blocks."""
    given, kv_cache = getattr(c, "kv_transfer_config", None), getattr(c, "cache_config", None)
    name, more = getattr(given, "kv_connector", None), {} if given is None else given.kv_connector_extra_config
    # Of a chunk of several blocks, vLLM stores what is left if a window has passed the first ones.
    beyond = [key for key in ("spec_name", "blocks_per_chunk", "block_size") if key in more]
    if kv_cache is not None and kv_cache.kv_offloading_size is not None:  # from which vLLM makes the connector later
        simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") != "0"
        name = "OffloadingConnector" if kv_cache.kv_offloading_backend == "native" else kv_cache.kv_offloading_backend
        name = "SimpleCPUOffloadConnector" if simple else name
    return f"{name} with {beyond[0]}" if name == "OffloadingConnector" and beyond else name


def _reasons(c: Any) -> Iterator[str]:
    parallel = c.parallel_config
    connector = _connector(c)
    if connector == "OffloadingConnector" and getattr(c.model_config, "is_hybrid", False):
        yield "offloading of Mamba's states to host memory has not been tried; unset --kv-offloading-size"
    elif connector not in (None, "OffloadingConnector"):
        yield (f"{connector}: only --kv-offloading-size is known to copy blocks alone, and others would see unbacked "
               "addresses; unset --kv-transfer-config")  # fmt: skip
    if any(getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("decode", "prefill")):
        yield "context parallelism deals a request's blocks out to several GPUs; set its sizes to 1"
    if getattr(getattr(c, "attention_config", None), "hisparse_config", None) is not None:
        yield "HiSparse keeps blocks in host memory, which vMem does not follow; unset its configuration"
    ranks = getattr(parallel, "tensor_parallel_size", 1) * getattr(parallel, "pipeline_parallel_size", 1)
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and ranks > 1:
        yield ("an external launcher runs a scheduler for each worker, which must all decide alike, and memory comes "
               "to each at another time; let vLLM start the workers, or set --tensor-parallel-size and "
               "--pipeline-parallel-size to 1")  # fmt: skip
    if getattr(parallel, "enable_elastic_ep", False):
        yield "elastic expert parallelism adds workers while it runs; unset --enable-elastic-ep"


def check(vllm_config: Any) -> None:
    """Raise `Refused` with the first reason why vLLM's own settings cannot work on vMem."""
    for reason in _reasons(vllm_config):
        raise Refused(f"VMEM_VLLM=1: {reason} (or unset VMEM_VLLM)")
