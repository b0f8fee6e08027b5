"""A trainer in the process of its engine, as TRL has it: in its lease whenever the engine has no request.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from pyvmem.engine import trainer
from pyvmem.engine.settings import cannot
from pyvmem.errors import VmemError
from pyvmem.vllm import plugin

logger = logging.getLogger("vllm.vmem")


def start(vllm_config: Any) -> bool:
    """Enter the trainer's lease if this process trains, which is what external launchers are for.

    Raises `Refused` if PyTorch or the environment allow no lease.
    """
    import torch

    chosen, backend = plugin.settings(), vllm_config.parallel_config.distributed_executor_backend
    if not chosen.pool or backend != "external_launcher":
        return False
    if not torch.cuda.is_available():
        logger.info("vMem: on CPUs, PyTorch has no memory pools: the trainer allocates outside the pool")
        return False
    try:
        trainer.start(chosen, torch.cuda.current_device())
    except (VmemError, ValueError) as error:
        raise cannot(plugin.SWITCH, str(error)) from error
    return True


def enter() -> None:
    """The engine has no request."""
    if trainer.here is not None:
        trainer.here.enter()


def leave() -> None:
    """The engine has a request: it may have what the trainer only caches."""
    if trainer.here is not None:
        trainer.here.leave()


def away() -> contextlib.AbstractContextManager[None]:
    """A block in which the engine needs memory that the trainer caches, or PyTorch's own caches are emptied."""
    return trainer.here.away() if trainer.here is not None else contextlib.nullcontext()
