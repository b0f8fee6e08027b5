"""How a vLLM engine takes device memory ahead and gives it back, without vLLM and without a device."""

import types

from pyvmem.errors import OutOfMemory
from pyvmem.vllm.memory import MARGIN, Memory


class DeviceMemory:
    """A context whose device memory changes by hand."""

    def __init__(self, free):
        self.free, self.created, self.overhead, self.calls = free, 0, 100, []

    def stats(self):
        return types.SimpleNamespace(created=self.created, overhead=self.overhead)

    def info(self):
        return types.SimpleNamespace(memory_free=self.free)

    def prealloc(self, n):
        self.calls.append(n)
        if n > self.free:
            raise OutOfMemory(12, "no")

    def trim(self):
        self.calls.append("trim")


GB = 1 << 30


def test_a_busy_engine_makes_memory_ahead_within_its_limit():
    device = DeviceMemory(50 * GB)
    memory = Memory(device, ahead=GB)
    assert memory.look(40 * GB, busy=False) == 50 * GB + 100 - MARGIN
    assert device.calls == []
    memory.look(40 * GB, busy=True)
    device.created = 40 * GB - 5
    memory.look(40 * GB, busy=True)
    device.created = 41 * GB
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, 5]


def test_a_busy_engine_gives_back_what_others_need_or_it_has_not_needed_for_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pyvmem.vllm.memory.time.monotonic", lambda: now[0])
    device = DeviceMemory(50 * GB)
    memory = Memory(device, ahead=GB)
    device.overhead += 3 * GB
    memory.look(40 * GB, busy=True)
    now[0] = 6.0
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, "trim"]
    device.free = MARGIN
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, "trim", "trim"]
    device.overhead = 100  # nothing is left to give
    memory.look(40 * GB, busy=True)
    assert device.calls == [GB, "trim", "trim"]


def test_memory_that_another_process_was_faster_to_take_is_no_error():
    device = DeviceMemory(3 * GB)
    memory = Memory(device, ahead=GB)
    device.prealloc = lambda n: (_ for _ in ()).throw(OutOfMemory(12, "no"))
    assert memory.look(40 * GB, busy=True) == 3 * GB + 100 - MARGIN
