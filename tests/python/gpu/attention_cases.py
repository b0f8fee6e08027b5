"""Attention kernels against float64 on memory that ends where the rows of a tile end: one function a case.

Run as ``attention_cases.py BACKEND KERNEL [CASE...]``: one JSON line a case. Nothing is mapped behind the tiles that a
kernel says it reads, and there is no backdrop, so a read past them is an illegal access and ends the process.
test_attention_gpu.py runs it.

SPDX-License-Identifier: MIT
"""

import json
import math
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from attention_reference import error, reference  # noqa: E402
from late import Lag  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem import attention  # noqa: E402
from pyvmem.attention.table import KERNELS  # noqa: E402
from pyvmem.tensor import tensor_at  # noqa: E402

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
BOUND = {BF16: 1e-2, FP16: 2e-3, FP8: 8e-2}
MAX_TOKENS = 1024


class Bare:
    """K and V of a layer over pages that end with each slot's last tile; slots stand in no order.

    passed: a window; the pages wholly before the tile in which it begins are missing as well.
    """

    def __init__(self, backend, lengths, kv_heads, dim, dtype, tile, fused=False, passed=0):
        self.context = pyvmem.Context(backend)
        page = min(self.context.page_sizes)
        self.slots, self.max_tokens, self.tile_rows = 17, MAX_TOKENS, tile
        self.order = [(3 * i + 2) % self.slots for i in range(len(lengths))]
        assert len(set(self.order)) == len(lengths)
        row = kv_heads * dim * dtype.itemsize * (2 if fused else 1)
        step = math.lcm(page, row)
        slot = -(-MAX_TOKENS * row // step) * step
        self.ranges, both = [], []
        for _ in range(1 if fused else 2):
            range_ = self.context.reserve(self.slots * slot)
            for s, length in zip(self.order, lengths):
                rows = min(-(-length // tile) * tile, MAX_TOKENS)
                first = max(length - passed, 0) // tile * tile * row // page if passed else 0
                n = -(-rows * row // page) - first
                range_.map(self.context.create(page, n, zero=True), s * slot + first * page)
            heads = (2, kv_heads, dim) if fused else (kv_heads, dim)
            strides = (slot // dtype.itemsize, row // dtype.itemsize, *((kv_heads * dim,) if fused else ()), dim, 1)
            x = tensor_at(range_._owner, range_.addr, (self.slots, MAX_TOKENS, *heads), dtype, "cuda", strides)
            self.ranges.append(range_)
            both += [x[:, :, 0], x[:, :, 1]] if fused else [x]
        k, v = both
        for s, length in zip(self.order, lengths):
            first = max(length - passed, 0) if passed else 0
            for x in (k, v):
                x[s, first:length].copy_(torch.randn(length - first, kv_heads, dim, device="cuda").to(dtype))
        self.keys, self.values = [k], [v]

    def tokens(self, slots):
        return [MAX_TOKENS] * len(slots)

    def close(self):
        torch.cuda.synchronize()
        for range_ in self.ranges:
            range_.close()
        self.context.close()


def lengths_for(tile):
    """Around tiles, pages of 64 KiB under rows of 2 KiB, and the end of a slot."""
    return sorted({1, tile - 1 or 1, tile, tile + 1, 31, 32, 33, 127, 128, 129, 500, MAX_TOKENS - 1, MAX_TOKENS})


def one(backend, kernel, *, heads=(8, 8), dim=128, dtype=BF16, q_dtype=None, window=0, softcap=0.0, fused=False,
        splits=0, passed=False, tile=None, phases=("decode", "prefill")):  # fmt: skip
    """Decode, and chunked prefill, of ragged lengths; what the kernel does not take must be refused in one line."""
    q_heads, kv_heads = heads
    q_dtype = q_dtype or dtype
    tile = tile or attention.tile_rows(kernel, q_heads, kv_heads, dim, dtype, window)
    lengths = lengths_for(tile)
    cache = Bare(backend, lengths, kv_heads, dim, dtype, tile, fused, window if passed else 0)
    slots, seen, k, v = cache.order, {}, cache.keys[0], cache.values[0]
    options = {"window": window, "softcap": softcap}
    counts = [min(n, c) for n, c in zip(lengths, (1, 30, 31, 32, 1, 100, 77, 128, 2, 64, 129, 300, MAX_TOKENS))]
    for phase, many in (("decode", [1] * len(slots)), ("prefill", counts)):
        if phase not in phases:
            continue
        q = torch.randn(sum(many), q_heads, dim, device="cuda").to(q_dtype)
        call = attention.decode if phase == "decode" else attention.prefill
        batch = attention.Batch(cache, slots, lengths, many)
        try:
            out = call(q, cache, 0, batch, kernel=kernel, num_splits=splits, **options)
        except ValueError as said:
            assert "\n" not in str(said), said
            seen[phase] = f"refused: {said}"
            continue
        torch.cuda.synchronize()
        dense = (k, v)
        if passed:  # the reference multiplies the rows before a window by zero: they must be there
            dense = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v)]
            for s, length in zip(slots, lengths):
                for x, y in zip((k, v), dense):
                    y[s, max(length - window, 0) : length] = x[s, max(length - window, 0) : length]
        wrong = error(out, reference(q, *dense, slots, lengths, many, **options))
        assert wrong < BOUND[dtype], (phase, wrong)
        seen[phase] = round(wrong, 6)
        if phase == "decode" and not passed:  # the last rows, stored by the call; the second is launched another way
            rows = torch.tensor(slots, device="cuda"), torch.tensor(lengths, device="cuda") - 1
            bits = [x.view(torch.uint8) if dtype == FP8 else x for x in (k, v)]
            stored = [x[rows] for x in bits]
            new = [x.view(dtype) for x in stored]
            for _ in range(2):
                for x in bits:
                    x[rows] = 1
                again = call(q, cache, 0, batch, kernel=kernel, num_splits=splits, new=new, **options)
                assert error(again, reference(q, k, v, slots, lengths, many, **options)) < BOUND[dtype], "new"
                assert all(torch.equal(x[rows], y) for x, y in zip(bits, stored)), "new rows stored"
        if phase == "prefill":  # one request alone takes another path in some kernels
            i = len(lengths) - 2
            q = q[: many[i]].contiguous()
            out = torch.full(q.shape, float("nan"), device="cuda", dtype=BF16 if q_dtype == FP8 else q_dtype)
            call(q, cache, 0, slots[i : i + 1], lengths[i : i + 1], many[i : i + 1], kernel=kernel, out=out, **options)
            wrong = error(out, reference(q, k, v, slots[i : i + 1], lengths[i : i + 1], many[i : i + 1], **options))
            assert wrong < BOUND[dtype], ("one request", wrong)
    del k, v
    cache.close()
    return seen


def graph(backend, kernel):
    """A captured decode goes on with other slots, longer lengths, and rows that a step backed after the capture."""
    if not KERNELS[kernel].capturable:
        return "not capturable"
    tile = attention.tile_rows(kernel, 8, 8, 128)
    torch.cuda.current_stream().synchronize()
    with pyvmem.KVCache.for_model(
        1, 8, 128, 4, MAX_TOKENS, 64 << 20, backend=backend, tile_rows=tile, name=None
    ) as cache:
        for _ in range(4):
            cache.alloc(10)
        first, then = ([0, 2, 3], [40, 700, 1]), ([3, 1, 0], [1000, 129, 400])
        lengths = np.zeros(4, np.int32)
        lengths[first[0]] = first[1]
        assert cache.step(lengths)
        for x in (cache.keys[0], cache.values[0]):
            for slot, length in zip(*first):
                x[slot, :length] = torch.randn(length, 8, 128, device="cuda").to(BF16)
        batch = attention.Batch(cache, *first, max_length=MAX_TOKENS)
        q = torch.randn(3, 8, 128, device="cuda").to(BF16)
        out = torch.empty_like(q)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                attention.decode(q, cache, 0, batch, kernel=kernel, out=out)
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            attention.decode(q, cache, 0, batch, kernel=kernel, out=out)
        seen = []
        for slots, wanted in (first, then):
            torch.cuda.synchronize()
            lengths[:] = 0
            lengths[slots] = wanted
            assert cache.step(lengths)
            for x in (cache.keys[0], cache.values[0]):
                for slot, length in zip(slots, wanted):
                    x[slot, :length] = torch.randn(length, 8, 128, device="cuda").to(BF16)
            batch.update(slots, wanted)
            out.fill_(float("nan"))
            recorded.replay()
            torch.cuda.synchronize()
            wrong = error(out, reference(q, cache.keys[0], cache.values[0], slots, wanted, [1] * 3))
            assert wrong < BOUND[BF16], (slots, wrong)
            seen.append(round(wrong, 6))
        del batch, recorded, x
    return seen


def case(**options):
    return lambda backend, kernel: one(backend, kernel, **options)


CASES = {
    "bf16 D128 MHA": case(),
    "bf16 D128 GQA 4": case(heads=(32, 8)),
    "graph": graph,
    "fp16 D64 GQA 8": case(heads=(32, 4), dim=64, dtype=FP16),
    "bf16 D256": case(heads=(8, 4), dim=256),
    "bf16 D64 MHA fused": case(heads=(8, 8), dim=64, fused=True),
    "bf16 D128 window": case(heads=(32, 8), window=200),
    "bf16 D128 window, passed rows given up": case(heads=(32, 8), window=200, passed=True, phases=("decode",)),
    "bf16 D128 softcap": case(heads=(32, 8), softcap=30.0),
    "fp8 D128": case(heads=(32, 8), dtype=FP8),
    "bf16 over fp8": case(heads=(32, 8), dtype=FP8, q_dtype=BF16),
    "fp8 D64": case(heads=(32, 8), dim=64, dtype=FP8),
    "fp8 D256": case(heads=(16, 4), dim=256, dtype=FP8),
    "bf16 D128 tile_rows 1": case(heads=(32, 8), tile=1),
    "bf16 D128 tile_rows 176": case(heads=(32, 8), tile=176),
    "bf16 D128 splits 3": case(heads=(32, 8), splits=3),
    "bf16 D80": case(heads=(8, 8), dim=80),
    "fp16 D256 window softcap": case(heads=(8, 4), dim=256, dtype=FP16, window=100, softcap=20.0),
}


def main(backend, kernel, names):
    if kernel == "fa3-vllm":
        import vllm.vllm_flash_attn  # noqa: F401, loads torch.ops._vllm_fa3_C

        kernel = "fa3"
    for name in names or CASES:
        torch.manual_seed(0)
        print(json.dumps({"case": name, "started": True}), flush=True)
        try:
            with Lag().everywhere():
                said = {"ok": True, "seen": CASES[name](backend, kernel)}
        except Exception as wrong:
            said = {"ok": False, "error": traceback.format_exc()[-3000:]}
            lost = "CUDA error" in str(wrong) or "illegal" in str(wrong)
        print(json.dumps({"case": name, **said}), flush=True)
        if not said["ok"] and lost:  # the CUDA context is lost: the rest gets a new process
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
