"""The cost of a lease: parking and unparking, new segments, a training step, and the tokens that it spares.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import math
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks import Peak, device_memory_used
from benchmarks.generate import llama
from benchmarks.registry import benchmark
from pyvmem._ffi import ffi, lib
from pyvmem.core import MIB, Context
from pyvmem.errors import _check, structure
from pyvmem.owned import _Owned
from pyvmem.tools import argtypes
from pyvmem.tools.argtypes import size_text

if TYPE_CHECKING:
    from benchmarks.records import Record
    from benchmarks.session import Session
    from pyvmem.kv.pool import KVPool

GIB = 1 << 30
SEGMENT = 64 * MIB  # of what is parked
NEW = (2 * MIB, 20 * MIB, 256 * MIB)  # sizes of new segments: PyTorch's two, and one of a large tensor
# Llama-3.2-1B with a smaller vocabulary.
SHAPE_1B = dict(vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                num_attention_heads=32, num_key_value_heads=8)  # fmt: skip
PARTS = ("park", "block", "new", "train", "saver")  # all but the first need PyTorch and a GPU


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own arguments."""
    group = parser.add_argument_group("lease")
    group.add_argument("--amount", type=argtypes.size, metavar="SIZE", help="memory to park (4G on a GPU, else 256M)")
    group.add_argument("--steps", type=argtypes.whole(1), metavar="N", help="training steps of each kind (20; quick 5)")
    group.add_argument("--part", choices=PARTS, action="append", help="only this part; can be repeated")


class Segments(_Owned):
    """A lease without PyTorch: its segments are allocated by the functions that PyTorch would call."""

    _what = "lease"

    def __init__(self, pool: KVPool, context: Context, most: int, page_size: int) -> None:
        raw = structure("vmem_torch_config")
        raw.most, raw.page_size = most, page_size
        owner, place = self._new_owner(context._owned()), ffi.new("uint32_t *")
        _check(lib.pv_own_torch(owner, context._owned(), context._use(), pool._use(), raw, place))
        self._own(owner)
        self.place, self.device = int(place[0]), context.device
        pair = self.place % lib.VMEM_TORCH_PLACES
        self._alloc = getattr(lib, f"vmem_torch_alloc_{pair}")
        self._free = getattr(lib, f"vmem_torch_free_{pair}")

    def alloc(self, size: int) -> Any:
        addr = self._alloc(size, self.device, ffi.NULL)
        if addr == ffi.NULL:
            raise MemoryError(f"no {size >> 20} MiB in the lease")
        return addr

    def free(self, addr: Any) -> None:
        self._free(addr, 0, self.device, ffi.NULL)

    def park(self, addrs: Any) -> None:
        _check(lib.vmem_torch_park(self.place, addrs, len(addrs), ffi.NULL))

    def unpark(self) -> None:
        _check(lib.vmem_torch_unpark(self.place, 1000, ffi.NULL))


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds."""
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1e3


def parking(session: Session, context: Context, page_size: int, amount: int, turns: int) -> list[Record]:
    """Park and unpark segments of `amount` in all, and make new ones, through the functions that PyTorch calls.

    Each turn parks twice: nobody asks, and a second lease of the pool takes the parked pages and gives them back.
    """
    from pyvmem.kv.pool import KVPool

    times: dict[str, list[float]] = {"park": [], "unpark": [], "give parked pages": [], "take them back": []}
    calls: list[float] = []  # to the driver, in a turn's second half
    new: dict[int, list[float]] = {size: [] for size in NEW if size <= amount}
    with (
        KVPool(amount + 16 * MIB) as pool,
        Segments(pool, context, amount, page_size) as lease,
        Segments(pool, context, amount, page_size) as other,
    ):
        addrs = [lease.alloc(SEGMENT) for _ in range(amount // SEGMENT)]
        raw = ffi.new("uint64_t[]", [int(ffi.cast("uintptr_t", a)) for a in addrs])
        for i in range(turns + 1):
            park, unpark = timed(lambda: lease.park(raw)), timed(lease.unpark)
            lease.park(raw)
            before = context.stats().syscalls
            start = perf_counter()
            taken = other.alloc(amount)
            give = (perf_counter() - start) * 1e3
            other.free(taken)
            back = timed(lease.unpark)
            if i:  # the first turn makes page tables
                for name, sample in zip(times, (park, unpark, give, back)):
                    times[name].append(sample)
                calls.append(context.stats().syscalls - before)
        for addr in addrs:
            lease.free(addr)
    with KVPool(2 * amount) as pool, Segments(pool, context, 2 * amount, page_size) as lease:
        addrs = [lease.alloc(SEGMENT) for _ in range(amount // SEGMENT)]  # page tables are made
        for size, samples in new.items():
            for i in range(turns + 1):
                start = perf_counter()
                addr = lease.alloc(size)
                if i:
                    samples.append((perf_counter() - start) * 1e6)
                lease.free(addr)
        for addr in addrs:
            lease.free(addr)
    gib = amount / GIB
    records = [
        session.record([t / gib for t in samples], context, f"{name} a GiB", "ms", page_size=page_size)
        for name, samples in times.items()
    ]
    records.append(session.record(calls, context, "driver calls to give and take back", "", page_size=page_size))
    for size, samples in new.items():
        records.append(session.record(samples, context, f"new segment of {size_text(size)}", "us", page_size=page_size))
    return records


# ---- with PyTorch ----------------------------------------------------------------------------------------------------


def training_step(model: Any, optimizer: Any, ids: Any) -> Any:
    """One step on a batch of token numbers, [requests, tokens + 1]; returns the loss, a tensor of the default pool."""
    from torch.nn.functional import cross_entropy

    logits = model(ids[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def torch_segments(session: Session, context: Context, turns: int) -> list[Record]:
    """New segments of PyTorch's own allocator: cudaMalloc, and expandable segments."""
    import torch

    records = []
    for name, setting in (("cudaMalloc", "False"), ("expandable segments", "True")):
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{setting}")
        for size in NEW:
            samples = []
            for i in range(turns + 1):
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
                start = perf_counter()
                x = torch.empty(size, dtype=torch.uint8, device="cuda")
                if i:
                    samples.append((perf_counter() - start) * 1e6)
                del x
            records.append(session.record(samples, context, f"new segment of {size_text(size)}", "us", backend=name))
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    torch.cuda.empty_cache()
    return records


