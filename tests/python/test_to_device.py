"""Copies to the device, by its copy engine and by the kernel in Triton.

SPDX-License-Identifier: MIT
"""

import types

import interpreter
import pytest
import torch

from pyvmem.sleep.to_device import ToDevice

CPU = torch.device("cpu")


def kernel_is_right(device):
    """On a GPU, or with Triton's interpreter on the host."""
    from pyvmem.sleep import to_device_kernel

    pinned = device.type == "cuda"
    draw = torch.Generator().manual_seed(3)
    for words in (1, 100, 4096, 8 * 4096, 17 * 4096 + 3):
        source = torch.randint(0, 256, (8 * words,), generator=draw, dtype=torch.uint8)
        source = source.pin_memory() if pinned else source
        room = torch.full((8 * words + 16,), 7, dtype=torch.uint8, device=device)
        copies = ToDevice(device)
        copies._kernel = to_device_kernel
        copies(room[8 : 8 + 8 * words], source, by_kernel=True)
        assert torch.equal(room[8 : 8 + 8 * words].cpu(), source), words
        assert room[:8].eq(7).all() and room[8 + 8 * words :].eq(7).all(), words
    print("the kernel is right")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_copies_and_is_compiled_before():
    kernel_is_right(torch.device("cuda"))
    copies = ToDevice(torch.device("cuda"))
    copies.prepare()
    assert copies._kernel is not None


def test_the_kernel_in_tritons_interpreter():
    interpreter.kernel_is_right("test_to_device")


@pytest.mark.parametrize("by_kernel, full", [(False, False), (True, False), (True, True)])
def test_the_kernel_copies_where_it_is_wanted_and_the_copy_engine_where_the_device_is_full(by_kernel, full):
    by = []

    def copy(to, source):
        if full:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        by.append(len(source))
        to.copy_(source)

    copies, source = ToDevice(CPU), torch.arange(64, dtype=torch.uint8)
    copies._kernel = types.SimpleNamespace(copy=copy)
    to = torch.zeros_like(source)
    copies(to, source, by_kernel)
    assert torch.equal(to, source) and by == ([8] if by_kernel and not full else [])


def test_without_a_kernel_the_copy_engine_copies():
    copies, source = ToDevice(CPU), torch.arange(64, dtype=torch.uint8)
    copies.prepare()
    to = torch.zeros_like(source)
    copies(to, source, by_kernel=True)
    assert torch.equal(to, source)
