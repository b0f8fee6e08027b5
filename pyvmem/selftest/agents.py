"""Agents access memory as code on a GPU does, by kernels. The tests have their own for a simulated GPU.

An agent loads and stores 64-bit words at device addresses of this process. `poll` and `store` begin accesses that go on
until they are stopped, for what must hold while memory is remapped.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyvmem.selftest.kernels import FACTOR, PTX

UInts = npt.NDArray[np.uint64]


class DeviceFault(Exception):
    """The GPU reported a fault, or a call of CUDA's failed: no call on this context works any more."""


@dataclass(frozen=True)
class Seen:
    """What the loads of a `Loop` returned, over all SMs."""

    loads: int = 0
    wrong: int = 0  # SMs that saw a value below the least one allowed
    value: int = 0  # the first such value, and what was the least
    least: int = 0
    largest: int = 0
    faulted: int = 0  # loads without a translation, or of memory that nobody owns (a real GPU ends the context)


class Loop(ABC):
    """Accesses by one thread on each SM, until `stop`."""

    def allow(self, least: int) -> None:
        """From now on, no load that begins may return less than this."""

    @abstractmethod
    def stop(self) -> Seen:
        """End the accesses, and return when all of them have reached memory. Raises `DeviceFault`."""


class Agent(ABC):
    """See the module. One loop runs at a time."""

    slow = False  # not a real GPU: the stages do less
    drops = True  # writes to sparse addresses are dropped

    @abstractmethod
    def gather(self, addrs: UInts) -> UInts:
        """Return the words at the addresses."""

    @abstractmethod
    def scatter(self, addrs: UInts, values: UInts) -> None:
        """Store values[i] at addrs[i]; done on return."""

    @abstractmethod
    def check(self, addr: int, words: int, first: int) -> Callable[[], int]:
        """Begin to compare memory with `pattern`. What is returned ends that, and returns how many words differ."""

    @abstractmethod
    def poll(self, addr: int, least: int = 0) -> Loop:
        """Load the word again and again; no load may return less than `least`."""

    @abstractmethod
    def store(self, addr: int, length: int) -> Loop:
        """Store words that are not 0 to a page again and again; on return, some have been stored."""


def pattern(first: int, words: int) -> UInts:
    """Words first to first + words - 1 of the pattern in which no two words are equal."""
    with np.errstate(over="ignore"):
        return np.arange(first, first + words, dtype=np.uint64) * np.uint64(FACTOR)


def every(addr: int, length: int, step: int) -> UInts:
    """Addresses from `addr` on, `step` bytes apart."""
    return np.arange(addr, addr + length, step, dtype=np.uint64)


class CudaAgent(Agent):
    """Kernels that the driver compiles from PTX, in the device's primary context.

    What they take and return is in the host's memory, which the device accesses at the same addresses.
    """

    _ROOM = 1 << 18  # words of each array of the kernel `move`

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self._library = library
        self._call("cuInit", 0)
        handle, context, sms, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self._call("cuDeviceGetAttribute", ctypes.byref(sms), 16, handle)
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.encode()))
        self.sms = sms.value
        self._functions = {name: ctypes.c_void_p() for name in ("move", "differ", "poll", "store")}
        for name, function in self._functions.items():
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self._moves, self._checks, self._loops = (self._stream() for _ in range(3))
        self._from, self._to, self._words = (self._memory(self._ROOM) for _ in range(3))
        self._own = every(self._words.ctypes.data, 8 * self._ROOM, 8)
        self._count, self.control, self.out = self._memory(1), self._memory(2), self._memory(4 * self.sms)
        # Beside a kernel that runs until it is stopped, nothing may be loaded: the driver would wait for it.
        self.gather(self._own[:128])

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._library, name)(*args):
            raise DeviceFault(f"{name}: CUDA error {code}")

    def _stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def _memory(self, words: int) -> UInts:
        addr = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(addr), ctypes.c_size_t(8 * words), 3)
        return np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(addr.value or 0))

    def _launch(self, stream: ctypes.c_void_p, name: str, blocks: int, threads: int, *args: UInts | int) -> None:
        values = [ctypes.c_uint64(arg if isinstance(arg, int) else arg.ctypes.data) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._call("cuLaunchKernel", self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def _move(self, from_: UInts, to: UInts) -> None:
        n = len(to)
        self._from[:n], self._to[:n] = from_, to
        self._launch(self._moves, "move", -(-n // 128), 128, self._from, self._to, n)
        self._call("cuStreamSynchronize", self._moves)

    def gather(self, addrs: UInts) -> UInts:
        n = len(addrs)
        self._move(addrs, self._own[:n])
        return self._words[:n].copy()

    def scatter(self, addrs: UInts, values: UInts) -> None:
        n = len(addrs)
        self._words[:n] = values
        self._move(self._own[:n], addrs)

    def check(self, addr: int, words: int, first: int) -> Callable[[], int]:
        self._count[0] = 0
        self._launch(self._checks, "differ", 4 * self.sms, 256, addr, words, first, self._count)

        def end() -> int:
            self._call("cuStreamSynchronize", self._checks)
            return int(self._count[0])

        return end

    def begin_loop(self, name: str, addr: int, mask: int) -> None:
        self._launch(self._loops, name, self.sms, 1, addr, self.control, self.out, mask)

    def end_loop(self) -> None:
        self._call("cuStreamSynchronize", self._loops)

    def poll(self, addr: int, least: int = 0) -> Loop:
        return _CudaLoop(self, "poll", addr, 0, least)

    def store(self, addr: int, length: int) -> Loop:
        loop = _CudaLoop(self, "store", addr, length - 1)
        time.sleep(0.001)  # some stores reach the page before it goes
        return loop


class _CudaLoop(Loop):
    """A kernel that runs until control[1] is set; control[0] is the least value allowed."""

    def __init__(self, agent: CudaAgent, name: str, addr: int, mask: int, least: int = 0) -> None:
        self._agent = agent
        agent.control[:] = least, 0
        agent.out[:] = 0
        agent.begin_loop(name, addr, mask)

    def allow(self, least: int) -> None:
        self._agent.control[0] = least

    def stop(self) -> Seen:
        self._agent.control[1] = 1
        self._agent.end_loop()
        out = self._agent.out.reshape(-1, 4)
        wrong = out[out[:, 2] != 0]
        value, least = (int(wrong[0, 1]), int(wrong[0, 2])) if len(wrong) else (0, 0)
        return Seen(int(out[:, 0].sum()), len(wrong), value, least, int(out[:, 3].max()))


def _stand_in(library: ctypes.CDLL) -> bool:
    return hasattr(library, "simcuda_address_space") or hasattr(library, "fakegpu_calls")


def simulated() -> bool:
    """Return whether the CUDA library that this process uses is a stand-in of the tests."""
    return _stand_in(ctypes.CDLL("libcuda.so.1"))


def agent(device: int) -> Agent:
    """The agent for the CUDA library that this process uses. A context of pyvmem must exist."""
    library = ctypes.CDLL("libcuda.so.1")
    if _stand_in(library):
        import selftest_agents  # of the tests: what accesses memory is a stand-in, too

        found: Agent = selftest_agents.agent(library, device)
        return found
    return CudaAgent(library, device)
