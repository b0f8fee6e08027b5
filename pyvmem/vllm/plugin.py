"""How vLLM finds vMem: the entry points that it calls in each of its processes.

They are `platform` (group ``vllm.platform_plugins``) and `check_platform` (``vllm.general_plugins``).

The settings are environment variables, which these processes inherit. `check_config` refuses those of vLLM's own that
cannot work. See docs/vllm.md.

It runs while vLLM is imported, so it imports neither torch nor vLLM.

SPDX-License-Identifier: MIT
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from pyvmem.engine import settings as engine_settings
from pyvmem.engine.settings import Settings, cannot, warn_if_forgotten, warn_of_unknown

SWITCH = "VMEM_VLLM"
LAYOUTS = ("auto", "vllm")


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment, as `pyvmem.engine.settings.read` has them."""
    return engine_settings.read(SWITCH, LAYOUTS, environ, engine_settings.SLEEPS)


def _connector(c: Any) -> str | None:
    """The KV connector of a configuration, and which of its settings goes beyond copies of single blocks."""
    given, kv_cache = getattr(c, "kv_transfer_config", None), getattr(c, "cache_config", None)
    name, more = getattr(given, "kv_connector", None), {} if given is None else given.kv_connector_extra_config
    # If a window has passed the first blocks of a chunk, vLLM stores the others.
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
    load = getattr(c, "load_config", None)
    if getattr(load, "load_format", None) == "ipc_cache" and settings().weights:
        yield (f"{SWITCH}_WEIGHTS=1 puts the weights into the pool, and --load-format ipc_cache maps those of another "
               f"process, which vLLM does not let sleep; choose another format, or unset {SWITCH}_WEIGHTS")  # fmt: skip
    if getattr(parallel, "enable_elastic_ep", False):
        yield "elastic expert parallelism adds workers while it runs; unset --enable-elastic-ep"


def check_config(vllm_config: Any) -> None:
    """Raise `Refused` with the first reason why vLLM's own settings cannot work on vMem."""
    for reason in _reasons(vllm_config):
        raise cannot(SWITCH, reason)


def _copy_to_ray(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have vLLM copy the settings to its workers under Ray, as it does with its own."""
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [p.strip() for p in environ.get(name, "").split(",") if p.strip()]
    if "VMEM_" not in prefixes:
        environ[name] = ",".join([*prefixes, "VMEM_"])


def platform() -> str | None:
    """The name of the platform if the environment says ``VMEM_VLLM=1``; otherwise None.

    vLLM logs an exception of a plugin and goes on without it. If vMem is requested but cannot run, vLLM must not start
    with its own KV cache: the platform raises what is wrong with the settings when vLLM makes its configuration. Beside
    another platform's plugin, vLLM itself does not start.
    """
    warn_of_unknown(SWITCH)
    with contextlib.suppress(ValueError):
        if not settings().on:
            warn_if_forgotten(SWITCH, "vLLM")
            return None
    _copy_to_ray()
    return "pyvmem.vllm.platform.Platform"


def check_platform() -> None:
    """Raise `Refused` if the environment asks for vMem, and vLLM runs on another platform, with its own KV cache.

    It does if the program set VMEM_VLLM after vLLM had chosen. vLLM 0.32 asks no plugin where VLLM_TARGET_DEVICE=cpu.
    """
    with contextlib.suppress(ValueError):  # which the platform raises
        if not settings().on:
            return
    from vllm.platforms import current_platform

    if type(current_platform).__module__ != "pyvmem.vllm.platform":
        raise cannot(
            SWITCH,
            "vLLM has chosen its platform without vMem; set VMEM_VLLM before vLLM is imported, unset "
            "VLLM_TARGET_DEVICE, and add vmem to VLLM_PLUGINS if that is set",
        )
