"""The worker's side of prefixes that outlive their engine: a thread saves blocks, and others are restored.

`prefixes` says which. Begin with `WorkerPrefixes.begin`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from pyvmem.errors import OutOfMemory
from pyvmem.sleep.common import CommonWeights
from pyvmem.sleep.image import Different
from pyvmem.sleep.prefixes import PrefixFile, Saved
from pyvmem.sleep.sums import Sums
from pyvmem.vllm.orders import PrefixOrders
from pyvmem.vllm.prefix_key import key_of

logger = logging.getLogger("vllm.vmem")

PORTION = 4 << 20  # bytes that are saved or restored at once; a step waits for so many
PAUSE = 2e-4  # seconds between two portions, in which a step may begin
POLL = 2e-3  # seconds between looks at whether the device has computed a step


class _Save:
    """A block that is to be saved."""

    def __init__(self, block: int, place: int, tokens: int, name: bytes, parent: bytes) -> None:
        self.block, self.place, self.tokens, self.name, self.parent = block, place, tokens, name, parent
        self.computed: Callable[[], bool] | None = None  # None: the step has not been given to the device


_here: dict[Path | None, WorkerPrefixes] = {}  # by the control pages of engines of this process


def of_engine(page: Path | None) -> WorkerPrefixes | None:
    """The worker's side of the engine of this process with this control page."""
    return _here.get(page)


