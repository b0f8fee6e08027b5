"""A stand-in for torch.cuda's caching allocator over the C functions of a lease, on machines without a GPU.

It behaves as PyTorch 2.13 does where a lease depends on it: segments of 2 and 20 MiB and above, best fit per stream,
splitting and merging, snapshots, blocks that wait for another stream, pools whose last holder leaves while blocks live,
routing to the pool that was begun last, and no emptying of caches while allocations are routed. Memory is the host's.

SPDX-License-Identifier: MIT
"""

import contextlib
import ctypes
import itertools
import threading

from pyvmem import _ffi

MIB = 1 << 20


class OutOfMemoryError(RuntimeError):
    pass


class Block:
    def __init__(self, segment, offset, size):
        self.segment, self.offset, self.size = segment, offset, size
        self.allocated = False
        self.waits = False  # record_stream: free, but not yet known to be

    @property
    def addr(self):
        return self.segment.addr + self.offset

    @property
    def state(self):
        return "active_allocated" if self.allocated else "active_pending_free" if self.waits else "inactive"


class Segment:
    def __init__(self, addr, size, stream, small):
        self.addr, self.size, self.stream, self.small = addr, size, stream, small
        self.blocks = [Block(self, 0, size)]


class Pool:
    """A MemPool. Its allocator's functions are called by their exported names, as PyTorch calls them."""

    numbers = itertools.count(1)

    def __init__(self, cuda, place):
        self.cuda, self.id = cuda, (0, next(self.numbers))
        library = ctypes.CDLL(_ffi.__file__)
        self.raw_alloc, self.raw_free = library[f"vmem_torch_alloc_{place}"], library[f"vmem_torch_free_{place}"]
        self.raw_alloc.restype = ctypes.c_void_p
        self.raw_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.raw_free.restype = None
        self.raw_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.inner = Inner(self)
        cuda.pools.append(self.inner)

    def use_count(self):
        return self.inner.holders

    def __del__(self):
        self.inner.holders -= 1
        assert not self.cuda.routes, "PyTorch ends the process when a pool ends while allocations are routed"
        self.inner.release()


class Inner:
    """A pool as PyTorch keeps it, also when its MemPool is gone."""

    def __init__(self, pool):
        self.id, self.raw_alloc, self.raw_free = pool.id, pool.raw_alloc, pool.raw_free
        self.holders = 1
        self.segments = []

    def alloc(self, size, stream):
        size = max(512, (size + 511) // 512 * 512)
        small = size <= MIB
        fits = [
            b
            for s in self.segments
            if (s.stream, s.small) == (stream, small)
            for b in s.blocks
            if b.state == "inactive" and b.size >= size
        ]
        if fits:
            block = min(fits, key=lambda b: (b.size, b.addr))
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            addr = self.raw_alloc(whole, 0, None)
            if not addr:
                raise OutOfMemoryError(f"tried to allocate {whole} bytes")
            self.segments.append(Segment(addr, whole, stream, small))
            block = self.segments[-1].blocks[0]
        if block.size - size >= (512 if small else MIB + 1):
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, block.offset + size, block.size - size))
            block.size = size
        block.allocated = True
        return block

    def free(self, block, waits=False):
        assert block.allocated
        block.allocated, block.waits = False, waits
        if not waits:
            self.merge(block.segment)
        if not self.holders:
            self.release()

    def events_have_passed(self):
        for s in self.segments:
            for b in s.blocks:
                b.waits = False
            self.merge(s)

    def merge(self, segment):
        merged = segment.blocks[:1]
        for b in segment.blocks[1:]:
            if b.state == merged[-1].state == "inactive":
                merged[-1].size += b.size
            else:
                merged.append(b)
        segment.blocks = merged

    def release(self):
        """Free whole segments, as nobody holds the pool."""
        if self.holders:
            return
        for s in list(self.segments):
            if all(not b.allocated for b in s.blocks):
                self.segments.remove(s)
                self.raw_free(s.addr, s.size, 0, None)


class FakeCuda:
    """Takes the place of `pyvmem.lease.TorchPools`."""

    routes_all_threads = True

    def __init__(self, device=0):
        self.device = device
        self.pools = []  # all that may have segments
        self.routes = []  # (Inner, thread or None), the last one first chosen

    def check(self):
        pass

    def new_pool(self, place):
        return Pool(self, place)

    def snapshot(self, pool):
        return [
            {
                "address": s.addr,
                "total_size": s.size,
                "blocks": [{"address": b.addr, "size": b.size, "state": b.state} for b in s.blocks],
            }
            for s in pool.inner.segments
        ]

    def is_shared(self, pool):
        return pool.use_count() > 1

    def route(self, pool, all_threads):
        assert all(inner is not pool.inner for inner, _ in self.routes), "already recording to mempool_id"
        entry = (pool.inner, None if all_threads else threading.get_ident())
        self.routes.append(entry)
        pool.inner.holders += 1

        def end():
            self.routes.remove(entry)
            pool.inner.holders -= 1

        return end

    def settle(self):
        for inner in self.pools if not self.routes else ():
            inner.events_have_passed()

    @contextlib.contextmanager
    def graph(self, graph, pool, options):
        end = self.route(pool, True)
        try:
            yield
        finally:
            end()
        graph.inner = pool.inner
        pool.inner.holders += 1

    # ---- what a program does with PyTorch

    def alloc(self, size, stream=0):
        """Allocate where PyTorch would; None: in the default pool, which is not modelled."""
        for inner, thread in reversed(self.routes):
            if thread in (None, threading.get_ident()):
                return inner, inner.alloc(size, stream)
        return None

    def free(self, at, waits=False):
        at[0].free(at[1], waits)


class FakeGraph:
    inner = None

    def reset(self):
        self.inner.holders -= 1


def words(at, n=None):
    """The 64-bit words of a block, as a ctypes array over the memory itself."""
    block = at[1]
    return (ctypes.c_uint64 * (n or block.size // 8)).from_address(block.addr)
