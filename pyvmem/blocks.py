"""Pages behind numbered blocks, for engines that keep their own block tables (vmem_blocks.h).

Such an engine has a pool of blocks of equal size at fixed places of one large virtual tensor. `Blocks` backs the blocks
whose numbers the engine uses, and gives up those that it no longer uses. It knows nothing of requests or tokens.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pyvmem._checks import elements, flag, one_of, shown, uint, uint32s
from pyvmem._ffi import ffi, lib
from pyvmem.errors import InvalidArgument, _check, structure
from pyvmem.owned import Reservation, _Owned

if TYPE_CHECKING:
    from pyvmem.kv.pool import KVPool
    from pyvmem.tensor import VirtualTensor

__all__ = ["BOARD_WORDS", "BlockRange", "Blocks", "BlocksStats"]

#: Words (uint64) of a board: `Blocks` describes them.
BOARD_WORDS: int = ffi.sizeof("struct vmem_blocks_board") // 8


@dataclass(frozen=True)
class BlockRange:
    """Addresses of blocks: layer ``l`` of block ``b`` begins at ``offset + l * layer_stride + b * stride``.

    All in bytes, but for `layers`; the offset counts from the first byte of the reservation or tensor.
    """

    offset: int
    bytes: int
    stride: int
    layers: int = 1
    layer_stride: int = 0


@dataclass(frozen=True)
class BlocksStats:
    """Counts of blocks and pages now, and of events so far; see ``struct vmem_blocks_stats`` in vmem_blocks.h.

    `held`, `most_held` and `budget` are bytes; `backed` and `leaving` are blocks, `waiting` orders.
    """

    page_size: int
    budget: int
    held: int
    most_held: int
    blocks: int
    backed: int
    leaving: int
    waiting: int
    orders: int
    refused: int
    unmapped_pages: int
    failed_unmaps: int


class _KeepBoard:
    """The destructor of the native pointer: ends the blocks before the memory that they write to."""

    def __init__(self, owner: Any, board: Any) -> None:
        self.owner, self.board = owner, board

    def __call__(self, thing: Any) -> None:
        self.owner = None
        self.board = None


class Blocks(_Owned):
    """Pages behind the blocks 0 to `blocks` - 1 of a reservation or virtual tensor. None is backed at first.

    Parameters
    ----------
    space : Reservation or VirtualTensor
        Where the blocks lie. It stays until the blocks are closed; nobody else maps anything under the blocks.
    ranges : iterable of BlockRange
        The parts of a block. Parts need not be multiples of a page: pages that several blocks share are counted.
    blocks : int
    page_size : int, optional
        Of the pages that back them, in bytes; by default the smallest (of a VirtualTensor: its own).
    budget : int
        Most bytes of pages; 0 for no limit but the context's.
    board : buffer of uint64, optional
        `BOARD_WORDS` words, such as a numpy array over shared memory, where the native thread writes for other
        processes. The first five words: the last answered order, the orders refused so far, bytes held, most bytes
        held, blocks backed. The next three: blocks that wait to be given up, the budget, and the bytes to which other
        members of its pool want it to fall (0: nobody asks; `offer`). Then come answers: that to order ``s`` is at
        ``8 + s % 256``. It is ``2 * s`` if the order was carried out, and ``2 * s + 1`` if it was refused.

    Raises
    ------
    InvalidArgument
        A range that is not inside the reservation, or another argument that is out of range; the text names it.
    OutOfMemory
        No memory for bookkeeping.

    Notes
    -----
    Every method may be called from any thread. Calls that name the same block take effect in the order in which they
    were made. In a forked child they raise `VmemError` (EPERM).
    """

    _what = "blocks object"

    page_size: int
    blocks: int

    def __init__(
        self,
        space: Reservation | VirtualTensor,
        ranges: Iterable[BlockRange],
        blocks: SupportsIndex,
        *,
        page_size: int | None = None,
        budget: SupportsIndex = 0,
        board: Any = None,
    ) -> None:
        at = space if isinstance(space, Reservation) else getattr(space, "_range", None)
        if not isinstance(at, Reservation):
            raise TypeError(f"space must be a Reservation or a VirtualTensor, not {shown(space)}")
        if page_size is None:
            page_size = getattr(space, "page_size", None) or min(at.context.page_sizes)
        self.page_size = one_of("page_size", page_size, at.context.page_sizes)
        self.blocks = uint("blocks", blocks, 32)
        parts = elements("ranges", ranges)
        raw = ffi.new("struct vmem_block_range[]", len(parts))
        for i, part in enumerate(parts):
            if not isinstance(part, BlockRange):
                raise TypeError(f"ranges must be of BlockRange, not of {shown(part)}")
            numbers = {
                n: uint(f"ranges[{i}].{n}", getattr(part, n)) for n in ("offset", "bytes", "stride", "layer_stride")
            }
            if numbers["offset"] >= at.length:
                raise InvalidArgument(errno.EINVAL, f"ranges[{i}].offset {numbers['offset']} must lie within {at!r}")
            raw[i].addr = at.addr + numbers["offset"]
            raw[i].bytes = numbers["bytes"]
            raw[i].block_stride = numbers["stride"]
            raw[i].layer_stride = numbers["layer_stride"]
            raw[i].layers = uint(f"ranges[{i}].layers", part.layers, 32)
        shared = None if board is None else _board(board)
        config = structure("vmem_blocks_config")
        config.ranges, config.n_ranges, config.blocks = raw, len(parts), self.blocks
        config.page_size, config.budget = self.page_size, uint("budget", budget)
        if shared is not None:
            config.board = ffi.cast("struct vmem_blocks_board *", shared)
        owner, out = self._new_owner(at._owned()), ffi.new("vmem_blocks **")
        _check(lib.pv_own_blocks(owner, at.context._use(), config, out))
        self._owner = self._handle = ffi.gc(out[0], _KeepBoard(owner, shared))
        at.context._children[id(self)] = self

    def __repr__(self) -> str:
        return f"<pyvmem.blocks.Blocks {self.blocks} blocks{', closed' if self.closed else ''}>"

    def close(self) -> None:
        """Unmap all blocks once all kernels of the device have ended. Orders that have not begun are dropped.

        Calls in progress in other threads finish first; the last of them ends the blocks. While a CUDA graph is
        captured, the pages stay until later.
        """
        self._drop()

    # ---- backing ---------------------------------------------------------------------------------------------

    def back(self, ids: Any, *, over: bool = False) -> int:
        """Back blocks now, all or none; returns how many were not backed. Needs no system call if all are.

        ids: int or array of int. With `over`, the budget does not count. Raises `OutOfMemory` if the budget or the
        device has no memory for all of them. A block that waits to be given up is kept.
        """
        raw, n = _ids(ids)
        flags, fresh = lib.VMEM_BLOCKS_OVER if flag("over", over) else 0, ffi.new("uint32_t *")
        _check(lib.vmem_blocks_back(self._use(), raw, n, flags, fresh))
        return int(fresh[0])

    def order(self, ids: Any) -> int:
        """Have the native thread back blocks, in the order of the calls; returns the order's number, from 1 on.

        An order for which there is no memory is refused: its blocks are as before the call.
        """
        raw, n = _ids(ids)
        seq = ffi.new("uint64_t *")
        _check(lib.vmem_blocks_order(self._use(), raw, n, seq))
        return int(seq[0])

    def unback(self, ids: Any, after: SupportsIndex | None = None) -> None:
        """Give up blocks once the fence `after` has passed (`record`, `fence`), or as soon as possible. Never waits.

        Orders for these blocks that wait are cut. A call that backs such a block again before it is unmapped keeps it.
        """
        raw, n = _ids(ids)
        _check(lib.vmem_blocks_unback(self._use(), raw, n, 0 if after is None else uint("after", after)))

    # ---- fences ----------------------------------------------------------------------------------------------

    def record(self, stream: Any = None) -> int:
        """Make a fence that passes when all work given to a CUDA stream before has ended.

        stream: ``torch.cuda.Stream``, or its handle (int); None for the legacy default stream. On the host backend the
        fence has passed already. Fences are numbers, and pass in their order. Other `Blocks` refuse them.
        """
        handle = 0 if stream is None else uint("stream", getattr(stream, "cuda_stream", stream))
        fence = ffi.new("uint64_t *")
        _check(lib.vmem_blocks_record(self._use(), ffi.cast("void *", handle), fence))
        return int(fence[0])

    def fence(self) -> int:
        """Make a fence that passes when `passed` is called with its number, or with a later one."""
        fence = ffi.new("uint64_t *")
        _check(lib.vmem_blocks_fence(self._use(), fence))
        return int(fence[0])

    def passed(self, fence: SupportsIndex) -> None:
        """Let a fence of `fence`, and all such before it, pass."""
        _check(lib.vmem_blocks_pass(self._use(), uint("fence", fence)))

    # ---- what is there ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until every order made before is answered, and no block waits whose fence has passed."""
        _check(lib.vmem_blocks_flush(self._use()))

    def states(self, ids: Any) -> npt.NDArray[np.uint8]:
        """The states of blocks, uint8[n]: 0 if it is not backed, 1 if it is, 2 if it is and waits to be given up."""
        raw, n = _ids(ids)
        found = np.empty(n, np.uint8)
        _check(lib.vmem_blocks_query(self._use(), raw, n, ffi.from_buffer("uint8_t[]", found)))
        return found

    def backed(self) -> npt.NDArray[np.uint32]:
        """The numbers of the blocks that are backed and do not wait to be given up, uint32[n], ascending."""
        ids = np.arange(self.blocks, dtype=np.uint32)
        found: npt.NDArray[np.uint32] = ids[self.states(ids) == 1]
        return found

    # ---- pools -----------------------------------------------------------------------------------------------

    def join(self, pool: KVPool, *, name: str = "blocks", min: SupportsIndex = 0, max: SupportsIndex = 0) -> None:
        """Become a member of a pool, which sets the budget from then on. Closing leaves the pool.

        min, max : bytes that are guaranteed, and that are possible at most; max 0: the pool's budget.

        Raises `OutOfMemory` if the minimums of all members, or the pages that are held, exceed the pool's budget.
        Raises `InvalidArgument` if the blocks are in a pool already, or on another device than its members.
        """
        if getattr(pool, "_what", "") != "pool":
            raise TypeError(f"pool must be a KVPool, not {shown(pool)}")
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {shown(name)}")
        text = ffi.new("char[]", name.encode(errors="replace")[:63])
        _check(lib.vmem_blocks_join(self._use(), pool._use(), text, uint("min", min), uint("max", max)))

    def set_share(self, min: SupportsIndex, max: SupportsIndex) -> None:
        """Change what the pool guarantees and allows, in bytes. Pages beyond `max` stay until they are given up."""
        _check(lib.vmem_blocks_set_share(self._use(), uint("min", min), uint("max", max)))

    def ask(self, bytes: SupportsIndex) -> int:
        """Ask for a budget of `bytes` beyond what is held; returns the bytes that are not there yet.

        Takes what is free in the pool, and asks other members for the rest. Returns at once. A question lapses after
        250 ms unless it is repeated. Raises `OutOfMemory` if no member could give them when they were last asked;
        repeat the call to ask them again.
        """
        missing = ffi.new("uint64_t *")
        _check(lib.vmem_blocks_ask(self._use(), uint("bytes", bytes), missing))
        return int(missing[0])

    def offer(self, bytes: SupportsIndex) -> None:
        """Say that `bytes` of what is held can be given up if other members ask.

        If they do, the board's word 7 says how many bytes to hold at most. Backing does not take that memory again. It
        lapses 100 ms after the last question, at the next call.
        """
        _check(lib.vmem_blocks_offer(self._use(), uint("bytes", bytes)))

    def stats(self) -> BlocksStats:
        """Return `BlocksStats` at this moment."""
        raw = structure("vmem_blocks_stats")
        _check(lib.vmem_blocks_get_stats(self._use(), raw))
        return BlocksStats(*(int(getattr(raw, name)) for name in BlocksStats.__dataclass_fields__))


def _ids(ids: Any) -> tuple[Any, int]:
    array = uint32s("ids", ids)
    return ffi.from_buffer("uint32_t[]", array), len(array)


def _board(board: Any) -> Any:
    try:
        raw = ffi.from_buffer("uint64_t[]", board, require_writable=True)
    except (TypeError, ValueError, BufferError):
        raise TypeError(f"board must be a writable, contiguous buffer, not {shown(board)}") from None
    if len(raw) < BOARD_WORDS:
        raise InvalidArgument(errno.EINVAL, f"board has {len(raw)} words of 8 bytes: must have {BOARD_WORDS}")
    return raw
