"""The virtual tensor behind the KV buffers of one pool of SGLang's, and the pages behind its pages.

SGLang makes its buffers with ``torch.zeros``, in one function of a pool. That function runs twice here: first on
PyTorch's device "meta", to learn the sizes, and then with pieces of one virtual tensor in their place.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pyvmem.blocks import BlockRange
from pyvmem.engine import control
from pyvmem.engine.control import Page
from pyvmem.engine.memory import PAGE, BlockMemory
from pyvmem.engine.settings import Refused, cannot
from pyvmem.sglang import settings
from pyvmem.sglang.ranks import Ranks
from pyvmem.sleep.checkpoint import weight_bytes
from pyvmem.sleep.sleeper import Sleeper
from pyvmem.tensor import VirtualTensor

logger = logging.getLogger("sglang.vmem")


class _Zeros(TorchFunctionMode):
    """``torch.zeros`` of a pool: on the device "meta", or pieces of a virtual tensor, each from a page on."""

    def __init__(self, space: VirtualTensor | None = None) -> None:
        super().__init__()
        self._space, self.bytes = space, 0
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.zeros:
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": "meta"})
        size, at = made.numel() * made.itemsize, self.bytes
        self.sizes.append(size)
        if self._space is None:
            return made
        step = self._space.page_size
        self.bytes += -(-size // step) * step
        return self._space.tensor[at : at + size].view(made.dtype).view(made.shape)


def device_of(what: Any) -> torch.device:
    """The device of a pool or a model runner of SGLang's."""
    device = torch.device(what.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _buffers(pool: Any) -> list[torch.Tensor]:
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def _part(pool: Any, buffer: torch.Tensor) -> int:
    """Bytes of a page of SGLang's in one buffer, whose rows are tokens or pages."""
    rows, row = buffer.shape[0], buffer.stride(0) * buffer.itemsize
    if rows == pool.size + pool.page_size:
        return int(row * pool.page_size)
    if rows == pool.size // pool.page_size + 1:
        return int(row)
    raise cannot(settings.SWITCH, f"a KV buffer has {rows} rows for {pool.size} tokens in pages of {pool.page_size}, "
                                  "which vMem does not know")  # fmt: skip


class KVMemory(BlockMemory):
    """The KV memory of one pool of SGLang's. A block is a page of SGLang's, in all layers of the pool.

    Parameters
    ----------
    page : Page
        The engine's control page.
    column : int
        The column of the page that rank 0's pool has. Those of the other ranks follow.
    ranks : Ranks
    pool : sglang.srt.mem_cache.memory_pool.KVCache
        While it makes its buffers.
    make : callable
        SGLang's function that makes them.

    Attributes
    ----------
    number : int
        Blocks, with block 0, which padding reads and writes.
    block_bytes : int
    """

    def __init__(self, page: Page, column: int, ranks: Ranks, pool: Any, make: Callable[[Any], None]) -> None:
        super().__init__(page, column + ranks.rank, settings.read())
        self._columns = range(column, column + ranks.size)
        self._device = device_of(pool)
        context = self.context(self._device)
        self.number = pool.size // pool.page_size + 1
        self._make_buffers(pool, make, context)
        self.block_bytes = sum(r.bytes * r.layers for r in self._ranges)
        alone = self._make_blocks(self.number, self.block_bytes)
        page[control.ATTACHED + self._rank] = 1
        self.publish()
        logger.info(
            "KV cache on vMem: backend %s, %d pages of %d tokens and %.1f KiB in pages of %d KiB, %.2f GiB at most; "
            "a page alone holds %.1f KiB", context.backend, self.number - 1, pool.page_size, self.block_bytes / 1024,
            self._space.page_size >> 10, self._space.nbytes / 2**30, alone / 1024,
        )  # fmt: skip

    def _make_buffers(self, pool: Any, make: Callable[[Any], None], context: Any) -> None:
        """Have SGLang make its tensors, one for each layer, in a virtual tensor."""
        with _Zeros() as zeros:
            make(pool)
        on_meta = _buffers(pool)
        whole = math.gcd(*(_part(pool, b) for b in on_meta), *(b.storage_offset() * b.itemsize for b in on_meta))
        fitting = (size for size in context.page_sizes if whole % size == 0 and size <= PAGE)
        page = self._chosen.page_size or max(fitting, default=min(context.page_sizes))
        size = sum(-(-n // page) * page for n in zeros.sizes)
        self._tensor = VirtualTensor((size,), torch.int8, self._device, page_size=page, zero=True, context=context)
        with _Zeros(self._tensor):
            make(pool)
        parts = [(b.data_ptr() - self._tensor.addr, _part(pool, b)) for b in _buffers(pool)]
        if any(at < 0 or at + n * self.number > size for at, n in parts):
            raise cannot(settings.SWITCH, f"{type(pool).__name__} made its KV buffers where vMem cannot see it")
        self._ranges = [BlockRange(at, n, n) for at, n in parts]

    @property
    def _space(self) -> VirtualTensor:
        assert self._tensor is not None
        return self._tensor

    def answer(self, order: int) -> int:
        """The ranks' answer to an order that each of them gave: 0 carried out, 1 refused by one of them, 2 none yet."""
        answers = [self._page.answer(order, column) for column in self._columns]
        return 2 if -1 in answers else max(answers)

    @property
    def page_bytes(self) -> int:
        """Bytes of blocks that share a page, or a page of each layer."""
        return self._page[control.PAGE_BYTES + self._rank]

    @property
    def nbytes(self) -> int:
        """Bytes of the virtual tensor."""
        return self._space.nbytes

    def back(self, ids: Sequence[int], over: bool = False) -> None:
        """Back blocks now. In a pool, ask the other members for what is missing. Raises `OutOfMemory`."""
        if over:
            self.blocks.back(ids, over=True)
        else:
            self._back(ids, 0)

    def empty(self) -> None:
        """Wait until every block that left has lost its memory, and give the device what is unused."""
        self.blocks.flush()
        self._trim()
        self.publish()


def _data_parallel_rank() -> int:
    from sglang.srt import runtime_context

    found = 0
    for name in ("dp_rank", "attn_dp_rank"):
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # a pool without a scheduler
            found = found or getattr(runtime_context.get_parallel(), name) or 0
    return found


class Memories:
    """The KV memories of this process's engine, in one control page."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.name: str = self.ranks.tell(uuid.uuid4().hex[:12])
        self.page = control.open_page(self.name, _data_parallel_rank())
        if self.ranks.size > 1 and not self.page.shared:
            raise cannot(settings.SWITCH, "the ranks of tensor parallelism need a folder that they share, and none is "
                                          "writable: set XDG_RUNTIME_DIR")  # fmt: skip
        self.all: list[KVMemory] = []
        self.sleeper: Sleeper | None = None
        self.scheduler: Any = None  # `pyvmem.sglang.scheduler.SchedulerMemory`, once there is one

    def make(self, pool: Any, make: Callable[[Any], None]) -> None:
        """Put the buffers of a pool on vMem."""
        if self.all and settings.read().pool:
            raise Refused(f"VMEM_SGLANG_POOL={settings.read().pool}: this model has several KV pools (windows or a "
                          "draft model), and one of them can be in a pool of vMem's so far; unset "
                          "VMEM_SGLANG_POOL")  # fmt: skip
        column = len(self.all) * self.ranks.size
        pool._vmem = memory = KVMemory(self.page, column, self.ranks, pool, make)
        self.all.append(memory)

    def load(self, runner: Any, load: Callable[[Any], None]) -> None:
        """Have a model runner load its weights into the pool. Raises `Refused`."""
        chosen, device = settings.read(), device_of(runner)
        pool = BlockMemory(self.page, self.ranks.rank, chosen).pool(device)
        self.sleeper = sleeper = Sleeper(self.page, self.ranks.rank, chosen, pool, device)
        args = runner.server_args
        size = weight_bytes(args.model_path, args.revision, args.download_dir) if args.load_format != "dummy" else 0
        # The region in which SGLang would use torch_memory_saver: its allocations are the weights. With
        # --enable-memory-saver, the saver has CUDA graphs, whose adapter is another one.
        runner.memory_saver_adapter.region = lambda *args, **kwargs: sleeper.weights.loading()
        with sleeper.claim(size // args.tp_size):
            load(runner)
            if device.type == "cpu":  # torch has no pools there
                sleeper.weights.adopt([runner.model])


_here: Memories | None = None


def here() -> Memories:
    """The memories of this process, made when they are first asked for."""
    global _here
    if _here is None:
        _here = Memories()
        logger.info("vMem: engine %s in process %d", _here.name, os.getpid())
    return _here
