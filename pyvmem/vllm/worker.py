"""The worker's side: the virtual tensor in the place of vLLM's KV allocation, and the pages behind its blocks.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import collections
import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pyvmem.engine import control
from pyvmem.engine.control import Page
from pyvmem.engine.memory import BlockMemory, page_size
from pyvmem.engine.settings import cannot
from pyvmem.errors import OutOfMemory
from pyvmem.sleep.sleeper import Sleeper
from pyvmem.sleep.weights import Weights
from pyvmem.tensor import VirtualTensor
from pyvmem.vllm import layout, plugin
from pyvmem.vllm.orders import StepOrders, named_blocks, submit_stores
from pyvmem.vllm.prefix_worker import WorkerPrefixes

logger = logging.getLogger("vllm.vmem")

POLL = 0.02  # seconds between the thread's looks at the ring
LOOK = 0.005  # in a pool, seconds between its looks at what the scheduler has published
BUSY = 0.1  # seconds between its looks while steps run: steps look themselves, and a wake-up would delay them
AGREE = 10.0  # seconds that a worker waits for the others to wake
WAKE = 10.0  # seconds in which the pool's other members must give the memory of an engine's blocks when it wakes


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


class WorkerMemory(BlockMemory):
    """The KV memory of one worker.

    Parameters
    ----------
    page : Page
        The engine's control page.
    rank : int
        The worker's number in its engine.
    """

    def __init__(self, page: Page, rank: int) -> None:
        super().__init__(page, rank, plugin.settings())
        if page[control.ATTACHED + rank]:  # the name of an engine comes with its configuration
            raise cannot(plugin.SWITCH, "an engine with this VllmConfig runs already, and one control page cannot "
                                        "serve both; make a VllmConfig for each")  # fmt: skip
        self._lock = threading.RLock()
        self._stop, self._wake = False, threading.Event()
        self._known: list[int] = []  # words that the scheduler had published when the thread last looked
        self._finished = 0  # number of the last step that was executed
        self._backed: set[int] = set()  # blocks that are known to be backed, and stay so until `_give_up` names them
        self._ordered: collections.deque[tuple[int, set[int]]] = collections.deque()  # orders without an answer
        self._asleep: list[int] | None = None  # while asleep, the blocks to back when the memory wakes
        self._level = 1  # vLLM's level of the present or last sleep
        self._sleeper: Sleeper | None = None
        self._copied = False  # whether a connector copies blocks
        self._warm = False  # whether vLLM's warm-up is over: the scheduler's first step has come
        self.prefixes: WorkerPrefixes | None = None  # that outlive this engine
        self._stream: Any = None  # the stream that steps use, for fences of the thread
        self._failure = ""  # the last error of the thread

    # ---- the start -------------------------------------------------------------------------------------------

    def claim(self, device: torch.device, size: int) -> AbstractContextManager[None]:
        """The context in which vLLM loads the weights, as `Sleeper.claim` has it."""
        return self.sleeper(device).claim(size)

    def sleeper(self, device: torch.device) -> Sleeper:
        """What sleeps and wakes beside the blocks."""
        if self._sleeper is None:
            self._sleeper = Sleeper(self._page, self._rank, self._chosen, self.pool(device), device)
        return self._sleeper

    @property
    def weights(self) -> Weights | None:
        """The weights, if they are in the pool."""
        return self._sleeper.weights if self._sleeper is not None else None

    def warmed_up(self) -> None:
        """vLLM has warmed up, and captured its graphs."""
        if self._sleeper is not None:
            self._sleeper.warmed_up(self.busy)

    def expect(self, config: Any, copied: bool = False) -> None:
        """Prepare for vLLM's allocation of its KV cache. The configuration may be changed.

        copied: whether a connector copies blocks. It takes their size from the model's configuration, so that stays.
        """
        self._copied = copied
        if not copied:
            layout.spread(config)
        self._ranges = layout.ranges_of(config)

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """The tensor for vLLM's KV cache, int8[size], with no page behind it."""
        if self._tensor is not None:
            raise cannot(plugin.SWITCH, "vLLM allocated its KV cache in two parts, which this release of vMem does "
                                        "not know")  # fmt: skip
        context = self.context(device)
        page = plugin.settings().page_size or page_size(self._ranges, context.page_sizes)
        self._tensor = VirtualTensor((size,), torch.int8, device, page_size=page, zero=True, context=context)
        return self._tensor.tensor

    def start(self, config: Any) -> None:
        """Make the blocks and back the null block, after vLLM has placed its layers."""
        tensor = self._tensor
        if tensor is None:
            if layout.bytes_of(config):
                raise cannot(plugin.SWITCH, "vLLM allocated its KV cache where vMem cannot see it")
            return
        if tensor.nbytes != layout.bytes_of(config):
            raise cannot(plugin.SWITCH, f"vLLM allocated {tensor.nbytes} bytes of KV cache, not the "
                                        f"{layout.bytes_of(config)} of its configuration")  # fmt: skip
        block = tensor.nbytes // config.num_blocks
        alone = self._make_blocks(config.num_blocks, block)
        self._attach()
        logger.info(
            "KV cache on vMem: backend %s, %d blocks of %.1f KiB in pages of %d KiB, %.2f GiB at most, layout %s",
            tensor.context.backend, config.num_blocks - 1, block / 1024,
            tensor.page_size >> 10, tensor.nbytes / 2**30, getattr(config, "kv_cache_layout", None) or "vLLM's",
        )  # fmt: skip
        if alone > 1.5 * block:
            logger.info("vMem: a block of %.1f KiB whose neighbours have all left holds %.1f KiB.", block / 1024,
                        alone / 1024)  # fmt: skip

    def _attach(self) -> None:
        """Tell the scheduler that the memory is there, and start the thread."""
        self._page[control.ATTACHED + self._rank] = 1
        threading.Thread(target=self._poll, name="vmem", daemon=True).start()
        self.publish()

    @property
    def active(self) -> bool:
        """True if vLLM's KV cache is in this memory."""
        return self._blocks is not None

    def _pending(self) -> int:
        """Blocks of orders without an answer. Each question to the pool asks for them, too, as it replaces the last."""
        with self._lock:
            done = self._board[control.DONE]
            return sum(len(ids) for number, ids in self._ordered if number > done)

    # ---- steps -----------------------------------------------------------------------------------------------

    def begin(self, output: Any) -> Any:
        """Before a step runs, carry out its orders and back every block that it names. Returns the step to run."""
        blocks = self._blocks
        if blocks is None:
            return output
        orders: StepOrders | None = getattr(output, "vmem", None)
        with self._lock:
            if self._asleep is not None:  # vLLM runs a step only if it is awake
                self.wake(weights=False)
            if orders is not None:
                self._end_warm_up()
                self._ring(orders.position)
                if orders.gone:
                    self._give_up(orders.gone)
                for number, ids in enumerate(orders.ahead, orders.order):
                    if blocks.order(ids) != number:
                        raise RuntimeError(f"worker {self._rank} lost count of the orders: step {orders.step} "
                                           f"has order {number}")  # fmt: skip
                    self._ordered.append((number, set(ids)))
                if self.prefixes is not None:
                    self.prefixes.begin(orders.prefixes)
            if self._ordered:
                self._see_answers()
            named = named_blocks(output)
            if not self._backed.issuperset(named):
                late = blocks.back([i for i in named if i not in self._backed], over=True)
                self._backed.update(named)
                if orders is not None:
                    self._count_maps(late)
        return output

    def _end_warm_up(self) -> None:
        """Give up the blocks that vLLM's warm-up used."""
        if not self._warm:
            self._warm = True
            self._give_up(self._backed_ids())

    def back_unused(self, ids: Sequence[int]) -> None:
        """Back blocks of which the scheduler knows that no step uses them, all or none. Raises OutOfMemory."""
        with self._lock:
            self._end_warm_up()
            self._synchronize()  # steps before may have used them
            self.blocks.back(ids)
            self._backed.update(ids)

    def _see_answers(self) -> None:
        """Learn which orders have been carried out."""
        done = self._board[control.DONE]
        while self._ordered and self._ordered[0][0] <= done:
            number, ids = self._ordered.popleft()
            if self._page.answer(number, self._rank) == 0:
                self._backed |= ids

    def _count_maps(self, n: int) -> None:
        """Count the blocks that a step had to map itself."""
        if n:
            self._page.words[control.STEP_MAPS + self._rank] += n

    def end(self, output: Any) -> None:
        """Publish that a step has been given to the device."""
        orders: StepOrders | None = getattr(output, "vmem", None)
        if self.active and orders is not None:
            self._finished = orders.step
            self._page.cells[control.FINISHED + self._rank] = orders.step
            if self.prefixes is not None:
                self.prefixes.given(self._event)
            if self._pool is not None and self._news():
                self._wake.set()

    def _backed_ids(self) -> list[int]:
        """The blocks that are backed and stay. The null block, which vLLM may read at any time, is not among them."""
        assert self._blocks is not None
        return [i for i in self._blocks.backed().tolist() if i]

    def _event(self) -> Callable[[], bool]:
        """What returns whether the device has done all work that it has been given until now."""
        if self._tensor is None or not self._tensor.tensor.is_cuda:
            return lambda: True
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._tensor.tensor.device))
        computed: Callable[[], bool] = event.query
        return computed

    def _fence(self) -> int | None:
        """Make a fence behind all work that the device has been given; None if it computes at once."""
        tensor, blocks = self._tensor, self._blocks
        if tensor is None or blocks is None or not tensor.tensor.is_cuda:
            return None
        if threading.current_thread().name != "vmem" or self._stream is None:
            self._stream = torch.cuda.current_stream(tensor.tensor.device)
        return blocks.record(self._stream)

    # ---- between steps ---------------------------------------------------------------------------------------

    def _ring(self, upto: int) -> None:
        """Give up the blocks of the ring's records, as far as the steps before them have run."""
        if upto == self._page.cells[control.RING_DONE + self._rank]:
            return
        for step, ids in self._page.pull(self._rank, upto, self.blocks.blocks):
            if step > self._finished:
                break
            if self._asleep is not None:
                gone = set(ids)
                self._asleep = [i for i in self._asleep if i not in gone]
            else:
                self._give_up(ids)

    def _give_up(self, ids: Sequence[int]) -> None:
        """Unback blocks that the scheduler has given up, behind a fence."""
        assert self._blocks is not None
        self._backed.difference_update(ids)
        if self.prefixes is not None:
            self.prefixes.forget(ids)
        # An order that is carried out later does not make these blocks known as backed.
        for _, ordered in self._ordered:
            ordered.difference_update(ids)
        self.blocks.unback(ids, self._fence())

    def _poll(self) -> None:
        before = finished = 0
        while not self._stop:
            self._rest(finished != before)
            before, finished = finished, self._finished
            self._look()

    def _rest(self, steps: bool) -> None:
        """Wait until the thread's next look is due: in a pool, when the scheduler gives up, wants or offers blocks.

        steps: whether steps ran before the last look; they look themselves.
        """
        pause = BUSY if steps and not self._pool else POLL
        control.rest(self._wake, pause, LOOK if self._pool else pause, self._news)
        self._wake.clear()

    def _published(self) -> list[int]:
        cells = self._page.cells
        return [cells[word] for word in (control.POSITION, control.WANTED, control.AHEAD, control.OFFERED)]

    def _news(self) -> bool:
        """Return whether the scheduler has published something since the thread last looked."""
        return self._published() != self._known

    def _look(self) -> None:
        """Do the work between steps: give up blocks of the ring, tell the pool, and publish."""
        self._known = self._published()
        try:
            if self._page[control.POSITION] != self._page[control.RING_DONE + self._rank]:
                with self._lock:
                    self._ring(self._page[control.POSITION])
            self.tend()
            if self.weights is not None:
                self.weights.copy_again()
        except Exception as error:
            if not self._stop and str(error) != self._failure:  # nothing is lost: the next step does the rest
                self._failure = str(error)
                logger.exception("vMem: the background thread failed, and continues")

    # ---- sleep and the end -----------------------------------------------------------------------------------

    def falls_asleep(self) -> None:
        """Note how much memory torch caches, before vLLM gives it to the driver."""
        if self._sleeper is not None:
            self._sleeper.falls_asleep()

    def sleep(self, level: int = 1) -> None:
        """Give up the memory of the weights and of the blocks: other members of the pool may have all of it.

        Blocks are dropped, as vLLM expects. At level 1 with VMEM_VLLM_SLEEP=keep, they stay until another member asks.
        """
        self._level = level
        if self.weights is not None:
            self.weights.park(keep=self._level == 1)
        if self._level != 1 or self._chosen.sleep != "keep":
            self.drop()
        else:
            self._page.cells[control.KEPT + self._rank] += 1
        with self._lock:
            self._page.cells[control.ASLEEP + self._rank] = 1
            self.tend()  # neighbours may have its minimum, too

    def drop(self) -> None:
        """Give up every page but those of the null block. The blocks' contents are lost."""
        if self._blocks is None or self._asleep is not None:
            return
        with self._lock:
            if self._copied:
                submit_stores()
            self._synchronize()
            if self.prefixes is not None:
                self.prefixes.forget()
            self._blocks.flush()
            self._asleep = self._backed_ids()
            self._backed.clear()
            self._ordered.clear()
            self.blocks.unback(self._asleep)
            self.blocks.flush()
            self._trim()
            self._page.cells[control.ASLEEP + self._rank] = 1
            self.tend()  # neighbours may have its minimum, too

    def wake(self, weights: bool = True, blocks: bool = True) -> bool:
        """Take back the memory as `try_to_wake` does. If one worker lacks some, the last raises OutOfMemory, and the
        others return False. If each raised, vLLM would take the later errors for answers to its next call.
        """
        failed = self.try_to_wake(weights, blocks)
        if failed is not None and (self._rank == self._page[control.RANKS_USED] - 1 or not self._page.shared):
            raise failed
        return failed is None

    def sleep_again(self) -> None:
        """The engine does not wake after all."""
        self.sleep(self._level)

    def try_to_wake(self, weights: bool = True, blocks: bool = True) -> OutOfMemory | None:
        """Take back the memory of the weights, and back the blocks that the scheduler has not given up meanwhile.

        All workers do, or none. If one lacks memory, nothing changes, and each returns why.
        """
        rank, cells = self._rank, self._page.cells
        wait = cells[control.PATIENCE] / 1000 or WAKE
        wakes = self._sleeper if weights and self.weights is not None and self.weights.parked else None
        failed: OutOfMemory | None = None
        backs, lacks = False, 0
        try:
            if wakes is not None:
                # Steps run on this thread's stream; meanwhile, blocks get their memory.
                wakes.wake(wait, self.tend, queued=True)
            with self._lock:
                if blocks and self.active and self._asleep is not None:
                    self._ring(self._page[control.POSITION])
                    lacks = self._bytes_under(self._asleep)
                    self._back(self._asleep, wait)
                    backs = True
        except OutOfMemory as error:
            failed = error
        cells[control.SHORT + rank] = getattr(failed, "missing", lacks) if failed else 0
        if not self._agree(failed is None, wait):
            if wakes is not None:
                wakes.park(self._level == 1)
            with self._lock:
                if backs:
                    self.blocks.unback(self._asleep or ())
            return failed or OutOfMemory(errno.ENOMEM, "another worker lacks memory to wake")
        with self._lock:
            if backs and self._asleep is not None:
                self._backed.update(self._asleep)
                self._asleep = None
            cells[control.ASLEEP + rank] = self._asleep is not None or (
                self.weights is not None and self.weights.parked)  # fmt: skip
            self.tend()
        return None

    def busy(self) -> bool:
        """Return whether running requests hold blocks."""
        return self._page[control.USED] > 0

    def _agree(self, done: bool, seconds: float) -> bool:
        """Return whether every worker of the engine could wake. One that does not answer in time counts as failed."""
        page, ranks, rank = self._page, self._page[control.RANKS_USED], self._rank
        attempt = page[control.WOKE + rank] // 2 + 1
        page[control.WOKE + rank] = 2 * attempt + (not done)
        if ranks < 2 or not page.attached(ranks):
            return done
        end = time.monotonic() + seconds + AGREE
        while True:
            woke = page.cells[control.WOKE : control.WOKE + ranks].tolist()
            if any(n // 2 >= attempt and n & 1 for n in woke):
                return False
            if all(n // 2 >= attempt for n in woke):
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(1e-3)

    def publish(self) -> None:
        """Write this worker's column of the control page; libvmem writes the board."""
        super().publish()
        if self._sleeper is not None:
            self._sleeper.publish()

    def close(self) -> None:
        """Give up all pages and stop the threads. The addresses go with the last view of the tensor."""
        self._stop = True
        self._wake.set()
        if self.prefixes is not None:
            self.prefixes.close()
        if self.active:
            self._synchronize()
            with self._lock:
                self.blocks.close()
        if self.weights is not None:
            self.weights.close()
        self._leave_pool()
        self._page[control.ATTACHED + self._rank] = 0
