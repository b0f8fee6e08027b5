"""What vLLM calls in each of its processes (entry point group ``vllm.general_plugins``).

SPDX-License-Identifier: MIT
"""

import sys

from pyvmem.vllm import settings


def _register_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "pyvmem.vllm.attention.SlotsBackend")


def register() -> None:
    """Put vMem under vLLM where the environment says ``VMEM_VLLM=1``; else do nothing.

    vLLM logs what a plugin raises when it is loaded and goes on without it. Asked for and not to be had must not mean
    that vLLM starts with its own KV cache, so errors end the process here, with one line.
    """
    try:
        chosen = settings.read()
        if not chosen.on:
            return
        import vllm

        from pyvmem.vllm import metrics, patches

        patches.install(vllm.__version__, chosen.force)
        _register_attention()
        metrics.register()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"pyvmem: {error}")
