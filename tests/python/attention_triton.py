"""Triton's kernels in its interpreter, against float64; test_attention.py runs it with TRITON_INTERPRET=1.

SPDX-License-Identifier: MIT
"""

import itertools

import torch
import triton
import triton.language as tl
from attention_reference import error, reference
from test_attention import make, queries

from pyvmem import attention
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


def updated():
    """A batch that is updated to longer requests is split another way, and to shorter ones again."""
    ours._splits = lambda programs, rows, device: 1 if rows < 100 else 2
    cache, slots = make(2, 64, lengths=(40, 60, 300, 50))
    with cache:
        k, v = cache.keys[0], cache.values[0]
        batch = attention.Batch(cache, slots[:2], (40, 60))
        for which, lengths in ((slots[:2], (39, 60)), ([slots[0], slots[2]], (40, 300)), (slots[:2], (39, 59))):
            batch.update(which, lengths)
            q, new = torch.randn(2, 8, 64), torch.randn(2, 2, 2, 64)
            out = attention.decode(q, cache, 0, batch, kernel="triton", new=tuple(new))
            rows = torch.from_numpy(batch.slots).long(), torch.from_numpy(batch.lengths).long() - 1
            assert torch.equal(k[rows], new[0]) and torch.equal(v[rows], new[1])
            assert error(out, reference(q, k, v, which, lengths, [1, 1])) < 1e-5, lengths


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
    updated()
    print(right, "cases right")
