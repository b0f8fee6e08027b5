"""The KV cache of a serving engine: request slots in virtual tensors, backed by pages as requests grow.

The calls are those of the vAttention paper (Prabhu et al., ASPLOS 2025, Table 3). The manager itself is native
(vmem_kv.h): each step makes one native call, without the GIL. `pyvmem.kv.prefix` provides prefix caching by token
hashes.

SPDX-License-Identifier: MIT
"""

import errno
import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeVar

import torch

from pyvmem._checks import elements, flag, one_of, shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.core import Context
from pyvmem.errors import InvalidArgument, OutOfMemory, VmemError, _check, structure
from pyvmem.kv.arguments import Lengths, config_of, lengths_of
from pyvmem.kv.options import KVCacheOptions, Spare, options_of
from pyvmem.kv.shortage import NO_SHORTAGE, Shortage, shortage_of
from pyvmem.kv.types import Run, SlotInfo, TensorSpec, model_specs
from pyvmem.kv.view import STATS, KVStats, new_view_path
from pyvmem.owned import _Owned, first_unbacked
from pyvmem.tensor import left_its_pages, moved, tensor_at

__all__ = [
    "KVCache",
    "KVCacheOptions",
    "KVStats",
    "Lengths",
    "Run",
    "Shortage",
    "SlotInfo",
    "Spare",
    "TensorSpec",
    "model_specs",
]

Cache = TypeVar("Cache", bound="KVCache")

_log = logging.getLogger("pyvmem")
_MOST = 2**32 - 1  # tokens: all
_NO_SLOT = 2**32 - 1
_ALLOC_BYTES = ffi.sizeof("struct vmem_kv_alloc_options")