def blocks(session: Session, context: Context, page_size: int, amount: int, turns: int) -> list[Record]:
    """Leaving and entering a block whose segments have `amount` in all, PyTorch's part included."""
    import torch

    from pyvmem.kv.pool import KVPool
    from pyvmem.lease import torch_pool

    leave, enter = [], []
    with KVPool(2 * amount) as pool:
        lease = torch_pool(pool, fine=page_size < 2 * MIB, context=context)
        for i in range(turns + 2):
            enter.append(timed(lease.__enter__))
            tensors = [torch.empty(SEGMENT, dtype=torch.uint8, device="cuda") for _ in range(amount // SEGMENT)]
            del tensors
            torch.cuda.synchronize()
            leave.append(timed(lambda: lease.__exit__(None, None, None)))
        lease.close()
    what = f"block of {size_text(amount)}"
    both = ("leave", leave), ("enter", enter)
    return [session.record(t[2:], context, f"{end} a {what}", "ms", page_size=page_size) for end, t in both]


def training(session: Session, context: Context, layers: int, turns: int) -> list[Record]:
    """A training step within a lease beside a serving cache, and with PyTorch's own allocator, in turns."""
    import torch

    from pyvmem.kv.cache import KVCache
    from pyvmem.kv.pool import KVPool
    from pyvmem.lease import torch_pool

    gc.collect()
    torch.cuda.empty_cache()
    model = llama(torch.device("cuda"), **dict(SHAPE_1B, num_hidden_layers=layers)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, 32000, (4, 1025), device="cuda")
    for _ in range(2):
        training_step(model, optimizer, ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training_step(model, optimizer, ids)
    torch.cuda.synchronize()
    needs = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    # Serving holds half of what the pool has, in running requests; it keeps the pages of others, which a step takes.
    budget = (2 * needs // GIB + 2) * GIB
    with KVPool(budget) as pool:
        tokens, slots = 4096, 512
        cache = KVCache.for_model(
            16, 8, 64, slots=slots, max_tokens=tokens, budget=budget, pool=pool, context=context, name=None
        )
        lease = torch_pool(pool, context=context)
        row = 16 * 2 * 8 * 64 * 2
        lengths = [0] * slots
        held = list(range(min(slots, budget * 9 // 10 // (tokens * row))))
        for slot in held:
            cache.alloc(tokens, slot=slot)
            lengths[slot] = tokens
        served = cache.step(lengths)
        for slot in held:
            for rows in (*cache.keys, *cache.values):
                rows[slot, :tokens] = slot % 100
        running = held[: len(held) // 2]
        for slot in held[len(running) :]:
            cache.free(slot)
        ours, own, peak = [], [], 0

        def inside() -> None:
            with lease:
                training_step(model, optimizer, ids)
            torch.cuda.synchronize()

        def plain() -> None:
            training_step(model, optimizer, ids)
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        base = device_memory_used() - sum(member.held for member in pool.members())
        with Peak(1e-3, device_memory_used) as count:
            inside()  # PyTorch's own pool has no activations yet
        for i in range(turns + 1):
            torch.cuda.synchronize()
            a = timed(inside)
            peak = max(peak, sum(member.has for member in pool.members()))
            torch.cuda.synchronize()
            b = timed(plain)
            if i:
                ours.append(a)
                own.append(b)
        torch.cuda.empty_cache()
        tensors = (*cache.keys, *cache.values)
        kept = [slot for slot in running if all(bool((rows[slot, :tokens] == slot % 100).all()) for rows in tensors)]
        # The time to recompute them: prefill of the same model, without gradients.
        with torch.no_grad():
            prompt = torch.randint(0, 32000, (1, tokens), device="cuda")
            model(prompt, use_cache=False, logits_to_keep=1)
            torch.cuda.synchronize()
            start = perf_counter()
            model(prompt, use_cache=False, logits_to_keep=1)
            torch.cuda.synchronize()
            prefill = perf_counter() - start
        lease.close()
        cache.close()
    if not served:
        raise MemoryError(f"no {budget >> 30} GiB for the cache and the lease together")
    what = f"training step, {sum(p.numel() for p in model.parameters()) / 1e9:.1f}B"
    found: list[tuple[str, str, Any]] = [
        (what, "ms", ours),
        (f"{what}, of PyTorch's own allocator", "", [a / b for a, b in zip(ours, own)]),
        ("activations of a step", "GiB", needs / GIB),
        ("budget of cache and lease", "GiB", budget / GIB),
        ("most of it that both had", "GiB", peak / GIB),
        ("the same by the driver's count", "GiB", (count.most - base) / GIB),
        ("tokens that need no recomputation", "tokens", len(kept) * tokens),
        ("tokens of running requests", "tokens", len(running) * tokens),
        ("prefill that this saves", "ms", len(kept) * prefill * 1e3),
    ]
    records = [session.record(own, context, what, "ms", backend="cudaMalloc")]
    return records + [session.record(value, context, m, unit, page_size=2 * MIB) for m, unit, value in found]


def memory_saver(session: Session, context: Context, amount: int, turns: int) -> list[Record]:
    """torch_memory_saver's pause and resume of the same amount, where it is installed."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        return []
    import torch

    saver = importlib.import_module("torch_memory_saver").torch_memory_saver
    saver.hook_mode = "torch"
    pause, resume = [], []
    with saver.region():
        tensors = [torch.empty(SEGMENT, dtype=torch.uint8, device="cuda") for _ in range(amount // SEGMENT)]
    for i in range(turns + 1):
        torch.cuda.synchronize()
        a, b = timed(saver.pause), timed(saver.resume)
        if i:
            pause.append(a / (amount / GIB))
            resume.append(b / (amount / GIB))
    del tensors
    both = ("park", pause), ("unpark", resume)
    return [session.record(t, context, f"{what} a GiB", "ms", backend="torch_memory_saver") for what, t in both]


@benchmark("lease", "PyTorch in a pool's budget: parking, new segments, a training step", arguments=arguments, order=45)
def run(session: Session) -> list[Record]:
    """Park and unpark on every backend; on a GPU that PyTorch sees, also train beside a serving cache."""
    import torch

    args = session.args
    turns = 5 if session.quick else 20
    records: list[Record] = []
    with session.context() as context:
        gpu = "cuda_pointer" in context.capabilities and torch.cuda.is_available()
        amount = args.amount or (4 * GIB if gpu else 256 * MIB)
        amount = min(amount, math.floor(context.memory_free / 4)) // SEGMENT * SEGMENT
        if not amount:
            raise MemoryError("the device has no 256 MiB free")
        chosen = args.part or PARTS
        sizes = session.page_sizes(context) if "park" in chosen else []
        for page_size in session.track(sizes, "page sizes"):
            records += parking(session, context, page_size, amount, turns)
            session.keep(records)
        if not gpu:
            return records
        layers, steps = 4 if session.quick else 16, args.steps or turns
        parts: dict[str, Callable[[], list[Record]]] = {
            "block": lambda: blocks(session, context, 2 * MIB, amount, turns),
            "new": lambda: torch_segments(session, context, turns),
            "train": lambda: training(session, context, layers, steps),
            "saver": lambda: memory_saver(session, context, amount, turns),
        }
        for name in session.track([name for name in parts if name in chosen], "with PyTorch"):
            records += parts[name]()
            session.keep(records)
    return records
