"""A KV cache beside kernels in flight: what is asked for after a step or an event, and what comes of it.

SPDX-License-Identifier: MIT
"""

import gc
import threading

import pytest
import torch

import pyvmem
from kv_caches import Event
from pyvmem.errors import InvalidArgument
from pyvmem.kv.cache import KVCache, Spare, TensorSpec

ROWS = 16384  # float32 of a row: one page


@pytest.fixture
def context():
    with pyvmem.Context("host") as context:
        yield context
        assert context.stats().created == 0


def make(context, **options):
    options = {"check": True, "name": None, "steps_in_flight": 2, **options}
    return KVCache([TensorSpec("k", (ROWS,), torch.float32)], 2, 100, 100 * 65536, context=context, **options)


def write(cache, slot, tokens):
    cache.tensors[0][slot, :tokens] = torch.arange(1.0, tokens + 1).view(-1, 1)


def holds(cache, slot, tokens):
    return bool((cache.tensors[0][slot, :tokens] == torch.arange(1.0, tokens + 1).view(-1, 1)).all())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["event", "step"])
def test_a_request_is_swapped_out_after_its_kernels(context, overlap, kind):
    with make(context, spare=Spare(overlap=overlap)) as cache:
        slot, other = cache.alloc(), cache.alloc()
        assert cache.step([60, 1])
        event = Event()
        cache.swap_out(slot, after=event if kind == "event" else cache.last_step)
        cache.wait()
        info = cache.slot(slot)
        assert (info.state, info.after, info.copy_left) == ("swapped", cache.last_step, cache.swap_size(slot))
        assert cache.stats().swapped_slots == 1
        write(cache, slot, 60)  # the kernel does
        assert not cache.step([0, 70])
        assert cache.shortage.ending_pages >= 60
        if kind == "event":
            event.come = True
        else:
            cache.retire()
        lengths = [0, 0]
        lengths[other] = 70
        assert cache.step(lengths)
        cache.wait()
        info = cache.slot(slot)
        assert (info.state, info.after, info.copy_left) == ("swapped", 0, 0)
        cache.free(other, after=cache.last_step)
        cache.retire()
        assert cache.swap_in(slot)
        assert holds(cache, slot, 60)


def test_a_request_comes_back_before_it_was_copied(context):
    with make(context) as cache:
        slot = cache.alloc()
        assert cache.step([60, 0])
        write(cache, slot, 60)
        cache.swap_out(slot, after=cache.last_step)
        with pytest.raises(InvalidArgument, match="swapped out"):
            cache.swap_out(slot, after=cache.last_step)
        assert cache.swap_in(slot, dry=True)
        assert cache.swap_in(slot)
        assert cache.slot(slot).state == "active" and holds(cache, slot, 60)
        assert cache.step([61, 0])
        cache.retire()
        cache.wait()
        assert cache.stats().swap_out_bytes == 0
        cache.swap_out(slot, after=cache.last_step)
        cache.free(slot)
        assert cache.slot(slot).state == "free" and not cache._swapped


