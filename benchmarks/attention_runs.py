"""The attention calls to time: over virtual tensors, over cudaMalloc's memory, and paged ones of the same libraries.

A `Run` is one call at one point (requests, tokens, heads). It uses several sets of K and V in turns, so that none is in
the GPU's cache when it is measured.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.vmm import backdrop_flag, scattered
from pyvmem import attention
from pyvmem.attention import fa3
from pyvmem.tensor import tensor_at

if TYPE_CHECKING:
    from pyvmem.core import Context


TILE_ROWS = math.lcm(64, 80, 96, 112, 128, 144, 160, 192, 224, 384)  # a multiple of every kernel's tile
WIDE_TILE_ROWS = 176 * TILE_ROWS  # allows FlashAttention-3 to decode with its tiles of 176 rows
SLOW = 10e-3  # seconds; for longer calls a CUDA graph saves nothing
L2_BYTES = 512 << 20  # the least total size of a point's sets: eight times the L2 of an H200


@dataclass(frozen=True)
class Point:
    """The shape of a timed call: `batch` requests of `tokens` rows each; `head_dim` 128, bfloat16."""

    phase: str
    batch: int
    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def bytes(self) -> int:
        """The bytes of K and V together."""
        return 4 * self.batch * self.tokens * self.kv_heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.phase} B={self.batch} L={self.tokens} heads {self.query_heads}/{self.kv_heads}"


class Pool:
    """K and V of random rows, `elements` bfloat16 each, in one kind of memory. Points take their sets from it."""

    def __init__(
        self, name: str, elements: int, device: Any, context: Context | None = None, page_size: int | None = None
    ) -> None:
        self.name, self.elements = name, elements
        self._held: list[Any] = []
        self.k, self.v = (self._tensor(elements, device, context, page_size) for _ in range(2))
        for x in (self.k, self.v):
            for part in x.split(1 << 26):
                part.copy_(torch.randn(part.numel(), dtype=torch.bfloat16, device=device))

    def _tensor(self, elements: int, device: Any, context: Context | None, page_size: int | None) -> torch.Tensor:
        if context is None or page_size is None:
            return torch.empty(elements, dtype=torch.bfloat16, device=device)
        n = -(-elements * 2 // page_size)
        range_ = context.reserve(n * page_size, backdrop=bool(backdrop_flag(context)))
        pages = context.create(page_size, n)
        range_.map(pages, scattered(n) * page_size)  # neighbours are far apart in physical memory
        self._held += [range_, pages]
        return tensor_at(range_._owner, range_.addr, (elements,), torch.bfloat16, device)

    def sets(self, point: Point) -> int:
        """Number of sets of K and V of the point: as many as fit and are needed."""
        size = point.bytes // 4
        return max(1, min(self.elements // size, -(-L2_BYTES // point.bytes), 16))

    def views(self, point: Point, i: int) -> Any:
        """K and V of set i, each ``[batch, tokens, kv_heads, head_dim]``."""
        size = point.bytes // 4
        shape = point.batch, point.tokens, point.kv_heads, point.head_dim
        return [x[i * size : (i + 1) * size].view(shape) for x in (self.k, self.v)]

    def close(self) -> None:
        """Free the memory."""
        self.k = self.v = torch.empty(0)
        for thing in self._held:
            thing.close()


class _Cache:
    """The part of a cache that `pyvmem.attention` reads. The sets take the place of layers."""

    def __init__(self, point: Point, pool: Pool, tile_rows: int = TILE_ROWS) -> None:
        both = [pool.views(point, i) for i in range(pool.sets(point))]
        self.keys, self.values = ([pair[n] for pair in both] for n in (0, 1))
        self.slots, self.max_tokens, self.tile_rows = point.batch, point.tokens, tile_rows

    def tokens(self, slots: Any) -> Any:
        return [self.max_tokens] * len(slots)


class Run:
    """One call, repeatable: ``run(i)`` uses set i modulo `sets`.

    `dense` gives K and V of set 0 in the order of the queries, for `check`. splits: the numbers of splits to choose
    from; ``run.split`` is the one in use.
    """

    def __init__(self, name: str, point: Point, pool: Pool, splits: Sequence[int] = (0,)) -> None:
        self.name, self.point, self.pool, self.splits, self.split = name, point, pool, splits, splits[0]
        self.sets = pool.sets(point)
        self.device = pool.k.device
        tokens = point.batch * (1 if point.phase == "decode" else point.tokens)
        shape = tokens, point.query_heads, point.head_dim
        self.q = torch.randn(shape, dtype=torch.bfloat16, device=self.device)
        self.out = torch.empty_like(self.q)

    def __call__(self, i: int) -> Any:
        raise NotImplementedError

    def dense(self) -> Any:
        raise NotImplementedError

    def check(self) -> Any:
        """The relative error of set 0's result against float32. Raises ValueError if it is too large."""
        point = self.point
        self.out.fill_(float("nan"))
        self(0)
        group = point.query_heads // point.kv_heads
        q = self.q.view(point.batch, -1, point.query_heads, point.head_dim).transpose(1, 2).float()
        k, v = (x.transpose(1, 2).float().repeat_interleave(group, dim=1) for x in self.dense())
        scores = q @ k.transpose(2, 3) * point.head_dim**-0.5
        if point.phase == "prefill":
            scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), float("-inf"))
        expected = (scores.softmax(-1) @ v).transpose(1, 2).reshape(self.out.shape)
        wrong = ((self.out.float() - expected).norm() / expected.norm()).item()
        if not wrong < 2e-2:
            raise ValueError(f"{self.name} at {point} is wrong: relative error {wrong:.3g}")
        return wrong


