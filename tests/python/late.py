"""A late device: what kernels in flight read is read long after the calls that launched them have returned.

`Kernels` launches single reads, on every backend. On a GPU the stream sleeps before each. Over the fake driver of
tests/fakegpu, the kernels of a device that is never in time: they run when somebody waits for the device, and at the
test's end. They know addresses alone, and keep no tensor, as kernels do. On the host, a thread that is not done yet
stands for them, which does keep its tensor.

SPDX-License-Identifier: MIT
"""

import contextlib
import ctypes
import functools
import os
import threading
import time

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MS = 2_000_000  # cycles of torch.cuda._sleep, about


def fake_driver():
    """The fake driver, if this process runs over it."""
    loaded = ctypes.CDLL(None)
    return loaded if hasattr(loaded, "fakegpu_queue") else None


class _Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_read = ctypes.CDLL(None, use_errno=True).process_vm_readv


def peek(addr, length):
    """Bytes at an address of this process; None if it has none there."""
    out = ctypes.create_string_buffer(length)
    here, there = _Part(ctypes.addressof(out), length), _Part(addr, length)
    got = _read(os.getpid(), ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), 0)
    return out.raw if got == length else None


class Kernels:
    """Launches reads of tensors, and compares what they find with what was there when they were launched."""

    def __init__(self, backend):
        self.backend = backend
        self.fake = None if backend == "host" else fake_driver()
        self.queued, self.wrong, self.running = [], [], threading.RLock()
        if self.fake:
            self.fake.fakegpu_entry.argtypes, self.fake.fakegpu_entry.restype = [ctypes.c_uint64], ctypes.c_uint64
            self._run = ctypes.CFUNCTYPE(None)(self.run)  # kept here as long as the driver may call it
            self.fake.fakegpu_queue(self._run)

    def read(self, tensor):
        """A kernel reads the first and the last bytes of a contiguous tensor."""
        flat = tensor.view(-1).view(torch.uint8)
        ends = flat[:4096], flat[-4096:]
        if self.backend == "host":
            self.queued += [(end, end.clone()) for end in ends]
        elif self.fake:
            self.queued += [(end.data_ptr(), bytes(end.numpy())) for end in ends]
        else:
            want = [end.clone() for end in ends]
            torch.cuda._sleep(30 * MS)
            self.queued += [(end.clone(), before) for end, before in zip(ends, want)]

    def touch(self, tensor):
        """A kernel accesses a tensor that others write meanwhile. Over the fake driver, its pages must be there."""
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) * tensor.element_size()
        for at in (tensor.data_ptr(), tensor.data_ptr() + last // 64 * 64) if tensor.numel() else ():
            if any(peek(at, 64) or b""):
                self.queued.append((at, self.fake.fakegpu_entry(at)))

    def run(self):
        """The kernels that are queued run, and end."""
        with self.running:  # who waits meanwhile waits for these, too
            queued, self.queued = self.queued, []
            self.compare(queued)

    def compare(self, queued):
        for found, want in queued:
            if self.fake:
                is_bytes = isinstance(want, bytes)
                there = peek(found, len(want)) if is_bytes else self.fake.fakegpu_entry(found)
                if there != want:
                    self.wrong.append(f"{found:#x}: {'other bytes or pages' if there else 'no memory'}")
            elif not torch.equal(found, want):
                self.wrong.append("other bytes")

    def end(self):
        """All kernels end now; raises if one found other bytes than there were, or no memory."""
        if self.backend != "host" and not self.fake:
            torch.cuda.synchronize()
        self.run()
        assert not self.wrong, self.wrong[:5]

    @contextlib.contextmanager
    def capture(self, monkeypatch):
        """A CUDA graph is captured, by this thread; on the host, nothing is."""
        if self.backend == "host":
            yield
        elif self.fake:
            broken = self.fake.fakegpu_broken_captures()
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "is_initialized", lambda: True)
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                self.fake.fakegpu_capture(1)
                try:
                    yield
                finally:
                    self.fake.fakegpu_capture(0)
            assert self.fake.fakegpu_broken_captures() == broken, "a wait ended the capture"
        else:
            graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
            with torch.cuda.graph(graph):
                x += 1
                yield
            graph.replay()
            assert float(x) == 1

    def close(self):
        if self.fake:
            self.fake.fakegpu_queue(None)


class Lag:
    """Keeps a GPU late in any test: the stream sleeps when memory has come, and before the modules of a model run.

    A test begins with a credit of sleep, and gets more while it runs, so that several processes leave each other a GPU.
    """

    CREDIT, SHARE = float(os.environ.get("VMEM_TEST_LAG", "40")), 0.05  # milliseconds, and of the time since
    STEP, MODULE = 5, 0.3  # milliseconds

    def __init__(self):
        self.begun, self.slept = time.monotonic(), 0.0

    def sleep(self, ms):
        if torch.compiler.is_compiling():  # what is traced runs without this
            return
        left = self.CREDIT and self.CREDIT + self.SHARE * 1000 * (time.monotonic() - self.begun) - self.slept
        busy = torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
        if left >= ms and busy and not torch.cuda.is_current_stream_capturing():
            self.slept += ms
            torch.cuda._sleep(int(ms * MS))

    def behind(self, call):
        @functools.wraps(call)
        def late(*args, **keywords):
            answer = call(*args, **keywords)
            self.sleep(self.STEP)
            return answer

        return late

    @contextlib.contextmanager
    def everywhere(self):
        """For the time of the block."""
        from pyvmem import KVCache
        from pyvmem.blocks import Blocks
        from pyvmem.core import Reservation
        from pyvmem.lease import Lease
        from pyvmem.tensor import VirtualTensor

        calls = [(KVCache, "step"), (KVCache, "attach"), (VirtualTensor, "commit"), (Reservation, "commit"),
                 (Reservation, "map"), (Blocks, "back"), (Lease, "__enter__")]  # fmt: skip
        plain = [getattr(kind, name) for kind, name in calls]
        hook = register_module_forward_pre_hook(lambda *_: self.sleep(self.MODULE))
        for (kind, name), call in zip(calls, plain):
            setattr(kind, name, self.behind(call))
        try:
            yield self
        finally:
            hook.remove()
            for (kind, name), call in zip(calls, plain):
                setattr(kind, name, call)


class Launches(TorchDispatchMode):
    """Lets each operation of torch on vMem's memory stand for a kernel that accesses it later."""

    def __init__(self, kernels, addresses):
        super().__init__()
        self.kernels, self.addresses = kernels, addresses

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in self.addresses:
                self.kernels.touch(each)
        return result


def tensors_of_the_fake_driver(monkeypatch):
    """Device memory of the fake driver is CPU memory: tensors over it are torch's for CPUs. Returns their addresses."""
    import pyvmem.kv.cache
    import pyvmem.tensor

    make, addresses = pyvmem.tensor.tensor_at, set()

    def tensor_at(owner, addr, shape, dtype, device, strides=None, checker=None):
        addresses.add(addr)
        return make(owner, addr, shape, dtype, "cpu", strides, checker)

    monkeypatch.setattr(pyvmem.tensor, "tensor_at", tensor_at)
    monkeypatch.setattr(pyvmem.kv.cache, "tensor_at", tensor_at)
    monkeypatch.setattr(pyvmem.tensor, "_device", lambda device: torch.device("cuda", 0))
    return addresses
