"""Weights that several engines read in common, and that outlive each of them.

The weights of a model are one range of addresses in each process, in parts that all of them map (`pyvmem.common`). One
process keeps the descriptors (`owner`), and counts them in the pool. An engine that loads weights offers them to it.
The next one with the same key takes them, and reads no file. One that sleeps unmaps them, so that the owner can give
them up when all sleep. The first that wakes brings back what went, from the one copy in host memory.

Nobody writes there: the parts are mapped read-only. An engine that changes its weights moves them to segments of its
own first (`CommonWeights.part_from_others`), which sleep as `weights` has it.

`sleeper` calls it. It calls `image`, `link`, `sums` and `weights`. Begin with `CommonWeights.find`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pyvmem.common import Common
from pyvmem.core import Context
from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.kv.pool import KVPool
from pyvmem.sleep.image import Different, Image, Trace, as_bytes
from pyvmem.sleep.link import Link, close_all
from pyvmem.sleep.owner import BOARD, FDS
from pyvmem.sleep.prefixes import PrefixFile
from pyvmem.sleep.sealed import SealedCopy
from pyvmem.sleep.sums import Sums
from pyvmem.sleep.weights import ARENA, LOAD_WAIT, LOG, Weights
from pyvmem.tensor import tensor_at

PART, MOST_PARTS = 8 << 20, 256  # a part's least size, which doubles until there are at most so many
POLL = 0.01  # seconds between questions to the owner
LOADS = 600.0  # seconds that an engine waits for another one that loads the same weights


class CommonWeights(Weights):
    """`Weights` that may be in common with other engines of the pool.

    Parameters
    ----------
    pool, context, name, log
        As for `Weights`.
    seconds : float
        How long they stay when no engine has them.
    """

    def __init__(
        self, pool: KVPool, context: Context, name: str, log: logging.Logger = LOG, seconds: float = 600
    ) -> None:
        super().__init__(pool, context, name, log)
        device = context.info().device_uuid.hex() if self._gpu else ""
        self._link = Link(str(pool.path), device, seconds)
        self._context = context
        self._key = ""  # of these weights; "": they are this engine's alone
        self._about: dict[str, Any] | None = None  # what the owner knows of them
        self._common: Common | None = None
        self._board: mmap.mmap | None = None
        self._sealed: SealedCopy | None = None  # in host memory
        self._fds: dict[int, tuple[int, str]] = {}  # of the parts that are mapped, with their names
        self._lacks = 0  # bytes that the pool did not have for them
        self._stale = False  # the owner has other parts than those that are mapped
        self._saves: tuple[str, PrefixFile] | None = None  # the prefixes that outlive this engine, and their key
        self.change: Callable[[], None] = lambda: None  # called before the weights may change

    # ---- which weights ---------------------------------------------------------------------------------------

    def find(self, key: str) -> bool:
        """Look for weights of this key. True: `take` them. False: load them, and `offer` them.

        Waits while another engine loads them. Raises VmemError if there is no owner, and none can be started.
        """
        end = time.monotonic() + LOADS
        while True:
            try:
                if self._link.gone:
                    self._link.connect()
                answer, fds = self._link.ask("find", key=key)
            except ConnectionError:
                continue
            if "wait" not in answer:
                break
            if time.monotonic() >= end:
                raise VmemError(errno.ETIMEDOUT, f"another engine has loaded the same weights for {LOADS:.0f} s")
            time.sleep(POLL)
        self._key, self._about = key, answer.get("about")
        if self._about is not None:
            self._keep_copy(SealedCopy(fds.pop(0), self._device))
        self._see_board(fds[0])
        return self._about is not None

    @property
    def is_common(self) -> bool:
        """Whether these are, or are to be, weights in common."""
        return bool(self._key)

    def _see_board(self, fd: int) -> None:
        self._board = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        os.close(fd)

    def _keep_copy(self, copy: SealedCopy | None) -> None:
        if self._sealed is not None:
            self._sealed.close()
        self._sealed = copy

    def lacking(self) -> int:
        return super().lacking() or self._lacks

    # ---- to offer, and to take -----------------------------------------------------------------------------------

    def adopt(self, modules: Sequence[torch.nn.Module]) -> None:  # type: ignore[override]
        """Move the parameters and buffers of modules to the pool, in common if there is a key."""
        if not self._key:
            super().adopt(modules)
            return
        image = Image(modules, self._device)
        try:
            self._offer(image)
        except ConnectionError:  # the owner has ended; who loads them now offers them
            self._log.warning("vMem: the owner of the weights in common has ended while they were loaded, so that "
                              "these are this engine's alone")  # fmt: skip
            assert self._sealed is not None
            places, sealed = image.places, self._sealed
            self._move_here(image, lambda i, size: sealed.bytes[places[i] : places[i] + size])
            self.leave()

    def _offer(self, image: Image) -> None:
        begin, part = time.monotonic(), PART
        while -(-image.bytes // part) > MOST_PARTS:
            part *= 2
        parts = max(-(-image.bytes // part), 1)
        self._keep_copy(SealedCopy.of(image, parts * part, self._device))
        self._make_common(part, parts)
        # What was loaded goes before its memory is taken again: the pool need not have room for both.
        image.move(self._place_in(image))
        self.reserve(0)
        self.lease.reset()
        self.lease.trim()
        self._await_promise(parts * part)
        self._bring(range(parts), LOAD_WAIT)
        sums = Sums(self._device)
        self._about = dict(bytes=parts * part, part=part, parts=parts, layout=image.digest, salt=sums.key,
                           sums=[int(sums(self._part(i))) for i in range(parts)], id=secrets.token_hex(8),
                           model=os.getpid())  # fmt: skip
        if not self._hand_over():
            raise ConnectionError("another engine has offered the same weights to a new owner")
        self._log.info("vMem: %.2f GiB of weights are in common from now on, after %.1f s", parts * part / 2**30,
                       time.monotonic() - begin)  # fmt: skip

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """The context in which a model is made that takes what `find` has found: its tensors have no contents."""
        with contextlib.ExitStack() as stack:
            with Trace(self._device, self._room(stack)) as trace:
                yield trace

    def _room(self, stack: contextlib.ExitStack) -> Callable[[int], torch.Tensor]:
        """Addresses for tensors that nobody reads: one part of memory at all of them."""
        assert self._about is not None
        part = self._about["part"]
        fd: list[int] = []

        def room(size: int) -> torch.Tensor:
            common = Common(self._context, part, -(-size // part))
            if not fd:
                fd.append(common.new())
                stack.callback(os.close, fd[0])
            for i in range(common.parts):
                common.map(i, fd[0], writable=True)
            return tensor_at(common._owned(), common.addr, (size,), torch.uint8, self._device)

        return room

    def take(self, modules: Sequence[torch.nn.Module], trace: Trace) -> None:
        """Have modules, made within `trace`, read what `find` has found. Raises `Different` or OutOfMemory."""
        about, begin = self._about, time.monotonic()
        assert about is not None
        image = Image(modules, self._device)
        if image.digest != about["layout"]:
            raise Different("the names, shapes or types of the tensors differ")
        self._make_common(about["part"], about["parts"])
        self._map_all(LOAD_WAIT)
        sums = Sums(self._device, about["salt"])
        for i in range(about["parts"]):
            if int(sums(self._part(i))) != about["sums"][i]:
                raise Different(f"the sum of part {i} is not that of the weights which were loaded")
        place = self._place_in(image)
        trace.check(image, lambda i: place(i, image.storages[i].nbytes()))
        image.move(place)
        trace.check_left()
        self._log.info("vMem: %.2f GiB of weights in common were taken after %.2f s", about["bytes"] / 2**30,
                       time.monotonic() - begin)  # fmt: skip

    # ---- prefixes ------------------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The key of these weights; "" if they are this engine's alone."""
        return self._key

    def save(self, key: str, file: PrefixFile) -> None:
        """Have the owner keep a file of prefixes beyond this engine's end, in the place of the one before."""
        self._saves = key, file
        with contextlib.suppress(ConnectionError):  # another owner gets it by `_hand_over`
            self._link.ask("save", [file.fd], key=key)

    def saved(self, key: str, block: int) -> PrefixFile | None:
        """The file of an engine of this key that has ended, which is to be kept for this one from now on."""
        try:
            fds = self._link.ask("saved", key=key)[1]
            file = PrefixFile(fds[0], key, block) if fds else None
        except ConnectionError:
            return None
        except (OSError, ValueError):  # it is none; the owner has let the one before go
            if self._saves is not None:
                self.save(*self._saves)
            return None
        if file is not None:
            self._saves = key, file
        return file

    def leave(self) -> None:
        """Have weights of this engine alone from now on. No tensor may read those in common."""
        self.change()
        with self._lock:
            self._saves = None
            key, self._key, self._about, self._common = self._key, "", None, None
            with contextlib.suppress(ConnectionError):
                self._link.ask("leave", key=key)
            self._link.close()
            self._close_fds()
            self._keep_copy(None)
            self._lacks = 0

    def part_from_others(self, modules: Sequence[torch.nn.Module]) -> None:
        """Before weights change: have a copy of this engine's own. The weights must be awake.

        Raises OutOfMemory or MemoryError; then they are in common as before, but for those that were moved already. No
        CUDA graph may have been captured, as graphs keep the addresses.
        """
        if not self._key:
            return
        with self._lock:
            image = Image(modules, self._device)
            common, about = self._common, self._about
            assert common is not None and about is not None
            inside = range(common.addr, common.addr + about["bytes"])
            old = list(image.storages)
            self._move_here(image, lambda i, size: as_bytes(old[i]), lambda i: old[i].data_ptr() in inside)
            self._log.info("vMem: these weights are about to change, so that this engine has a copy of its own now")
            self.leave()

    def _move_here(
        self, image: Image, contents: Callable[[int, int], torch.Tensor], which: Callable[[int], bool] = lambda i: True
    ) -> None:
        """Move storages to memory of this engine's own. contents: as for `Image.move`, what is to be there."""

        def new(i: int, size: int) -> torch.Tensor:
            there = torch.empty(size, dtype=torch.uint8, device=self._device) if self._gpu else self._bytes(size)
            return there.copy_(contents(i, size))

        with self.loading():
            image.move(new, which)
        if not self._gpu:
            image.keep(self.lease.mem_pool)
        self._synchronize()

    # ---- parts -----------------------------------------------------------------------------------------------

    def _make_common(self, part: int, parts: int) -> None:
        self._common = Common(self._context, part, parts)

    def _part(self, i: int) -> torch.Tensor:
        """A part that is mapped, uint8[part]."""
        assert self._common is not None
        common = self._common
        return tensor_at(common._owned(), common.addr + i * common.part_bytes, (common.part_bytes,), torch.uint8,
                         self._device)  # fmt: skip

    def _place_in(self, image: Image) -> Callable[[int, int], torch.Tensor]:
        """The memory of a storage among the common weights."""
        common = self._common
        assert common is not None
        return lambda i, size: tensor_at(
            common._owned(), common.addr + image.places[i], (size,), torch.uint8, self._device
        )

    def _await_promise(self, size: int) -> None:
        """Wait until the pool has the bytes. Raises OutOfMemory."""
        end = time.monotonic() + LOAD_WAIT
        while missing := int(self._link.ask("promise", bytes=size)[0]["missing"]):
            self._lacks = missing
            if time.monotonic() >= end:
                raise OutOfMemory(errno.ENOMEM, f"the pool lacks {missing} bytes of the {size} of the weights")
            time.sleep(POLL)
        self._lacks = 0

    def _bring(self, parts: Sequence[int], wait: float = 0) -> None:
        """Make parts on the device from the copy in host memory. Raises OutOfMemory; then no part is mapped.

        wait: the most seconds until the device has the memory, which the pool has already.
        """
        common, sealed, end = self._common, self._sealed, time.monotonic() + wait
        assert common is not None and sealed is not None
        part = common.part_bytes
        while True:
            try:
                for i in parts:
                    fd = common.new()
                    self._fds[i] = fd, secrets.token_hex(8)
                    common.map(i, fd, writable=True)
                    self._part(i).copy_(sealed.bytes[i * part : (i + 1) * part], non_blocking=True)
                break
            except OutOfMemory:
                self._unmap()
                self._lacks = len(parts) * part
                if time.monotonic() >= end:
                    raise
                time.sleep(POLL)
        self._synchronize()
        self._lacks = 0
        for i in parts:
            common.seal(i)

    def _give(self, parts: Sequence[int]) -> None:
        """Give the owner parts that are mapped here."""
        for at in range(0, len(parts), FDS):
            some = parts[at : at + FDS]
            answer = self._link.ask("parts", [self._fds[i][0] for i in some], key=self._key,
                                    parts=[(i, self._fds[i][1]) for i in some])[0]  # fmt: skip
            self._stale |= bool(answer["other"])

    def _hand_over(self) -> bool:
        """Give the owner the weights. False: it has others of this key."""
        assert self._sealed is not None
        if self._saves is not None:
            self._link.ask("save", [self._saves[1].fd], key=self._saves[0])
        answer, fds = self._link.ask("offer", [self._sealed.fd], key=self._key, about=self._about)
        self._see_board(fds[0])
        if answer["same"]:
            self._give(sorted(self._fds))
            self._link.ask("done", key=self._key, asleep=self._asleep)
        return bool(answer["same"])

    # ---- sleep and wake --------------------------------------------------------------------------------------

    def _map_all(self, wait: float) -> int:
        """Map every part, all or none; returns the bytes that were copied. Raises OutOfMemory."""
        end = time.monotonic() + wait
        while True:
            try:
                answer = self._link.ask("wake", key=self._key)[0]
                if "bring" in answer:
                    copied = self._take_and_bring(answer["bring"])
                    self._link.ask("done", key=self._key)
                    self._lacks = 0
                    return copied
                self._lacks = answer.get("missing", self._lacks)
            except OutOfMemory:  # the pool has the bytes, and the device not yet
                with contextlib.suppress(ConnectionError):
                    self._link.ask("done", key=self._key, asleep=True)
            except ConnectionError:
                self._unmap()
                self._find_owner()
                continue
            except BaseException:
                self._unmap()
                with contextlib.suppress(ConnectionError):
                    self._link.ask("done", key=self._key, asleep=True)
                raise
            if time.monotonic() >= end:
                error = OutOfMemory(errno.ENOMEM, f"the pool lacks {self._lacks} bytes of the weights")
                error.missing = self._lacks or 1  # type: ignore[attr-defined]
                raise error
            time.sleep(POLL)

    def _take_and_bring(self, bring: list[int]) -> int:
        assert self._about is not None and self._common is not None
        lacks = set(bring)
        there = [i for i in range(self._about["parts"]) if i not in lacks]
        for at in range(0, len(there), FDS):
            some = there[at : at + FDS]
            answer, fds = self._link.ask("take", key=self._key, parts=some)
            for i, fd, name in zip(some, fds, answer["names"], strict=True):
                self._fds[i] = fd, name
            for i in some:
                self._common.map(i, self._fds[i][0])
        if bring:
            self._bring(bring)
            self._give(bring)
        return len(bring) * int(self._about["part"])

    def _unmap(self) -> None:
        self._synchronize()
        if self._common is not None:
            self._common.unmap()
        self._close_fds()

    def _close_fds(self) -> None:
        close_all([fd for fd, _ in self._fds.values()])
        self._fds.clear()

    def _find_owner(self) -> None:
        """The owner has ended: hand what is here to another one. Raises VmemError."""
        while self._link.gone:
            self._link.connect()
            try:
                if not self._hand_over():
                    self._follow()
            except ConnectionError:
                self._link.close()
        self._log.info("vMem: process %d is the owner of the weights in common now", self._link.owner)

    def _follow(self) -> None:
        """Another engine has loaded the same weights while there was no owner: have its parts from the next wake on."""
        self._stale = True
        if not self._asleep:
            return
        answer, fds = self._link.ask("find", key=self._key)
        if "about" in answer:
            self._keep_copy(SealedCopy(fds[0], self._device))
            self._about, self._stale = answer["about"], False
            self._see_board(fds[1])

    def copy_again(self) -> None:
        super().copy_again()
        if self._key and self._about is not None and self._link.gone and self._lock.acquire(blocking=False):
            try:
                self._find_owner()
            finally:
                self._lock.release()

    def park(self, keep: bool = True, busy: Callable[[], bool] | None = None) -> None:
        with self._lock:
            if self._asleep:
                return
            super().park(keep, busy)
            if self._key:
                self._unmap()
                with contextlib.suppress(ConnectionError):  # a new owner learns it by `copy_again`
                    self._link.ask("done", key=self._key, asleep=True)
                    if self._stale:
                        self._follow()
                if self._sealed is not None and self._sealed.unpinned:
                    self.copy_behind(self._busy)

    def _copy_all(self) -> None:
        try:
            self._pin()
        finally:
            super()._copy_all()

    def _pin(self) -> None:
        """Have the device read the copy in host memory at the link's rate."""
        begin, sealed = time.monotonic(), self._sealed
        if sealed is None or not sealed.unpinned or self._common is None:
            return
        size = max(ARENA, self._common.part_bytes)
        while sealed.unpinned and not self._stop:
            self._pause(size)
            with self._lock:
                if sealed is not self._sealed:
                    return
                sealed.pin(size)
        if sealed.error:
            self._log.info("vMem: the driver does not pin the copy of the weights in common (CUDA error %d): they wake "
                           "more slowly", sealed.error)  # fmt: skip
        else:
            self._log.info("vMem: the copy of the weights in common is pinned after %.1f s", time.monotonic() - begin)

    def wake(
        self, wait: float, came: Callable[[], None] = lambda: None, queued: bool = False, ahead: bool = False
    ) -> int:
        with self._lock:
            if not self._asleep or not self._key:
                return super().wake(wait, came, queued, ahead)
            copied = self._map_all(wait)
            try:
                return copied + super().wake(wait, came, queued, ahead)
            except BaseException:
                self._unmap()
                with contextlib.suppress(ConnectionError):
                    self._link.ask("done", key=self._key, asleep=True)
                raise

    def _share(self) -> int:
        """Bytes of the common weights on the device that this engine counts, so that all of its readers add up.

        While one is awake, those count that are: if they sleep, it goes. Then all do.
        """
        if self._board is None or self._about is None:
            return 0
        held, awake, known = map(int, BOARD.unpack_from(self._board, 0))
        if awake:
            return 0 if self._asleep else held // awake
        return held // max(known, 1)

    @property
    def bytes(self) -> int:
        return super().bytes + (self._about["bytes"] if self._about is not None else 0)

    @property
    def held(self) -> int:
        return super().held + self._share()

    @property
    def gives(self) -> int:
        return super().gives + self._share()

    def close(self) -> None:
        super().close()
        self._link.close()
        self._close_fds()
        self._keep_copy(None)
