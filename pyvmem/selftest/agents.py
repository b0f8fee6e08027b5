"""What accesses memory as code on a GPU does: kernels on a real one, /dev/simgpu on a simulated one.

An agent loads and stores 64-bit words at device addresses of this process. `poll` and `store` start accesses that go on
until they are stopped, for what must hold while memory is remapped.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ctypes
import fcntl
import struct
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyvmem.selftest.kernels import FACTOR, PTX

UInts = npt.NDArray[np.uint64]
CUDA_ERROR_NOT_READY = 600


class DeviceFault(Exception):
    """The GPU reported a fault: no call on this context works any more. `code` is CUDA's."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what}: CUDA error {code}")
        self.code = code


@dataclass(frozen=True)
class Seen:
    """What the loads of `Poll` returned, over all SMs."""

    loads: int
    wrong: int  # SMs that saw a value below the least one allowed
    value: int  # the first such value, and what was the least
    least: int
    largest: int
    faulted: int = 0  # loads that found no translation (simulated GPU; a real one ends the context)
    freed: int = 0  # loads of memory that nobody owns (the same)


class Poll(ABC):
    """Loads of one address, by one thread on each SM, until `stop`."""

    @abstractmethod
    def allow(self, least: int) -> None:
        """From now on, no load that begins may return less than this."""

    @abstractmethod
    def fault(self) -> int:
        """CUDA's error if the loads have ended by a fault, else 0."""

    @abstractmethod
    def stop(self) -> Seen:
        """End the loads. Raises `DeviceFault`."""


class Store(ABC):
    """Stores of values that are not 0 to a page, by one thread on each SM, until `stop`."""

    @abstractmethod
    def again(self) -> None:
        """The page is mapped again (a simulated GPU then stores once more)."""

    @abstractmethod
    def settle(self) -> None:
        """Give a store that is late the time to reach memory."""

    @abstractmethod
    def stop(self) -> None:
        """End the stores. Raises `DeviceFault`."""


class Agent(ABC):
    """See the module."""

    kind: str
    slow = False  # not a real GPU: the stages do less
    continuous = True  # poll and store work
    drops = True  # writes to sparse addresses are dropped
    sms = 1

    @abstractmethod
    def gather(self, addrs: UInts) -> UInts:
        """Return the words at the addresses."""

    @abstractmethod
    def scatter(self, addrs: UInts, values: UInts) -> None:
        """Store values[i] at addrs[i]; done on return."""

    @abstractmethod
    def begin_check(self, addr: int, words: int, first: int) -> None:
        """Begin to compare memory with `pattern`; the next `end_check` returns how many words differ."""

    @abstractmethod
    def end_check(self) -> int: ...

    @abstractmethod
    def poll(self, addr: int) -> Poll: ...

    @abstractmethod
    def store(self, addr: int, length: int) -> Store: ...


def pattern(first: int, words: int) -> UInts:
    """Words first to first + words - 1 of the pattern in which no two words are equal."""
    with np.errstate(over="ignore"):
        return np.arange(first, first + words, dtype=np.uint64) * np.uint64(FACTOR)


# ---- a real GPU ---------------------------------------------------------------------------------------------


class _Cuda:
    """The driver's functions, and the device's primary context, current in this thread."""

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self._library = library
        self.call("cuInit", 0)
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self.call("cuCtxSetCurrent", context)
        sms = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(sms), 16, handle)
        self.sms = sms.value

    def status(self, name: str, *args: Any) -> int:
        return int(getattr(self._library, name)(*args))

    def call(self, name: str, *args: Any) -> None:
        code = self.status(name, *args)
        if code:
            raise DeviceFault(code, name)

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def memory(self, size: int) -> int:
        addr = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(addr), ctypes.c_size_t(size))
        return addr.value

    def host_memory(self, size: int) -> tuple[int, int]:
        """Memory of the host that the GPU can access: its addresses for the CPU and for the GPU."""
        host, addr = ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), 3)
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(addr), host, 0)
        assert host.value
        return host.value, addr.value


