"""The worker's side: the virtual tensor in the place of vLLM's KV allocation, and the pages behind its blocks.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pyvmem import Context
from pyvmem.blocks import BlockRange, Blocks
from pyvmem.errors import OutOfMemory
from pyvmem.kv.pool import KVPool
from pyvmem.tensor import VirtualTensor
from pyvmem.vllm import control, geometry, open_pool, pools, refuse, settings
from pyvmem.vllm.control import Page
from pyvmem.vllm.orders import StepOrders

logger = logging.getLogger("vllm.vmem")

POLL = 0.02  # seconds between looks at the ring
LOOK = 0.005  # and in a pool at whether there is something new
BUSY = 0.1  # and while steps run, which look themselves: a thread that wakes up delays them
START = 60.0  # seconds in which an engine that starts gets the memory of block 0 from the other members of a pool,
WAKE = 10.0  # and in which one that wakes gets that of its blocks
ASK = 0.06  # seconds in which an engine that runs requests asks others for memory, before it gives for once


class Allocation(TorchFunctionMode):
    """The context of vLLM's KV allocation: its one ``torch.zeros`` of bytes becomes a virtual tensor."""

    def __init__(self, memory: WorkerMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1:
            size = args[0] if isinstance(args[0], int) else args[0][0] if len(args[0]) == 1 else None
            if size is not None:
                return self._memory.allocate(size, torch.device(kwargs.get("device") or "cpu"))
        return func(*args, **kwargs)


def context_on(device: torch.device) -> Context:
    """A context for the KV memory of a worker. Raises `refuse.Refused` for a backend or page size that cannot be."""
    refuse.backend(os.environ.get("VMEM_BACKEND", ""), device.type)
    context = Context(device=device.index or 0) if device.type == "cuda" else Context("host")
    refuse.backend(context.backend, device.type)
    refuse.page_size(settings.read().page_size, context.backend, context.page_sizes)
    return context


class WorkerMemory:
    """The KV memory of one worker.

    Parameters
    ----------
    page : Page
        The engine's control page.
    rank : int
        The worker's number in its engine.
    """

    def __init__(self, page: Page, rank: int) -> None:
        if rank >= control.RANKS:
            raise refuse.Refused(f"VMEM_VLLM=1: worker {rank} is out of range: an engine may have {control.RANKS} "
                                 "workers (or unset VMEM_VLLM)")  # fmt: skip
        if page[control.ATTACHED + rank]:  # the name of an engine comes with its configuration
            raise refuse.Refused("VMEM_VLLM=1: an engine with this VllmConfig runs already, and one control page "
                                 "cannot serve both; make a VllmConfig for each (or unset VMEM_VLLM)")  # fmt: skip
        self._page, self._rank = page, rank
        self._tensor: VirtualTensor | None = None
        self._ranges: list[BlockRange] = []
        self._block = 0  # bytes of a block
        self._blocks: Blocks | None = None
        self._pool: KVPool | None = None
        self._pool_size, self._share = 0, (0, 0)
        self._unfit: tuple[int, int] | None = None  # a share that the pool has refused
        self._asking = 0.0  # since when the pool has been asked for what it does not give; 0: for nothing
        self._lock = threading.RLock()
        self._stop, self._wake = False, threading.Event()
        self._known: list[int] = []  # of what the scheduler publishes, when the thread last looked
        self._finished = 0  # the last step that was executed
        self._sure: set[int] = set()  # blocks that are backed and stay until `_give_up` names them
        self._ordered: collections.deque[tuple[int, set[int]]] = collections.deque()  # orders without an answer
        self._asleep: list[int] | None = None  # what circulates while the memory sleeps
        self._real = False  # whether the scheduler's first step has come
        self._stream: Any = None
        self._failure = ""

    # ---- the start -------------------------------------------------------------------------------------------

    def expect(self, config: Any) -> None:
        """vLLM is about to allocate its KV cache with this configuration, which may change."""
        geometry.spread(config)
        self._ranges = geometry.ranges_of(config)

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """The tensor for vLLM's KV cache, int8[size], with no page behind it."""
        if self._tensor is not None:
            raise refuse.Refused("VMEM_VLLM=1: vLLM allocated its KV cache in two parts, which this release of vMem "
                                 "does not know (or unset VMEM_VLLM)")  # fmt: skip
        context = context_on(device)
        page = settings.read().page_size or geometry.page_size(self._ranges, context.page_sizes)
        self._tensor = VirtualTensor((size,), torch.int8, device, page_size=page, zero=True, context=context)
        return self._tensor.tensor

    def start(self, config: Any) -> None:
        """vLLM has placed its layers: back the null block."""
        tensor = self._tensor
        if tensor is None:
            if geometry.bytes_of(config):
                raise refuse.Refused("VMEM_VLLM=1: vLLM allocated its KV cache where vMem cannot see it "
                                     "(or unset VMEM_VLLM)")  # fmt: skip
            return
        ranges = self._ranges
        wrong = geometry.beyond(ranges, config.num_blocks, tensor.nbytes)
        if tensor.nbytes != geometry.bytes_of(config) or wrong:
            wrong = wrong or f"{tensor.nbytes} bytes were allocated, not {geometry.bytes_of(config)}"
            raise refuse.Refused(f"VMEM_VLLM=1: vLLM's KV cache is not as its configuration says: {wrong} "
                                 "(or unset VMEM_VLLM)")  # fmt: skip
        self._block = tensor.nbytes // config.num_blocks
        self._blocks = Blocks(tensor, ranges, config.num_blocks, zero=True, board=self._board)
        self._join(tensor.context)
        self._back_null()
        alone, block = self._blocks.stats().held, self._block
        self._page[control.NULL + self._rank] = alone
        self._page[control.SPAN + self._rank] = geometry.span(ranges, tensor.page_size, block)
        self._page[control.OWN_BLOCK + self._rank] = block
        self._attach()
        logger.info(
            "KV cache on vMem: backend %s, %d blocks of %.1f KiB in pages of %d KiB, %.2f GiB at most, layout %s",
            tensor.context.backend, config.num_blocks - 1, block / 1024,
            tensor.page_size >> 10, tensor.nbytes / 2**30, getattr(config, "kv_cache_layout", None) or "vLLM's",
        )  # fmt: skip
        if alone > 1.5 * block:
            logger.info("vMem: a block of %.1f KiB whose neighbours have all left holds %.1f KiB.", block / 1024,
                        alone / 1024)  # fmt: skip

    def _attach(self, kept: int = control.IN_BLOCKS) -> None:
        """The memory is there: tell the scheduler, and start the thread."""
        self._page[control.ATTACHED + self._rank] = kept
        threading.Thread(target=self._poll, name="vmem", daemon=True).start()
        self.publish()

    def _join(self, context: Context) -> None:
        """Become a member of the pool that the environment names, if it names one."""
        asked = settings.read()
        if not asked.pool or self._blocks is None:
            return
        try:
            self._pool = open_pool(context)
            self._pool_size, self._share = self._pool.budget, (asked.minimum, asked.maximum)
            self._page[control.POOL_BYTES + self._rank] = self._pool_size
            if asked.minimum > self._pool_size:
                raise refuse.Refused(f"VMEM_VLLM_MIN={asked.minimum} is over the {self._pool_size} bytes of "
                                     f"VMEM_VLLM_POOL={asked.pool}")  # fmt: skip
            self._page[control.POOL_OF + self._rank] = pools.number_of(Path(str(self._pool.path)).stem)
            name = f"{pools.ENGINE}{os.getpid()}"
            self._blocks.join(self._pool, name=name, min=asked.minimum, max=asked.maximum)
        except refuse.Refused:
            raise
        except OutOfMemory as error:  # of the pool
            raise refuse.Refused(f"VMEM_VLLM_MIN={asked.minimum} does not fit VMEM_VLLM_POOL={asked.pool}: {error}; "
                                 "lower it, or the minimum of another member") from error  # fmt: skip
        except (OSError, ValueError, MemoryError) as error:
            size = f"VMEM_VLLM_POOL_SIZE {f'is {asked.pool_size}' if asked.pool_size else 'is not set'}"
            raise refuse.Refused(f"VMEM_VLLM_POOL={asked.pool}: {error}; {size} (or unset VMEM_VLLM_POOL)") from error

    def _back_null(self) -> None:
        """Back block 0."""
        try:
            self._back([0], START)
        except OutOfMemory as error:
            if self._pool is None:
                raise
            size = self._bytes_under([0])
            raise refuse.Refused(f"VMEM_VLLM_POOL={settings.read().pool}: the other members did not give {size} bytes "
                                 f"within {START:.0f} s: {error}") from error  # fmt: skip

    def _bytes_under(self, ids: Sequence[int]) -> int:
        assert self._tensor is not None
        return geometry.bytes_under(ids, self._ranges, self._tensor.page_size)

    def _back(self, ids: Sequence[int], seconds: float) -> None:
        """Back blocks. In a pool, the other members may have to give their bytes first, and have them in use now."""
        assert self._blocks is not None
        end = time.monotonic() + seconds
        size = self._bytes_under(ids) if self._pool is not None else 0
        while True:
            try:
                if self._pool is not None:
                    self._blocks.ask(size)
                self._blocks.back(ids)
                break
            except OutOfMemory:
                if self._pool is None or time.monotonic() >= end:
                    raise
            time.sleep(POLL)

    def _between(self) -> None:
        """Tell the pool what the scheduler offers and wants."""
        page, blocks = self._page, self._blocks
        if self._pool is None or blocks is None or not page[control.PID]:
            return
        least = page[control.LEAST] * self._block + page[control.NULL + self._rank]
        share = (0 if page[control.LENT] else page[control.MIN], page[control.MAX] and max(page[control.MAX], least))
        self._set_share(share)
        blocks.offer(page[control.OFFERED] * self._block)
        page[control.POOL_BYTES + self._rank] = self._pool_size
        page[control.POOL_MAY + self._rank] = int(self._board[control.BUDGET]) + self._pool.free
        most = min(share[1] or self._pool_size, self._pool_size)
        held = int(self._board[control.HELD])
        wanted = max(page[control.WANTED], page[control.AHEAD]) + self._pending()
        wanted = min(wanted * self._block, most - held)
        self._ask(wanted, page[control.USED] > 0)

    def _set_share(self, share: tuple[int, int]) -> None:
        """Set minimum and maximum. While the minimums of all members exceed the pool, this one's is as before."""
        assert self._blocks is not None
        if share == self._share:
            return
        try:
            self._blocks.set_share(*share)
        except OutOfMemory as error:
            if share != self._unfit:
                logger.warning("vMem: the pool has no room for this engine's minimum yet: %s", error)
            self._unfit = share
            return
        self._share, self._unfit = share, None

    def _pending(self) -> int:
        """Blocks of orders on their way. What they lack is asked for, too, as a question replaces the last one."""
        with self._lock:
            done = self._board[control.DONE]
            return sum(len(ids) for number, ids in self._ordered if number > done)

    def _ask(self, wanted: int, runs: bool) -> None:
        """Ask the pool. An engine that runs requests pauses now and then, as who asks gives others nothing."""
        assert self._blocks is not None
        now = time.monotonic()
        if self._asking and (wanted <= 0 or (runs and now >= self._asking + ASK)):
            self._blocks.ask(0)
            self._asking = 0.0
        elif wanted > 0:
            try:
                missing = self._blocks.ask(wanted)
            except OutOfMemory:
                missing = wanted
            self._asking = (self._asking or now) if missing else 0.0

    @property
    def active(self) -> bool:
        """Whether vLLM's KV cache is here."""
        return self._blocks is not None

    @property
    def _board(self) -> Any:
        """This worker's row of the boards."""
        return self._page.boards(control.RANKS)[self._rank]

    # ---- steps -----------------------------------------------------------------------------------------------

    def begin(self, output: Any) -> Any:
        """A step is about to run: carry out its orders, and back every block that it names. Returns what to run."""
        blocks = self._blocks
        if blocks is None:
            return output
        orders: StepOrders | None = getattr(output, "vmem", None)
        with self._lock:
            if self._asleep is not None:  # vLLM runs a step only if it is awake
                self.wake()
            if orders is not None:
                if not self._real:  # what vLLM's warm-up used
                    self._real = True
                    self._give_up(self._in())
                self._ring(orders.position)
                if orders.gone:
                    self._give_up(orders.gone)
                for number, ids in enumerate(orders.ahead, orders.order):
                    if blocks.order(ids) != number:
                        raise RuntimeError(f"worker {self._rank} lost count of the orders: step {orders.step} "
                                           f"has order {number}")  # fmt: skip
                    self._ordered.append((number, set(ids)))
            if self._ordered:
                self._see_answers()
            named = named_blocks(output)
            if not self._sure.issuperset(named):
                late = blocks.back([i for i in named if i not in self._sure], over=True)
                self._sure.update(named)
                if orders is not None:
                    self._count_maps(late)
        return output

    def _see_answers(self) -> None:
        """Learn which orders have been carried out."""
        done = self._board[control.DONE]
        while self._ordered and self._ordered[0][0] <= done:
            number, ids = self._ordered.popleft()
            if self._page.answer(number, self._rank) == 0:
                self._sure |= ids

    def _count_maps(self, n: int) -> None:
        """A step of the scheduler's had to map this often itself."""
        if n:
            self._page.words[control.LATE + self._rank] += 1
            self._page.words[control.STEP_MAPS + self._rank] += n

    def end(self, output: Any) -> None:
        """The step has been given to the device."""
        orders: StepOrders | None = getattr(output, "vmem", None)
        if self.active and orders is not None:
            self._finished = orders.step
            self._page.cells[control.FINISHED + self._rank] = orders.step
            if self._pool is not None and self._news():
                self._wake.set()

    def dummy(self) -> None:
        """vLLM runs a step without requests, beside ranks that have some. It reads the null block alone."""
        if self.active:
            self._page.words[control.DUMMIES + self._rank] += 1

    def _in(self) -> list[int]:
        """The blocks that are backed and stay, without the null block, which vLLM reads at any time."""
        assert self._blocks is not None
        return [i for i in self._blocks.backed().tolist() if i]

    def _fence(self) -> int | None:
        """A fence behind what the device has been given so far; None if it computes at once."""
        tensor, blocks = self._tensor, self._blocks
        if tensor is None or blocks is None or not tensor.tensor.is_cuda:
            return None
        if threading.current_thread().name != "vmem" or self._stream is None:
            self._stream = torch.cuda.current_stream(tensor.tensor.device)
        return blocks.record(self._stream)

    # ---- between steps ---------------------------------------------------------------------------------------

    def _ring(self, upto: int) -> None:
        """Give up what the scheduler gave up between steps, as far as the steps before have run."""
        if upto == self._page.cells[control.RING_DONE + self._rank]:
            return
        for step, ids in self._page.pull(self._rank, upto):
            if step > self._finished:
                break
            if self._asleep is not None:
                gone = set(ids)
                self._asleep = [i for i in self._asleep if i not in gone]
            else:
                self._give_up(ids)

    def _give_up(self, ids: Sequence[int]) -> None:
        """These blocks no longer circulate."""
        assert self._blocks is not None
        self._sure.difference_update(ids)
        for _, ordered in self._ordered:  # they were not carried out yet: now these blocks are left out
            ordered.difference_update(ids)
        self._blocks.unback(ids, self._fence())

    def _poll(self) -> None:
        finished = 0
        while not self._stop:
            self._rest(finished != self._finished)
            finished = self._finished
            self._look()

    def _rest(self, steps: bool) -> None:
        """Wait until it is time to look again. In a pool, that is when the scheduler gives up, wants or offers some.

        steps: whether steps run, which look themselves.
        """
        pause = BUSY if steps and not self._pool else POLL
        control.rest(self._wake, pause, LOOK if self._pool and not steps else pause, self._news)
        self._wake.clear()

    def _published(self) -> list[int]:
        cells = self._page.cells
        return [cells[word] for word in (control.POSITION, control.WANTED, control.AHEAD, control.OFFERED)]

    def _news(self) -> bool:
        """Whether the scheduler has published something since the thread last looked."""
        return self._published() != self._known

    def _look(self) -> None:
        """What is done between steps."""
        self._known = self._published()
        try:
            if self._page[control.POSITION] != self._page[control.RING_DONE + self._rank]:
                with self._lock:
                    self._ring(self._page[control.POSITION])
            self._between()
            self.publish()
        except Exception as error:
            if not self._stop and str(error) != self._failure:  # the next step does what was not done
                self._failure = str(error)
                logger.exception("vMem: the background thread failed and goes on")

    def publish(self) -> None:
        """Write this worker's column of the control page; libvmem writes the board."""
        if self._tensor is not None:
            self._page.words[control.RESIDENT + self._rank] = self._tensor.resident_bytes

    # ---- sleep and the end -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give up every page but those of the null block. What the blocks held is lost, as vLLM expects."""
        if self._blocks is None or self._asleep is not None:
            return
        with self._lock:
            self._synchronize()
            self._blocks.flush()
            self._asleep = self._in()
            self._sure.clear()
            self._ordered.clear()
            self._blocks.unback(self._asleep)
            self._blocks.flush()
            self._trim()
        self.publish()

    def wake(self) -> None:
        """Back what circulates. Raises OutOfMemory, and changes nothing."""
        with self._lock:
            if self._blocks is not None and self._asleep is not None:
                self._back(self._asleep, WAKE)
                self._sure.update(self._asleep)
                self._asleep = None
        self.publish()

    def _synchronize(self) -> None:
        if self._tensor is not None and self._tensor.tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.tensor.device)

    def _trim(self) -> None:
        if self._tensor is not None:
            self._tensor.context.trim()

    def close(self) -> None:
        """Give up all pages and stop the threads. The addresses go with the last view of the tensor."""
        self._stop = True
        self._wake.set()
        if self._blocks is not None:
            self._synchronize()
            with self._lock:
                self._blocks.close()
        if self._pool is not None:
            self._pool.close()
        self._page[control.ATTACHED + self._rank] = 0


def named_blocks(output: Any) -> list[int]:
    """Every block that a step writes or newly reads. `output` is vLLM's SchedulerOutput."""
    found: list[int] = []
    for request in output.scheduled_new_reqs:
        for ids in request.block_ids:
            found += ids
    for groups in filter(None, output.scheduled_cached_reqs.new_block_ids):  # None: no new blocks
        for ids in groups:
            found += ids
    found += output.new_block_ids_to_zero or ()
    for copy in output.kv_cache_block_copies or ():
        found += [copy.src_block_id, copy.dst_block_id]
    return found
