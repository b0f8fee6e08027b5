"""Agents that access memory in place of a GPU's kernels in the self-test (`pyvmem.selftest.agents`).

The simulated GPU has /dev/simgpu for it. Over the fake driver, the CPU does it.

SPDX-License-Identifier: MIT
"""

import ctypes
import fcntl
import struct
import time

import numpy as np

from pyvmem.selftest.agents import CUDA_ERROR_ILLEGAL_ADDRESS, Agent, DeviceFault, Loop, Seen, pattern


class WordByWord(Agent):
    """An agent that makes one access at a time, with `access`."""

    slow = True
    _differ = 0

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

    def begin_check(self, addr, words, first):
        data = bytearray(8 * words)
        self.access(addr, data, write=False)
        self._differ = int((np.frombuffer(data, np.uint64) != pattern(first, words)).sum())

    def end_check(self):
        return self._differ

    def poll(self, addr):
        raise NotImplementedError

    def store(self, addr, length):
        raise NotImplementedError


class CpuAgent(WordByWord):
    """The CPU, over the fake driver of the tests, whose device addresses are the process's own."""

    continuous = drops = False

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
            raise DeviceFault(201, "simcuda_address_space")
        self.vas = bytes(vas)

    def access(self, addr, data, write, posted=False):
        flags = self._WRITE * write | self._POSTED * posted
        buffer = (ctypes.c_char * len(data)).from_buffer(data)
        call = bytearray(self.vas + struct.pack("<QQQIiQ", addr, len(data), ctypes.addressof(buffer), flags, 0, 0))
        fcntl.ioctl(self._device, _request(1, len(call)), call)
        del buffer
        if result := struct.unpack_from("<i", call, 16 + 24 + 4)[0]:
            raise DeviceFault(CUDA_ERROR_ILLEGAL_ADDRESS, f"access to {addr:#x}: {result}")

    def poll(self, addr):
        return _SimPoll(self, addr)

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
    def __init__(self, agent, addr):
        self._agent, self._addr = agent, addr
        self._id = agent.loop(5, addr, 0)[0]
        self._wrong = self._value = self._least = self._largest = 0

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

    def fault(self):
        found = self._look()  # a load, or one that missed its TLB, finds no translation
        return CUDA_ERROR_ILLEGAL_ADDRESS if found[4] or found[3] else 0

    def stop(self):
        found = self._look(number=7)
        return Seen(found[2], self._wrong, self._value, self._least, self._largest, found[4], found[6])


class _SimStore(Loop):
    def __init__(self, agent, addr):
        self._agent, self._addr = agent, addr
        self.again()

    def again(self):
        self._agent.access(self._addr, bytearray(b"\xff" * 8), write=True, posted=True)

    def settle(self):
        self._agent.drain()

    def stop(self):
        self.settle()
        return Seen()


def agent(library, device):
    """The agent for a stand-in of CUDA's library."""
    return SimAgent(library, device) if hasattr(library, "simcuda_address_space") else CpuAgent()