class CudaAgent(Agent):
    """Kernels that the driver compiles from PTX."""

    kind = "kernels"

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self._cuda = cuda = _Cuda(library, device)
        module = ctypes.c_void_p()
        cuda.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.encode()))
        self._functions: dict[str, ctypes.c_void_p] = {}
        for name in ("gather", "scatter", "differ", "poll", "store"):
            function = ctypes.c_void_p()
            cuda.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self._functions[name] = function
        self.sms = cuda.sms
        self._stream, self._checks = cuda.stream(), cuda.stream()
        self._room, self._words = 0, 0
        self._count = cuda.memory(8)
        # Beside a kernel that runs until it is stopped, nothing may be loaded or freed: the driver would wait for it.
        word = cuda.memory(8 * 128)
        self._buffers(1 << 18)
        self.scatter(np.full(128, word, np.uint64), np.zeros(1, np.uint64))
        self.gather(np.full(128, word, np.uint64))

    def launch(self, stream: ctypes.c_void_p, name: str, blocks: int, threads: int, *args: int) -> None:
        values = [ctypes.c_uint64(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._cuda.call("cuLaunchKernel", self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def _buffers(self, n: int) -> tuple[int, int]:
        if n > self._words:
            if self._room:
                self._cuda.call("cuMemFree_v2", ctypes.c_uint64(self._room))
            self._words = n
            self._room = self._cuda.memory(16 * self._words)
        return self._room, self._room + 8 * self._words

    def _copy_in(self, addr: int, data: UInts) -> None:
        data = np.ascontiguousarray(data, np.uint64)
        source = ctypes.c_void_p(data.ctypes.data)
        self._cuda.call(
            "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(addr), source, ctypes.c_size_t(data.nbytes), self._stream
        )
        self._cuda.call("cuStreamSynchronize", self._stream)

    def copy_out(self, addr: int, words: int, stream: ctypes.c_void_p | None = None) -> UInts:
        out, stream = np.empty(words, np.uint64), stream or self._stream
        to, size = ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(out.nbytes)
        self._cuda.call("cuMemcpyDtoHAsync_v2", to, ctypes.c_uint64(addr), size, stream)
        self._cuda.call("cuStreamSynchronize", stream)
        return out

    def gather(self, addrs: UInts) -> UInts:
        n = len(addrs)
        from_, to = self._buffers(n)
        self._copy_in(from_, addrs)
        self.launch(self._stream, "gather", -(-n // 128), 128, from_, to, n)
        return self.copy_out(to, n)

    def scatter(self, addrs: UInts, values: UInts) -> None:
        n = len(addrs)
        to, from_ = self._buffers(n)
        self._copy_in(to, addrs)
        self._copy_in(from_, np.broadcast_to(values, n))
        self.launch(self._stream, "scatter", -(-n // 128), 128, to, from_, n)
        self._cuda.call("cuStreamSynchronize", self._stream)

    def begin_check(self, addr: int, words: int, first: int) -> None:
        self._cuda.call("cuMemsetD8Async", ctypes.c_uint64(self._count), 0, ctypes.c_size_t(8), self._checks)
        self.launch(self._checks, "differ", 4 * self.sms, 256, addr, words, first, self._count)

    def end_check(self) -> int:
        return int(self.copy_out(self._count, 1, self._checks)[0])

    def poll(self, addr: int) -> Poll:
        return _CudaPoll(self, self._cuda, addr)

    def store(self, addr: int, length: int) -> Store:
        return _CudaStore(self, self._cuda, addr, length)


class _Running:
    """A kernel that runs until control[1] is set."""

    def __init__(self, agent: CudaAgent, cuda: _Cuda) -> None:
        self._agent, self._cuda = agent, cuda
        self._stream = cuda.stream()
        host, self._device_control = cuda.host_memory(16)
        self._control = (ctypes.c_uint64 * 2).from_address(host)
        self._control[0] = self._control[1] = 0

    def fault(self) -> int:
        code = self._cuda.status("cuStreamQuery", self._stream)
        return 0 if code in (0, CUDA_ERROR_NOT_READY) else code

    def _end(self) -> None:
        self._control[1] = 1
        self._cuda.call("cuStreamSynchronize", self._stream)


class _CudaPoll(_Running, Poll):
    def __init__(self, agent: CudaAgent, cuda: _Cuda, addr: int) -> None:
        super().__init__(agent, cuda)
        self._out = cuda.memory(32 * agent.sms)
        agent.launch(self._stream, "poll", agent.sms, 1, addr, self._device_control, self._out)

    def allow(self, least: int) -> None:
        self._control[0] = least

    def stop(self) -> Seen:
        self._end()
        out = self._agent.copy_out(self._out, 4 * self._agent.sms).reshape(-1, 4)
        wrong = out[out[:, 2] != 0]
        value, least = (int(wrong[0, 1]), int(wrong[0, 2])) if len(wrong) else (0, 0)
        return Seen(int(out[:, 0].sum()), len(wrong), value, least, int(out[:, 3].max()))


class _CudaStore(_Running, Store):
    def __init__(self, agent: CudaAgent, cuda: _Cuda, addr: int, length: int) -> None:
        super().__init__(agent, cuda)
        agent.launch(self._stream, "store", agent.sms, 1, addr, length - 1, self._device_control)

    def again(self) -> None:
        time.sleep(0.001)  # some stores reach the page before it goes again

    def settle(self) -> None:
        time.sleep(0.01)

    def stop(self) -> None:
        self._end()


# ---- a fake driver in CPU memory ----------------------------------------------------------------------------


class CpuAgent(Agent):
    """The CPU, over the fake driver of the tests, whose device addresses are the process's own."""

    kind = "the CPU, over a fake driver"
    slow = True
    continuous = drops = False

    def gather(self, addrs: UInts) -> UInts:
        return np.array([ctypes.c_uint64.from_address(int(a)).value for a in addrs], np.uint64)

    def scatter(self, addrs: UInts, values: UInts) -> None:
        for addr, value in zip(addrs, np.broadcast_to(values, len(addrs)), strict=True):
            ctypes.c_uint64.from_address(int(addr)).value = int(value)

    def begin_check(self, addr: int, words: int, first: int) -> None:
        data = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(addr))
        self._differ = int((data != pattern(first, words)).sum())

    def end_check(self) -> int:
        return self._differ

    def poll(self, addr: int) -> Poll:
        raise NotImplementedError

    def store(self, addr: int, length: int) -> Store:
        raise NotImplementedError


# ---- the simulated GPU (tests/vm/simgpu/simgpu_uapi.h) ------------------------------------------------------


def _request(number: int, size: int, direction: int = 3) -> int:
    return direction << 30 | size << 16 | ord("s") << 8 | number


class SimAgent(Agent):
    """Accesses through /dev/simgpu, as an SM of the simulated GPU makes them."""

    kind = "the simulated GPU"
    slow = True
    _WRITE, _NOFAULT, _POSTED = 1, 4, 8

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self._device = open("/dev/simgpu", "r+b", buffering=0)
        vas = (ctypes.c_uint32 * 4)()
        if library.simcuda_address_space(device, vas):
            raise DeviceFault(201, "simcuda_address_space")
        self.vas = bytes(vas)

    def access(self, addr: int, data: bytearray, flags: int) -> int:
        """Read or write through the TLB and page tables; returns the simulator's result: 0, or -errno."""
        buffer = (ctypes.c_char * len(data)).from_buffer(data)
        call = bytearray(
            self.vas + struct.pack("<QQQIIIIiIQ", addr, len(data), ctypes.addressof(buffer), flags, 1, 0, 0, 0, 0, 0)
        )
        fcntl.ioctl(self._device, _request(1, len(call)), call)
        del buffer
        return int(struct.unpack_from("<i", call, 16 + 24 + 16)[0])

    def _one(self, addr: int, data: bytearray, flags: int) -> None:
        result = self.access(addr, data, flags | self._NOFAULT)
        if result:
            raise DeviceFault(700, f"access to {addr:#x}: {result}")

    def gather(self, addrs: UInts) -> UInts:
        out = np.empty(len(addrs), np.uint64)
        for i, addr in enumerate(addrs):
            word = bytearray(8)
            self._one(int(addr), word, 0)
            out[i] = int.from_bytes(word, "little")
        return out

    def scatter(self, addrs: UInts, values: UInts) -> None:
        for addr, value in zip(addrs, np.broadcast_to(values, len(addrs)), strict=True):
            self._one(int(addr), bytearray(int(value).to_bytes(8, "little")), self._WRITE)

    def begin_check(self, addr: int, words: int, first: int) -> None:
        data = bytearray(8 * words)
        self._one(addr, data, 0)
        self._differ = int((np.frombuffer(data, np.uint64) != pattern(first, words)).sum())

    def end_check(self) -> int:
        return self._differ

    def poll(self, addr: int) -> Poll:
        return _SimPoll(self, addr)

    def store(self, addr: int, length: int) -> Store:
        return _SimStore(self, addr)

    def loop(self, number: int, call: bytes) -> tuple[int, ...]:
        """SIMGPU_LOOP_*; returns the words of struct simgpu_loop from `id` on."""
        data = bytearray(call)
        fcntl.ioctl(self._device, _request(number, len(data)), data)
        return struct.unpack_from("<IIQQQQQQQQ", data, 24)

    def drain(self, gpu: int) -> None:
        """Let every write in flight land."""
        fcntl.ioctl(self._device, _request(16, 4, 1), struct.pack("<I", gpu))


class _SimPoll(Poll):
    def __init__(self, agent: SimAgent, addr: int) -> None:
        self._agent, self._addr = agent, addr
        self._id = agent.loop(5, self._struct(0))[0]
        self._wrong = self._value = self._least = self._largest = 0

    def _struct(self, id: int) -> bytes:
        return self._agent.vas + struct.pack("<QIIQQQQQQQQ", self._addr, id, 0, *[0] * 8)

    def _look(self, number: int, least: int) -> tuple[int, ...]:
        found = self._agent.loop(number, self._struct(self._id))
        last = found[8]
        self._largest = max(self._largest, last)
        if last < least and not self._least:
            self._wrong, self._value, self._least = 1, last, least
        return found

    def allow(self, least: int) -> None:
        # A load after the call, which the simulated SM makes whenever its engine is idle.
        loads = self._look(6, 0)[2]
        deadline = time.monotonic() + 20
        while self._look(6, 0)[2] <= loads and time.monotonic() < deadline:
            time.sleep(0.001)
        self._look(6, least)

    def fault(self) -> int:
        found = self._look(6, 0)
        return 700 if found[4] or found[3] else 0  # a load, or one that missed its TLB, finds no translation

    def stop(self) -> Seen:
        found = self._look(7, 0)
        return Seen(found[2], self._wrong, self._value, self._least, self._largest, found[4], found[6])


class _SimStore(Store):
    def __init__(self, agent: SimAgent, addr: int) -> None:
        self._agent, self._addr = agent, addr
        self.again()

    def again(self) -> None:
        flags = self._agent._WRITE | self._agent._NOFAULT | self._agent._POSTED
        result = self._agent.access(self._addr, bytearray(b"\xff" * 8), flags)
        if result:
            raise DeviceFault(700, f"store to {self._addr:#x}: {result}")

    def settle(self) -> None:
        self._agent.drain(int.from_bytes(self._agent.vas[:4], "little"))

    def stop(self) -> None:
        self.settle()


def agent(device: int) -> Agent:
    """The agent for the CUDA library that this process uses. A context of pyvmem must exist."""
    library = ctypes.CDLL("libcuda.so.1")
    if hasattr(library, "simcuda_address_space"):
        return SimAgent(library, device)
    if hasattr(library, "fakegpu_calls"):
        return CpuAgent()
    return CudaAgent(library, device)
