"""Virtual tensors: ordinary torch tensors over memory that comes and goes.

SPDX-License-Identifier: MIT
"""

import gc
import itertools
import threading

import pytest
from conftest import forks, python

import pyvmem

torch = pytest.importorskip("torch")

KIB, MIB = 1 << 10, 1 << 20

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.fixture
def empty(context, device):
    """virtual_empty on the backend under test."""

    def make(shape, dtype=torch.float32, **options):
        return pyvmem.virtual_empty(shape, dtype, device, context=context, **options)

    return make


def wait_for_kernels(v):
    """On a GPU, no kernel in flight may access what is given up."""
    if v.tensor.is_cuda:
        torch.cuda.synchronize(v.tensor.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(empty, device, dtype):
    v = empty((1024, 64), dtype)
    v.commit()
    values = torch.randint(0, 2, (1024, 64), device=device).to(dtype)
    v.tensor.copy_(values)
    assert v.tensor.dtype == dtype and v.tensor.shape == (1024, 64)
    as_bytes = [t.contiguous().view(torch.uint8) for t in (v.tensor, values)]
    assert torch.equal(*as_bytes)


def test_it_is_an_ordinary_tensor(empty, device):
    v = empty((8, 16))
    v.commit()
    t = v.tensor
    assert type(t) is torch.Tensor
    assert t.device.type == device and t.is_contiguous() and t.is_leaf and not t._is_view()
    assert t.data_ptr() == v.addr
    t.fill_(2.0)
    assert torch.equal(t.clone().cpu(), torch.full((8, 16), 2.0))
    assert (t @ t.T).sum().item() == 8 * 8 * 64
    t.requires_grad_()
    (t * 3).sum().backward()
    assert torch.equal(t.grad.cpu(), torch.full((8, 16), 3.0))


def test_far_larger_than_memory(empty, context):
    v = empty((1 << 28, 8192), torch.bfloat16)  # 4 TiB
    assert v.nbytes == 4 << 40
    last = (1 << 28) - 1
    v.commit(rows=last)
    v.tensor[last] = 1.5
    assert v.tensor[last].float().sum().item() == 1.5 * 8192
    assert v.resident_bytes == context.stats().mapped <= 2 * max(context.page_sizes)


def test_commit_and_decommit_of_rows(empty, context):
    size = min(context.page_sizes)
    v = empty((64, size // 4))  # a row is a page
    assert v.page_size == size
    assert v.resident_bytes == 0
    assert v.commit(rows=slice(3, 7)) == 4 * size
    assert v.commit(rows=range(5, 9)) == 2 * size
    assert v.commit(rows=torch.tensor(0)) == size
    assert v.resident_bytes == context.stats().mapped == 7 * size
    v.tensor[3:9] = 4.0
    wait_for_kernels(v)
    assert v.decommit(rows=slice(4, 6)) == 2 * size
    assert v.tensor[3].sum().item() == v.tensor[6].sum().item() == size
    assert v.decommit() == 5 * size
    assert v.resident_bytes == context.stats().mapped == 0


def test_rows_share_pages(empty, context):
    size = min(context.page_sizes)
    v = empty((100, size // 16))  # four rows to a page
    assert v.commit(rows=slice(0, 1)) == size
    assert v.commit(rows=slice(3, 5)) == size
    v.tensor[:8] = 1.0
    wait_for_kernels(v)
    assert v.decommit(rows=slice(1, 4)) == 0  # no page lies wholly within
    assert v.decommit(rows=slice(3, 8)) == size
    assert v.tensor[:4].sum().item() == 4 * (size // 16)
    assert v.commit(rows=slice(96, 100)) == size
    assert v.decommit(rows=slice(96, 100)) == size


@pytest.mark.parametrize("rows", [64, -1, slice(0, 65), slice(-1, 3), slice(5, 3), range(60, 66)])
def test_rows_outside_the_tensor(empty, rows):
    v = empty((64, 1024))
    with pytest.raises(IndexError):
        v.commit(rows=rows)
    with pytest.raises(ValueError, match="rows"):
        v.commit(rows=slice(0, 10, 2))
    for wrong in (1.5, "x", [1, 2], slice(0, 1.5)):
        with pytest.raises(TypeError, match="rows"):
            v.commit(rows=wrong)
    assert v.resident_bytes == 0


def test_the_end_of_a_tensor_that_ends_within_a_page(empty, context):
    v = empty((3, 1000))
    size = min(context.page_sizes)
    assert v.commit() == size
    v.tensor.fill_(1.0)
    assert v.tensor.sum().item() == 3000
    assert v.decommit() == size


@pytest.mark.parametrize("shape", [0, (0,), (5, 0, 3), (), (1,)])
def test_small_shapes(empty, device, shape):
    v = empty(shape)
    v.commit()
    expected = torch.empty(shape, device=device)
    assert v.tensor.shape == expected.shape and v.tensor.numel() == expected.numel()
    v.tensor.fill_(1.0)
    assert v.tensor.sum().item() == expected.numel()


def test_fresh_memory_is_zero_and_zero_clears_memory_used_before(empty):
    v = empty((256, 4096), zero=True)
    for _ in range(4):
        v.commit()
        assert not v.tensor.any()
        v.tensor.fill_(float("nan"))
        wait_for_kernels(v)
        v.decommit()


def test_unbacked_rows_read_as_zero_where_the_backend_has_a_backdrop(empty, context):
    if "backdrop" not in context.info().capabilities:
        return
    size = min(context.page_sizes)
    v = empty((8, size // 4))
    v.commit(rows=2)
    v.tensor[2] = 1.0
    v.backdrop(rows=slice(0, 4))  # the cuda backend has it behind backed rows only, until it is asked
    assert v.tensor[:4].sum().item() == size // 4


def test_every_page_size(empty, context):
    for size in context.page_sizes:
        v = empty((5, 3 * size // 4 // 4), page_size=size)
        v.commit(rows=slice(1, 3))
        v.tensor[1:3] = 2.0
        assert v.resident_bytes % size == 0
        assert v.tensor[1:3].sum().item() == 2.0 * v.tensor[1:3].numel()
    with pytest.raises(ValueError):
        empty(4, page_size=4096)


def test_out_of_memory_changes_nothing(empty, context):
    v = empty((1024, 65536))
    v.commit(rows=slice(0, 8))
    held = v.resident_bytes
    context.set_budget(held + (1 << 20))
    with pytest.raises(pyvmem.OutOfMemory):
        v.commit()
    assert v.resident_bytes == context.stats().created == held


def test_wrong_arguments(empty, context, device):
    with pytest.raises(ValueError, match="shape"):
        empty((-1, 2))
    for shape in (1.5, "x", (2, None), None):
        with pytest.raises(TypeError, match="shape"):
            empty(shape)
    with pytest.raises(ValueError, match=r"2\^46|2\^64"):
        empty((1 << 40, 1 << 40))
    with pytest.raises(TypeError, match="dtype"):
        empty(4, "float32")
    with pytest.raises(TypeError, match="context"):
        pyvmem.virtual_empty(4, device=device, context=device)
    for wrong in ("meta", "nonsense", 1.5):
        with pytest.raises(ValueError, match="device"):
            pyvmem.virtual_empty(4, device=wrong, context=context)
    with pytest.raises(ValueError, match="page_size"):
        empty(4, page_size=4096)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no CUDA device"):
            pyvmem.virtual_empty(4, device="cuda")
    other = "cuda" if device == "cpu" else "cpu"
    if other == "cpu" or torch.cuda.is_available():
        with pytest.raises(ValueError):
            pyvmem.virtual_empty(4, device=other, context=context)


# ---- lifetimes ----------------------------------------------------------------------------------------------


def test_a_view_keeps_the_memory(empty, context):
    v = empty((64, 4096))
    v.commit()
    view = v.tensor[10:12].T
    view.fill_(5.0)
    v.close()
    v.close()
    del v
    gc.collect()
    assert view.sum().item() == 5.0 * 2 * 4096
    assert context.stats().mapped == max(64 * 4096 * 4, min(context.page_sizes))
    del view
    gc.collect()
    stats = context.stats()
    assert (stats.reserved, stats.created, stats.mapped) == (0, 0, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(["context", "handle", "tensor", "view"])))
def test_any_order_of_garbage_collection(backend, device, order):
    context = pyvmem.Context(backend)
    handle = pyvmem.virtual_empty((64, 4096), torch.float32, device, context=context)
    handle.commit()
    objects = {"context": context, "handle": handle, "tensor": handle.tensor, "view": handle.tensor[3:5, ::2]}
    del context, handle
    for name in order:
        last = objects.pop(name)
        if name in ("tensor", "view"):
            last.fill_(1.0)
            assert last.sum().item() == last.numel()
        del last
        gc.collect()


def test_a_tensor_outlives_its_closed_context(backend, device):
    context = pyvmem.Context(backend)
    v = pyvmem.virtual_empty((64, 4096), torch.float32, device, context=context)
    v.commit()
    t = v.tensor
    context.close()
    t.fill_(1.0)
    assert t.sum().item() == t.numel()
    with pytest.raises(ValueError):
        v.commit()


def test_a_capsule_that_nobody_takes_is_freed(empty, context, monkeypatch):
    taken = []

    def refuse(capsule):
        taken.append(capsule)
        raise MemoryError

    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", refuse)
    with pytest.raises(MemoryError):
        empty(16, torch.uint8)
    gc.collect()
    assert context.stats().reserved > 0  # the capsule keeps the memory
    taken.clear()
    assert context.stats().reserved == 0


def test_tensors_dropped_by_other_threads(empty, context):
    def work():
        for _ in range(20):
            v = empty((32, 4096))
            v.commit()
            v.tensor.fill_(1.0)
            assert v.tensor.sum().item() == 32 * 4096

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert context.stats().reserved == 0


def test_memory_that_only_autograd_still_holds(empty, context):
    v = empty((64, 64))
    v.commit()
    v.tensor.fill_(2.0)
    x = torch.ones(64, 64, device=v.tensor.device, requires_grad=True)
    loss = (x * v.tensor).sum()  # saved for backward
    v.close()
    del v
    gc.collect()
    loss.backward()
    assert torch.equal(x.grad.cpu(), torch.full((64, 64), 2.0))
    del loss
    gc.collect()
    assert context.stats().reserved == 0


EXITS = {
    "everything is alive": "",
    "only a view is alive": "view = t[5:]; del v, t, context",
    "the context is closed": "context.close()",
    "a cycle holds it": "t.cycle = v.cycle = [v, t]; del v, t",
    "a global of another module holds it": "import json; json.held = t; del v, t, context",
    "a thread holds it": """
import threading, time
threading.Thread(target=lambda t=t: time.sleep(60), daemon=True).start()
""",
}


def test_the_interpreter_exits_cleanly(backend, device):
    code = """
import sys, torch, pyvmem
context = pyvmem.Context(sys.argv[1])
v = pyvmem.virtual_empty((64, 4096), torch.float32, sys.argv[2], context=context)
v.commit()
t = v.tensor
t.fill_(1)
"""
    assert forks({how: code + end for how, end in EXITS.items()}, backend, device).stderr == ""


def test_other_libraries_take_it_by_dlpack(empty, device):
    v = empty((1024, 1024))
    v.commit(range(512))
    v.tensor[:512].fill_(3)
    taken = torch.from_dlpack(v.tensor)
    assert taken.data_ptr() == v.addr and taken.shape == (1024, 1024) and taken.device == v.tensor.device
    taken[7, 7] = 5
    assert v.tensor[7, 7] == 5
    if v.tensor.device.type == "cpu":
        array = pytest.importorskip("numpy").from_dlpack(v.tensor)
        assert array.shape == (1024, 1024) and array[7, 7] == 5
    v.close()
    gc.collect()
    assert taken[7, 7] == 5 and taken[511, 0] == 3  # it keeps the memory


def test_pyvmem_alone_does_not_import_torch():
    reserve = "import sys, pyvmem, pyvmem.tools.cli; pyvmem.Context('host').reserve(1 << 21)"
    python(f"{reserve}; assert 'torch' not in sys.modules")
