"""pyvmem.attention on CPUs: SDPA against float64, Triton's kernels in its interpreter, and what is refused.

SPDX-License-Identifier: MIT
"""

import math
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from attention_reference import error, reference

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from pyvmem import KVCache, attention  # noqa: E402
from pyvmem.attention import table  # noqa: E402

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300, 512)  # around pages and tiles, and a whole slot


def make(kv_heads=4, head_dim=64, dtype=torch.float32, layout="separate", lengths=LENGTHS, max_tokens=512, **options):
    """A cache whose slots hold random rows up to the lengths, in slots that stand in no order."""
    cache = KVCache.for_model(2, kv_heads, head_dim, len(lengths) + 2, max_tokens, 64 << 20, dtype=dtype, layout=layout,
                              backend="host", name=None, lazy=True, **options)  # fmt: skip
    taken = [cache.alloc(1) for _ in range(cache.slots)]
    slots = [taken[(5 * i + 3) % cache.slots] for i in range(len(lengths))]
    assert len(set(slots)) == len(slots)
    wanted = [0] * cache.slots
    for slot, length in zip(slots, lengths):
        wanted[slot] = length
    assert cache.step(wanted)
    generator = torch.Generator().manual_seed(1)
    for slot, length in zip(slots, lengths):
        for x in (*cache.keys, *cache.values):
            x[slot, :length] = torch.randn(x[slot, :length].shape, generator=generator).to(dtype)
    return cache, slots


def plain_cache(k, v, tile_rows=1):
    """The parts of a cache that attention needs, over tensors ``[slots, tokens, heads, dim]``."""
    return SimpleNamespace(keys=[k], values=[v], slots=len(k), max_tokens=k.shape[1], tile_rows=tile_rows,
                           tokens=lambda slots: [k.shape[1]] * len(slots))  # fmt: skip


def queries(count, heads, dim, dtype=torch.float32):
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("layout", ["separate", "fused", "token-major"])
@pytest.mark.parametrize("heads, kv_heads", [(8, 4), (4, 4), (6, 1)])
def test_decode_equals_the_reference(heads, kv_heads, layout):
    cache, slots = make(kv_heads, layout=layout)
    with cache:
        q = queries(len(slots), heads, 64)
        for layer in (0, 1):
            out = attention.decode(q, cache, layer, slots, LENGTHS, kernel="sdpa")
            expected = reference(q, cache.keys[layer], cache.values[layer], slots, LENGTHS, [1] * len(slots))
            assert error(out, expected) < 1e-5


@pytest.mark.parametrize("window", [0, 1, 50, 64, 600])
@pytest.mark.parametrize("heads, kv_heads, dim", [(8, 4, 64), (4, 4, 128), (4, 1, 80)])
def test_chunked_prefill_equals_the_reference(heads, kv_heads, dim, window):
    cache, slots = make(kv_heads, dim)
    with cache:
        counts = [min(n, c) for n, c in zip(LENGTHS, (1, 63, 1, 64, 127, 5, 129, 37, 200))]
        q = queries(sum(counts), heads, dim)
        options = {"window": window, "softmax_scale": 0.2}
        out = attention.prefill(q, cache, 1, slots, LENGTHS, counts, kernel="sdpa", **options)
        expected = reference(q, cache.keys[1], cache.values[1], slots, LENGTHS, counts, **options)
        assert error(out, expected) < 1e-5


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float64, 1e-12)])
def test_dtypes(dtype, bound):
    cache, slots = make(dtype=dtype)
    with cache:
        q = queries(len(slots), 8, 64, dtype)
        batch = attention.Batch(cache, np.array(slots), torch.tensor(LENGTHS))
        out = attention.decode(q, cache, 0, batch)
        assert out.dtype == dtype
        assert error(out, reference(q, cache.keys[0], cache.values[0], slots, LENGTHS, [1] * len(slots))) < bound


