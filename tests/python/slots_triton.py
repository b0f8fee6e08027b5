"""Decode attention by slots against float64: on a GPU, or in Triton's interpreter (test_vllm_slots.py).

SPDX-License-Identifier: MIT
"""

import itertools

import torch
import triton.runtime.interpreter as interpreter
from attention_triton import fault

from pyvmem.vllm.slots import kernels
from pyvmem.vllm.slots.kernels import Work, decode

TOKENS = 16
LENGTHS = ((100, 1, 33, 300, 64), (500,), (5, 5), (0, 100, 0, 33, 0), (77,) * 9)


def cache(lengths, kv_heads, dim, device, dtype):
    """K and V with the slots' rows in no order, and what each request's first block is. Past a length stands NaN."""
    blocks = max(lengths) // TOKENS + 2
    kv = torch.randn(len(lengths) * blocks + 3, TOKENS, kv_heads, 2 * dim, device=device).to(dtype)
    table = torch.full((len(lengths), 3), 10**6, dtype=torch.int32)
    table[:, 0] = torch.randperm(len(lengths)) * blocks + 1
    for first, length in zip(table[:, 0].tolist(), lengths):
        kv[first : first + blocks].view(-1, kv_heads, 2 * dim)[length:] = float("nan")
    return kv, table.to(device)


def new_rows(kv, table, lengths):
    """The last row of each request, taken out of the cache, and where it belongs."""
    places = table[:, 0].long() * TOKENS + torch.tensor(lengths, device=table.device) - 1
    places[torch.tensor(lengths) == 0] = -1
    rows = kv.view(-1, *kv.shape[2:])
    k, v = rows[places].chunk(2, -1)  # of an unused entry: the cache's last row, which is not stored
    rows[places[places >= 0]] = float("nan")
    return k.clone(), v.clone(), places


def store(kv, k, v, places):
    used = places >= 0
    kv.view(-1, *kv.shape[2:])[places[used]] = torch.cat((k, v), -1)[used]


def reference(q, kv, first, length, window, softcap):
    rows = kv.view(-1, *kv.shape[2:])[first * TOKENS : first * TOKENS + length][-window:].double()
    dim, group = q.shape[1], q.shape[0] // kv.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in rows.split(dim, -1))
    scores = torch.einsum("hd,nhd->hn", q.double(), k) * dim**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)


def out_of_order():
    """Runs the programs of each of the interpreter's launches in another order, as a GPU may."""
    builder = interpreter.interpreter_builder
    start, order = builder.set_grid_dim, []

    def launch(*grid):
        order[:] = torch.randperm(grid[0]).tolist()
        start(*grid)

    go = builder.set_grid_idx
    builder.set_grid_dim = launch
    builder.set_grid_idx = lambda x, y, z: go(order[x], y, z)


def main(device, dtype, most):
    torch.manual_seed(0)
    cases = [*itertools.product(LENGTHS, [(8, 2, 64)], [(0, 0.0)]), (LENGTHS[0], (2, 2, 80), (0, 0.0)),
             (LENGTHS[0], (8, 2, 64), (70, 0.0)), (LENGTHS[3], (8, 2, 64), (0, 5.0)),
             ((100,), (4, 1, 64), (0, 0.0)), ((130, 3), (4, 1, 64), (0, 0.0))]  # fmt: skip
    ways = itertools.product((False, True), cases)
    for append, (lengths, (heads, kv_heads, dim), (window, softcap)) in ways:
        kv, table = cache(lengths, kv_heads, dim, device, dtype)
        q = torch.randn(len(lengths), heads, dim, device=device).to(dtype)
        out = torch.zeros_like(q)
        work = Work(len(lengths), torch.device(device), kv_heads, window)
        lengths_t = torch.tensor(lengths, dtype=torch.int32, device=device)
        work.plan(lengths_t)
        for place in kernels._parts(lengths_t.device, heads // kv_heads, dim)[1:]:
            place.fill_(float("nan"))  # nothing may be read there that this call has not written
        given, before = new_rows(kv, table, lengths) if append else None, kv.clone()
        decode(q, kv.transpose(1, 2), out, table, lengths_t, work, dim**-0.5, softcap, given)
        assert not work.ended.any()
        if append:
            store(before, *given)
        assert torch.equal(kv.nan_to_num(), before.nan_to_num()), (lengths, append)
        for i, length in enumerate(lengths):
            if length:
                expected = reference(q[i], kv, int(table[i, 0]), length, window, softcap)
                wrong = (out[i] - expected).abs().max().item()
                assert wrong < most, (lengths, i, heads, dim, window, softcap, append, wrong)
    print("right")


if __name__ == "__main__":
    said = None if torch.cuda.is_available() else fault()
    if said:
        print("interpreter:", said)
    elif torch.cuda.is_available():
        main("cuda", torch.bfloat16, 0.02)
    else:
        out_of_order()
        main("cpu", torch.float32, 1e-5)
