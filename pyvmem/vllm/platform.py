"""vLLM's own platform with three hooks: this is what makes vLLM use the classes of `mixins`.

vLLM resolves the platform in each of its processes, by the entry point group ``vllm.platform_plugins``. The base is
what vLLM's own detection finds, so every question that vLLM asks its platform has vLLM's own answer.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import functools
import logging
import uuid
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import builtin_platform_plugins, interface
from vllm.utils.import_utils import resolve_obj_by_qualname

from pyvmem.engine.settings import Refused
from pyvmem.vllm import check, http, mixins, plugin

logger = init_logger("vllm.vmem")


def _of_others(record: logging.LogRecord) -> bool:
    """Leave out vLLM's warning of a scheduler class that may be slower: vMem's extends vLLM's own."""
    return not (mixins.__name__ in str(record.args) and "__vllm__" in str(record.args))


logging.getLogger("vllm.config.scheduler").addFilter(_of_others)


def _base() -> Any:
    found = [name for name in (detect() for detect in builtin_platform_plugins.values()) if name]
    return resolve_obj_by_qualname(found[0]) if found else interface.UnspecifiedPlatform


_Base: Any = _base()


def _qualname(chosen: Any) -> str:
    return chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}"


def _diffusion(vllm_config: Any) -> str | None:
    """The scheduler that vLLM would choose later, if none were chosen."""
    chosen = vllm_config.scheduler_config
    if getattr(vllm_config, "diffusion_config", None) is None or chosen.scheduler_cls is not None:
        return None
    kind = "DiffusionAsyncScheduler" if chosen.async_scheduling else "DiffusionScheduler"
    return f"vllm.v1.core.sched.diffusion_scheduler.{kind}"


@functools.cache
def _release() -> str | None:
    """What is to be said of this release, once for all engines of the process: to read its sources takes a second."""
    return check.NEEDS.release(vllm.__version__)


def install(vllm_config: Any) -> None:
    """Put the mixins into a configuration, once. Raises `Refused`."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if any(mixins.engine_of(_qualname(chosen)) for chosen in (parallel.worker_cls, scheduler.scheduler_cls) if chosen):
        return  # vLLM makes its configuration several times, for a draft model with another parallel_config
    if vllm_config.model_config is None or parallel.worker_cls == "auto":
        return  # a configuration without an engine
    asked = plugin.settings()
    if not asked.on:
        return  # switched off since vLLM was imported
    plugin.check_config(vllm_config)
    if registers := plugin.registrar(vllm_config):
        http.Limits.hint = f"{registers} registers KV memory, which then stays"
        logger.warning("vMem: %s; this engine's KV cache is vLLM's own, without limits, pools and lending",
                       http.Limits.hint)  # fmt: skip
        return
    if note := _release():
        logger.warning(note)
    engine = uuid.uuid4().hex[:12]
    worker = _qualname(parallel.worker_cls)
    chosen = _diffusion(vllm_config) or _qualname(scheduler.get_scheduler_cls())
    parallel.worker_cls = mixins.name_of("Worker", engine, worker)
    scheduler.scheduler_cls = mixins.name_of("Scheduler", engine, chosen)
    http.register()


class Platform(_Base):  # type: ignore[misc]
    """The platform that vLLM found, on vMem."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        try:
            install(vllm_config)
        except (Refused, ValueError) as error:  # as which pydantic would bury it
            raise RuntimeError(f"pyvmem: {error}") from None

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        super().update_block_size_for_backend(vllm_config)
        cache, tokens = vllm_config.cache_config, plugin.tokens_of_block(vllm_config)
        if tokens != cache.block_size:
            logger.info("vMem: blocks have %d tokens instead of %d, as memory of the pool comes and goes by blocks; "
                        "--block-size chooses others", tokens, cache.block_size)  # fmt: skip
            cache.block_size = tokens