def test_a_window_layer_needs_no_row_before_its_window():
    cache, slots = make()
    with cache:
        q = queries(len(slots), 8, 64)
        expected = reference(q, cache.keys[0], cache.values[0], slots, LENGTHS, [1] * len(slots), window=100)
        for x in (cache.keys[0], cache.values[0]):  # what windows have passed may be given up
            for slot, length in zip(slots, LENGTHS):
                x[slot, : max(length - 100, 0)] = float("nan")
        assert error(attention.decode(q, cache, 0, slots, LENGTHS, window=100), expected) < 1e-5


def test_the_result_goes_where_it_is_wanted():
    cache, slots = make()
    with cache:
        q, out = queries(len(slots), 8, 64), torch.full((len(slots), 8, 64), float("nan"))
        assert attention.decode(q, cache, 0, slots, LENGTHS, out=out) is out
        assert torch.equal(out, attention.decode(q, cache, 0, slots, LENGTHS))
        with pytest.raises(ValueError, match=r"out must be contiguous \(9, 8, 64\)"):
            attention.decode(q, cache, 0, slots, LENGTHS, out=out[:, :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_stored_and_seen(dtype):
    cache, slots = make(dtype=dtype)
    with cache:
        n, k, v = len(slots), cache.keys[0], cache.values[0]
        q, rows = queries(n, 8, 64, dtype), (torch.tensor(slots), torch.tensor(LENGTHS) - 1)
        before = k.clone(), v.clone()
        new = torch.randn(2, n, 4, 64).to(dtype).unbind()
        out = attention.decode(q, cache, 0, slots, LENGTHS, new=new)
        for x, old, rows_new in zip((k, v), before, new):
            assert torch.equal(x[rows], rows_new)
            x[rows] = old[rows]
            assert torch.equal(x.nan_to_num(), old.nan_to_num())  # and nothing else was
            x[rows] = rows_new
        assert error(out, reference(q, k, v, slots, LENGTHS, [1] * n)) < (1e-5 if dtype == torch.float32 else 1e-2)
        batch = attention.Batch(cache, slots, LENGTHS)
        attention.decode(q, cache, 0, batch, new=new)
        shorter = [max(length - 1, 1) for length in LENGTHS]
        batch.update(slots, shorter)
        attention.decode(q, cache, 0, batch, new=new)
        assert torch.equal(k[torch.tensor(slots), torch.tensor(shorter) - 1], new[0])


@pytest.mark.parametrize(
    "new, text",
    [
        (lambda x: x, "new must be a pair of tensors"),
        (lambda x: (x, x[:, :2]), r"new: V \(9, 2, 64\) of torch.float32 on cpu must be \(9, 4, 64\)"),
        (lambda x: (x.double(), x), r"new: K .* of torch.float64 .* must be .* of torch.float32"),
    ],
)
def test_wrong_new_rows_are_refused_before_anything_is_stored(new, text):
    cache, slots = make()
    with cache:
        before = cache.keys[0].clone()
        with pytest.raises((TypeError, ValueError), match=text):
            attention.decode(queries(9, 8, 64), cache, 0, slots, LENGTHS, new=new(torch.zeros(9, 4, 64)))
        assert torch.equal(cache.keys[0].nan_to_num(), before.nan_to_num())


def test_update_serves_the_next_iteration_from_the_same_memory():
    cache, slots = make()
    with cache:
        batch = attention.Batch(cache, slots[:3], LENGTHS[:3])
        q, where = queries(3, 8, 64), batch.lengths_t.data_ptr()
        attention.decode(q, cache, 0, batch)
        batch.update(slots[4:7], LENGTHS[4:7])
        out = attention.decode(q, cache, 0, batch)
        expected = reference(q, cache.keys[0], cache.values[0], slots[4:7], LENGTHS[4:7], [1] * 3)
        assert error(out, expected) < 1e-5 and batch.lengths_t.data_ptr() == where
        assert batch.lengths_t.tolist() == list(LENGTHS[4:7]) and batch.slots_t.tolist() == slots[4:7]
        with pytest.raises(ValueError, match="update with 2 slots and 2 queries: the batch has 3 and 3"):
            batch.update(slots[:2], LENGTHS[:2])
        assert batch.slots.tolist() == slots[4:7]


def test_max_length_bounds_what_a_captured_batch_takes():
    cache, slots = make()
    with cache:
        batch = attention.Batch(cache, slots[:2], LENGTHS[:2], max_length=64)
        assert batch.max_length == 64
        with pytest.raises(ValueError, match=r"lengths\[1\] 65 must lie between 1 and 64 \(max_length is 64\)"):
            batch.update(slots[2:4], LENGTHS[2:4])


WRONG = {
    r"slots\[1\] 11 must lie between 0 and 10 \(the cache has 11 slots\)": {"slots": [0, 11]},
    r"slots\[0\] -1 must lie": {"slots": [-1, 3]},
    r"slots has slot 3 twice": {"slots": [3, 3]},
    r"slots is empty": {"slots": [], "lengths": []},
    r"lengths has 1 elements, slots has 2": {"lengths": [5]},
    r"lengths\[1\] 0 must lie between 1 and 512 \(max_tokens is 512\)": {"lengths": [5, 0]},
    r"lengths\[0\] 513 must lie between 1 and 512": {"lengths": [513, 5]},
    r"lengths\[0\] 301: slot \d+ has 300 rows backed: call step first": {"lengths": [301, 5]},
    r"lengths\[0\] 5: slot \d+ is not in use, or swapped out": {"slots": "free"},
    r"layer 2 must lie between 0 and 1": {"layer": 2},
    r"q \(2, 8, 32\) must be \[2 tokens, query_heads, 64\]": {"q": queries(2, 8, 32)},
    r"q \(3, 8, 64\) must be \[2 tokens": {"q": queries(3, 8, 64)},
    r"query_heads 6 must be a multiple of the cache's 4 KV heads": {"q": queries(2, 6, 64)},
    r"kernel 'fa9' must be one of best, fa3, triton": {"kernel": "fa9"},
    r"kernel sdpa does not take softcap 30.0 \(none\); no other kernel does": {"softcap": 30.0, "kernel": "sdpa"},
    r"no kernel supports this call: .*sdpa: softcap 30.0": {"softcap": 30.0},
    r"window -1 must be a number of tokens": {"window": -1},
    r"softcap -1.0 must be positive": {"softcap": -1.0},
    r"softcap None must be positive": {"softcap": None},
    r"softmax_scale nan must be a finite number": {"softmax_scale": math.nan},
    r"num_splits -1 must be a number of parts": {"num_splits": -1},
    r"slots\[1\] 4294967297 is larger than a cache can have": {"slots": [0, 2**32 + 1]},
    r"lengths\[0\] 18446744073709551615 is larger": {"lengths": np.array([2**64 - 1, 5], np.uint64)},
    r"layer: K is of torch.float32 on cpu, V of torch.float64 on cpu": {
        "layer": (torch.zeros(11, 512, 4, 64), torch.zeros(11, 512, 4, 64, dtype=torch.float64))
    },
    r"layer: K \(11, 512, 0, 64\) and V": {"layer": (torch.zeros(11, 512, 0, 64),) * 2},
    r"kernel sdpa does not take dtype bfloat16 over a cache of float32 \(only .*float32": {
        "q": queries(2, 8, 64, torch.bfloat16), "kernel": "sdpa"
    },
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_err_names_the_argument_and_its_limit(text, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cache, slots = make()
    with cache:
        free = next(s for s in range(cache.slots) if s not in slots)
        given = {"q": queries(2, 8, 64), "layer": 0, "slots": [slots[7], slots[8]], "lengths": [300, 512]} | WRONG[text]
        if given["slots"] == "free":
            cache.free(free)
            given.update(slots=[free, slots[8]], lengths=[5, 5])
        with pytest.raises(ValueError, match=text) as raised:
            attention.decode(given.pop("q"), cache, **given)
        assert "\n" not in str(raised.value)


def test_err_types():
    cache, slots = make()
    with cache:
        with pytest.raises(TypeError, match="lengths must be a sequence of integers"):
            attention.decode(queries(2, 8, 64), cache, 0, slots[:2], [1.5, 2.0])
        for name, given in {
            "slots must be a sequence of integers, not [[1], [2, 3]]": {"slots": [[1], [2, 3]]},
            "lengths must be a sequence of integers, not [[3], [4]]": {"lengths": torch.tensor([[3], [4]])},
            "q must be a tensor, [tokens, query_heads, head_dim], not None": {"q": None},
            "layer: K and V must be tensors, not NoneType and NoneType": {"layer": (None, None)},
            "new: K must be a tensor, not ndarray": {"new": (np.zeros((2, 4, 64)),) * 2},
        }.items():
            call = {"q": queries(2, 8, 64), "layer": 0, "slots": slots[:2], "lengths": LENGTHS[:2], **given}
            with pytest.raises(TypeError, match=re.escape(name)):
                attention.decode(call.pop("q"), cache, **call)
        with pytest.raises(ValueError, match="max_length 1.5 must be a number of rows"):
            attention.Batch(cache, slots[:2], LENGTHS[:2], max_length=1.5)
        with pytest.raises(ValueError, match="lengths is missing"):
            attention.decode(queries(2, 8, 64), cache, 0, slots[:2])
        with pytest.raises(ValueError, match="query_lengths is missing"):
            attention.prefill(queries(2, 8, 64), cache, 0, slots[:2], [300, 512])
        batch = attention.Batch(cache, slots[7:9], LENGTHS[7:9], [2, 3])
        with pytest.raises(ValueError, match="query_lengths of the batch go up to 3: decode takes 1"):
            attention.decode(queries(5, 8, 64), cache, 0, batch)
        with pytest.raises(TypeError, match="which has its own lengths"):
            attention.prefill(queries(5, 8, 64), cache, 0, batch, LENGTHS[7:9])
        other, _ = make()
        with other, pytest.raises(ValueError, match="a Batch of another cache"):
            attention.prefill(queries(5, 8, 64), other, 0, batch)


def test_err_a_closed_cache():
    cache, slots = make()
    batch = attention.Batch(cache, slots[:2], LENGTHS[:2])
    cache.close()
    with pytest.raises(ValueError, match="cache has no keys and values: .* not closed"):
        attention.Batch(cache, slots[:2], LENGTHS[:2])
    with pytest.raises(ValueError, match="or is closed"):
        attention.decode(queries(2, 8, 64), cache, 0, batch)


def test_a_window_of_all_rows_is_none():
    cache, slots = make()
    with cache:
        q, options = queries(2, 8, 64), {"slots": slots[:2], "lengths": LENGTHS[:2]}
        out = attention.decode(q, cache, 0, window=2**40, **options)
        assert torch.equal(out, attention.decode(q, cache, 0, **options))


def test_err_rows_of_a_freed_slot():
    cache, slots = make()
    with cache:
        batch = attention.Batch(cache, slots[:2], LENGTHS[:2])
        cache.free(slots[1])
        with pytest.raises(ValueError, match=rf"lengths\[1\] 63: slot {slots[1]} is not in use"):
            batch.update(slots[:2], LENGTHS[:2])


# ---- kernels that are not here ------------------------------------------------------------------------------------

HOPPER = attention.Shape("decode", 32, 8, 128, torch.bfloat16, torch.bfloat16, "cuda", (9, 0), tile_rows=128)
REFUSED = {
    ("fa3", "device cpu (only cuda)"): {"device": "cpu", "capability": (0, 0)},
    ("fa3", "a GPU of compute capability 8.0 (from 9.0 on)"): {"capability": (8, 0)},
    ("fa3", "a GPU of compute capability 10.0 (only 9.0)"): {"capability": (10, 0)},
    ("fa3", "dtype float32 (only bfloat16, float16, float8_e4m3fn)"): {
        "q_dtype": torch.float32, "kv_dtype": torch.float32
    },
    ("fa3", "a cache of tile_rows 1 (a multiple of 128, since it loads whole tiles)"): {"tile_rows": 1},
    ("fa3", "a cache of tile_rows 192 (a multiple of 128, since it loads whole tiles)"): {"tile_rows": 192},
    ("fa3", "window 100 in decode (its tiles begin at the window there, and end past those backed)"): {"window": 100},
    ("fa3", "head_dim 512 (multiples of 8 up to 256)"): {"head_dim": 512},
    ("triton", "head_dim 65 (multiples of 8 up to 256)"): {"head_dim": 65},
    ("fa3", "dtype bfloat16 over a cache of float8_e4m3fn (only bfloat16, float16, float8_e4m3fn)"): {
        "kv_dtype": torch.float8_e4m3fn
    },
    ("triton", "a GPU of compute capability 7.0 (from 7.5 on)"): {"capability": (7, 0)},
}  # fmt: skip


@pytest.mark.parametrize("name, text", REFUSED)
def test_err_what_a_kernel_does_not_take(name, text, monkeypatch):
    shape = replace(HOPPER, **REFUSED[name, text])
    assert table.KERNELS[name].refusal(shape) == text
    monkeypatch.setattr(table.SDPA, "unavailable", lambda self, shape: None)
    with pytest.raises(ValueError) as raised:
        table.require(name, shape)
    assert str(raised.value).startswith(f"kernel {name} does not take {text}; ") and "\n" not in str(raised.value)


@pytest.mark.parametrize("name, how", [("fa3", "pip install fa3-fwd"), ("triton", "pip install triton")])
def test_err_a_kernel_that_is_not_installed(name, how, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *a: None)
    with pytest.raises(ValueError, match=f"kernel {name} does not run here: .* is not installed .*{how}.*sdpa"):
        table.require(name, HOPPER)


def test_best_says_why_not_the_others(monkeypatch):
    monkeypatch.setattr(table.KERNELS["triton"], "unavailable", lambda shape: None)
    choice = table.choose(replace(HOPPER, requests=64, rows=8192, tile_rows=1))
    assert choice.kernel == "triton" and "tile_rows 1" in choice.refused["fa3"] and "not fa3: " in choice.why
    capped = table.choose(replace(HOPPER, tile_rows=1, softcap=5.0))
    assert capped.kernel == "triton"
    monkeypatch.undo()
    cache, _ = make()
    with cache:
        assert attention.best("decode", cache, 8).kernel == "sdpa"
        assert attention.best("prefill", cache, 8).kernel == "sdpa"
        assert attention.best("decode", cache, 8).refused["fa3"] == "device cpu (only cuda)"


def test_fa3_takes_what_its_tiles_allow():
    fa3 = table.KERNELS["fa3"]
    for tile_rows, phase, reason in ((128, "decode", None), (176, "decode", None), (1, "prefill", None),
                                     (1408, "decode", None)):  # fmt: skip
        assert fa3.refusal(replace(HOPPER, tile_rows=tile_rows, phase=phase)) == reason
    assert "tile_rows 1 " in fa3.refusal(replace(HOPPER, phase="prefill", window=100, tile_rows=1))
    # 176 rows are those of the kernel without a mask at head_dim 128 in 16 bits alone.
    assert "tile_rows 176" in fa3.refusal(replace(HOPPER, tile_rows=176, head_dim=64))
    fp8 = {"q_dtype": torch.float8_e4m3fn, "kv_dtype": torch.float8_e4m3fn}
    assert "tile_rows 176" in fa3.refusal(replace(HOPPER, tile_rows=176, **fp8))


def test_best_prefers_one_launch_to_one_a_request(monkeypatch):
    for name in table.KERNELS:
        here = None if name in ("fa3", "triton") else "not here"
        monkeypatch.setattr(table.KERNELS[name], "unavailable", lambda shape, here=here: here)
    prompts = replace(HOPPER, phase="prefill", tile_rows=1)
    assert table.choose(prompts).kernel == "fa3"
    assert table.choose(replace(prompts, requests=100, tile_rows=128)).kernel == "fa3"
    many = table.choose(replace(prompts, requests=100))
    assert many.kernel == "triton" and "100 launches, one per request" in many.why
    for name in table.KERNELS:  # rather so than not at all
        if name != "fa3":
            monkeypatch.setattr(table.KERNELS[name], "unavailable", lambda shape: "not here")
    assert table.choose(replace(prompts, requests=100)).kernel == "fa3"


def test_best_decodes_with_triton_but_for_many_long_requests(monkeypatch):
    for name in table.KERNELS:
        monkeypatch.setattr(table.KERNELS[name], "unavailable", lambda shape: None)
    for requests, rows in ((0, 0), (1, 100_000), (33, 100_000), (256, 4095)):
        choice = table.choose(replace(HOPPER, requests=requests, rows=rows))
        assert choice.why.startswith("triton: the fastest measured for decode")
    assert table.choose(replace(HOPPER, requests=34, rows=4096)).kernel == "fa3"
    # Where Triton's kernel was not measured, or converts what it reads.
    assert table.choose(replace(HOPPER, head_dim=256, tile_rows=384 * 5)).kernel == "fa3"
    assert table.choose(replace(HOPPER, q_dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn,
                                tile_rows=224 * 3)).kernel == "fa3"  # fmt: skip
    monkeypatch.setattr(table.KERNELS["triton"], "unavailable", lambda shape: "not here")
    assert table.choose(HOPPER).kernel == "fa3"


def test_tile_rows():
    with pytest.raises(ValueError, match="query_heads 3 must be a multiple of kv_heads 2"):
        attention.tile_rows("fa3", 3, 2, 128)
    with pytest.raises(TypeError, match="dtype must be a torch.dtype"):
        attention.tile_rows("fa3", 4, 2, 128, "bf16")
    with pytest.raises(TypeError, match="query_heads must be an integer, not 32.0"):
        attention.tile_rows("fa3", 32.0, 8, 128)
    assert attention.tile_rows("fa3", np.int64(32), np.int64(8), 128) == 128
    assert attention.tile_rows("triton", 32, 8, 128) == attention.tile_rows("sdpa", 32, 8, 128) == 1
    assert attention.tile_rows("fa3", 32, 8, 128) == 128
    assert attention.tile_rows("fa3", 32, 8, 128, torch.float8_e4m3fn) == 224


def test_the_cache_knows_the_rows_of_its_slots():
    cache, slots = make()
    with cache:
        assert cache.tokens(slots) == list(LENGTHS)
        cache.swap_out(slots[3])
        cache.free(slots[4])
        assert cache.tokens(slots[3:5]) == [0, 0]


# ---- masks and tables of kernels that need a GPU, on the CPU ---------------------------------------------------------


# Requests of 8 KV heads, rows; the parts that were the fastest on 132 multiprocessors, or within 2 % of them.
PARTS = {
    (1, 1024): (8,), (1, 4096): (16, 32), (1, 16384): (24, 33, 49), (2, 16384): (16, 24), (4, 8192): (8,),
    (4, 32768): (8,), (8, 1024): (4,), (8, 8192): (3, 4), (8, 32768): (4,), (16, 16384): (2,), (16, 65536): (2,),
    (32, 1024): (1,), (32, 8192): (1,), (32, 32768): (1,), (64, 4096): (2, 3, 4), (128, 2048): (1, 2),
    (256, 1024): (1,),
}  # fmt: skip


@pytest.mark.parametrize("requests, rows", PARTS)
def test_decode_is_split_as_was_fastest(requests, rows, monkeypatch):
    from pyvmem.attention import triton

    monkeypatch.setattr(triton, "multiprocessors", lambda index: 132)
    assert triton._splits(8 * requests, rows, torch.device("cuda", 0)) in PARTS[requests, rows]


def test_triton_in_its_interpreter():
    pytest.importorskip("triton")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from attention_triton import main
main()
"""
    import os
    from pathlib import Path

    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    if done.stdout.startswith("interpreter: "):
        pytest.skip(done.stdout.strip())
    assert "cases right" in done.stdout
