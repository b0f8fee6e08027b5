"""Agents that access memory in place of a GPU's kernels in the self-test (`pyvmem.selftest.agents`).

The simulated GPU has /dev/simgpu for it. Over the fake driver, the CPU does it.

SPDX-License-Identifier: MIT
"""

import ctypes
import fcntl
import struct
import time

import numpy as np

from pyvmem.selftest.agents import Agent, DeviceFault, Loop, Seen, pattern


class WordByWord(Agent):
    """An agent that makes one access at a time, with `access`."""

    slow = True

    def access(self, addr, data, write):
        """Read or write bytes at a device address. Raises `DeviceFault`."""
        raise NotImplementedError

    def gather(self, addrs):
        words = [bytearray(8) for _ in addrs]
        for addr, word in zip(addrs, words, strict=True):
            self.access(int(addr), word, write=False)
        return np.frombuffer(b"".join(words), np.uint64)

    def scatter(self, addrs, values):
        for addr, value in zip(addrs, np.broadcast_to(values, len(addrs)), strict=True):
            self.access(int(addr), bytearray(int(value).to_bytes(8, "little")), write=True)

    def check(self, addr, words, first):
        data = bytearray(8 * words)
        self.access(addr, data, write=False)
        return lambda: int((np.frombuffer(data, np.uint64) != pattern(first, words)).sum())

    def poll(self, addr, least=0):
        return _CpuPoll(self, addr, least)

    def store(self, addr, length):
        self.access(addr, bytearray(b"\xff" * 8), write=True)
        return Stopped()


class Stopped(Loop):
    """Stores that were made before the loop began."""

    def stop(self):
        return Seen()


class _CpuPoll(Loop):
    """One load when it begins, one whenever the page was replaced, and one at the end."""

    def __init__(self, agent, addr, least):
        self._agent, self._addr, self._least = agent, addr, least
        self._seen = []
        self.allow(least)

    def allow(self, least):
        self._least = least
        self._seen.append((int(self._agent.gather([self._addr])[0]), least))

    def stop(self):
        self.allow(self._least)
        wrong = [pair for pair in self._seen if pair[0] < pair[1]]
        return Seen(len(self._seen), len(wrong), *(wrong or [(0, 0)])[0], max(value for value, _ in self._seen))


class CpuAgent(WordByWord):
    """The CPU, over the fake driver of the tests, whose device addresses are the process's own."""

    drops = False

    def access(self, addr, data, write):
        memory = (ctypes.c_char * len(data)).from_address(addr)
        if write:
            memory.raw = bytes(data)
        else:
            data[:] = memory.raw


def _request(number, size, direction=3):
    return direction << 30 | size << 16 | ord("s") << 8 | number


class SimAgent(WordByWord):
    """Accesses through /dev/simgpu, as an SM of the simulated GPU makes them (tests/vm/simgpu/simgpu_uapi.h)."""

    _WRITE, _POSTED = 1, 4

    def __init__(self, library, device):
        self._device = open("/dev/simgpu", "r+b", buffering=0)
        vas = (ctypes.c_uint32 * 4)()
        if library.simcuda_address_space(device, vas):
            raise DeviceFault("simcuda_address_space: CUDA error 201")
        self.vas = bytes(vas)

    def access(self, addr, data, write, posted=False):
        flags = self._WRITE * write | self._POSTED * posted
        buffer = (ctypes.c_char * len(data)).from_buffer(data)
        call = bytearray(self.vas + struct.pack("<QQQIiQ", addr, len(data), ctypes.addressof(buffer), flags, 0, 0))
        fcntl.ioctl(self._device, _request(1, len(call)), call)
        del buffer
        if result := struct.unpack_from("<i", call, 16 + 24 + 4)[0]:
            raise DeviceFault(f"access to {addr:#x}: {result}")

    def poll(self, addr, least=0):
        return _SimPoll(self, addr, least)

    def store(self, addr, length):
        return _SimStore(self, addr)

    def loop(self, number, addr, id):
        """SIMGPU_LOOP_*; returns the words of struct simgpu_loop from `id` on."""
        data = bytearray(self.vas + struct.pack("<QIIQQQQQQQQ", addr, id, 0, *[0] * 8))
        fcntl.ioctl(self._device, _request(number, len(data)), data)
        return struct.unpack_from("<IIQQQQQQQQ", data, 24)

    def drain(self):
        """Let every write in flight land."""
        fcntl.ioctl(self._device, _request(16, 4, 1), self.vas[:4])


class _SimPoll(Loop):
    def __init__(self, agent, addr, least):
        self._agent, self._addr = agent, addr
        self._id = agent.loop(5, addr, 0)[0]
        self._wrong = self._value = self._least = self._largest = 0
        self._look(least)  # the load that it began with

    def _look(self, least=0, number=6):
        found = self._agent.loop(number, self._addr, self._id)
        last = found[8]
        self._largest = max(self._largest, last)
        if last < least and not self._least:
            self._wrong, self._value, self._least = 1, last, least
        return found

    def allow(self, least):
        # A load after the call, which the simulated SM makes whenever its engine is idle.
        loads, deadline = self._look()[2], time.monotonic() + 20
        while self._look()[2] <= loads and time.monotonic() < deadline:
            time.sleep(0.001)
        self._look(least)

    def stop(self):
        found = self._look(number=7)
        return Seen(found[2], self._wrong, self._value, self._least, self._largest, found[4] + found[6])


class _SimStore(Loop):
    def __init__(self, agent, addr):
        self._agent = agent
        agent.access(addr, bytearray(b"\xff" * 8), write=True, posted=True)

    def stop(self):
        self._agent.drain()
        return Seen()


def agent(library, device):
    """The agent for a stand-in of CUDA's library."""
    return SimAgent(library, device) if hasattr(library, "simcuda_address_space") else CpuAgent()