class Contiguous(Run):
    """A kernel of `pyvmem.attention` by name, over slots in random order."""

    def __init__(self, kernel: str, point: Point, pool: Pool, splits: Sequence[int] = (0,), wide: bool = False) -> None:
        super().__init__(f"{kernel}{'-176' if wide else ''} contiguous", point, pool, splits)
        self.kernel = kernel
        self.cache = _Cache(point, pool, WIDE_TILE_ROWS if wide else TILE_ROWS)
        self.order = np.random.default_rng(0).permutation(point.batch)
        self.lengths = np.full(point.batch, point.tokens)
        queries = None if point.phase == "decode" else self.lengths
        most = point.tokens if point.phase == "decode" else None
        self.batch = attention.Batch(self.cache, self.order, self.lengths, queries, max_length=most)
        self._call = attention.decode if point.phase == "decode" else attention.prefill

    def __call__(self, i: int) -> Any:
        layer = i % self.sets
        self._call(self.q, self.cache, layer, self.batch, kernel=self.kernel, num_splits=self.split, out=self.out)

    def dense(self) -> Any:
        order = torch.from_numpy(self.order).to(self.device)
        return [x[order] for x in self.pool.views(self.point, 0)]


class _Paged(Run):
    """A paged call: blocks of `block` rows in random order."""

    def __init__(self, name: str, point: Point, pool: Pool, block: int, splits: Sequence[int] = (0,)) -> None:
        super().__init__(f"{name} paged {block}", point, pool, splits)
        self.block = block
        self.count = point.tokens // block
        table = np.random.default_rng(0).permutation(point.batch * self.count).astype(np.int32)
        self.indices = torch.from_numpy(table)
        self.table = self.indices.to(self.device).view(point.batch, self.count)
        shape = -1, block, point.kv_heads, point.head_dim
        self.kv = [[x.view(shape) for x in pool.views(point, i)] for i in range(self.sets)]

    def dense(self) -> Any:
        point = self.point
        shape = point.batch, point.tokens, point.kv_heads, point.head_dim
        return [x[self.table.flatten()].view(shape) for x in self.kv[0]]

    def ends(self, each: int) -> Any:
        """int32[batch + 1] offsets of requests with `each` rows."""
        return torch.arange(self.point.batch + 1, dtype=torch.int32) * each


class FA3Paged(_Paged):
    """FlashAttention-3 with a page table, which vLLM's build has."""

    def __init__(self, point: Point, pool: Pool, block: int, splits: Sequence[int] = (0,)) -> None:
        super().__init__("fa3", point, pool, block, splits)
        each = 1 if point.phase == "decode" else point.tokens
        self.max_query = each
        self.cu_seqlens_q = self.ends(each).to(self.device)
        self.used = torch.full((point.batch,), point.tokens, dtype=torch.int32, device=self.device)

    def __call__(self, i: int) -> Any:
        k, v = self.kv[i % self.sets]
        build = fa3.build()
        assert build is not None  # otherwise this run is not selected
        build(
            q=self.q, k=k, v=v, out=self.out, cu_seqlens_q=self.cu_seqlens_q, max_seqlen_q=self.max_query,
            seqused_k=self.used, page_table=self.table, softmax_scale=self.point.head_dim**-0.5, is_causal=True,
            window_size_left=-1, window_size_right=-1, softcap=0.0, num_splits=self.split,
        )  # fmt: skip


