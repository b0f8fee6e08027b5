"""The entry point that vLLM calls in each of its processes (group ``vllm.platform_plugins``).

It runs while vLLM is imported, so it imports neither torch nor vLLM.

SPDX-License-Identifier: MIT
"""

import contextlib
import os
import sys
from collections.abc import MutableMapping
from importlib.metadata import entry_points

from pyvmem.engine.settings import warn_if_forgotten
from pyvmem.vllm import settings

GROUP = "vllm.platform_plugins"


def _copy_to_ray(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have vLLM copy the settings to its workers under Ray, as it does with its own."""
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [p.strip() for p in environ.get(name, "").split(",") if p.strip()]
    if "VMEM_" not in prefixes:
        environ[name] = ",".join([*prefixes, "VMEM_"])


def _other() -> str | None:
    """Another platform plugin that is active here; vLLM allows one."""
    allowed = os.environ.get("VLLM_PLUGINS")
    for point in entry_points(group=GROUP):
        if point.name == "vmem" or (allowed is not None and point.name not in allowed.split(",")):
            continue
        try:
            if point.load()():
                return point.name
        except Exception:  # vLLM logs it
            continue
    return None


def platform() -> str | None:
    """The name of the platform if the environment says ``VMEM_VLLM=1``; otherwise None.

    vLLM logs an exception of a plugin and goes on without it. If vMem is requested but cannot run, vLLM must not start
    with its own KV cache: the platform raises what is wrong with the settings when vLLM makes its configuration. Beside
    another platform, the process ends here with one line.
    """
    with contextlib.suppress(ValueError):
        if not settings.read().on:
            warn_if_forgotten(settings.SWITCH, "vLLM")
            return None
    other = _other()
    if other is not None:
        sys.exit(f"pyvmem: VMEM_VLLM=1: the platform plugin {other} is active, and vLLM takes one; vMem runs on vLLM's "
                 "own platforms only (unset VMEM_VLLM)")  # fmt: skip
    _copy_to_ray()
    return "pyvmem.vllm.platform.Platform"
