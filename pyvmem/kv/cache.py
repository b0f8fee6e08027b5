"""The KV cache of a serving engine: request slots in virtual tensors, backed by pages as requests grow.

The calls are those of the vAttention paper (Prabhu et al., ASPLOS 2025, Table 3). The manager itself is native
(vmem_kv.h): each step makes one native call, without the GIL. `pyvmem.kv.prefix` provides prefix caching by token
hashes, and `pyvmem.parallel.cache` tensor parallelism.

SPDX-License-Identifier: MIT
"""

import array
import errno
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pyvmem._checks import elements, one_of, uint, uint32s
from pyvmem._ffi import ffi, lib
from pyvmem.core import Context
from pyvmem.errors import InvalidArgument, _check, structure
from pyvmem.kv.admission import KVAdmission
from pyvmem.kv.options import KVCacheOptions, options_of
from pyvmem.kv.sharing import KVSharing
from pyvmem.kv.types import GroupInfo, KVStats, Prefix, Shortage, SlotInfo, TensorSpec, model_specs
from pyvmem.kv.view import new_view_path
from pyvmem.tensor import tensor_at

__all__ = [
    "GroupInfo",
    "KVCache",
    "KVCacheOptions",
    "KVStats",
    "Lengths",
    "Prefix",
    "Shortage",
    "SlotInfo",
    "TensorSpec",
    "model_specs",
]

# The lengths that a step takes: one token count per slot.
Lengths = Sequence[int] | npt.NDArray[Any] | torch.Tensor
Cache = TypeVar("Cache", bound="KVCache")

_INT32 = np.dtype(np.int32)
_ALLOC_BYTES = ffi.sizeof("struct vmem_kv_alloc_options")


def _config(specs: list[TensorSpec], flags: int, **numbers: SupportsIndex) -> tuple[Any, Any]:
    """Build a struct vmem_kv_config and the array it points to. Both must stay alive until the call returns."""
    kinds: dict[torch.dtype, int] = {}
    raw = ffi.new("struct vmem_kv_tensor[]", len(specs))
    for spec, tensor in zip(specs, raw):
        tensor.row_bytes = uint("row_bytes", spec.row_bytes)
        tensor.max_tokens = uint("max_tokens", spec.max_tokens, 32)
        tensor.window = uint("window", spec.window, 32)
        tensor.kind = kinds.setdefault(spec.dtype, len(kinds))
    config = ffi.new("struct vmem_kv_config *")
    config.size = ffi.sizeof("struct vmem_kv_config")
    config.flags = flags
    config.tensors, config.n_tensors = raw, len(specs)
    fields = dict(ffi.typeof("struct vmem_kv_config").fields)
    for name, value in numbers.items():
        setattr(config, name, uint(name, value, 8 * ffi.sizeof(fields[name].type)))
    return config, raw


def _not_lengths(lengths: Iterable[Any]) -> Exception:
    """Return an exception that names the first invalid length."""
    for i, value in enumerate(lengths):
        if not hasattr(value, "__index__"):
            return TypeError(f"lengths must be integers; lengths[{i}] is {value!r}")
        if not -(2**31) <= value < 2**31:
            return InvalidArgument(errno.EINVAL, f"lengths[{i}] {value} must lie between 0 and max_tokens")
    return TypeError("lengths must be integers")


