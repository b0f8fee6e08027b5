"""Requests whose rows are in CPU memory while others have their pages.

SPDX-License-Identifier: MIT
"""

import errno

import pytest
import torch
from kv_caches import PAGE_TOKENS, make, start, view_dim

from torch.utils._python_dispatch import TorchDispatchMode

from pyvmem.errors import OutOfMemory, VmemError
from pyvmem.kv.cache import KVCache, TensorSpec


class Allocated(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.bytes += made.nbytes
        return made


def test_swapping_brings_the_rows_back_to_where_they_were(backend, device):
    with make(backend) as cache:
        slot, values = start(cache, 333)
        torch.manual_seed(1)
        data = torch.randn(333, 4, view_dim(cache)).half().to(device)
        views = [tensor[slot, :333] for tensor in cache.tensors]
        for i, view in enumerate(views):
            view.copy_(data + i)
        address = views[0].data_ptr()
        cache.swap_out(slot)
        assert cache.slot(slot).state == "swapped" and cache.slot(slot).pages == 0
        with pytest.raises(ValueError, match="swapped out"):
            cache.step(values)
        other, _ = start(cache, 500)
        cache.tensors[0][other, :500] = 9
        assert cache.swap_in(slot)
        assert views[0].data_ptr() == address
        for i, view in enumerate(views):
            assert torch.equal(view, data + i)


@pytest.mark.parametrize("tile", [1, 48])
def test_layers_that_differ_come_back(backend, device, tile):
    """With windows, odd rows that lie across pages, and fewer rows in a layer."""
    specs = [
        TensorSpec("full", (2, 128), torch.bfloat16),
        TensorSpec("window", (3, 100), torch.bfloat16, window=64),
        TensorSpec("fp8", (656,), torch.float8_e4m3fn, window=100),
        TensorSpec("encoder", (8,), torch.float32, max_tokens=100),
    ]
    with KVCache(specs, 3, 4000, 64 << 20, backend=backend, name=None, check=True, tile_rows=tile) as cache:
        slot, _ = start(cache, 3000)
        assert cache.step([3001 if s == slot else 0 for s in range(3)])
        rows = [slice(0, 3001), slice(2937, 3001), slice(2901, 3001), slice(0, 100)]
        for tensor, part in zip(cache.tensors, rows, strict=True):
            numbers = torch.arange(part.start, part.stop, device=device) % 251
            tensor[slot, part].view(torch.uint8).copy_(numbers.view(-1, *[1] * (tensor.dim() - 2)))
        before = [tensor[slot, part].clone() for tensor, part in zip(cache.tensors, rows, strict=True)]
        with Allocated() as host:
            cache.swap_out(slot)
        assert 0 < host.bytes < (3001 * 512 + 64 * 600 + 100 * 656 + 100 * 32) + 12 * cache.page_size, (
            "what windows have passed"
        )
        other, _ = start(cache, 3000)
        for tensor in cache.tensors:
            tensor[other, :100].view(torch.uint8).fill_(77)
        cache.free(other)
        assert cache.swap_in(slot)
        for tensor, part, rows_of_it in zip(cache.tensors, rows, before, strict=True):
            assert torch.equal(tensor[slot, part].view(torch.uint8), rows_of_it.view(torch.uint8))
        assert cache.truncate(slot, 3000)  # its windows still have what the next token reads
        assert cache.step([3001 if s == slot else 0 for s in range(3)])


def test_shared_rows_come_back_as_copies(backend):
    with make(backend) as cache:
        slot, _ = start(cache, 2 * PAGE_TOKENS)
        cache.keys[0][slot, : 2 * PAGE_TOKENS] = 5
        prefix = cache.share(slot, 2 * PAGE_TOKENS)
        cache.swap_out(slot)
        other = cache.alloc()
        assert cache.attach(other, prefix) == 2 * PAGE_TOKENS
        assert cache.swap_in(slot) and cache.slot(slot).shared_pages == 0
        cache.keys[0][slot, :1] = 6
        assert (cache.keys[0][other, : 2 * PAGE_TOKENS] == 5).all()
        assert (cache.keys[0][slot, 1 : 2 * PAGE_TOKENS] == 5).all()


def not_swapped(cache, slot):
    """The slot runs, and the cache keeps no copy of its rows."""
    assert cache.slot(slot).state == "active"
    with pytest.raises(ValueError, match="not swapped out"):
        cache.swap_in(slot)


def test_without_cpu_memory_nothing_changes(backend, monkeypatch):
    with make(backend) as cache:
        slot, values = start(cache, 100)

        def none(*_, **__):
            raise RuntimeError("DefaultCPUAllocator: not enough memory")

        monkeypatch.setattr(torch, "empty_like", none)
        with pytest.raises(OutOfMemory, match=rf"no CPU memory for the \d+ bytes of slot {slot}'s rows: .*not enough"):
            cache.swap_out(slot)
        monkeypatch.undo()
        not_swapped(cache, slot)
        assert cache.step(values)


def test_without_pages_it_stays_out(backend):
    with make(backend, pages=16) as cache:
        slot, _ = start(cache, 2 * PAGE_TOKENS)
        cache.keys[0][slot, :200] = 5
        cache.swap_out(slot)
        other, _ = start(cache, 3 * PAGE_TOKENS)
        assert not cache.swap_in(slot) and cache.shortage.missing_pages == 4
        assert cache.slot(slot).state == "swapped"
        cache.free(other)
        assert cache.swap_in(slot) and (cache.keys[0][slot, :200] == 5).all()


@pytest.mark.parametrize("call", ["step", "truncate"])
def test_what_another_thread_does_meanwhile_is_not_lost(backend, monkeypatch, call):
    with make(backend) as cache:
        slot, values = start(cache, 100)

        def copy_beside(to, source, non_blocking):
            monkeypatch.undo()
            assert cache.step(values) if call == "step" else cache.truncate(slot, 99)
            return to.copy_(source)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_beside)
        with pytest.raises(VmemError, match="copied too early") as caught:
            cache.swap_out(slot)
        assert caught.value.errno == errno.EBUSY
        not_swapped(cache, slot)
        cache.swap_out(slot)
        assert cache.swap_in(slot)


def test_a_copy_back_that_fails_can_be_tried_again(backend, monkeypatch):
    with make(backend) as cache:
        slot, _ = start(cache, 100)
        cache.keys[0][slot, :100] = 5
        cache.swap_out(slot)

        def fail(*_, **__):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch.Tensor, "copy_", fail)
        with pytest.raises(RuntimeError, match="illegal"):
            cache.swap_in(slot)
        monkeypatch.undo()
        assert cache.slot(slot).state == "swapped" and cache.slot(slot).pages == 0
        assert cache.swap_in(slot) and (cache.keys[0][slot, :100] == 5).all()


def test_a_captured_step_is_not_swapped_out(backend, device):
    if device == "cpu":
        pytest.skip("graphs are of a GPU")
    with make(backend) as cache:
        slot, _ = start(cache, 100)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(VmemError, match="a captured step has not run"), torch.cuda.graph(graph):
            cache.swap_out(slot)
        assert cache.slot(slot).state == "active"