def _not_backed(
    cache: "weakref.ref[KVCache]", place: tuple[Any, str, int, int, int], first: int, end: int, writes: bool
) -> str | None:
    """Name the first row between two addresses that no step has backed (`pyvmem.checked`)."""
    kv, (context, name, addr, stride, row_bytes) = cache(), place
    if kv is None or kv.closed:  # which its tensors outlive
        at = first_unbacked(context, first, end)
        if at is None:
            return None
        slot, row = (at - addr) // stride, (at - addr) % stride // row_bytes
        return f"row {row} of slot {slot} of {name}, which is not backed, and its cache is closed"
    for slot in range((first - addr) // stride, (end - addr - 1) // stride + 1):
        start = addr + slot * stride
        rows = kv.tokens([slot])[0]
        if min(end, start + stride) > start + rows * row_bytes:
            row = max((max(first, start) - start) // row_bytes, rows)
            return f"row {row} of slot {slot} of {name}, which has {rows} rows backed: call step first"
    return None


def _copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Copy behind the kernels of the current stream, and wait for the end."""
    for a, b in zip(to, source, strict=True):
        a.copy_(b, non_blocking=True)
    for device in {t.device for t in (*to[:1], *source[:1]) if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class KVCache(_Owned):
    """A KV cache of `slots` requests of at most `max_tokens` tokens.

    Parameters
    ----------
    specs : list of TensorSpec
        From `model_specs`, or custom ones: layers may differ in shape, dtype and window.
    slots, max_tokens : int
        At least 1; slots at most 65,536.
    budget : int
        The largest number of bytes of pages, at least one page. The constructor allocates them from the device, unless
        the cache is `lazy`.
    options : KVCacheOptions, optional
        How the cache gets and keeps its pages.
    **keywords
        Any of those options by name: ``KVCache(..., backend="stock", page_size=2 << 20)``.

    Attributes
    ----------
    tensors : list of torch.Tensor
        One for each spec, ``[slots, max_tokens, *shape]``. ``cache.tensors[i][slot, :length]`` is an ordinary tensor.
    keys, values : list of torch.Tensor
        Only of a cache made by `for_model`.
    slots, max_tokens, page_size : int
        As given; `page_size` in bytes, also if none was given.
    context : Context
        The context that provides the memory.
    shortage : Shortage
        The shortage of the calling thread's last call of this cache that needed memory or a slot.
    options : KVCacheOptions
        The options given, with the keywords applied.

    Raises
    ------
    OutOfMemory
        The device has less memory than the budget.
    InvalidArgument
        An argument exceeds its limits. Every call here that takes a slot or tokens raises it.

    Notes
    -----
    A call that finds too little memory, or no slot, returns False, or None where it would return a number. Nothing has
    changed then, and `shortage` says what is missing and what would help. ``step(dry=True)`` only answers:
    others, such as another process, may take the memory of a `lazy` cache or of a pool before the call itself.

    Between one step and the next, kernels may access the rows that the step backed. A call marked *Quiet* requires that
    no kernel in flight accesses the slot.
    """

    _what = "KV cache"

    keys: list[torch.Tensor]  # of `for_model`
    values: list[torch.Tensor]

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        slots: int,
        max_tokens: int,
        budget: int,
        options: KVCacheOptions | None = None,
        **keywords: Any,
    ) -> None:
        self._last = threading.local()
        self._events: list[tuple[Any, int]] = []  # (event, step), the oldest first
        self._polling = threading.RLock()
        self._prefix_block = 0  # tokens of a block of its PrefixCache; 0: it has none
        self._swapped: dict[int, list[torch.Tensor]] = {}  # the rows, tensor after tensor
        self._ended_tensors = 0  # when all were at their places
        self.options = options = options_of(options, keywords)
        self.specs = elements("specs", specs)
        for spec in self.specs:
            if not isinstance(spec, TensorSpec):
                raise TypeError(f"specs must be a list of TensorSpec, not of {spec!r}")
        self.slots = uint("slots", slots, 32)
        self.max_tokens = uint("max_tokens", max_tokens, 32)
        self.tile_rows = options.tile_rows
        self._own_context = options.context is None
        self.context = options.context or Context(options.backend, options.device)
        kv = ffi.new("vmem_kv **")
        try:
            sizes = self.context.page_sizes
            asked = options.page_size
            self.page_size = min(sizes) if asked is None else one_of("page_size", asked, sizes)
            pool, most = options.pool, uint("budget", budget)
            if options.pool_min > most:
                raise InvalidArgument(errno.EINVAL, f"pool_min {options.pool_min} is over budget, {most}")
            config, _tensors = config_of(
                self.specs, options._flags(), slots=slots, max_tokens=max_tokens, page_size=self.page_size,
                budget=most if pool is None or most < self.page_size else self.page_size, **options._numbers(),
            )  # fmt: skip
            owner = self._new_owner(self.context._owned())
            _check(lib.pv_own_kv(owner, self.context._use(), config, kv))
            if pool is not None:
                pool._join(kv[0], int(options.pool_min), most, options.name or "kv", self.context)
        except Exception:
            self._close_context()
            raise
        self._own(owner, kv[0])
        self.tensors = [self._tensor(i) for i in range(len(self.specs))]
        if options.name is not None:
            path = new_view_path()
            if path:
                # Publishing is best effort: if it fails, as on a full disk, the cache still works but is not shown.
                name = options.name.encode(errors="replace")
                lib.vmem_kv_publish(self._use(), os.fsencode(path), name[:63])

    @classmethod
    def for_model(
        cls: type[Cache],
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        max_tokens: int,
        budget: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "separate",
        window: int = 0,
        options: KVCacheOptions | None = None,
        **keywords: Any,
    ) -> Cache:
        """Make the cache of a model whose layers are alike.

        Parameters
        ----------
        layers, kv_heads, head_dim : int
            Of this worker, as in the paper.
        slots, max_tokens, budget, options, **keywords
            As in `KVCache`.
        dtype, layout, window
            As in `model_specs`.

        Returns
        -------
        KVCache
            With `keys` and `values`, lists of one tensor per layer: views of `tensors`, ``[slots, max_tokens, kv_heads,
            head_dim]`` in every layout.
        """
        specs = model_specs(layers, kv_heads, head_dim, dtype=dtype, layout=layout, window=window)
        cache = cls(specs, slots, max_tokens, budget, options, **keywords)
        if layout == "separate":
            cache.keys, cache.values = cache.tensors[::2], cache.tensors[1::2]
        elif layout == "fused":
            cache.keys, cache.values = ([t[:, :, i] for t in cache.tensors] for i in (0, 1))
        else:
            cache.keys, cache.values = ([cache.tensors[0][:, :, n, i] for n in range(layers)] for i in (0, 1))
        return cache

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<pyvmem.KVCache {self.slots} slots of {self.max_tokens} tokens on {self.context.backend}{state}>"

    def layout(self, tensor: SupportsIndex) -> tuple[int, int, int, int]:
        """Say where a tensor lies.

        A slot may have more rows than `max_tokens`. Slot s starts at row ``s * rows`` of the contiguous ``[slots *
        rows, *shape]`` (`flat`). Kernels with cumulative offsets need that.

        Parameters
        ----------
        tensor : int

        Returns
        -------
        (int, int, int, int)
            Address, bytes, slot stride in bytes, and rows of a slot.
        """
        raw = structure("vmem_kv_layout")
        _check(lib.vmem_kv_get_layout(self._use(), uint("tensor", tensor, 32), raw))
        return raw.addr, raw.length, raw.slot_stride, raw.slot_rows

    def _tensor(self, i: int, flat: bool = False) -> torch.Tensor:
        addr, _, stride, rows = self.layout(i)
        owned, spec = self._owned(), self.specs[i]
        gpu = "gpu" in self.context.capabilities
        device = torch.device("cuda", self.context.device) if gpu else torch.device("cpu")
        shape = [self.slots * rows] if flat else [self.slots, spec.max_tokens or self.max_tokens]
        strides = [math.prod(spec.shape[k:]) for k in range(len(spec.shape) + 1)]
        if not flat:
            strides.insert(0, stride // spec.dtype.itemsize)
        place = self.context._use(), spec.name, addr, stride, spec.row_bytes
        check = functools.partial(_not_backed, weakref.ref(self), place)
        where = (*shape, *spec.shape), spec.dtype, device, strides
        return tensor_at(owned, addr, *where, (check, spec.row_bytes))

    def flat(self, tensor: int) -> torch.Tensor:
        """Return a tensor as contiguous rows; see `layout`.

        Parameters
        ----------
        tensor : int

        Returns
        -------
        torch.Tensor
            ``[slots * rows, *shape]``.
        """
        self._use()
        return self._tensor(tensor, flat=True)

    # ---- requests --------------------------------------------------------------------------------------------

    def alloc(
        self, tokens: SupportsIndex = 0, *, slot: SupportsIndex | None = None, prefix_tokens: SupportsIndex = 0
    ) -> int | None:
        """Allocate a slot for a new request.

        Chooses the free slot whose kept pages fit best (deferred reclamation, section 5.4.2 of the paper).

        Parameters
        ----------
        tokens : int
            About how many tokens the first step will have; 0 if unknown.
        slot : int, optional
            Take exactly this slot.
        prefix_tokens : int
            Rows that `attach` will provide: kept pages in their place are useless.

        Returns
        -------
        int or None
            The slot; None if all slots are taken.

        Raises
        ------
        VmemError
            EBUSY: the requested slot is taken.
        """
        options = {"size": _ALLOC_BYTES, "tokens": uint("tokens", tokens, 32)}
        options["prefix_tokens"] = uint("prefix_tokens", prefix_tokens, 32)
        if slot is not None:
            options["flags"], options["slot"] = lib.VMEM_KV_ALLOC_SLOT, uint("slot", slot, 32)
        kv, raw = self._ready(), ffi.new("struct vmem_kv_alloc_options *", options)
        chosen = ffi.new("uint32_t *", _NO_SLOT)
        try:
            return int(chosen[0]) if self._answer(lib.vmem_kv_alloc(kv, raw, chosen)) else None
        except BaseException:  # also Ctrl-C: nobody else knows the slot
            if chosen[0] != _NO_SLOT:
                self.free(chosen[0])
            raise

    def free(self, slot: SupportsIndex, after: Any = None) -> None:
        """End a request. Its pages are kept for the next one while memory allows.

        With `after`, the slot is freed once the kernels up to that point have ended. No call may name it until it is
        allocated again.

        Parameters
        ----------
        slot : int
        after : int or event, optional
            A step's number (`last_step`), or an event with a ``query()``, such as a ``torch.cuda.Event`` recorded after
            the last step's kernels. None: quiet, no kernel in flight may access the slot.
        """
        kv, slot = self._use(), uint("slot", slot, 32)
        host = self._swapped.get(slot)
        try:
            self._swapped.pop(slot, None)  # before the call: once the slot is free, another thread may allocate it
            number = 0 if after is None else self._fence(after)
            _check(lib.vmem_kv_free(kv, slot, number))
        except BaseException:
            if host is not None and self.slot(slot).state == "swapped":
                self._swapped.setdefault(slot, host)
            raise
        self._watch(after, number)

    def step(self, lengths: Lengths, *, dry: bool = False) -> bool:
        """Back the rows of the coming iteration.

        Parameters
        ----------
        lengths : sequence, numpy array or torch CPU tensor of `slots` ints
            Tokens of each slot once the iteration has run; 0 for slots that take no part.
        dry : bool
            Only answer. Requests that are ending count as running: after False, the step itself may find that they have
            ended.

        Returns
        -------
        bool
            False: memory is short. If `shortage.step` is not 0, wait for the kernels of that step, `retire` it and try
            again; otherwise free or swap out a request.
        """
        flags = lib.VMEM_KV_DRY if dry is not False and flag("dry", dry) else 0
        return self._answer(lib.vmem_kv_step(self._ready(), lengths_of(lengths, self.slots), self.slots, flags))

    def truncate(self, slot: SupportsIndex, tokens: SupportsIndex, after: Any = None) -> bool:
        """Discard rows from `tokens` onward (rejected speculation).

        Parameters
        ----------
        slot : int
        tokens : int
            Rows that stay.
        after : int or event, optional
            As in `free`: kernels up to that point may still touch the rows.

        Returns
        -------
        bool
            False: there is no memory to copy a shared page.

        Raises
        ------
        VmemError
            EBUSY: shared rows would have to be copied before those kernels end. ENODATA: a window has given up rows
            that the next token reads. Nothing has changed.
        """
        kv, slot, tokens = self._ready(), uint("slot", slot, 32), uint("tokens", tokens, 32)
        number = 0 if after is None else self._fence(after)
        if not self._answer(lib.vmem_kv_truncate(kv, slot, tokens, number)):
            return False
        self._watch(after, number)
        return True

    def wait(self) -> None:
        """Wait until the background thread has nothing left to do."""
        _check(lib.vmem_kv_wait(self._use()))

    def slot(self, slot: SupportsIndex) -> SlotInfo:
        """Describe a slot.

        Parameters
        ----------
        slot : int

        Returns
        -------
        SlotInfo
        """
        raw = structure("vmem_kv_slot_info")
        _check(lib.vmem_kv_get_slot(self._use(), uint("slot", slot, 32), raw))
        state = ("free", "active", "swapped")[raw.state]
        return SlotInfo(
            state, raw.tokens, raw.shared_tokens, pages=raw.pages, shared_pages=raw.shared_pages,
            needed_pages=raw.needed_pages, absent_steps=raw.absent_steps, after=int(raw.after),
        )  # fmt: skip

    def tokens(self, slots: Iterable[int]) -> list[int]:
        """Say how many rows of each slot kernels may read.

        Parameters
        ----------
        slots : iterable of int

        Returns
        -------
        list of int
            Rows; 0 for slots that are free or swapped out.
        """
        raw, kv, get = structure("vmem_kv_slot_info"), self._use(), lib.vmem_kv_get_slot
        rows = []
        for slot in elements("slots", slots):
            _check(get(kv, uint("slots", slot, 32), raw))
            rows.append(raw.tokens if raw.state == 1 else 0)
        return rows

    # ---- when memory is short --------------------------------------------------------------------------------

    @property
    def shortage(self) -> Shortage:
        """The shortage of the calling thread's last call of this cache that needed memory or a slot."""
        return getattr(self._last, "shortage", NO_SHORTAGE)

    def _answer(self, rc: int) -> bool:
        """Return whether a call found memory and a slot, and note what it was short of."""
        if not rc:
            self._last.shortage = NO_SHORTAGE
            return True
        if rc not in (-errno.ENOMEM, -errno.ENOSPC):
            _check(rc)
        raw = structure("vmem_kv_shortage")
        _check(lib.vmem_kv_last_shortage(raw))  # libvmem keeps it for each thread
        lib.pv_end_put_off()  # for the next attempt
        self._last.shortage = shortage = shortage_of(raw)
        if not shortage.reason:  # such as ENOMEM of the system
            _check(rc)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%r: %s", self, shortage)
        return False

    # ---- fences ----------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The number of the last successful step: the fence of its kernels.

        Steps have consecutive numbers, which no other cache of the process has: ``last_step - 1`` is the step before.
        The first number is not 1, and before the first step, `last_step` is lower by one. `stats` counts the steps.
        """
        number = ffi.new("uint64_t *")
        _check(lib.vmem_kv_last_step(self._use(), number))
        return int(number[0])

    def retire(self, step: SupportsIndex | None = None) -> None:
        """Declare that the kernels of all steps up to this one have ended.

        Without this call, a step's kernels count as ended once the steps that may be in flight have been called after
        it.

        Parameters
        ----------
        step : int, optional
            Its number; None: every step.
        """
        _check(lib.vmem_kv_retire(self._use(), self.last_step if step is None else uint("step", step)))

    def _fence(self, after: Any) -> int:
        return self.last_step if callable(getattr(after, "query", None)) else uint("after", after)

    def _watch(self, after: Any, number: int) -> None:
        """If `after` is an event, retire the step once the event has completed."""
        if callable(getattr(after, "query", None)):
            self._events.append((after, number))

    def _ready(self) -> Any:
        """As `_use`, for a call that takes or returns a slot or memory: completed events may have made some free."""
        if self._events:
            self._poll()
        if lib.pv_owner_ended_tensors(self._owned()) != self._ended_tensors:
            self._check_places()
        return self._handle or self._use()  # one call less

    def _poll(self) -> None:
        """Retire the steps whose events have completed."""
        with self._polling:
            while self._events:
                first = self._events[0]
                if not first[0].query():
                    break
                self.retire(first[1])
                if self._events and self._events[0] is first:  # a signal handler may have polled, too
                    del self._events[0]

    def _check_places(self) -> None:
        """Raise if torch has moved a tensor: rows are elsewhere than their pages. Views of `flat` end, too."""
        ended = int(lib.pv_owner_ended_tensors(self._owned()))
        for i, tensor in enumerate(self.tensors):
            if left_its_pages(tensor, self.layout(i)[0]):
                raise moved(self.specs[i].name)
        self._ended_tensors = ended

    # ---- runs ------------------------------------------------------------------------------------------------

    def share(self, slot: SupportsIndex, tokens: SupportsIndex, first: SupportsIndex = 0) -> Run:
        """Hold rows of a slot for other requests, until `drop`.

        Kernels in flight may still be writing the rows: see `attach`.

        Parameters
        ----------
        slot : int
        tokens : int
            How many rows.
        first : int
            The first of them.

        Returns
        -------
        Run

        Raises
        ------
        VmemError
            ENODATA: windows have given up rows that a request needs which begins with the run. After a step that ends
            with the run, none has.
        """
        run = ffi.new("struct vmem_kv_run *", {"keep": 1})
        run.slot, run.first = uint("slot", slot, 32), uint("first", first, 32)
        run.tokens = uint("tokens", tokens, 32)
        try:
            _check(lib.vmem_kv_share(self._use(), run, 1, 0))
            info = structure("vmem_kv_run_info")
            if run.id:
                _check(lib.vmem_kv_get_run(self._use(), run.id, info))
            if not run.id or (not run.first and info.min_tokens > run.tokens):
                text = f"tokens {run.tokens}: a window has given up rows before them; share when a step ends there"
                raise VmemError(errno.ENODATA, text)
            return Run(int(run.id), run.first, run.tokens, info.min_tokens)
        except BaseException:  # also Ctrl-C: nobody else knows the run
            if run.id:
                self.drop(Run(int(run.id), run.first, run.tokens))
            raise

    @staticmethod
    def _numbers_of(runs: Run | Iterable[Run]) -> list[int]:
        found = [runs] if isinstance(runs, Run) else elements("runs", runs)
        for run in found:
            if not isinstance(run, Run):
                raise TypeError(f"runs must be a Run or a sequence of them, not of {shown(run)}")
        return [run.id for run in found]

    def _attach(self, slot: SupportsIndex, runs: list[int], most: int) -> int | None:
        """`attach`, by the numbers of runs."""
        tokens = ffi.new("uint32_t *")
        rc = lib.vmem_kv_attach(self._ready(), uint("slot", slot, 32), runs, len(runs), most, 0, tokens)
        return int(tokens[0]) if self._answer(rc) else None

    def attach(self, slot: SupportsIndex, runs: Run | Iterable[Run], most: SupportsIndex | None = None) -> int | None:
        """Start a newly allocated slot, which no kernel accesses, with the rows of runs.

        Full pages are mapped, not copied. Kernels that write their rows may still be in flight, provided that kernels
        that read the rows in this slot run after them. Rows in a partial last page are copied, so they must have been
        written.

        Parameters
        ----------
        slot : int
        runs : Run or sequence of Run
            They follow each other from row 0. Different requests may have written them.
        most : int, optional
            Begin with at most so many tokens.

        Returns
        -------
        int or None
            The tokens that the slot then has: those of the runs before the first that is gone. It is 0 if none is
            left, or if windows have given up rows that the next token reads. None: there is no memory to copy a page.
        """
        return self._attach(slot, self._numbers_of(runs), _MOST if most is None else uint("most", most, 32))

    def drop(self, runs: Run | Iterable[Run]) -> None:
        """Hold runs no longer. Pages without another holder are released.

        Parameters
        ----------
        runs : Run or sequence of Run
            Runs that are gone are skipped.
        """
        numbers = self._numbers_of(runs)
        _check(lib.vmem_kv_drop(self._use(), numbers, len(numbers), ffi.NULL))

    # ---- swapping -------------------------------------------------------------------------------------------

    def swap_out(self, slot: SupportsIndex) -> None:
        """Copy the slot's rows to CPU memory and release its pages; the slot stays taken.

        Waits for the kernels of the current stream; *Quiet* for those of other streams. The CPU memory is pinned for a
        cache on a GPU.

        Parameters
        ----------
        slot : int

        Raises
        ------
        OutOfMemory
            There is no CPU memory. Nothing has changed.
        VmemError
            EBUSY: another thread makes a step of the slot meanwhile, or the current stream is being captured.
        """
        slot = self._to_swap(slot)
        step = self.last_step
        tokens = self.slot(slot).tokens  # after the step's number: a step in between is noticed
        rows = self._rows(slot)
        try:  # pinned for a GPU: PyTorch keeps it for the next request that is swapped out
            host = [torch.empty_like(view, device="cpu", pin_memory=view.is_cuda) for view in rows]
        except RuntimeError as error:
            text = f"no CPU memory for the {sum(view.nbytes for view in rows)} bytes of slot {slot}'s rows: {error}"
            raise OutOfMemory(errno.ENOMEM, text) from error
        _copy(host, rows)
        before = self._swapped.get(slot)
        self._swapped[slot] = host  # before the call: after it nobody else has the rows, whatever Ctrl-C interrupts
        try:
            _check(lib.vmem_kv_swap_out(self._use(), slot, tokens, step))
        except VmemError:
            if before is None:
                self._swapped.pop(slot, None)
            else:
                self._swapped[slot] = before
            raise

    def _to_swap(self, slot: SupportsIndex) -> int:
        self._check_places()
        slot = uint("slot", slot, 32)
        if self.tensors and self.tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise VmemError(errno.EBUSY, f"slot {slot}: a captured step has not run: swap before or after the capture")
        return slot

    def _rows(self, slot: int) -> list[torch.Tensor]:
        """For each tensor, a view of the rows of a slot that its request can read."""
        first, end, views = ffi.new("uint32_t *"), ffi.new("uint32_t *"), []
        for i, tensor in enumerate(self.tensors):
            _check(lib.vmem_kv_get_rows(self._use(), slot, i, first, end))
            views.append(tensor[slot, first[0] : end[0]])
        return views

    def swap_in(self, slot: SupportsIndex) -> bool:
        """Copy a swapped slot back to the same addresses.

        Parameters
        ----------
        slot : int

        Returns
        -------
        bool
            False: memory is short, as with `step`.

        Raises
        ------
        ValueError
            The slot is not swapped out.
        VmemError
            EBUSY: the current stream is being captured.
        """
        kv, slot = self._ready(), self._to_swap(slot)
        host = self._swapped.get(slot)
        if host is None:
            raise ValueError(f"slot {slot} is not swapped out")
        try:
            if not self._answer(lib.vmem_kv_swap_in(kv, slot)):
                return False
            _copy(self._rows(slot), host)
        except VmemError:  # refused
            raise
        except BaseException:  # also Ctrl-C: the slot has pages, and not all rows
            if self.slot(slot).state == "active":
                lib.pv_wait_for_kernels(self.context._use())  # copies may be in flight
                lib.vmem_kv_swap_out(self._use(), slot, self.slot(slot).tokens, self.last_step)
            raise
        self._swapped.pop(slot, None)  # close() in another thread may have taken it
        return True

    # ---- memory ----------------------------------------------------------------------------------------------

    def set_budget(self, bytes: SupportsIndex) -> None:
        """Grow or shrink the budget.

        Shrinking returns device memory; active requests keep what they need.

        Parameters
        ----------
        bytes : int
            A page or more.

        Raises
        ------
        OutOfMemory
            The device has less memory than that.
        """
        _check(lib.vmem_kv_set_budget(self._ready(), uint("bytes", bytes)))

    def reclaim(self, bytes: SupportsIndex | None = None) -> int:
        """Release kept pages and return unused device memory.

        Parameters
        ----------
        bytes : int, optional
            Release at least so much, if it is kept; by default, all kept pages.

        Returns
        -------
        int
            Bytes of pages released.
        """
        freed, least = ffi.new("uint64_t *"), 2**64 - 1 if bytes is None else uint("bytes", bytes)
        lib.pv_end_put_off()
        _check(lib.vmem_kv_reclaim(self._ready(), least, 0, freed))
        return int(freed[0])

    # ---- metrics ---------------------------------------------------------------------------------------------

    def stats(self) -> KVStats:
        """Return what the cache holds at this moment, and counts of its calls.

        Returns
        -------
        KVStats
        """
        raw = structure("vmem_kv_stats")
        _check(lib.vmem_kv_get_stats(self._use(), raw))
        return KVStats(**{name: int(getattr(raw, name)) for name in STATS})

    # ---- the end ---------------------------------------------------------------------------------------------

    def _close_context(self) -> None:
        if self._own_context:
            self.context.close()

    def close(self) -> None:
        """Free the memory, now or when the last view of a tensor is gone. No other call may follow.

        Waits until all kernels of the device have ended. While a CUDA graph is captured, the memory stays until later.
        """
        with self._polling:  # another thread may close it, too
            if self._owner is None:
                return
            ended = lib.vmem_kv_close(self._use())
            if ended != -errno.EPERM:  # a forked child of the cache's process has nothing to end
                _check(ended)
            self._events.clear()
            self._drop()
        self._close_context()
        self.tensors = []
        self.__dict__.pop("keys", None)
        self.__dict__.pop("values", None)
        self._swapped.clear()