class FlashInferPaged(_Paged):
    """FlashInfer over a block table in random order."""

    def __init__(self, point: Point, pool: Pool, block: int, backend: str = "auto") -> None:
        import flashinfer

        super().__init__("flashinfer" if backend == "auto" else f"flashinfer-{backend}", point, pool, block)
        heads = (point.query_heads, point.kv_heads, point.head_dim, block)
        last = torch.full((point.batch,), block, dtype=torch.int32)
        options: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        ints = functools.partial(torch.empty, dtype=torch.int32, device=self.device)
        work = torch.zeros(128 << 20, dtype=torch.uint8, device=self.device)  # as FlashInfer recommends
        if point.phase == "decode":
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                work, "NHD", use_cuda_graph=True, use_tensor_cores=point.query_heads > point.kv_heads,
                paged_kv_indptr_buffer=ints(point.batch + 1), paged_kv_indices_buffer=ints(len(self.indices)),
                paged_kv_last_page_len_buffer=ints(point.batch),
            )  # fmt: skip
            self.wrapper.plan(self.ends(self.count), self.table.flatten(), last, *heads, **options)
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(work, "NHD", backend=backend)
            self.wrapper.plan(self.ends(point.tokens), self.ends(self.count), self.table.flatten(), last, *heads,
                              causal=True, **options)  # fmt: skip

    def __call__(self, i: int) -> Any:
        self.wrapper.run(self.q, tuple(self.kv[i % self.sets]), out=self.out)


class FlashInferRagged(Run):
    """FlashInfer's kernel for contiguous K and V: one prompt at a time."""

    def __init__(self, point: Point, pool: Pool) -> None:
        super().__init__("flashinfer unpaged", point, pool)

    def __call__(self, i: int) -> Any:
        import flashinfer

        k, v = self.pool.views(self.point, i % self.sets)
        self.out.copy_(flashinfer.single_prefill_with_kv_cache(self.q, k[0], v[0], causal=True))

    def dense(self) -> Any:
        return self.pool.views(self.point, 0)


class TritonPaged(_Paged):
    """vMem's Triton decode kernel with a block table: the same code plus the look-up."""

    def __init__(self, point: Point, pool: Pool, block: int, splits: Sequence[int] = (0,)) -> None:
        from pyvmem.attention import triton as ours
        from pyvmem.attention.kernel import Call, Shape, capability

        super().__init__("triton", point, pool, block, splits)
        cache = _Cache(point, pool)
        batch = attention.Batch(cache, range(point.batch), [point.tokens] * point.batch, max_length=point.tokens)
        shape = Shape(
            "decode", point.query_heads, point.kv_heads, point.head_dim, torch.bfloat16, kv_dtype=torch.bfloat16,
            device="cuda", capability=capability(self.device.index or 0),
        )  # fmt: skip
        self.calls = {}
        for i, (k, v) in enumerate(self.kv):
            for n in splits:
                call = Call(self.q, k, v, batch, shape, softmax_scale=point.head_dim**-0.5, num_splits=n,
                            out=self.out, plan=None)  # fmt: skip
                call.plan = ours.Triton().plan(call)
                self.calls[i, n] = call
        self._decode = ours.decode

    def __call__(self, i: int) -> Any:
        self._decode(self.calls[i % self.sets, self.split], self.out, self.table)


# ---- timing ---------------------------------------------------------------------------------------------------------


class Timer:
    """Calls of one run by the clock: a captured CUDA graph on a GPU, a loop on the CPU. A sample is the time of one."""

    def __init__(self, run: Any, target: float = 1.5e-3) -> None:
        self.run = run
        self.gpu = run.device.type == "cuda"
        once = self._warm()
        self.calls = run.sets * max(1, min(64, round(target / (once * run.sets))))
        self.seconds = once * self.calls
        self.graph = None
        if self.gpu and once < SLOW:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._loop()
            self.result(self.start())  # the first replay uploads the graph

    def _loop(self) -> None:
        for i in range(self.calls):
            self.run(i)

    def _warm(self) -> Any:
        """Seconds of one call, roughly."""
        if not self.gpu:
            self.run(0)
            start = perf_counter()
            self.run(0)
            return max(perf_counter() - start, 1e-6)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run(0)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            self.run(1)
            last.record()
        last.synchronize()
        torch.cuda.current_stream().wait_stream(stream)
        return max(first.elapsed_time(last) / 1e3, 1e-6)

    def start(self) -> Any:
        """Time the calls once; on a GPU only queue them."""
        if not self.gpu:
            begin = perf_counter()
            self._loop()
            return (perf_counter() - begin) / self.calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay() if self.graph else self._loop()
        end.record()
        return start, end

    def result(self, started: Any) -> Any:
        """Microseconds of one call."""
        if not self.gpu:
            return started * 1e6
        started[1].synchronize()
        return started[0].elapsed_time(started[1]) * 1e3 / self.calls


