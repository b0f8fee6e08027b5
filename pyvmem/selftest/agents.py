"""Agents access memory as code on a GPU does, by kernels. The tests have their own for a simulated GPU.

An agent loads and stores 64-bit words at device addresses of this process. `poll` and `store` start accesses that go on
until they are stopped, for what must hold while memory is remapped.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyvmem.selftest.kernels import FACTOR, PTX

UInts = npt.NDArray[np.uint64]
CUDA_ERROR_NOT_READY, CUDA_ERROR_ILLEGAL_ADDRESS = 600, 700


class DeviceFault(Exception):
    """The GPU reported a fault: no call on this context works any more. `code` is CUDA's."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what}: CUDA error {code}")
        self.code = code


@dataclass(frozen=True)
class Seen:
    """The values that the loads of a `Loop` returned, over all SMs."""

    loads: int = 0
    wrong: int = 0  # SMs that saw a value below the least one allowed
    value: int = 0  # the first such value, and what was the least
    least: int = 0
    largest: int = 0
    faulted: int = 0  # loads that found no translation (simulated GPU; a real one ends the context)
    freed: int = 0  # loads of memory that nobody owns (the same)


class Loop:
    """Accesses by one thread on each SM, until `stop`: loads of one address, or stores of values that are not 0."""

    def allow(self, least: int) -> None:
        """From now on, no load that begins may return less than this."""

    def fault(self) -> int:
        """CUDA's error if the accesses have ended by a fault, else 0."""
        return 0

    def again(self) -> None:
        """The page is mapped again (a simulated GPU then stores once more)."""

    def settle(self) -> None:
        """Give a store that is late the time to reach memory."""

    def stop(self) -> Seen:
        """End the accesses. Raises `DeviceFault`."""
        return Seen()


class Agent(ABC):
    """See the module."""

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
    def poll(self, addr: int) -> Loop:
        """Load the word again and again."""

    @abstractmethod
    def store(self, addr: int, length: int) -> Loop:
        """Store to a page again and again."""


def pattern(first: int, words: int) -> UInts:
    """Words first to first + words - 1 of the pattern in which no two words are equal."""
    with np.errstate(over="ignore"):
        return np.arange(first, first + words, dtype=np.uint64) * np.uint64(FACTOR)


