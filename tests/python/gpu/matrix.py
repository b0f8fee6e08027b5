"""Operations of torch that must work on virtual tensors on a GPU: one function a case.

Run as ``matrix.py BACKEND PAGE_SIZE CASE...``: one JSON line a case. test_torch.py runs it, in processes of its own,
since one bad access costs a process its CUDA context.

SPDX-License-Identifier: MIT
"""

import json
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from late import Lag  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem.tensor import tensor_at  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20


class Memory:
    """Makes tensors whose neighbouring pages lie apart in physical memory."""

    def __init__(self, backend, page_size):
        self.context = pyvmem.Context(backend)
        self.page_size = page_size or min(self.context.page_sizes)
        self.backdrop = "backdrop" in self.context.info().capabilities
        self.held = []

    def scattered(self, shape, dtype=torch.float32):
        """A tensor over pages in random order."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        n = -(-nbytes // self.page_size)
        range_ = self.context.reserve(n * self.page_size, backdrop=self.backdrop)
        order = np.random.default_rng(n).permutation(n)
        range_.map(self.context.create(self.page_size, n), order * self.page_size)
        self.held.append(range_)
        return tensor_at(range_._owner, range_.addr, shape, dtype, "cuda")

    def twin(self, plain):
        """A scattered copy of a tensor in cudaMalloc's memory."""
        tensor = self.scattered(plain.shape, plain.dtype)
        tensor.copy_(plain)
        return tensor

    def drop(self):
        torch.cuda.synchronize()
        for range_ in self.held:
            range_.close()
        self.held.clear()


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


# ---- copies and fills ---------------------------------------------------------------------------------------


def fill(memory):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64):
        t = memory.scattered((1000, 1001), dtype)
        t.fill_(3)
        assert torch.equal(t, torch.full((1000, 1001), 3, dtype=dtype, device="cuda"))
        t.zero_()
        assert not t.any()


def copy_(memory):
    plain = randn(3000, 1024)
    t = memory.scattered((3000, 1024))
    t.copy_(plain)
    assert torch.equal(t, plain)
    t.copy_(plain.cpu())
    assert torch.equal(t, plain)
    t.copy_(plain.cpu().pin_memory(), non_blocking=True)
    assert torch.equal(t, plain)
    t.copy_(plain.to(torch.bfloat16))
    assert torch.equal(t, plain.to(torch.bfloat16).float())


def slice_copy_(memory):
    plain = randn(700, 513)
    t = memory.twin(torch.zeros(900, 1024, device="cuda"))
    t[100:800, 5:518].copy_(plain)
    assert torch.equal(t[100:800, 5:518], plain)
    assert not t[:100].any() and not t[800:].any() and not t[:, :5].any() and not t[:, 518:].any()
    t[::2, ::3].copy_(torch.ones(450, 342, device="cuda"))
    assert torch.equal(t[::2, ::3], torch.ones(450, 342, device="cuda"))


def clone(memory):
    plain = randn(2000, 2000)
    t = memory.twin(plain)
    assert torch.equal(t.clone(), plain)
    assert torch.equal(t.T.contiguous(), plain.T.contiguous())


def cpu(memory):
    plain = randn(2000, 1500)
    t = memory.twin(plain)
    assert torch.equal(t.cpu(), plain.cpu())
    assert torch.equal(t[::3].cpu(), plain[::3].cpu())


def index_put(memory):
    t = memory.twin(torch.zeros(4096, 256, device="cuda"))
    rows = torch.randperm(4096, device="cuda")[:1000]
    values = randn(1000, 256)
    t[rows] = values
    assert torch.equal(t[rows], values)
    assert torch.equal(t.index_select(0, rows), values)
    counts = memory.twin(torch.zeros(512, dtype=torch.int32, device="cuda"))
    where = torch.randint(0, 512, (100_000,), device="cuda")
    counts.index_put_((where,), torch.ones(100_000, dtype=torch.int32, device="cuda"), accumulate=True)
    assert torch.equal(counts, torch.bincount(where, minlength=512).int())


def matmul(memory):
    a, b = randn(1024, 2048, dtype=torch.bfloat16), randn(2048, 1536, dtype=torch.bfloat16)
    out = memory.scattered((1024, 1536), torch.bfloat16)
    torch.mm(memory.twin(a), memory.twin(b), out=out)
    assert torch.equal(out, a @ b)


