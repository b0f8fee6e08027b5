"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins``).

SPDX-License-Identifier: MIT
"""

import logging
import multiprocessing
import sys
from typing import Any

from pyvmem.engine.settings import warn_if_forgotten
from pyvmem.sglang import settings


def _hooks(http: bool) -> list[tuple[str, str, Any]]:
    """(target, kind, hook) of this process. To apply one imports its module, which takes seconds if nothing has."""
    from pyvmem.sglang import hooks

    chosen: list[Any] = list(hooks.EVERYWHERE)
    if "sglang.srt.managers.scheduler" in sys.modules or "sglang.srt.managers.detokenizer_manager" not in sys.modules:
        chosen += hooks.ENGINE
    if http and multiprocessing.parent_process() is None:  # it serves, and imports the server later than its plugins
        chosen += hooks.SERVER
    return [(hooks.target(file, function), kind, hook) for file, function, _, kind, hook in chosen]


def activate() -> None:
    """Register vMem's hooks if the environment says ``VMEM_SGLANG=1``.

    SGLang logs an exception of a plugin or a hook and goes on without it. If vMem is requested but cannot run, SGLang
    must not start with its own KV cache, so an error ends the process with one line.
    """
    try:
        chosen = settings.read()
        if not chosen.on:
            warn_if_forgotten(settings.SWITCH, "SGLang")
            return
        import sglang
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from pyvmem.sglang import check

        note = check.release(sglang.__version__, chosen.strict)
        if note and multiprocessing.parent_process() is None:
            logging.getLogger("sglang.vmem").warning(note)
        hooked = _hooks(chosen.http)
        for target, kind, hook in hooked:
            HookRegistry.register(target, hook, HookType[kind])
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