class KVCache(KVAdmission, KVSharing):
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
    keywords
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
    missing_pages : int
        How many pages the last call that returned -1 was short of; `shortage` gives the reason.
    options : KVCacheOptions
        The options given, with the keywords applied.
    sharing : bool
        Whether requests may share pages.

    Raises
    ------
    OutOfMemory
        The device has less memory than the budget.
    InvalidArgument
        An argument exceeds its limits. Every call here that takes a slot or tokens raises it.

    Notes
    -----
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
        super().__init__()
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
        self.same_slots = options.same_slots
        kv = ffi.new("vmem_kv **")
        try:
            sizes = self.context.page_sizes
            asked = options.page_size
            self.page_size = min(sizes) if asked is None else one_of("page_size", asked, sizes)
            self.sharing = self.context.backend != "cuda" if options.sharing is None else options.sharing
            pool, most = options.pool, uint("budget", budget)
            if options.pool_min > most:
                raise InvalidArgument(errno.EINVAL, f"pool_min {options.pool_min} is over budget, {most}")
            config, _tensors = _config(
                self.specs, options._flags(self.sharing), slots=slots, max_tokens=max_tokens, page_size=self.page_size,
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
        if options.watermark or options.watermark_percent:
            self.set_watermark(options.watermark, percent=options.watermark_percent)
        self.tensors = [self._tensor(i) for i in range(len(self.specs))]
        self._pinned = self.tensors[0].is_cuda
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
        slots, max_tokens, budget, options, keywords
            As in `KVCache`.
        dtype, layout, window
            As in `model_specs`.

        Returns
        -------
        KVCache
            With `keys` and `values`, lists of one tensor per layer: views of `tensors`, ``[slots, max_tokens, kv_heads,
            head_dim]`` in every layout.
        """
        specs = model_specs(layers, kv_heads, head_dim, dtype, layout, window)
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
        """Return (address, bytes, slot stride in bytes, rows per slot) of tensor number `tensor`.

        A slot may have more rows than `max_tokens`: slot s starts at row ``s * rows`` of the contiguous
        ``[slots * rows, *shape]``, which is what kernels with cumulative offsets need (`flat`).
        """
        raw = structure("vmem_kv_layout")
        _check(lib.vmem_kv_get_layout(self._use(), uint("tensor", tensor, 32), raw))
        return raw.addr, raw.length, raw.slot_stride, raw.slot_rows

    def _tensor(self, i: int, flat: bool = False) -> torch.Tensor:
        addr, _, stride, rows = self.layout(i)
        spec = self.specs[i]
        gpu = "gpu" in self.context.capabilities
        device = torch.device("cuda", self.context.device) if gpu else torch.device("cpu")
        row = [math.prod(spec.shape[k:]) for k in range(1, len(spec.shape) + 1)]
        shape: tuple[int, ...]
        strides: tuple[int, ...]
        if flat:
            shape, strides = (self.slots * rows, *spec.shape), (math.prod(spec.shape), *row)
        else:
            tokens = spec.max_tokens or self.max_tokens
            shape = (self.slots, tokens, *spec.shape)
            strides = (stride // spec.dtype.itemsize, math.prod(spec.shape), *row)
        return tensor_at(self._owner, addr, shape, spec.dtype, device, strides)

    def flat(self, tensor: int) -> torch.Tensor:
        """Return tensor number `tensor` as contiguous rows, ``[slots * rows, *shape]``; see `layout`."""
        self._use()
        return self._tensor(tensor, flat=True)

    # ---- requests --------------------------------------------------------------------------------------------

    def alloc_reqid(
        self, tokens: SupportsIndex = 0, slot: SupportsIndex | None = None, *, prefix_tokens: SupportsIndex = 0
    ) -> int:
        """Allocate a slot for a new request; returns -1 if all slots are taken.

        Chooses the free slot whose kept pages fit best (deferred reclamation, section 5.4.2 of the paper).

        Parameters
        ----------
        tokens : int
            About how many tokens the first step will have; 0 if unknown.
        slot : int, optional
            Take exactly this slot.
        prefix_tokens : int
            Rows that `attach_prefix` will provide: kept pages in their place are useless.

        Raises
        ------
        VmemError
            EBUSY: the requested slot is taken.
        """
        options = {"size": _ALLOC_BYTES, "tokens": uint("tokens", tokens, 32)}
        options["prefix_tokens"] = uint("prefix_tokens", prefix_tokens, 32)
        if slot is not None:
            options["flags"], options["slot"] = lib.VMEM_KV_ALLOC_SLOT, uint("slot", slot, 32)
        chosen = ffi.new("uint32_t *")
        rc = lib.vmem_kv_alloc_with(self._ready(), ffi.new("struct vmem_kv_alloc_options *", options), chosen)
        if rc == -errno.ENOSPC:
            self.missing_pages = 0
            return -1
        _check(rc)
        return int(chosen[0])

    def expect(self, tokens: npt.ArrayLike, prefix_tokens: npt.ArrayLike | None = None) -> None:
        """Announce the requests that will be allocated next, by the tokens of their first step.

        It replaces what was announced before. While memory is plentiful, the background thread backs a free slot for
        each of the first 64.

        Parameters
        ----------
        tokens : sequence of int
        prefix_tokens : sequence of int, optional
            For each request, the rows that `attach_prefix` or blocks will provide. Only the rows after them are backed.
        """
        sizes = uint32s("tokens", tokens)
        prefixes = uint32s("prefix_tokens", [] if prefix_tokens is None else prefix_tokens)
        if prefix_tokens is not None and prefixes.size != sizes.size:
            raise InvalidArgument(errno.EINVAL, f"prefix_tokens has {prefixes.size} elements, tokens {sizes.size}")
        behind = ffi.NULL if prefix_tokens is None else ffi.from_buffer("uint32_t[]", prefixes)
        _check(lib.vmem_kv_expect_behind(self._use(), ffi.from_buffer("uint32_t[]", sizes), behind, sizes.size))

    def free_reqid(self, slot: SupportsIndex, after: Any = None) -> None:
        """End a request. Its pages are kept for the next one while memory allows.

        Quiet, unless `after` is given: a step's number (`last_step`), or an event with a ``query()``, such as a
        ``torch.cuda.Event`` recorded after the last step's kernels. The slot is then freed once the kernels up to that
        point have ended. No call may name it until it is allocated again.
        """
        kv, slot = self._use(), uint("slot", slot, 32)
        host = self._swapped.pop(slot, None)  # before the call: once the slot is free, another thread may allocate it
        try:
            number = 0 if after is None else self._fence(after)
            _check(lib.vmem_kv_free(kv, slot) if after is None else lib.vmem_kv_free_after(kv, slot, number))
        except Exception:
            if host is not None:
                self._swapped[slot] = host
            raise
        self._watch(after, number)

    def step(self, lengths: Lengths) -> int:
        """Back the rows of the coming iteration.

        Parameters
        ----------
        lengths : sequence, numpy array or torch CPU tensor of `slots` ints
            Tokens of each slot once the iteration has run; 0 for slots that take no part. With `zero_ends`, 0 ends an
            active request, as `free_reqid` does after the last step that it took part in.

        Returns
        -------
        int
            0, or -1 if memory is short. Nothing has changed then, and the step can succeed only once `missing_pages`
            more pages are free: free or swap out a request.
        """
        return self._answer(lib.pv_kv_step(self._ready(), self._raw(lengths), self.slots))

    def grow(self, slot: SupportsIndex, tokens: SupportsIndex) -> int:
        """Stage a request's growth to `tokens` tokens for the next `commit`; 0 removes it.

        Returns 0 if there is memory for a step with all staged growth. Otherwise returns -1 and does not stage this
        growth.
        """
        return self._answer(lib.pv_kv_grow(self._ready(), uint("slot", slot, 32), uint("tokens", tokens, 32)))

    def commit(self) -> int:
        """Perform a `step` with the growth that `grow` staged; other slots take no part.

        Raises ValueError if no growth is staged.
        """
        return self._answer(lib.pv_kv_commit(self._ready()))

    def check(self, lengths: Lengths) -> int:
        """Return what `step` would return now, and change nothing.

        Requests that are ending count as running: after -1, the step may still find that they have ended. After 0, a
        `lazy` cache or a member of a pool may find that others, such as another process, have taken the memory.
        """
        return self._answer(lib.pv_kv_check(self._ready(), self._raw(lengths), self.slots))

    def _raw(self, lengths: Lengths) -> Any:
        if type(lengths) is list:
            if len(lengths) != self.slots:
                raise ValueError(f"lengths has {len(lengths)} elements, not {self.slots}")
            try:
                return ffi.from_buffer("int32_t[]", array.array("i", lengths))
            except (OverflowError, TypeError) as error:
                raise _not_lengths(lengths) from error
        if not isinstance(lengths, np.ndarray):
            lengths = lengths.numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
        if lengths.shape != (self.slots,):
            raise ValueError(f"lengths has shape {lengths.shape}, not ({self.slots},)")
        if lengths.dtype == _INT32 and lengths.flags.c_contiguous:
            return ffi.from_buffer("int32_t[]", lengths)
        if lengths.dtype.kind not in "iu":
            raise _not_lengths(lengths.tolist())
        narrow = lengths.astype(np.int32)
        if (narrow != lengths).any():
            raise _not_lengths(lengths.tolist())
        return ffi.from_buffer("int32_t[]", narrow)

    def truncate(self, slot: SupportsIndex, tokens: SupportsIndex, after: Any = None) -> None:
        """Discard rows from `tokens` onward (rejected speculation).

        Quiet, unless `after` is given, as in `free_reqid`: kernels up to that point may still touch the rows. Raises
        `OutOfMemory` if there is no memory to copy a shared page (`check_truncate`), and `VmemError` (EBUSY) if shared
        rows would have to be copied before those kernels end. In both cases, nothing changes.
        """
        kv, slot, tokens = self._ready(), uint("slot", slot, 32), uint("tokens", tokens, 32)
        if after is None:
            _check(lib.vmem_kv_truncate(kv, slot, tokens))
        else:
            number = self._fence(after)
            _check(lib.vmem_kv_truncate_after(kv, slot, tokens, number))
            self._watch(after, number)

    def check_truncate(self, slot: SupportsIndex, tokens: SupportsIndex) -> int:
        """Return 0 if `truncate` would succeed, or -1 if there is no memory to copy a shared page."""
        return self._answer(lib.pv_kv_truncate_check(self._ready(), uint("slot", slot, 32), uint("tokens", tokens, 32)))

    def wait(self) -> None:
        """Wait until the background thread has nothing left to do."""
        _check(lib.vmem_kv_wait(self._use()))

    def slot(self, slot: SupportsIndex) -> SlotInfo:
        """Return the `SlotInfo` of a slot."""
        raw = structure("vmem_kv_slot_info")
        _check(lib.vmem_kv_get_slot(self._use(), uint("slot", slot, 32), raw))
        state = ("free", "active", "swapped", "ending", "swapping")[raw.state]
        pages = (raw.pages, raw.shared_pages, raw.needed_pages)
        return SlotInfo(state, raw.tokens, raw.shared_tokens, *pages, raw.absent_steps)

    def absent_slots(self, steps: SupportsIndex = 1) -> list[int]:
        """Return the active slots that took part in none of the last `steps` steps, nor were allocated or swapped in
        since.

        Their requests are waiting, or have ended without being freed. ``stats().absent_slots`` counts the slots that
        were absent from the last step.
        """
        raw, count = ffi.new("uint32_t[]", self.slots), ffi.new("uint32_t *")
        _check(lib.vmem_kv_absent_slots(self._use(), uint("steps", steps, 32), raw, self.slots, count))
        return list(raw[0 : count[0]])

    def tokens(self, slots: Iterable[int]) -> list[int]:
        """Return, for each of the slots, the rows that kernels may read: 0 for slots that are free or swapped out."""
        raw, kv, get = structure("vmem_kv_slot_info"), self._use(), lib.vmem_kv_get_slot
        rows = []
        for slot in elements("slots", slots):
            _check(get(kv, uint("slots", slot, 32), raw))
            rows.append(raw.tokens if raw.state == 1 else 0)
        return rows

    # ---- memory ----------------------------------------------------------------------------------------------

    def set_budget(self, bytes: SupportsIndex) -> None:
        """Grow or shrink the budget. Shrinking returns device memory; active requests keep what they need.

        Raises `OutOfMemory` if the device has less memory than that.
        """
        _check(lib.vmem_kv_set_budget(self._ready(), uint("bytes", bytes)))

    def reclaim(self, bytes: SupportsIndex | None = None) -> int:
        """Release kept pages and return unused device memory; returns the bytes of pages released.

        Releases at least `bytes` if that much is kept; by default, releases all kept pages.
        """
        freed = ffi.new("uint64_t *")
        _check(lib.vmem_kv_reclaim(self._ready(), 2**64 - 1 if bytes is None else uint("bytes", bytes), freed))
        return int(freed[0])

    # ---- the end ---------------------------------------------------------------------------------------------

    def _close_context(self) -> None:
        if self._own_context:
            self.context.close()

    def close(self, after: Any = None) -> None:
        """Free the memory, now or when the last view of a tensor is gone. No other call may follow.

        Quiet, unless `after` is given, as in `free_reqid`. The call then returns at once, and the memory is freed when
        the kernels have ended. If `after` is an event, a thread queries it every millisecond, and the interpreter waits
        for that thread before it exits. If `after` is a step's number, `retire` declares the end. Keep the cache until
        then: garbage collection frees its memory.
        """
        with self._polling:  # another thread may close it, too
            if self._owner is None:
                return
            self._close_after(after)
        if self._stop_copying is not None:
            self._stop_copying.detach()
        self.tensors = []
        self.__dict__.pop("keys", None)
        self.__dict__.pop("values", None)
        self._swapped.clear()

    def _end(self) -> None:
        super()._end()
        self._close_context()