def float8(memory):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        plain = randn(512, 512).to(dtype)
        t = memory.scattered((512, 512), dtype)
        t.copy_(plain)
        assert torch.equal(t.view(torch.uint8), plain.view(torch.uint8))
        assert torch.equal(t.float(), plain.float())


# ---- attention ----------------------------------------------------------------------------------------------


def _sdpa(memory, kernel):
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    for heads, length, causal in ((8, 4096, True), (8, 1000, False), (4, 8192, True)):
        q = randn(2, heads, length, 128, dtype=torch.bfloat16)
        k, v = (randn(2, heads, length, 128, dtype=torch.bfloat16) for _ in range(2))
        with sdpa_kernel(kernel):
            plain = scaled_dot_product_attention(q, k, v, is_causal=causal)
            ours = scaled_dot_product_attention(memory.twin(q), memory.twin(k), memory.twin(v), is_causal=causal)
        assert torch.equal(ours, plain)
        # K and V as a cache holds them: rows of all heads, longer than what is read.
        cache = [memory.scattered((2, length + 500, heads, 128), torch.bfloat16) for _ in range(2)]
        for c, x in zip(cache, (k, v)):
            c.zero_()
            c[:, :length].copy_(x.transpose(1, 2))
        layout = [torch.zeros_like(c).copy_(c) for c in cache]
        with sdpa_kernel(kernel):
            ours, plain = (
                scaled_dot_product_attention(q, *(c[:, :length].transpose(1, 2) for c in pair), is_causal=causal)
                for pair in (cache, layout)
            )
        assert torch.equal(ours, plain)


def sdpa_flash(memory):
    from torch.nn.attention import SDPBackend

    _sdpa(memory, SDPBackend.FLASH_ATTENTION)


def sdpa_cudnn(memory):
    from torch.nn.attention import SDPBackend

    _sdpa(memory, SDPBackend.CUDNN_ATTENTION)


