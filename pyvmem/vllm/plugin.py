"""How vLLM finds vMem: the entry points that it calls in each of its processes.

They are `platform` (group ``vllm.platform_plugins``) and `check_platform` (``vllm.general_plugins``).

The settings are environment variables, which these processes inherit. `check_config` refuses those of vLLM's own that
cannot work. See docs/vllm.md.

It runs while vLLM is imported, so it imports neither torch nor vLLM.

SPDX-License-Identifier: MIT
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from pyvmem.engine import settings as engine_settings
from pyvmem.engine.settings import Settings, cannot, warn_if_forgotten, warn_of_unknown
from pyvmem.vllm import connectors

SWITCH = "VMEM_VLLM"
LAYOUTS = ("auto", "vllm")
# Settings that an engine cannot keep if its KV memory stays: {field: the end of the variable's name}.
_FIXED = dict(pool="POOL", limit="LIMIT", maximum="MAX", minimum="MIN", weights="WEIGHTS", idle="IDLE", sleep="SLEEP",
              page_size="PAGE_SIZE")  # fmt: skip
BLOCK = 64  # tokens of a block in a pool
# The engine of Ray Serve LLM, and its switch to serve vLLM's own application.
RAY_LLM, RAY_DIRECT = "ray.llm._internal.serve.engines.vllm.vllm_engine", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING"


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment, as `pyvmem.engine.settings.read` has them."""
    return engine_settings.read(SWITCH, LAYOUTS, environ, (*engine_settings.SLEEPS, "common", "prefixes", "standby"))


def registrar(vllm_config: Any) -> str:
    """The connector for which the engine keeps vLLM's own KV memory; "" if blocks may come and go."""
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "cuda")
    return next((each.name for each in connectors.of(vllm_config) if each.registers(str(device))), "")


def tokens_of_block(vllm_config: Any) -> int:
    """The tokens of a block: `BLOCK` for an engine in a pool, if nobody chose and vLLM would take fewer.

    Blocks are what memory comes and goes by, and a call of the driver for each takes longer than to copy 16 tokens. Not
    where others count blocks, or where vLLM chooses because of states or of several types of rows.
    """
    c, cache = vllm_config, vllm_config.cache_config
    size = int(cache.block_size)
    chosen = (cache.user_specified_block_size or cache.prefix_match_unit or cache.kv_cache_dtype_skip_layers or
              cache.num_gpu_blocks_override is not None or cache.prefix_cache_retention_interval)  # fmt: skip
    events = c.kv_events_config is not None and c.kv_events_config.enable_kv_cache_events
    others = any(each.name != connectors.OFFLOADING for each in connectors.of(c))
    states = c.model_config is None or c.model_config.is_hybrid or c.model_config.is_attention_free
    if not settings().pool or chosen or events or others or states or c.device_config.device_type == "cpu":
        return size
    return BLOCK if BLOCK % size == 0 else size


def _fixed_reasons(c: Any) -> Iterator[str]:
    """What an engine whose KV memory stays cannot do, and how to do without."""
    asked, default = settings(), Settings(SWITCH)
    for field, name in _FIXED.items():
        if getattr(asked, field) != getattr(default, field):
            yield f"unset {SWITCH}_{name}"
    if getattr(c.model_config, "enable_sleep_mode", False):
        yield "unset --enable-sleep-mode"


def _reasons(c: Any) -> Iterator[str]:
    parallel = c.parallel_config
    found = connectors.of(c)
    if found and getattr(c.model_config, "is_hybrid", False):
        yield ("KV connectors have not been tried with Mamba's states; unset --kv-offloading-size and "
               "--kv-transfer-config")  # fmt: skip
    yield from filter(None, (each.refusal() for each in found))
    if [each.name for each in found].count(connectors.OFFLOADING) > 1:
        yield "two OffloadingConnectors number their copies alike; leave one in --kv-transfer-config"
    if registers := registrar(c):
        yield from (f"{registers} registers KV memory, which then stays; {reason}" for reason in _fixed_reasons(c))
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
    if RAY_LLM in sys.modules and settings().weights and os.environ.get(RAY_DIRECT, "0") != "1":
        yield (f"{SWITCH}_WEIGHTS=1: Ray Serve LLM's ingress calls the engine past vLLM's server, so a request for a "
               "sleeping model would wait for ever; start the servers by `pyvmem models FILE render ray-serve`, or set "
               f"{RAY_DIRECT}=1 and the middleware pyvmem.vllm.http.Serve")  # fmt: skip
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