def measure(runs: Any, turns: int = 11, seconds: float = 0.4) -> Any:
    """Time runs in turns, another one first in each. Returns {name: (microseconds[turns], splits chosen)}.

    Where a run has several numbers of splits, the fastest of two tries each is taken first; the kind of memory does
    not change it. Turns are fewer where they would take more than `seconds`, but at least three.
    """
    timers, chosen = {}, {}
    for name, run in runs.items():
        if len(run.splits) > 1 and run.name not in chosen:
            tried = {}
            for split in run.splits:
                run.split = split
                timer = Timer(run)
                tried[split] = min(timer.result(timer.start()) for _ in range(2))
                del timer
            chosen[run.name] = min(tried, key=lambda split: tried[split])
        run.split = chosen.get(run.name, run.split)
        timers[name] = Timer(run)
    whole = sum(t.seconds for t in timers.values())
    turns = max(3, min(turns, int(seconds / max(whole, 1e-9))))
    samples = {name: np.zeros(turns) for name in timers}
    order = list(timers)
    for turn in range(turns):
        order = order[1:] + order[:1]
        # Not timed: behind an idle GPU, the first would be timed with its launch.
        timers[order[-1]].start()
        started = {name: timers[name].start() for name in order}
        for name, timer in timers.items():
            samples[name][turn] = timer.result(started[name])
    return {name: (samples[name], runs[name].split) for name in timers}


# ---- what a block table costs the CPU ----------------------------------------------------------------------------


def prepare(batch: int, tokens: int, block: int, device: Any, repeats: int) -> Any:
    """Microseconds until an iteration's tables are on the device: {how: samples}.

    Three ways. A padded table as vLLM builds one: rows of block numbers, of which each request has a list, copied as a
    whole. The compressed table that FlashInfer takes. Slots and lengths, which are all that contiguous slots need.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(tokens // 2, 1), tokens + 1, batch).astype(np.int32)
    count = -(-lengths // block)
    numbers = rng.permutation(int(count.sum())).astype(np.int32)
    lists = [part.tolist() for part in np.split(numbers, np.cumsum(count)[:-1])]

    def upload(array: Any) -> Any:
        host = torch.from_numpy(array)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()

    def padded() -> None:
        table = np.zeros((batch, max(map(len, lists))), np.int32)
        for row, blocks in zip(table, lists):
            row[: len(blocks)] = blocks
        upload(table)
        upload(lengths)

    def compressed() -> None:
        indptr = np.zeros(batch + 1, np.int32)
        np.cumsum([len(blocks) for blocks in lists], out=indptr[1:])
        upload(indptr)
        upload(np.fromiter((n for blocks in lists for n in blocks), np.int32, int(indptr[-1])))
        upload((lengths - 1) % block + 1)

    k = torch.empty((batch, 1, 1, 16), dtype=torch.bfloat16, device=device).expand(batch, tokens, 1, 16)
    cache = type("Slots", (), {"keys": [k], "values": [k], "slots": batch, "max_tokens": tokens, "tile_rows": 1,
                               "tokens": lambda self, slots: [tokens] * len(slots)})()  # fmt: skip
    order = rng.permutation(batch).astype(np.int32)
    ready = attention.Batch(cache, order, lengths, max_length=tokens)
    ways: dict[str, Callable[[], object]] = {
        f"block table, padded, block {block}": padded,
        f"block table, compressed, block {block}": compressed,
        "slots and lengths": lambda: ready.update(order, lengths),
    }
    samples = {name: np.zeros(repeats) for name in ways}
    for i in range(-2, repeats):
        for name, way in ways.items():
            start = perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if i >= 0:
                samples[name][i] = (perf_counter() - start) * 1e6
    return samples