def flex_attention(memory):
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attention

    compiled = torch.compile(attention)
    q, k, v = (randn(1, 4, 2048, 64, dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 2048, 2048, device="cuda")
    plain = compiled(q, k, v, block_mask=mask)
    ours = compiled(memory.twin(q), memory.twin(k), memory.twin(v), block_mask=mask)
    assert torch.equal(ours, plain)


def triton_kernel(memory):
    import triton
    import triton_kernels

    n = 5_000_001
    x, y = randn(n), randn(n)
    ours, plain = memory.scattered((n,)), torch.empty(n, device="cuda")
    grid = (triton.cdiv(n, 1024),)
    triton_kernels.axpy[grid](memory.twin(x), memory.twin(y), ours, 2.0, n, BLOCK=1024)
    triton_kernels.axpy[grid](x, y, plain, 2.0, n, BLOCK=1024)
    assert torch.equal(ours, plain)


# ---- memory that changes under running programs -------------------------------------------------------------


def graph_across_a_remap(memory):
    context, size = memory.context, memory.page_size
    range_ = context.reserve(8 * size, backdrop=memory.backdrop)
    pages, other = context.create(size, 8), context.create(size)
    range_.map(pages)
    memory.held.append(range_)
    x = tensor_at(range_._owner, range_.addr, (8 * size // 4,), torch.float32, "cuda")
    x.copy_(torch.arange(x.numel(), device="cuda"))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mul(x, 2, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(x, 2, out=y)
    expected = torch.arange(x.numel(), device="cuda").float()
    spare = int(other.handles[0])
    for turn in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected * 2), turn
        slot = turn % 8
        span = slice(slot * size // 4, (slot + 1) * size // 4)
        # The page at this slot gives way to the spare one, with other contents; nothing runs meanwhile.
        gone, _ = context.query(range_.addr + slot * size)
        context.map(range_.addr + slot * size, spare, replace=True)
        spare = gone
        x[span] = float(turn)
        expected[span] = float(turn)
        torch.cuda.synchronize()


def ten_million_words_beside_maps(memory):
    """A kernel verifies data while its neighbours in the same 2 MiB blocks are mapped and unmapped."""
    context, size = memory.context, memory.page_size
    words = 10_000_000
    n = 2 * -(-words * 4 // size)  # every other page holds data, the rest come and go
    n += n % 2
    range_ = context.reserve(n * size, backdrop=memory.backdrop)
    data, churn = context.create(size, n // 2), context.create(size, n // 2)
    offsets = np.arange(n) * size
    rng = np.random.default_rng(0)
    context.map(range_.addr + offsets[::2], data, fine=True)
    context.map(range_.addr + offsets[1::2], rng.permutation(churn.handles), fine=True)
    memory.held += [range_, data, churn]
    whole = tensor_at(range_._owner, range_.addr, (n // 2, 2, size // 4), torch.int32, "cuda")
    mine = whole[:, 0]
    pattern = torch.arange(mine.numel(), device="cuda", dtype=torch.int32).view_as(mine) * 40503
    mine.copy_(pattern)
    torch.cuda.synchronize()
    stop, failure, turns = threading.Event(), [], [0]
    batch = min(64, n // 2)

    def work():
        try:
            while not stop.is_set():
                some = rng.choice(n // 2, batch, replace=False)
                addrs = range_.addr + offsets[1::2][some]
                context.unmap(addrs, size)
                context.map(addrs, rng.permutation(churn.handles)[:batch], fine=True)
                turns[0] += 1
        except BaseException as error:
            failure.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    checks, now = 0, time.monotonic()
    end, last = now + 4, now + 120  # beside other tests, a turn may take a second

    def enough():
        return turns[0] > 10 and checks * words >= words

    while (now < end or not enough()) and now < last and not failure:
        for _ in range(20):
            wrong += (mine != pattern).sum()
        torch.cuda.synchronize()
        checks += 20
        now = time.monotonic()
    stop.set()
    worker.join()
    assert not failure, failure
    assert wrong.item() == 0
    assert enough()
    return {"words": words, "checks": checks, "batch": batch, "batches unmapped and mapped": turns[0]}


def beside_the_caching_allocator(memory):
    """Virtual tensors and torch's own come and go between each other, and keep their contents."""
    context = memory.context
    rng = np.random.default_rng(0)
    kept = []
    for turn in range(60):
        v = pyvmem.virtual_empty((64, 65536), torch.float32, "cuda", context=context)
        v.commit(rows=slice(0, int(rng.integers(1, 65))))
        rows = v.resident_bytes // (4 * 65536)
        v.tensor[:rows] = float(turn)
        plain = torch.full((int(rng.integers(1, 30)) * 100_000,), float(turn), device="cuda")
        kept.append((turn, rows, v, plain))
        if len(kept) > 6:
            turn_, rows_, v_, plain_ = kept.pop(int(rng.integers(0, len(kept))))
            assert (v_.tensor[:rows_] == turn_).all() and (plain_ == turn_).all()
            del v_, plain_
        if turn % 7 == 0:
            torch.cuda.empty_cache()
    for turn, rows, v, plain in kept:
        assert (v.tensor[:rows] == turn).all() and (plain == turn).all()
    return {"allocator": torch.cuda.memory.get_allocator_backend(), "reserved": torch.cuda.memory_reserved()}


def dropped_with_kernels_queued(memory):
    """A tensor that is dropped while kernels that read it are queued stays until they have run."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    a = randn(4096, 4096)
    for turn in range(5):
        v = pyvmem.virtual_empty((4096, 4096), torch.float32, "cuda", context=memory.context)
        v.commit()
        v.tensor.fill_(float(turn))
        torch.cuda.synchronize()
        sums = []
        for stream in streams:
            with torch.cuda.stream(stream):
                b = a
                for _ in range(10):
                    b = b @ a
                sums.append(v.tensor.sum())
        del v
        assert memory.context.stats().created == 0
        assert [s.item() for s in sums] == [turn * 4096.0 * 4096.0] * 2


def streams(memory):
    t = memory.twin(torch.zeros(1 << 20, device="cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        t.add_(1)
        t.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    t.add_(1)
    assert (t == 2).all()


CASES = {
    case.__name__: case
    for case in (
        fill,
        copy_,
        slice_copy_,
        clone,
        cpu,
        index_put,
        matmul,
        float8,
        streams,
        sdpa_flash,
        sdpa_cudnn,
        triton_kernel,
        graph_across_a_remap,
        beside_the_caching_allocator,
        dropped_with_kernels_queued,
        ten_million_words_beside_maps,
        flex_attention,
    )
}


def main(backend, page_size, names):
    memory = Memory(backend, int(page_size))
    for name in names:
        torch.manual_seed(0)
        print(json.dumps({"case": name, "started": True}), flush=True)
        try:
            with Lag().everywhere():
                said = {"ok": True, "seen": CASES[name](memory)}
            memory.drop()
        except Exception:
            said = {"ok": False, "error": traceback.format_exc()}
        print(json.dumps({"case": name, **said}), flush=True)
        if not said["ok"]:  # the CUDA context may be lost: the rest gets a new process
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
