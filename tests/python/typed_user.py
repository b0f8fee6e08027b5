"""A user's script that mypy checks (test_typing.py) and that runs: the public calls, with the types they promise."""

import numpy as np
import torch

import pyvmem
from pyvmem import KVCache, OutOfMemory, VirtualTensor
from pyvmem.core import Reservation
from pyvmem.kv.prefix import PrefixCache, block_hashes


def pages(context: pyvmem.Context) -> int:
    size: int = min(context.page_sizes)
    range_: Reservation
    with context.reserve(16 * size) as range_, context.create(size, 4, zero=True) as held:
        range_.map(held, [0, size, 2 * size, 3 * size])
        first: int = int(held.handles[0])
        assert context.page_info(first).mappings == 1
        context.write(range_.addr, np.arange(8, dtype=np.int64))
        data: bytes = context.read(range_.addr, 8)
        range_.unmap()
        return len(data) + range_.commit(0, 2 * size) + sum(length for _, length in range_.backed())


def tensors() -> float:
    v: VirtualTensor = pyvmem.virtual_empty((1024, 4096), torch.float32)
    try:
        committed: int = v.commit(rows=slice(0, 16))
    except OutOfMemory as error:
        raise SystemExit(f"{error.errno}: {error}") from error
    t: torch.Tensor = v.tensor
    t[:16].fill_(2.0)
    total: float = t[:16].sum().item()
    v.close()
    return total / committed


def cache() -> list[int]:
    made: KVCache = KVCache.for_model(2, 4, 64, 4, 4096, 64 << 20, backend="host", name=None)
    with made as kv:
        prompts = PrefixCache(kv)
        slot, cached = prompts.alloc(4, block_hashes([1, 2, 3, 4], prompts.block_tokens))
        lengths = [0] * kv.slots
        assert slot is not None
        lengths[slot] = 4 + cached
        missing: int = 0 if kv.step(lengths) else kv.shortage.missing_pages
        rows: torch.Tensor = kv.keys[0][slot, :4]
        return [missing, rows.numel(), kv.stats().held_pages, *kv.tokens([slot])]


def lease(pool: pyvmem.KVPool) -> int:
    try:
        with pyvmem.torch_pool(pool, most=1 << 20, fine=True) as lent:
            parked: int = lent.stats().parked_bytes
            return parked
    except pyvmem.VmemError as error:  # PyTorch has no memory pools for CPU tensors
        return error.errno


if __name__ == "__main__":
    with pyvmem.Context("host") as context:
        free: int = context.memory_free
        print(free > 0, pages(context), tensors(), cache())
    error: pyvmem.VmemError | None = pyvmem.probe("host")
    assert error is None
