"""Triton's kernels in its interpreter, against float64; test_attention.py runs it with TRITON_INTERPRET=1.

SPDX-License-Identifier: MIT
"""

import ctypes
import itertools
import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from attention_reference import error, reference
from test_attention import make, queries

from pyvmem import attention
from pyvmem.attention import table
from pyvmem.attention import triton as ours

LENGTHS = (1, 63, 65, 130, 300)
COUNTS = (1, 63, 2, 130, 37)


@triton.jit
def loop(x, n):
    """Counts to a number that it is given: what Triton 3.6's interpreter cannot do with numpy 2.4 or later."""
    total = 0
    for i in range(tl.load(x), n):
        total += i
    tl.store(x, total)


def fault():
    """The interpreter's own answer to a loop; None where it runs one."""
    x = torch.ones(1, dtype=torch.int32)
    try:
        loop[(1,)](x, 4)
    except triton.runtime.errors.InterpreterError as error:
        return str(error)
    assert x.item() == 6
    return None


def at(pointer, shape, dtype):
    """A tensor over memory."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=dtype).view(shape)


def repeated():
    """`attention.RepeatedDecode` repeats a decode for other addresses, until the batch is split another way.

    A compiled kernel takes addresses; here the interpreter stands in for it.
    """
    by_lookup, launches = ours._decode_by_lookup, []

    def inner(*arguments):
        ours._direct = lambda: False  # the interpreter compiles nothing
        by_lookup(*arguments)
        ours._direct = lambda: True

    def lookup(call, out, table, strides):
        inner(call, out, table, strides)

        def launch(pointers):
            launches.append(pointers)
            (n, heads, dim), kv_heads = call.q.shape, call.shape.kv_heads
            q, result = (at(p, (n, heads, dim), call.q.dtype) for p in (pointers[0], pointers[3]))
            new = tuple(at(p, (n, kv_heads, dim), call.k.dtype) for p in pointers[4:])
            assert tuple(pointers[1:3]) == (call.k.data_ptr(), call.v.data_ptr())
            inner(replace(call, q=q, new=new), result, table, strides)

        return launch, None

    ours._decode_by_lookup = lookup
    ours._splits = lambda programs, rows, device: 1 if rows < 100 else 2
    cache, slots = make(2, 64, lengths=(40, 60, 300, 50))
    table.ORDER = {name: ("triton", *order) for name, order in table.ORDER.items()}
    with cache:
        k, v = cache.keys[0], cache.values[0]
        again, batch = attention.RepeatedDecode(cache, (k, v)), attention.Batch(cache, slots[:2], (40, 60))
        for number, lengths, many in ((0, (40, 59), 2), (1, (39, 60), 2), (2, (39, 59), 2), (2, (40, 300), 2)):
            if lengths[1] == 300:
                batch.update([slots[0], slots[2]], lengths)
            else:
                batch.update(slots[:2], lengths)
            q, new = torch.randn(many, 8, 1, 64), torch.randn(2, many, 2, 1, 64)
            out = again(q, *new, batch, None, 0, 0.0)
            rows = torch.from_numpy(batch.slots).long(), torch.from_numpy(batch.lengths).long() - 1
            assert torch.equal(k[rows], new[0, :, :, 0]) and torch.equal(v[rows], new[1, :, :, 0])
            expected = reference(q[:, :, 0], k, v, batch.slots.tolist(), lengths, [1] * many)
            assert out.shape == (many, 1, 8, 64) and error(out[:, 0], expected) < 1e-5, number
            assert len(launches) == number, "checked in full the first time, and where the parts change"
        q = torch.randn(2, 8, 64, 1).transpose(2, 3)  # other strides
        out = again(q, *new, batch, None, 0, 0.0)
        assert error(out[:, 0], reference(q[:, :, 0], k, v, batch.slots.tolist(), lengths, [1, 1])) < 1e-5


def main():
    said = fault()
    if said:
        print("interpreter:", said)
        return
    right = 0
    for (heads, kv_heads, dim), window, softcap, splits in itertools.product(
        ((8, 2, 64), (2, 2, 80)), (0, 70), (0.0, 5.0), (1, 3)
    ):
        splits += 3 * (splits == 3 and softcap > 0)  # joined by the last program, or by a second launch
        cache, slots = make(kv_heads, dim, lengths=LENGTHS)
        with cache:
            k, v = cache.keys[1], cache.values[1]
            for x in (k, v):  # whatever stands past a length must not matter
                for slot, length in zip(slots, LENGTHS):
                    x[slot, length : length + 40] = float("nan")
            options = {"window": window, "softcap": softcap}
            q = queries(len(slots), heads, dim)
            expected = reference(q, k, v, slots, LENGTHS, [1] * 5, **options)
            options["num_splits"] = splits
            out = attention.decode(q, cache, 1, slots, LENGTHS, kernel="triton", **options)
            wrong = error(out, expected)
            assert wrong < 1e-5, ("decode", heads, dim, window, softcap, splits, wrong)
            rows = torch.tensor(slots), torch.tensor(LENGTHS) - 1
            kept = k.clone(), v.clone()
            new = k[rows], v[rows]
            for x in (k, v):
                x[rows] = float("nan")
            out = attention.decode(q, cache, 1, slots, LENGTHS, kernel="triton", new=new, **options)
            wrong = error(out, expected)
            assert wrong < 1e-5, ("append", heads, dim, window, softcap, splits, wrong)
            for x, before in zip((k, v), kept):
                assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0)), "append stores elsewhere"
            del options["num_splits"]
            if splits == 1:
                q = queries(sum(COUNTS), heads, dim)
                out = attention.prefill(q, cache, 1, slots, LENGTHS, COUNTS, kernel="triton", **options)
                wrong = error(out, reference(q, k, v, slots, LENGTHS, COUNTS, **options))
                assert wrong < 1e-5, ("prefill", heads, dim, window, softcap, wrong)
            right += 1
    for dtype in (torch.float16, torch.float8_e4m3fn):  # the interpreter multiplies bfloat16 as if it were integers
        cache, slots = make(4, 64, dtype, lengths=LENGTHS)
        with cache:
            q = queries(5, 8, 64, torch.float16)
            out = attention.decode(q, cache, 0, slots, LENGTHS, kernel="triton")
            wrong = error(out, reference(q, cache.keys[0], cache.values[0], slots, LENGTHS, [1] * 5))
            assert out.dtype == torch.float16 and wrong < 2e-3, (dtype, wrong)
            right += 1
    repeated()
    print(right, "cases right")
