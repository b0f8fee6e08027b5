"""No byte of what another process left in device memory is readable: where the driver clears memory that is freed, vMem
does not clear it again, so these tests fill the whole device, end in each way, and look at once.

SPDX-License-Identifier: MIT
"""

import os
import signal
import subprocess
import sys

import pytest
from conftest import BACKENDS

import pyvmem

torch = pytest.importorskip("torch")

GIB, PAGE = 1 << 30, 2 << 20
GPU = [name for name in BACKENDS if name != "host" and "cuda_pointer" in pyvmem.Context(name).info().capabilities]

FILL = """
import sys, torch
held, size = [], 1 << 30
while size >= 2 << 20:
    try:
        held.append(torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
torch.cuda.synchronize()
print(sum(x.numel() for x in held), flush=True)
if sys.argv[1] == "free":
    held.clear()
    torch.cuda.empty_cache()
elif sys.argv[1] == "wait":
    torch.cuda._sleep(1 << 62)  # killed in a kernel
    torch.cuda.synchronize()
"""


def fill(how):
    """Another process fills the device with 0xA5 and ends: it frees all, exits with it, or is killed in a kernel."""
    process = subprocess.Popen([sys.executable, "-c", FILL, how], stdout=subprocess.PIPE, text=True)
    filled = int(process.stdout.readline())
    if how == "wait":
        process.send_signal(signal.SIGKILL)
    process.wait()
    assert filled > 0.9 * torch.cuda.mem_get_info()[0]


def words_that_are_not_zero(context, space, n):
    """int64 words, in n new pages, that are not zero. They are -1 afterwards."""
    from pyvmem.tensor import tensor_at

    with context.create(PAGE, n, zero=True) as pages:
        space.map(pages, 0)
        words = tensor_at(space._owner, space.addr, (n * PAGE // 8,), torch.int64, "cuda")
        found = sum(int(torch.count_nonzero(part)) for part in words.split(1 << 24))  # it takes memory, too
        words.fill_(-1)
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("how", ["free", "exit", "wait"])
@pytest.mark.parametrize("backend", GPU)
def test_memory_of_another_process_is_never_readable(backend, how):
    for _ in range(int(os.environ.get("VMEM_TEST_TURNS", 3))):
        fill(how)
        with pyvmem.Context(backend) as context:
            n = (torch.cuda.mem_get_info()[0] - GIB) // PAGE  # a GiB for page tables and torch
            with context.reserve(n * PAGE, backdrop=True) as space:
                assert words_that_are_not_zero(context, space, n) == 0


@pytest.mark.parametrize("backend", GPU)
def test_memory_that_this_process_wrote_is_zero_when_it_comes_again(backend):
    n = 8 * GIB // PAGE
    with pyvmem.Context(backend) as context, context.reserve(n * PAGE, backdrop=True) as space:
        for _ in range(5):
            assert words_that_are_not_zero(context, space, n) == 0
            context.trim()