@pytest.mark.parametrize("fenced", [True, False])
def test_rows_are_copied_to_the_callers_memory(context, fenced):
    with make(context) as cache:
        slot = cache.alloc()
        assert cache.step([60, 0])
        write(cache, slot, 60)
        size = cache.swap_size(slot)
        host = torch.full((size // 2 + 100,), -1, dtype=torch.int16)
        for turn in range(2):  # the memory can be used again
            cache.swap_out(slot, cache.last_step if fenced else None, host)
            cache.retire()
            cache.wait()
            assert cache.slot(slot).state == "swapped"
            rows = torch.from_numpy(host.numpy()[: size // 2].copy()).view(cache.tensors[0].dtype)
            assert rows[:: rows.numel() // 60].tolist()[:60] == list(range(1, 61))
            assert (host[size // 2 :] == -1).all(), "beyond the rows"
            write(cache, slot, 0)
            assert cache.swap_in(slot) and holds(cache, slot, 60) and not cache._swapped


def test_memory_that_a_swap_cannot_use_changes_nothing(context):
    with make(context) as cache:
        slot, other = cache.alloc(), cache.alloc()
        assert cache.step([30, 30])
        size = cache.swap_size(slot)
        memory = torch.empty(3 * size, dtype=torch.uint8)
        cache.swap_out(other, host=memory[size : 2 * size])
        for host, text in (
            (torch.empty(size - 1, dtype=torch.uint8), f"host has {size - 1} bytes: slot {slot} needs {size}"),
            (torch.empty(2 * size, dtype=torch.uint8)[::2], "host is not contiguous"),
            (torch.empty(size, dtype=torch.uint8, device="meta"), "host is on meta, not on the CPU"),
            (memory[1:], f"host overlaps the memory of slot {other}, which is swapped out"),
            (memory[2 * size - 1 :], f"host overlaps the memory of slot {other}, which is swapped out"),
        ):
            for after in (None, cache.last_step):
                with pytest.raises(InvalidArgument, match=text):
                    cache.swap_out(slot, after, host)
        with pytest.raises(TypeError, match="host must be a CPU tensor, not bytearray"):
            cache.swap_out(slot, host=bytearray(size))
        assert cache.slot(slot).state == "active" and list(cache._swapped) == [other]
        cache.swap_out(slot, host=memory[2 * size :])
        cache.free(other)
        assert cache.swap_in(slot) and not cache._swapped


def test_another_thread_swaps_in_while_memory_is_compared(context):
    with make(context) as cache:
        slot, other = cache.alloc(), cache.alloc()
        assert cache.step([30, 30])
        cache.swap_out(other)
        memory = cache._swapped[other]

        class Watched:
            """The memory of `other`, which is swapped in as soon as somebody looks where it is."""

            nbytes = memory.nbytes

            def data_ptr(self):
                if cache._swapped.get(other) is self:
                    cache._swapped[other] = memory
                    assert cache.swap_in(other)
                return memory.data_ptr()

        cache._swapped[other] = Watched()
        cache.swap_out(slot, host=torch.empty(cache.swap_size(slot), dtype=torch.uint8))
        assert list(cache._swapped) == [slot] and cache.slot(other).state == "active"


def test_a_fence_of_the_future_changes_nothing(context):
    with make(context) as cache:
        slot = cache.alloc()
        assert cache.step([60, 0])
        for call in (
            lambda: cache.free(slot, after=2),
            lambda: cache.swap_out(slot, after=2),
            lambda: cache.truncate(slot, 5, after=2),
            lambda: cache.close(after=2),
            lambda: cache.retire(2),
        ):
            with pytest.raises(InvalidArgument, match="step 2 has not been made yet; the last is 1"):
                call()
        for wrong in (-1, 1.5, "1"):
            with pytest.raises((InvalidArgument, TypeError), match="after"):
                cache.close(after=wrong)
        assert not cache.closed and cache.slot(slot).tokens == 60 and not cache._swapped
        assert cache.step([61, 0])


def test_a_slot_that_is_being_given_up_is_left_alone(context):
    with make(context) as cache:
        slot = cache.alloc()
        assert cache.step([60, 0])
        cache.free(slot, after=1)
        for call in (
            lambda: cache.free(slot),
            lambda: cache.free(slot, after=1),
            lambda: cache.swap_out(slot),
            lambda: cache.swap_out(slot, after=1),
            lambda: cache.truncate(slot, 5, after=1),
            lambda: cache.step([61, 0]),
            lambda: cache.share(slot, 5),
        ):
            with pytest.raises(InvalidArgument, match="is being given up"):
                call()
        assert cache.slot(slot).state == "free" and cache.slot(slot).after
        cache.retire()
        assert cache.slot(slot).state == "free" and not cache.slot(slot).after


def close_threads():
    return [thread for thread in threading.enumerate() if thread.name == "pyvmem close"]


@pytest.mark.parametrize("call", ["reclaim", "dry truncate", "truncate", "set_budget"])
def test_an_event_that_has_completed_frees_memory_for_every_call(context, call):
    """No step, nor another call that would look at the event, comes between."""
    with KVCache([TensorSpec("k", (ROWS // 2,), torch.float32)], 2, 100, 10 * 65536, context=context, name=None,
                 check=True, spare=Spare(overlap=False, generous=False, eager=False)) as cache:  # fmt: skip
        slot, other = cache.alloc(), cache.alloc()
        assert cache.step([5, 1])
        cache.share(slot, 5)
        assert cache.step([5, 14])  # no page is left for a copy of the shared ones
        assert not cache.truncate(slot, 1, dry=True)
        event = Event()
        cache.free(other, after=event)
        event.come = True
        if call == "reclaim":
            assert cache.reclaim() == 7 * 65536
        elif call == "set_budget":
            cache.set_budget(3 * 65536)
            assert cache.stats().held_pages == 3
        elif call == "truncate":
            assert cache.truncate(slot, 1)
            assert cache.slot(slot).tokens == 1
        else:
            assert cache.truncate(slot, 1, dry=True)


def test_a_cache_closes_after_an_event(context):
    cache, event = make(context), Event()
    assert cache.step([0, 0])
    slot = cache.alloc()
    assert cache.step([60 if s == slot else 0 for s in range(2)])
    cache.swap_out(slot, after=event)
    cache.close(after=event)
    assert cache.closed and context.stats().created >= 60 * 65536
    with pytest.raises(ValueError, match="closed"):
        cache.step([0, 0])
    cache.close()  # it is
    event.come = True
    for thread in close_threads():
        thread.join(60)
    assert context.stats().created == 0


def test_a_cache_closes_after_a_step(context):
    cache = make(context)
    cache.alloc()
    assert cache.step([60, 0])
    assert cache.step([61, 0])
    cache.close(after=2)
    cache.retire(1)
    assert context.stats().created >= 60 * 65536 and not close_threads()
    cache.retire(2)
    assert context.stats().created == 0
    with pytest.raises(ValueError, match="closed"):
        cache.retire(2)
    cache = make(context)
    assert cache.step([0, 0])
    cache.retire()
    cache.close(after=1)  # its kernels have ended
    assert context.stats().created == 0


def test_an_event_that_cannot_be_asked_does_not_keep_the_memory(context):
    class Lost:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cache = make(context)
    assert cache.step([0, 0])
    cache.close(after=Lost())
    for thread in close_threads():
        thread.join(60)
    assert context.stats().created == 0


@pytest.mark.parametrize("end", ["close", "collect"])
def test_nothing_is_copied_once_the_cache_is_gone(context, end):
    """A view of a tensor keeps the memory; what the rows were to be copied to is gone with the cache."""
    cache = make(context)
    slot = cache.alloc()
    assert cache.step([60, 0])
    cache.swap_out(slot, after=1)
    host = cache._swapped[slot]
    host.zero_()
    write(cache, slot, 60)
    view = cache.tensors[0]
    if end == "close":
        cache.retire(0)
        cache.close()
    del cache
    gc.collect()
    assert bool((view[slot, :60, 0] == torch.arange(1.0, 61.0)).all())
    assert not host.any()
    del view
