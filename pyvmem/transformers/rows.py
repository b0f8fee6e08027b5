"""The rows of a batch: one slot of a `KVCache` for each sequence, backed once per forward pass.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from pyvmem.attention import Batch
from pyvmem.errors import OutOfMemory
from pyvmem.kv.cache import KVCache, Run, Spare, TensorSpec
from pyvmem.kv.pool import KVPool
from pyvmem.transformers.columns import Bools, Columns, padding_after_tokens
from pyvmem.transformers.memory import cudnn_off, default_budget, finish, wait, what_helps, with_pool
from pyvmem.transformers.plan import Plan, follow

MIB = 1 << 20
AHEAD = 8  # tokens behind a prompt that are backed with it

Int32s = npt.NDArray[np.int32]


class Rows:
    """The slots, lengths and pages of one `VMemCache`, which all its layers share."""

    def __init__(
        self, windows: Iterable[int], max_tokens: int, slots: int, budget: int | None, options: dict[str, Any]
    ) -> None:
        self.windows = list(windows)  # in tokens, of each layer that keeps rows here; 0: none
        self.max_tokens = max_tokens
        self.budget = budget
        self.options = options
        self.pool: KVPool | None = options.get("pool")
        # A KVCache, a torch.device, a torch.dtype; None until a layer reports its shapes. All slots are allocated
        # permanently, used or not.
        self.kv: Any = None
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # what `_pairs` returns
        self.device: Any = None
        self.dtype: Any = None
        self.autocast = False  # whether torch.autocast chose the dtype of any rows
        self.blank: Any = None  # one element, of which each `OpaqueTensor` is a view
        self.plan: Plan | None = None
        # The last pass whose mask leaves causality and windows to lengths (`vmem_mask`): start, tokens.
        self.masked: tuple[int, int] | None = None
        self.eager = False  # whether the model has eager attention only, whose masks are never left out
        self.closed = False
        self.as_tensors = False  # whether some layer's K and V are read as one tensor, which needs sdpa's mask
        self.pending: Any = None  # a `PendingKV` whose keys have not reached the attention yet
        self.batch = 0  # sequences
        self.slots: list[int] = []  # of each sequence
        self.version = 0  # of the tensors and the batch: what layers derive from them is valid for one version
        self.tile_rows = 1
        self.capturing = False  # whether a CUDA graph of the pass is being captured
        self._least_slots = slots
        self._shapes: list[Any] = [None] * len(self.windows)  # ((heads, head_dim) of K, of V)
        self._known = [False] * len(self.windows)
        self.columns = Columns(0, max_tokens, torch.device("cpu"))  # which have rows
        self._floor: list[int] = []  # rows below this minus a window may be gone
        self._lengths: Any = None  # of every slot in the last step, int32
        self._fence: torch.cuda.Event | None = None
        self._finalizer: Any = None
        self.cudnn: Any = None  # switches cuDNN's attention on again; False: it was off before
        self._swapped = False
        self._batch: Any = None  # the last pass's `Batch`, and the pass for which it is valid
        self._batch_shape: tuple[int, ...] | None = None

    @property
    def ragged(self) -> bool:
        """True if sequences have different lengths, because padding has no rows."""
        return self.columns.ragged

    @property
    def in_order(self) -> bool:
        """True if one view of the slots holds all sequences: they have one length, and sequence i is in slot i."""
        return not self.columns.ragged and self.slots == list(range(self.batch))

    # ---- memory ----------------------------------------------------------------------------------------------

    def open(self, layer: int, key: torch.Tensor, value: torch.Tensor, tile_rows: int = 1) -> None:
        """A layer reports the shapes of its K and V, ``[batch, heads, tokens, head_dim]``."""
        shapes = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        if self.closed:
            raise ValueError("the cache is closed: create another VMemCache")
        if self.kv is None:
            if key.device.type not in ("cpu", "cuda"):
                raise ValueError(f"device {key.device} must be cpu or cuda")
            self.dtype, self.device, self.tile_rows = torch.promote_types(key.dtype, value.dtype), key.device, tile_rows
            self.autocast = torch.is_autocast_enabled(key.device.type)
            self.blank = torch.zeros((), dtype=self.dtype, device=self.device)
            # Until a layer reports other shapes, all layers are assumed to have the first one's.
            self._shapes = [shapes] * len(self.windows)
            self._use_cache(self._create(max(key.shape[0], self._least_slots)))
            self._begin_batch(key.shape[0])
        elif key.device != self.device or key.dtype is not self.dtype and not self.autocast:
            raise ValueError(
                f"layer {layer} has {key.dtype} on {key.device}, the layers before it {self.dtype} on {self.device}: "
                "the rows of one VMemCache have one dtype and one device"
            )
        self._known[layer] = True
        if self._shapes[layer] != shapes:
            like = self.windows[layer]  # sliding layers have equal shapes, and so do full ones
            self._shapes = [
                shapes if i == layer or (window == like and not known) else old
                for i, (old, window, known) in enumerate(zip(self._shapes, self.windows, self._known))
            ]
            self._rebuild(self.kv.slots)

    def widen(self, dtype: torch.dtype) -> None:
        """Make the rows' dtype wide enough for `dtype` as well."""
        before, wide = self.dtype, torch.promote_types(self.dtype, dtype)
        if wide is before:
            return
        self.swap_in()
        self.dtype = wide
        try:
            self._rebuild(self.kv.slots)
        except BaseException:
            self.dtype = before
            raise
        self.blank = torch.empty((), dtype=wide, device=self.device)

    def _create(self, slots: int, **more: Any) -> KVCache:
        specs = []
        for i, ((k, v), window) in enumerate(zip(self._shapes, self.windows)):
            # K and V side by side, row by row: half as many tensors, so half as many runs of pages to map.
            parts = {f"kv{i}": (2, *k)} if k == v else {f"k{i}": k, f"v{i}": v}
            specs += [TensorSpec(name, shape, self.dtype, window) for name, shape in parts.items()]
        spare = Spare(generous=False, eager=False)
        options = {"lazy": True, "spare": spare, "name": "transformers", **self.options, **more}
        if options.get("context") is None and options.get("backend") is None and self.device.type == "cpu":
            options["backend"] = "host"
        if options.get("context") is None:
            options["device"] = self.device.index or 0
        options.setdefault("tile_rows", self.tile_rows)
        kv = KVCache(specs, slots, self.max_tokens, self._max_budget(), **options)
        if kv.tensors[0].device != self.device:
            backend = kv.context.backend
            kv.close()
            raise ValueError(f"backend {backend} has no memory on {self.device}, the model's device")
        for slot in range(slots):
            kv.alloc(slot=slot)
        return kv

    def _max_budget(self) -> int:
        """The budget in bytes; in a pool, the largest one."""
        return self.budget or (self.pool.budget if self.pool else default_budget(self.device))

    @staticmethod
    def _pairs(kv: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, ``[slots, max_tokens, heads, head_dim]``."""
        each = iter(zip(kv.specs, kv.tensors))
        return [(t[:, :, 0], t[:, :, 1]) if spec.name.startswith("kv") else (t, next(each)[1]) for spec, t in each]

    def _use_cache(self, kv: KVCache) -> None:
        self.kv = kv
        self.pairs = self._pairs(kv)
        self._finalizer = weakref.finalize(self, kv.close)
        self._lengths = np.zeros(kv.slots, np.int32)
        self.plan = None
        self.version += 1

    def _free_cache(self) -> None:
        """Free the memory of the present cache, once no kernel reads it."""
        if self._finalizer.detach() is not None:
            finish(self.kv)

    def _begin_batch(self, batch: int) -> None:
        """Start with `batch` empty sequences."""
        if batch > self.kv.slots:
            self._free_cache()
            self._use_cache(self._create(batch))
        self.batch = batch
        self.slots = list(range(batch))
        self._floor = [0] * batch
        self.columns = Columns(batch, self.max_tokens, self.device)
        self.plan = self.pending = None
        self._lengths[:] = 0
        self.version += 1

    def _rebuild(self, slots: int) -> None:
        """Move the rows to tensors of other shapes, or with more slots."""
        lengths = self._lengths
        least = self.options.get("pool_min", 0)
        new = self._copy_cache(slots, **({"pool_min": 0} if least else {}))  # the old tensors have it until the end
        # Not `finish`: in the middle of a pass, layers that share rows still read them in the old tensors. Their views
        # keep the memory, and the last of them waits for the kernels that read it.
        self._finalizer.detach()
        self.kv.close()
        if self.pool and least:
            self.pool.set_share(new, least, self._max_budget())
        self._use_cache(new)
        self._lengths[: len(lengths)] = lengths

    def _copy_cache(self, slots: int, **more: Any) -> KVCache:
        """A `KVCache` with the current shapes and copies of the rows, in the same slots."""
        new = self._create(slots, **more)
        try:
            lengths = np.zeros(slots, np.int32)
            lengths[: len(self._lengths)] = self._lengths
            if lengths.any():
                self._back_rows(new, lengths)
            for window, old, copies in zip(self.windows, self.pairs, self._pairs(new)):
                if any(source.shape[2:] != target.shape[2:] for source, target in zip(old, copies)):
                    continue  # this layer has no rows yet
                for slot, floor in zip(self.slots, self._floor):
                    live = slice(max(0, floor - window) if window else 0, int(lengths[slot]))
                    for source, target in zip(old, copies):
                        target[slot, live] = source[slot, live]
        except BaseException:
            finish(new)
            raise
        return new

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a VMemCache cannot be pickled, because its rows are in this process's memory: save the tokens, and set "
            "the cache in generate()'s output to None first: output.cache, or past_key_values before transformers 5.24"
        )

    def copy(self) -> Rows:
        """Rows of the same sequences, with memory of their own."""
        other = Rows(self.windows, self.max_tokens, self._least_slots, self.budget, self.options)
        if self.kv is None:
            return other
        if self._swapped:
            self.swap_in()
        for name in ("dtype", "autocast", "blank", "device", "tile_rows", "batch", "as_tensors"):
            setattr(other, name, getattr(self, name))
        other.slots, other._floor = self.slots[:], self._floor[:]
        other._shapes, other._known = self._shapes[:], self._known[:]
        other.columns = self.columns.select(range(self.batch))
        other._use_cache(self._copy_cache(self.kv.slots))
        other._lengths[:] = self._lengths
        return other

    def close(self) -> None:
        self.closed = True
        if self.kv is not None:
            self._free_cache()
            if self.cudnn:
                self.cudnn()
            self.kv = self.plan = self.cudnn = None
            self.pairs = []
            self.batch = 0
            self._known = [False] * len(self.windows)

    def for_stock_attention(self) -> None:
        """Prepare the rows for torch's own attention."""
        if self.cudnn is None:
            self.cudnn = self.device.type == "cuda" and cudnn_off(self)

    # ---- a forward pass --------------------------------------------------------------------------------------

    def begin(self, start: int, tokens: int, batch: int, mask: torch.Tensor | None = None) -> Plan:
        """The `Plan` of the pass that adds `tokens` columns after the first `start`. The first layer backs its rows.

        mask: None, or bool ``[batch, start + tokens]``, False for padding. With a mask, padding gets no rows.
        """
        plan = self.plan
        if plan is not None and plan.start == start and plan.tokens == tokens:
            return plan
        if self.kv is None:
            raise ValueError("the cache is closed")
        if self._swapped:
            self.swap_in()
        if batch != self.batch:
            if start:
                repeats, odd = divmod(batch, self.batch)
                first = "reset() the cache" if odd else f"reset() the cache, or batch_repeat_interleave({repeats}) it,"
                raise ValueError(f"the batch has {batch} sequences, the cache {self.batch}: {first} first")
            self.reset(batch)
        elif plan is not None and start != plan.start + plan.tokens:
            raise RuntimeError(
                f"the last pass was interrupted, or failed in the model: some layers have {plan.start + plan.tokens} "
                f"tokens, others {start}: reset() the cache, or crop() it to the tokens that all layers have"
            )
        if start + tokens > self.max_tokens:
            raise ValueError(
                f"{start + tokens} tokens exceed the cache's max_tokens={self.max_tokens}: create it with a larger one"
            )
        plan = self._plan(start, tokens, mask)
        before = self.columns.num_rows(start)
        want = self._lengths.copy()
        for slot, length in zip(self.slots, plan.lengths):
            want[slot] = max(length, want[slot])
        if (want != self._lengths).any():
            self._order_steps()
            # A run of pages is mapped as fast as one page: a prompt takes what the first decode steps need with it.
            ahead = AHEAD if tokens > 1 and not any(self.windows) else 0
            if not ahead or not self.kv.step(np.minimum(want + ahead * (want > 0), self.max_tokens)):
                self._back_rows(self.kv, want)
            self._lengths = want
        if any(self.windows):
            least = min(w for w in self.windows if w)
            self._floor = [max(f, b) if b > least else f for f, b in zip(self._floor, before)]
        self.columns.add(start, start + tokens, plan.kept)
        self.plan = plan
        return plan

    def _plan(self, start: int, tokens: int, mask: torch.Tensor | None) -> Plan:
        kept, masked = (None, False) if mask is None else self._padding(start, tokens, mask.bool())
        before = self.columns.num_rows(start)
        if kept is not None and any(self.windows) and padding_after_tokens(kept, before).any():
            # A window counts columns, and rows would be fewer: this padding is stored, like any other token.
            kept, masked = None, True
        added = [tokens] * self.batch if kept is None else kept.sum(1).tolist()
        lengths = [b + a for b, a in zip(before, added)]
        return Plan(start, tokens, lengths, kept=kept, uniform=kept is None and self.in_order, masked=masked)

    def _padding(self, start: int, tokens: int, mask: torch.Tensor) -> tuple[Bools | None, bool]:
        """`Plan.kept` and `Plan.masked` of a pass. Rows that the mask hides are discarded if they are the last ones."""
        if mask.shape[0] != self.batch or mask.shape[1] < start + tokens:
            raise ValueError(f"attention_mask of shape {tuple(mask.shape)} must be [{self.batch}, {start + tokens}]")
        kept, masked = self.columns.compare(start, mask[:, : start + tokens])
        if masked and not self.ragged:
            return None, True  # padding was stored like any other token, and still is
        return None if kept.all() else kept, masked and not self._discard(mask[:, :start].cpu().numpy())

    def _discard(self, shown: Bools) -> bool:
        """Discard the rows that a mask hides, bool ``[batch, start]``; False if they are not the last of each sequence.

        Such are the tokens that generate() adds to a sequence which has ended, once a chat goes on.
        """
        cuts = None if any(self.windows) else self.columns.cut_by(shown)
        if cuts is None:
            return False
        wait(self.kv)
        for row, seen in cuts:
            slot, length = self.slots[row], int(seen.sum())
            if not self.kv.truncate(slot, length):
                return False
            self._lengths[slot] = length
            self.columns.cut(row, seen)
        return True

    def locate(self, plan: Plan) -> None:
        """Find the rows that a pass writes if its sequences differ. Done once per pass."""
        if plan.targets is not None:
            return
        before = np.array(self.columns.num_rows(plan.start))[:, None]
        kept = np.ones((self.batch, plan.tokens), bool) if plan.kept is None else plan.kept
        rank = np.cumsum(kept, 1) - 1
        slots = np.broadcast_to(np.array(self.slots)[:, None], kept.shape)
        plan.targets = self.columns.upload(slots[kept]), self.columns.upload((before + rank)[kept])
        if plan.kept is not None:
            plan.sources = self.columns.upload(np.flatnonzero(kept))
            ends = before + rank + 1
            late = padding_after_tokens(kept, before[:, 0])
            rows = np.flatnonzero(late.any(1))
            plan.padding = [(int(row), np.flatnonzero(late[row]), ends[row][late[row]]) for row in rows]

    def narrowed(self, plan: Plan, queries: int) -> Plan:
        """The `Plan` of the last `queries` columns of a pass, whose rows are stored.

        Gemma 4 trims a prompt to them before the layers that read other layers' rows.
        """
        if plan.narrowed is None or plan.narrowed.tokens != queries:
            kept = None if plan.kept is None else plan.kept[:, plan.tokens - queries :]
            if kept is not None and kept.all():
                kept = None
            plan.narrowed = Plan(plan.start + plan.tokens - queries, queries, plan.lengths, kept, plan.uniform)
            if kept is not None:
                self.locate(plan.narrowed)
        return plan.narrowed

    def batch_of(self, plan: Plan) -> Batch | None:
        """The `pyvmem.attention.Batch` of a pass, created once; None if the pass is only padding."""
        if plan.batch is None or plan.batch.cache is not self.kv:  # a later layer's shapes may have moved the rows
            queries = [plan.tokens] * self.batch if plan.kept is None else plan.kept.sum(1).tolist()
            chosen = [(s, n, q) for s, n, q in zip(self.slots, plan.lengths, queries) if q]
            if not chosen:
                return None
            slots, lengths, queries = map(list, zip(*chosen))
            shape = (self.version, len(chosen), max(queries), sum(queries))
            if shape == self._batch_shape:
                follow(self._batch, slots, lengths, queries)
            else:
                self._batch = Batch(self.kv, slots, lengths, queries, check=False)
                self._batch_shape = shape
            plan.batch = self._batch
        return plan.batch

    def _order_steps(self) -> None:
        """Wait for the pass before the last: a step may overlap only with the last pass."""
        if self.device.type != "cuda":
            return
        fence = torch.cuda.Event()
        fence.record(torch.cuda.current_stream(self.device))
        if self._fence is not None:
            self._fence.synchronize()
        self._fence = fence

    def _back_rows(self, kv: KVCache, lengths: Int32s) -> None:
        if kv.step(lengths):
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # memory that torch caches can become pages
        if with_pool(kv, partial(kv.step, lengths)):
            return
        live, stats = int((lengths > 0).sum()), kv.stats()
        pages = kv.shortage.missing_pages, stats.held_pages, stats.budget_pages
        missing, held, budget = (n * kv.page_size / MIB for n in pages)
        raise OutOfMemory(
            errno.ENOMEM,
            f"{live} sequences of up to {int(lengths.max())} tokens: {missing:.1f} MiB of pages are missing "
            f"({held:.1f} MiB held, budget {budget:.1f} MiB): lower the batch, the beams or max_new_tokens, or "
            f"{what_helps(kv)}; the cache is unchanged",
        )

    # ---- sequences -------------------------------------------------------------------------------------------

    def crop(self, columns: int) -> None:
        """Discard every column from `columns` on."""
        if self.kv is None:
            return
        if self._swapped:
            self.swap_in()
        lengths = self.columns.num_rows(columns)
        for row, (length, floor) in enumerate(zip(lengths, self._floor)):
            if length < floor:
                raise RuntimeError(
                    f"crop: sequence {row} cannot go back to {length} tokens, because a sliding window gave up rows "
                    f"that they read; {floor} tokens are the fewest"
                )
        self.plan = None
        if all(self._lengths[slot] <= length for slot, length in zip(self.slots, lengths)):
            return
        wait(self.kv)
        for slot, length in zip(self.slots, lengths):
            if length < self._lengths[slot]:
                if not with_pool(self.kv, partial(self.kv.truncate, slot, length)):
                    raise OutOfMemory(
                        errno.ENOMEM,
                        f"crop: {self.kv.shortage.missing_pages} pages are missing to copy what sequences share: lower "
                        f"the batch, or {what_helps(self.kv)}; crop again",
                    )
                self._lengths[slot] = length

    def reset(self, batch: int | None = None) -> None:
        """Discard every sequence. The cache keeps its pages until they are needed elsewhere."""
        if self.kv is None:
            return
        wait(self.kv)
        for slot in np.flatnonzero(self._lengths).tolist():
            self._empty_slot(slot)
        self._swapped = False
        self._begin_batch(self.batch if batch is None else batch)

    def _empty_slot(self, slot: int) -> None:
        self.kv.free(slot)
        self.kv.alloc(slot=slot)
        self._lengths[slot] = 0

    def select(self, sources: list[int], in_order: bool = True) -> None:
        """Replace the batch by the sequences `sources` of it. Repeated sequences share pages, and nothing moves.

        in_order: sequence i must be in slot i, as tensors with a batch dimension require. Otherwise each sequence
        that continues keeps its slot.

        Raises
        ------
        OutOfMemory
            No memory for the copies of partial last pages. The sequences are lost, and the cache is empty.
        """
        if any(not 0 <= s < self.batch for s in sources):
            raise IndexError(f"indices {sources} must lie between 0 and the batch, {self.batch}")
        if self._swapped:
            self.swap_in()
        if len(sources) > self.kv.slots:
            self._rebuild(len(sources))
        old = self.slots
        lengths = [int(self._lengths[slot]) for slot in old]
        new = list(range(len(sources))) if in_order else self._keep_slots(sources)
        moves = [(s, slot) for s, slot in zip(sources, new) if old[s] != slot]
        self.plan = None
        if moves or len(sources) != self.batch:
            wait(self.kv)
            try:
                self._share(moves, old, lengths, new)
            except BaseException:
                self.reset()
                raise
        self.batch, self.slots = len(sources), new
        self._floor = [self._floor[s] for s in sources]
        self.columns = self.columns.select(sources)
        self.version += 1

    def _keep_slots(self, sources: list[int]) -> list[int]:
        taken: set[int] = set()
        new: list[int | None] = [None] * len(sources)
        for i, s in enumerate(sources):
            if self.slots[s] not in taken:
                new[i] = self.slots[s]
                taken.add(self.slots[s])
        free = iter([slot for slot in range(self.kv.slots) if slot not in taken])
        return [next(free) if slot is None else slot for slot in new]

    def _share(self, moves: list[tuple[int, int]], old: list[int], lengths: list[int], new: list[int]) -> None:
        runs = {}
        try:
            for s in dict.fromkeys(s for s, _ in moves):
                if lengths[s]:
                    runs[s] = self.kv.share(old[s], lengths[s])
            for slot in set(old) - set(new):
                if self._lengths[slot]:
                    self._empty_slot(slot)
            for s, slot in moves:
                if self._lengths[slot] or slot in old:
                    self._empty_slot(slot)
                if not lengths[s]:
                    continue
                if not with_pool(self.kv, partial(self._attach_run, slot, runs[s])):
                    raise OutOfMemory(
                        errno.ENOMEM,
                        f"{self.kv.shortage.missing_pages} pages are missing for {len(new)} sequences of up to "
                        f"{max(lengths)} tokens: lower the batch, the beams or max_new_tokens, or "
                        f"{what_helps(self.kv)}; the cache is empty now",
                    )
                self._lengths[slot] = lengths[s]
        finally:
            self.kv.drop(runs.values())

    def _attach_run(self, slot: int, run: Run) -> bool:
        return self.kv.attach(slot, run) is not None

    # ---- swapping --------------------------------------------------------------------------------------------

    def swap_out(self) -> None:
        """Move the rows to CPU memory, and free their pages."""
        if self.kv is None or self._swapped:
            return
        wait(self.kv)
        self._swapped = True  # before the first: if CPU memory runs out, `swap_in` moves back those that were moved
        for slot in np.flatnonzero(self._lengths).tolist():
            self.kv.swap_out(slot)

    def swap_in(self) -> None:
        """Move the rows back from CPU memory."""
        if not self._swapped:
            return
        for slot in np.flatnonzero(self._lengths).tolist():
            if self.kv.slot(slot).state != "swapped":
                continue
            if not with_pool(self.kv, partial(self.kv.swap_in, slot)):
                raise OutOfMemory(
                    errno.ENOMEM,
                    f"{self.kv.shortage.missing_pages} pages are missing to move {self.batch} sequences back from CPU "
                    f"memory: free other memory, lower the batch, or {what_helps(self.kv)}",
                )
        self._swapped = False