class CudaAgent(Agent):
    """Kernels that the driver compiles from PTX, in the device's primary context."""

    _ROOM = 1 << 18  # words of each array of the kernel `move`

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self._library = library
        self.call("cuInit", 0)
        handle, context, sms, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self.call("cuCtxSetCurrent", context)
        self.call("cuDeviceGetAttribute", ctypes.byref(sms), 16, handle)
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.encode()))
        self.sms = sms.value
        self._functions = {name: ctypes.c_void_p() for name in ("move", "differ", "poll", "store")}
        for name, function in self._functions.items():
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self._stream, self._checks = self.stream(), self.stream()
        self._from, self._to, self._words = (self.memory(8 * self._ROOM) for _ in range(3))
        self._count = self.memory(8)
        # Beside a kernel that runs until it is stopped, nothing may be loaded or freed: the driver would wait for it.
        word = np.full(128, self._count, np.uint64)
        self.scatter(word, np.zeros(1, np.uint64))
        self.gather(word)

    def status(self, name: str, *args: Any) -> int:
        return int(getattr(self._library, name)(*args))

    def call(self, name: str, *args: Any) -> None:
        """Call the driver. Raises `DeviceFault`."""
        if code := self.status(name, *args):
            raise DeviceFault(code, name)

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def memory(self, size: int) -> int:
        addr = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(addr), ctypes.c_size_t(size))
        return addr.value

    def launch(self, stream: ctypes.c_void_p, name: str, blocks: int, threads: int, *args: int) -> None:
        values = [ctypes.c_uint64(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self.call("cuLaunchKernel", self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def _copy_in(self, addr: int, data: UInts) -> None:
        data = np.ascontiguousarray(data, np.uint64)
        source, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(addr), source, size, self._stream)
        self.call("cuStreamSynchronize", self._stream)

    def copy_out(self, addr: int, words: int, stream: ctypes.c_void_p | None = None) -> UInts:
        out, stream = np.empty(words, np.uint64), stream or self._stream
        to, size = ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(out.nbytes)
        self.call("cuMemcpyDtoHAsync_v2", to, ctypes.c_uint64(addr), size, stream)
        self.call("cuStreamSynchronize", stream)
        return out

    def _move(self, from_: UInts, to: UInts) -> None:
        self._copy_in(self._from, from_)
        self._copy_in(self._to, to)
        self.launch(self._stream, "move", -(-len(to) // 128), 128, self._from, self._to, len(to))
        self.call("cuStreamSynchronize", self._stream)

    def _own_words(self, n: int) -> UInts:
        """The addresses of n words of the agent's own."""
        if n > self._ROOM:
            raise ValueError(f"{n} words exceed the agent's {self._ROOM}")
        return np.uint64(self._words) + np.uint64(8) * np.arange(n, dtype=np.uint64)

    def gather(self, addrs: UInts) -> UInts:
        self._move(addrs, self._own_words(len(addrs)))
        return self.copy_out(self._words, len(addrs))

    def scatter(self, addrs: UInts, values: UInts) -> None:
        words = self._own_words(len(addrs))
        self._copy_in(self._words, np.broadcast_to(values, len(addrs)))
        self._move(words, addrs)

    def begin_check(self, addr: int, words: int, first: int) -> None:
        self.call("cuMemsetD8Async", ctypes.c_uint64(self._count), 0, ctypes.c_size_t(8), self._checks)
        self.launch(self._checks, "differ", 4 * self.sms, 256, addr, words, first, self._count)

    def end_check(self) -> int:
        return int(self.copy_out(self._count, 1, self._checks)[0])

    def poll(self, addr: int) -> Loop:
        return _CudaLoop(self, "poll", addr, 0)

    def store(self, addr: int, length: int) -> Loop:
        return _CudaLoop(self, "store", addr, length - 1)


class _CudaLoop(Loop):
    """A kernel that runs until control[1], in the host's memory, is set; control[0] is the least value allowed."""

    def __init__(self, agent: CudaAgent, name: str, addr: int, mask: int) -> None:
        self._agent, self._stream, self._out = agent, agent.stream(), agent.memory(32 * agent.sms)
        host, control = ctypes.c_void_p(), ctypes.c_uint64()
        agent.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(16), 3)
        agent.call("cuMemHostGetDevicePointer_v2", ctypes.byref(control), host, 0)
        self._control = (ctypes.c_uint64 * 2).from_address(host.value or 0)
        self._control[0] = self._control[1] = 0
        agent.call("cuMemsetD8_v2", ctypes.c_uint64(self._out), 0, ctypes.c_size_t(32 * agent.sms))
        agent.launch(self._stream, name, agent.sms, 1, addr, control.value, self._out, mask)

    def allow(self, least: int) -> None:
        self._control[0] = least

    def fault(self) -> int:
        code = self._agent.status("cuStreamQuery", self._stream)
        return 0 if code in (0, CUDA_ERROR_NOT_READY) else code

    def again(self) -> None:
        time.sleep(0.001)  # some stores reach the page before it goes again

    def settle(self) -> None:
        time.sleep(0.01)

    def stop(self) -> Seen:
        self._control[1] = 1
        self._agent.call("cuStreamSynchronize", self._stream)
        out = self._agent.copy_out(self._out, 4 * self._agent.sms).reshape(-1, 4)
        wrong = out[out[:, 2] != 0]
        value, least = (int(wrong[0, 1]), int(wrong[0, 2])) if len(wrong) else (0, 0)
        return Seen(int(out[:, 0].sum()), len(wrong), value, least, int(out[:, 3].max()))


def agent(device: int) -> Agent:
    """The agent for the CUDA library that this process uses. A context of pyvmem must exist."""
    library = ctypes.CDLL("libcuda.so.1")
    if hasattr(library, "simcuda_address_space") or hasattr(library, "fakegpu_calls"):
        import selftest_agents  # of the tests: this library is a stand-in, and so is what accesses memory

        found: Agent = selftest_agents.agent(library, device)
        return found
    return CudaAgent(library, device)
