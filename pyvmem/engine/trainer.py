"""A process that trains, as a member of the pool of its engines: PyTorch allocates out of the pool's budget.

Reinforcement learning alternates between an engine that generates and a trainer. Both may run in one process: then the
trainer is in its lease whenever the engine has no request. Or they run in several: then the trainer is always in it,
and `torch.cuda.empty_cache`, which frameworks call between the phases, gives up what no tensor uses.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from pyvmem.engine import pools
from pyvmem.engine.settings import Settings
from pyvmem.errors import OutOfMemory
from pyvmem.lease import Lease, torch_pool

logger = logging.getLogger("vmem.train")
WAIT = 1.0  # seconds in which a trainer gets back what it cached; after that, it allocates what it needs
_CONF = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_EXPANDABLE = "expandable_segments"


def _expands(settings: str) -> bool:
    """Return whether settings of PyTorch's allocator ask for expandable segments."""
    pairs = (part.partition(":") for part in settings.replace(" ", "").split(","))
    return any(name == _EXPANDABLE and value.lower() == "true" for name, _, value in pairs)


def check_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise ValueError if the environment asks for expandable segments, which are in no memory pool."""
    for name in _CONF:
        if _expands(environ.get(name, "")):
            raise ValueError(f"{name}={environ[name]}: expandable segments are in no memory pool, and a trainer "
                             f"beside an engine on vMem needs one; take {_EXPANDABLE}:True out")  # fmt: skip


class Trainer:
    """The lease of a process that trains."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.inside = False  # whether PyTorch allocates in the lease now
        self._lock = threading.RLock()

    def enter(self) -> None:
        """Have PyTorch allocate in the lease. Memory that it had cached comes back, or is dropped if others need it."""
        with self._lock:
            if self.inside or self.lease.closed:
                return
            try:
                self.lease.__enter__()
            except OutOfMemory:
                self.lease.reset()
                self.lease.__enter__()
            self.inside = True

    def leave(self) -> None:
        """Offer the pool what no tensor uses, and have PyTorch allocate its own memory."""
        with self._lock:
            if self.inside:
                self.inside = False
                self.lease.__exit__()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """A block in which the process is not in the lease; afterwards, it is if it was."""
        with self._lock:
            was = self.inside
            self.leave()
            try:
                yield
            finally:
                if was:
                    self.enter()

    def empty_cache(self, own: Callable[[], None]) -> None:
        """Give up all memory in which no tensor lives, in the lease and out of it. own: PyTorch's function."""
        with self.away():
            own()
            if not self.lease.closed:
                self.lease.reset()

    def take_out(self, storage: torch.UntypedStorage) -> None:
        """Move a storage out of the lease, with all tensors that view it. Out of memory, it stays as it is."""
        with self._lock, self.lease._aside() if self.inside else contextlib.nullcontext():
            if storage.device.type == "cuda":
                torch.cuda.synchronize(storage.device)  # kernels of any stream may use it
                view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                view.record_stream(torch.cuda.current_stream(storage.device))  # the copy's
            storage.resize_(storage.nbytes())  # allocates, copies, and frees the old memory, in this order


here: Trainer | None = None  # this process's


def start(chosen: Settings, device: int) -> Trainer:
    """Make this process a member of the pool that the settings name, once, and enter its lease.

    Raises ValueError if it asks for expandable segments, and as `pools.open_pool` and `torch_pool`.
    """
    global here
    if here is None:
        from pyvmem.engine.memory import context_on

        check_environment()
        context = context_on(torch.device("cuda", device), chosen)
        pool = pools.open_pool(chosen, context)
        here = Trainer(torch_pool(pool, wait=WAIT, context=context, name=f"trainer {os.getpid()}"))
        _replace(here)
        atexit.register(here.leave)  # PyTorch ends its pools then
    here.enter()
    return here


def _replace(trainer: Trainer) -> None:
    """Put the trainer behind PyTorch's functions that free, share and configure a process's memory."""
    own = torch.cuda.empty_cache

    def empty_cache() -> None:
        if torch.cuda.is_current_stream_capturing():
            own()
        else:
            trainer.empty_cache(own)

    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = empty_cache
    configure: Any = getattr(torch.cuda.memory, "_set_allocator_settings", None)

    def set_allocator_settings(settings: str) -> None:
        if not _expands(settings):
            configure(settings)
            return
        logger.warning("vMem: %s is not applied: expandable segments are in no memory pool", settings)

    if configure is not None:
        torch.cuda.memory._set_allocator_settings = set_allocator_settings  # type: ignore[assignment]
    shares: Any = torch.UntypedStorage._share_cuda_

    def share(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        """CUDA shares no memory of a lease with other processes: what they are to see moves out of it."""
        try:
            return shares(storage, *args, **kwargs)
        except RuntimeError:
            trainer.take_out(storage)
            return shares(storage, *args, **kwargs)

    torch.UntypedStorage._share_cuda_ = share  # type: ignore[assignment, method-assign]