class WorkerPrefixes:
    """What a worker saves, and restores.

    Parameters
    ----------
    memory : WorkerMemory
    weights : CommonWeights
        Which reach the owner.
    key : str
    size : int
        Most bytes of the file.

    Raises ValueError or OSError if there can be no file.
    """

    def __init__(self, memory: Any, weights: CommonWeights, key: str, size: int) -> None:
        self._memory, self._weights, self._key, self.lock = memory, weights, key, memory._lock
        tensor = memory._tensor.tensor
        self._flat, self._ranges = tensor.view(torch.uint8), memory._ranges
        self.block = sum(r.bytes * r.layers for r in self._ranges)
        self._device = tensor.device
        self.together = max(PORTION // self.block, 1)
        room = torch.empty((self.together, -(-self.block // 8) * 8), dtype=torch.uint8, device=self._device)
        self._images = room[:, : self.block]
        self._stream = torch.cuda.Stream(self._device) if tensor.is_cuda else None
        self._pending: dict[int, _Save] = {}  # by block, in the order of steps
        self._begun: list[_Save] = []  # of the step that is being given to the device
        self._order = self.resets = 0
        self._failure = ""
        self.ended, self._wake = False, threading.Event()
        found = weights.saved(key, self.block)
        self.take_over(found or PrefixFile.create(key, self.block, size))
        weights.save(key, self.file)
        weights.change = self.end
        self.found = found is not None  # the file of another engine, whose blocks have not been restored
        self._sums_of(1)  # compiles the kernel, for which no step has to wait then
        _here[memory._page.path] = self
        threading.Thread(target=self._run, name="vmem-prefixes", daemon=True).start()

    def take_over(self, file: PrefixFile) -> None:
        """Save to a file from now on, and after what is there."""
        self.file, self._sums = file, Sums(self._device, file.salt)
        self._order = max((saved.order for saved in file.saved()), default=0)

    def find(self, resets: int) -> bool:
        """Return whether there are blocks of another engine that has ended, which have not been restored.

        If this one has saved nothing, it takes over the file of one that has ended since. resets: as of `reset`, one
        more than before, since steps that have not begun name places of the file before.
        """
        if self.found or self.ended or self._pending or self._order:
            return self.found
        found = self._weights.saved(self._key, self.block)
        if found is not None:
            with self.lock:
                if self.ended:
                    found.close()
                    return False
                self.forget()
                self.file.close()
                self.take_over(found)
                self.found, self.resets = True, resets
        return self.found

    # ---- steps: the memory calls these with its lock held ----------------------------------------------------

    def begin(self, orders: PrefixOrders | None) -> None:
        """Before a step runs."""
        if orders is None or self.ended:
            return
        self.forget(orders.taken)
        if orders.resets != self.resets:
            return
        for save in orders.saves:
            made = self._pending[save[0]] = _Save(*save)
            self._begun.append(made)

    def forget(self, blocks: Sequence[int] | None = None) -> None:
        """Do not save blocks any more; None: all."""
        if blocks is None:
            self._pending.clear()
        for block in blocks or () if self._pending else ():
            self._pending.pop(block, None)

    def given(self, event: Callable[[], Callable[[], bool]]) -> None:
        """A step has been given to the device. event: returns what says whether the device has computed it."""
        if self._begun:
            computed = event()
            for save in self._begun:
                save.computed = computed
            self._begun.clear()
            self._wake.set()

    def reset(self, resets: int) -> None:
        """The scheduler has reset its prefix cache so often."""
        with self.lock:
            self.resets = resets
            self.forget()
            if not self.ended:
                self.file.wipe()

    def end(self) -> None:
        """Save nothing any more, and forget what was saved: the weights may change."""
        self._end(wipe=True)

    def close(self) -> None:
        """Save nothing any more. The owner keeps what was saved."""
        self._end(wipe=False)

    def _end(self, wipe: bool) -> None:
        with self.lock:
            if not self.ended:
                self.ended = True
                self.forget()
                if wipe:
                    self.file.wipe()
                self.file.close()
                _here.pop(self._memory._page.path, None)
        self._wake.set()

    # ---- copies ----------------------------------------------------------------------------------------------

    def _parts(self, block: int, image: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of a block in the KV cache, each with its place in an image of the block."""
        at = 0
        for r in self._ranges:
            first, apart = r.offset + block * r.stride, r.layer_stride or r.bytes
            here = self._flat.as_strided((r.layers, r.bytes), (apart, 1), first)
            yield here, image[at : at + r.bytes * r.layers].view(r.layers, r.bytes)
            at += r.bytes * r.layers

    def _on_stream(self) -> AbstractContextManager[Any]:
        """The context of copies, which run beside steps."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _sums_of(self, n: int) -> list[int]:
        """The sums of the first images."""
        return [int(s) for s in torch.stack([self._sums(image) for image in self._images[:n]]).tolist()]

    def _ready(self) -> list[_Save]:
        """The blocks that can be saved now, oldest first."""
        found: list[_Save] = []
        for save in self._pending.values():
            if len(found) == self.together or save.computed is None or not save.computed():
                break
            found.append(save)
        return found

    def _save(self, some: list[_Save]) -> None:
        for save in some:
            del self._pending[save.block]
        with self._on_stream():
            for save, image in zip(some, self._images):
                for here, there in self._parts(save.block, image):
                    there.copy_(here, non_blocking=True)
            for save, image, total in zip(some, self._images, self._sums_of(len(some))):
                self.file.clear(save.place)
                self.file.contents(save.place).copy_(image)
                self._order += 1
                self.file.write(
                    Saved(self._order, save.tokens, total, hash=save.name, parent=save.parent, place=save.place)
                )

    def _run(self) -> None:
        while not self.ended:
            self._wake.wait()
            self._wake.clear()
            while self._pending and not self.ended:
                some: list[_Save] = []
                with self.lock:
                    try:
                        some = [] if self.ended else self._ready()
                        if some:
                            self._save(some)
                    except Exception as error:
                        if str(error) != self._failure:  # such as a host without memory; nothing but a copy is lost
                            self._failure = str(error)
                            logger.warning("vMem: blocks of the prefix cache could not be saved: %s", error)
                time.sleep(PAUSE if some else POLL)

    def restore(self, blocks: Sequence[int], saved: Sequence[Saved]) -> list[bool]:
        """Copy what was saved to blocks that nobody uses, at most `together`; returns which have their prefix's rows.

        Raises OutOfMemory; then no block has memory.
        """
        memory = self._memory
        with self.lock:
            if self.ended or memory._asleep is not None:
                raise OutOfMemory(0, "the engine sleeps")
            memory.back_unused(blocks)
            with self._on_stream():
                for each, image in zip(saved, self._images):
                    image.copy_(self.file.contents(each.place))
                found = [total == each.sum for total, each in zip(self._sums_of(len(saved)), saved)]
                for block, image, right in zip(blocks, self._images, found):
                    for here, there in self._parts(block, image) if right else ():
                        here.copy_(there, non_blocking=True)
                if self._stream is not None:
                    self._stream.synchronize()
        return found


def start(worker: Any, memory: Any, config: Any, size: int) -> WorkerPrefixes | None:
    """Save the prefixes of vLLM's worker from now on; None if they do not outlive it, for the reason logged."""
    weights = memory.weights
    try:
        if memory._page.path is None:
            raise Different("it has no control page that others see")
        key = key_of(worker.vllm_config, config, getattr(weights, "key", ""), memory._ranges, size)
        made = WorkerPrefixes(memory, weights, key, size)
    except (Different, ValueError, OSError) as reason:
        logger.warning("vMem: prefixes end with this engine: %s", reason)
        return None
    logger.info("vMem: prefixes outlive this engine: up to %d blocks of them, in host memory", made.file.places)
    return made
