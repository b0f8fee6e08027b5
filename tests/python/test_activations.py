"""A model that wakes gets the memory of its activations first, which torch caches; without it, it goes on sleeping.

SPDX-License-Identifier: MIT
"""

import errno
import types

import pytest
import torch
from kv_pools import free, load, make

import pyvmem
from pyvmem import KVPool, OutOfMemory
from pyvmem.sleep.activations import Activations
from pyvmem.sleep.weights import MIB, Weights


class Device:
    """A GPU with a neighbour that gives half of what it has each time it is asked, and torch's functions for it."""

    device = torch.device("cuda", 0)

    def __init__(self, free, neighbour):
        self.free, self.neighbour, self.reserved, self.asked = free, neighbour, 0, []

    def empty(self, size, dtype, device):
        assert dtype is torch.int8 and device == self.device
        if size > self.free:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.free, self.reserved = self.free - size, self.reserved + size

    def memory_reserved(self, device):
        return self.reserved

    def empty_cache(self):
        self.free, self.reserved = self.free + self.reserved, 0

    def make_room(self, size, seconds, lacks):
        self.asked.append(size)
        given = -(-self.neighbour // 2)
        self.free, self.neighbour = self.free + given, self.neighbour - given


@pytest.fixture
def on(monkeypatch):
    def on(device):
        monkeypatch.setattr(torch, "empty", device.empty)
        monkeypatch.setattr(torch.cuda, "memory_reserved", device.memory_reserved)
        monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
        return Activations(device)

    return on


def sleeps(activations, device):
    activations.note()
    device.empty_cache()


def test_a_model_that_wakes_has_the_memory_of_its_activations_again(on):
    device = Device(free=100, neighbour=0)
    activations, told = on(device), []
    device.empty(60, torch.int8, device.device)
    for _ in range(2):
        sleeps(activations, device)
        assert device.free == 100
        activations.take(0, told.append)
        assert (device.free, device.reserved) == (40, 60)
    assert told == device.asked == []


def test_neighbours_are_asked_for_what_the_device_lacks(on):
    device = Device(free=60, neighbour=0)
    activations, told = on(device), []
    device.empty(60, torch.int8, device.device)
    sleeps(activations, device)
    device.free, device.neighbour = 0, 80  # which a neighbour took
    activations.take(60, told.append)
    assert device.reserved == 60
    assert told == device.asked == [60, 60]  # 40 bytes, and 20 more


def test_a_model_goes_on_sleeping_whose_activations_have_no_room(on):
    device = Device(free=60, neighbour=0)
    activations, told = on(device), []
    device.empty(60, torch.int8, device.device)
    sleeps(activations, device)
    device.free = 59
    with pytest.raises(OutOfMemory, match="activations") as short:
        activations.take(0, told.append)
    assert short.value.errno == errno.ENOMEM and short.value.missing == 60 and told == [60]
    device.free = 60
    activations.take(0, told.append)
    activations.drop()
    assert (device.free, device.reserved) == (60, 0)


def test_on_the_host_there_is_nothing_to_do(on):
    activations = Activations(types.SimpleNamespace(device=torch.device("cpu")))
    activations.note()
    activations.take(0, pytest.fail)
    activations.drop()


def test_room_that_is_made_is_the_drivers_and_nobody_elses():
    with KVPool(budget=40 * MIB) as pool, pyvmem.Context("host") as context:
        weights = Weights(pool, context)
        cache = make(pool, context=context)
        free(cache, load(cache, 8, pool))  # 32 MiB, kept for the next requests
        told = []
        weights.make_room(24 * MIB, 10, told.append)
        assert sum(m.held for m in pool.members()) <= 16 * MIB
        assert context.stats().created + context.stats().overhead <= 16 * MIB
        weights.close()
        cache.close()
