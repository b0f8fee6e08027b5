"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins``).

SPDX-License-Identifier: MIT
"""

import logging
import multiprocessing
import sys
from typing import Any

from pyvmem.engine.settings import Settings, warn_if_forgotten, warn_of_unknown
from pyvmem.sglang import settings


def _hooks(chosen: Settings) -> list[tuple[str, str, Any]]:
    """(target, kind, hook) of this process. To apply one imports its module, which takes seconds if nothing has."""
    from pyvmem.sglang import hooks

    wanted: list[Any] = list(hooks.EVERYWHERE)
    modules = "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"
    engine = modules[0] in sys.modules or modules[1] not in sys.modules
    if engine:
        wanted += hooks.ENGINE
    if chosen.weights:
        wanted += hooks.ORDERS + (hooks.WEIGHTS if engine else ())
    return [(hooks.target(file, function), kind, hook) for file, function, _, kind, hook in wanted]


def _may_serve() -> bool:
    """Return whether this process may serve HTTP.

    A user's does, which imports the server later than its plugins. So does one whose target is SGLang's server, or that
    runs its application by itself. Schedulers that these start may have imported it, too, and serve nothing.
    """
    return multiprocessing.parent_process() is None or "sglang.srt.entrypoints.http_server" in sys.modules


def activate() -> None:
    """Register vMem's hooks if the environment says ``VMEM_SGLANG=1``.

    SGLang logs an exception of a plugin or a hook and goes on without it. If vMem is requested but cannot run, SGLang
    must not start with its own KV cache, so an error ends the process with one line.
    """
    try:
        warn_of_unknown(settings.SWITCH)
        chosen = settings.read()
        if not chosen.on:
            warn_if_forgotten(settings.SWITCH, "SGLang")
            return
        import sglang
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from pyvmem.sglang import check

        note = check.release(sglang.__version__)
        if note and multiprocessing.parent_process() is None:
            logging.getLogger("sglang.vmem").warning(note)
        hooked = _hooks(chosen)
        for target, kind, hook in hooked:
            HookRegistry.register(target, hook, HookType[kind])
        if (chosen.http or chosen.weights) and _may_serve():
            from pyvmem.sglang import hooks

            hooks.serve()
    except (ValueError, ImportError) as error:
        sys.exit(f"pyvmem: {error}")
    apply = HookRegistry.apply_hooks

    def applied() -> None:
        """SGLang's own function, and then the check that each of vMem's hooks has taken."""
        apply()
        missing = [target for target, _, _ in hooked if target not in HookRegistry._patched]
        if missing:
            sys.exit(f"pyvmem: VMEM_SGLANG=1: SGLang did not apply the hook of {missing[0]} (or unset VMEM_SGLANG)")

    HookRegistry.apply_hooks = applied
