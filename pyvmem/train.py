"""Run a trainer as a member of the pool of the engines that generate for it, on the same GPU.

    python -m pyvmem.train script.py [ARGUMENTS]      torchrun ... -m pyvmem.train script.py [ARGUMENTS]
    python -m pyvmem.train -m module [ARGUMENTS]

To import this module does the same for a process that something else starts, such as a framework's worker under Ray.
The variables VMEM_VLLM or VMEM_SGLANG, with _POOL and _POOL_SIZE, name the pool, as they do for the engines.

From when the process first uses its GPU on, PyTorch allocates in a lease of the pool. ``torch.cuda.empty_cache()``
returns to the pool what no tensor uses. See docs/rl.md.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from pyvmem.engine.settings import Settings
from pyvmem.sglang import settings as sglang
from pyvmem.vllm import plugin as vllm


ENGINES = {"vllm.v1.worker.gpu_worker", "sglang.srt.managers.scheduler"}  # which others do not import


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings that name the trainer's pool. Raises ValueError if there are none, or two that differ."""
    found = [made for made in (vllm.settings(environ), sglang.read(environ)) if made.on and made.pool]
    if not found:
        raise ValueError("no pool is named: set VMEM_VLLM=1 and VMEM_VLLM_POOL, or VMEM_SGLANG=1 and "
                         "VMEM_SGLANG_POOL, as for the engine")  # fmt: skip
    if len({made.pool for made in found}) > 1:
        raise ValueError(f"VMEM_VLLM_POOL={found[0].pool} and VMEM_SGLANG_POOL={found[1].pool} must be equal: a "
                         "trainer is a member of one pool")  # fmt: skip
    return found[0]


def device(visible: int, environ: Mapping[str, str] = os.environ) -> int:
    """The process's device, of so many that it sees: the only one, or that of its LOCAL_RANK."""
    rank = environ.get("LOCAL_RANK", "")
    return int(rank) % visible if rank.isdecimal() and visible > 1 else 0


def has_engine() -> bool:
    """Return whether this process runs an engine's model, whose memory is vMem's already."""
    return not ENGINES.isdisjoint(sys.modules)


def start() -> None:
    """Enter the lease when the process first uses its GPU, or now if it has. Raises as `settings`.

    A framework may have every process of its job call this. Those of engines, and those that a trainer has forked, stay
    as they are.
    """
    chosen, process = settings(), os.getpid()
    from pyvmem.engine import trainer

    trainer.check_environment()
    import torch

    def enter() -> None:
        if os.getpid() == process and not has_engine():
            trainer.start(chosen, device(torch.cuda.device_count()))

    torch.cuda._lazy_call(enter)


def main(arguments: Sequence[str]) -> None:
    """Run a script, or with -m a module, as Python itself would."""
    module = arguments[:1] == ["-m"]
    rest = list(arguments[1 if module else 0 :])
    if not rest or rest[0].startswith("-"):
        sys.exit("usage: python -m pyvmem.train [-m MODULE | SCRIPT] [ARGUMENTS]")
    try:
        start()
    except ValueError as error:
        sys.exit(f"pyvmem.train: {error}")
    sys.argv = rest
    if module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
else:
    start()
