"""Sums of memory see what becomes of structured data, by torch and by the kernel in Triton.

SPDX-License-Identifier: MIT
"""

import types

import interpreter
import pytest
import structured
import torch

from pyvmem.sleep.sums import PIECE, Sums

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def summed(device):
    sums = Sums(device)
    return lambda memory: int(sums(memory.to(device)))


@pytest.mark.parametrize("n", [4096, 4093, 301])
def test_no_two_contents_have_the_same_sum(device, n):
    assert structured.confused(summed(device), n) == []


def test_they_see_every_exchange_of_small_integers(device):
    draw, add, unseen = torch.Generator().manual_seed(1), summed(device), []
    for i in range(1000):
        told = torch.randint(0, 8, (64,), generator=draw)
        now, places = told.clone(), torch.randperm(64, generator=draw)[: 3 + i % 3]
        now[places] = told[places[torch.randperm(len(places), generator=draw)]]
        same = add(told.view(torch.uint8)) == add(now.view(torch.uint8))
        unseen += [(told, now)] if same != torch.equal(told, now) else []
    assert not unseen


def test_they_see_a_change_of_any_byte_whatever_the_size(device):
    add = summed(device)
    for size in (0, 1, 7, 8, 9, 15, 16, 8 * 1024 + 3):
        told = torch.zeros(size, dtype=torch.uint8)
        seen = {add(told)}
        for i in range(size) if size < 100 else (0, 4096, size - 1):
            now = told.clone()
            now[i] = 1
            seen.add(add(now))
        assert len(seen) == 1 + min(size, 3 if size > 100 else size)


def test_a_sum_does_not_depend_on_the_pieces(monkeypatch):
    sums, memory = Sums(torch.device("cpu")), torch.arange(40_000, dtype=torch.int16).view(torch.uint8)
    told = int(sums(memory))
    monkeypatch.setitem(PIECE, "cpu", 1 << 10)
    other = Sums(torch.device("cpu"))
    other.key = sums.key
    assert int(other(memory)) == told
    assert int(Sums(torch.device("cpu"))(memory)) != told  # each has a key of its own


def test_torch_adds_where_triton_fails(caplog):
    def fails(words, total, key):
        raise RuntimeError("Failed to find C compiler")

    sums, memory = Sums(torch.device("cpu")), torch.arange(100).view(torch.uint8)
    told = int(sums(memory))
    sums._kernel = types.SimpleNamespace(add=fails)
    with caplog.at_level("INFO"):
        assert [int(sums(memory)) for _ in range(2)] == [told, told]
    assert [r.getMessage() for r in caplog.records if "C compiler" in r.getMessage()] != [] and len(caplog.records) == 1


def kernel_is_right(device):
    """On a GPU, or with Triton's interpreter on the host."""
    from pyvmem.sleep import sums_kernel

    sums, draw = Sums(device), torch.Generator().manual_seed(3)
    for n in (8, 100, 8 * 1024, 64 * 1024, 3 * 64 * 1024 + 40):
        memory = torch.randint(0, 256, (n,), generator=draw, dtype=torch.uint8).to(device)
        sums._kernel = None
        told = int(sums(memory))
        sums._kernel = sums_kernel
        assert int(sums(memory)) == told and sums._kernel is sums_kernel, n
    print("the kernel is right")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_adds_as_torch_does():
    kernel_is_right(torch.device("cuda"))


def test_the_kernel_in_tritons_interpreter():
    interpreter.kernel_is_right("test_sums")
