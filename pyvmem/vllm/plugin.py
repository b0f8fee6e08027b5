"""The entry point that vLLM calls in each of its processes (group ``vllm.general_plugins``).

SPDX-License-Identifier: MIT
"""

import os
import sys
from collections.abc import MutableMapping

from pyvmem.vllm import settings


def _register_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "pyvmem.vllm.attention.SlotsBackend")


def _copy_to_ray(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have vLLM copy the settings to its workers under Ray, as it does with its own."""
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [p.strip() for p in environ.get(name, "").split(",") if p.strip()]
    if "VMEM_" not in prefixes:
        environ[name] = ",".join([*prefixes, "VMEM_"])


def register() -> None:
    """Install vMem in vLLM if the environment says ``VMEM_VLLM=1``; otherwise do nothing.

    vLLM logs an exception of a plugin and continues without it. If vMem is requested but cannot run, vLLM must not
    start with its own KV cache, so an error ends the process here with one line.
    """
    try:
        chosen = settings.read()
        if not chosen.on:
            return
        import vllm

        from pyvmem.vllm import metrics, patches

        patches.install(vllm.__version__, chosen.force)
        _register_attention()
        _copy_to_ray()
        metrics.register()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"pyvmem: {error}")
    except Exception as error:
        reason = " ".join(str(error).split())
        sys.exit(f"pyvmem: VMEM_VLLM=1 failed in vLLM's plugin: {type(error).__name__}: {reason}")
