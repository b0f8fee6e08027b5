"""Reads of GPU memory on scattered pages and on cudaMalloc's, in turns.

The cost of scattered small pages depends on a kernel's access pattern, so there are two kernels: a streaming one, whose
blocks each read consecutive memory (as attention kernels read K and V), and `torch.sum`, whose blocks stride over the
whole tensor.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from pyvmem.bench.vmm import backdrop_flag, scattered

if TYPE_CHECKING:
    from pyvmem.core import Context


BLOCK = 4096  # float32 elements that a block of the streaming kernel reads


def _streaming_kernel() -> Any:
    """A function that streams through a float32 tensor once; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    import torch

    from pyvmem.triton_stream import stream

    def read(tensor: Any) -> None:
        blocks = tensor.numel() // BLOCK
        stream[(blocks,)](tensor, torch.empty(blocks, device=tensor.device), BLOCK=BLOCK)

    return read


def reads(context: Context, page_size: int, size: int, repeats: int) -> Any:
    """Read bandwidth by kernel and kind of memory.

    Parameters
    ----------
    context : Context
        One whose addresses torch accepts.
    page_size, size : int
        Bytes; the pages are mapped in random order.
    repeats : int
        Reads of each kind of memory by each kernel, in turns.

    Returns
    -------
    dict
        {(kernel, memory): GB/s[repeats]}, by CUDA events.
    """
    import torch

    from pyvmem.tensor import tensor_at

    device = torch.device("cuda", context.info().device)
    n = size // page_size
    kernels = {"streaming read": _streaming_kernel(), "torch.sum": lambda tensor: tensor.sum()}
    seen = {}
    with context.reserve(n * page_size, backdrop=bool(backdrop_flag(context))) as range_:
        with context.create(page_size, n) as pages:
            range_.map(pages, scattered(n) * page_size)
            virtual = tensor_at(range_._owner, range_.addr, [size // 4], torch.float32, device)
            memory = {"scattered pages": virtual, "cudaMalloc": torch.empty(size // 4, device=device)}
            for kernel, read in kernels.items():
                if read is None:
                    continue
                for name, tensor in memory.items():
                    seen[kernel, name] = np.zeros(repeats)
                    tensor.fill_(1.0)
                    read(tensor)
                for i in range(repeats):
                    for name, tensor in memory.items():
                        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        start.record()
                        read(tensor)
                        end.record()
                        end.synchronize()
                        seen[kernel, name][i] = tensor.nbytes / start.elapsed_time(end) / 1e6
            torch.cuda.synchronize(device)
            del virtual, tensor, memory
    return seen
