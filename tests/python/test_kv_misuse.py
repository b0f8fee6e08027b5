"""A KV cache in wrong hands: wrong types, numbers out of range, several threads, children of its process.

SPDX-License-Identifier: MIT
"""

import threading

import numpy as np
import pytest
import torch
from kv_caches import Event

import pyvmem
from pyvmem._ffi import lib
from pyvmem.errors import InvalidArgument, OutOfMemory
from pyvmem.kv.cache import KVCache, Spare, TensorSpec
from pyvmem.kv.prefix import PrefixCache, block_hashes

MIB = 1 << 20


def make(slots=4, **options):
    options = {"backend": "host", "name": None, "dtype": torch.float16, **options}
    return KVCache.for_model(2, 4, 64, slots, 1024, 32 * MIB, **options)


@pytest.fixture
def cache():
    with make() as cache:
        yield cache


# ---- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [3, None, "cache"])
def test_what_is_no_cache_is_named(wrong):
    with pytest.raises(TypeError, match="cache must be a KVCache, not "):
        PrefixCache(wrong)


def test_a_step_that_is_refused_is_not_counted(cache):
    slot, before = cache.alloc(), cache.last_step
    lengths = [0] * 4
    for wrong in (2000, -1):
        lengths[slot] = wrong
        with pytest.raises(InvalidArgument):
            cache.step(lengths)
    assert (cache.stats().steps, cache.stats().step_failures) == (0, 0)
    cache.set_budget(MIB)
    lengths[slot] = 1024
    assert not cache.step(lengths) and cache.stats().step_failures == 1
    lengths[slot] = 8
    assert cache.step(lengths) and cache.stats().steps == 1 == cache.last_step - before


def test_a_run_of_another_cache_is_refused(cache):
    """A target and its draft are such a pair."""
    with make() as draft:
        runs = []
        for one, value in ((cache, 1.0), (draft, 2.0)):
            slot = one.alloc(200)
            assert one.step([200 if i == slot else 0 for i in range(4)])
            one.keys[0][slot, :200] = value
            runs.append(one.share(slot, 128))
        slot = draft.alloc()
        calls = (
            lambda: draft.attach(slot, runs[0]), lambda: draft.attach(slot, runs[::-1]),
            lambda: draft.drop(runs[::-1]),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(InvalidArgument, match="run"):
                call()
        assert draft.attach(slot, runs[1]) == 128
        assert (draft.keys[0][slot, :128] == 2.0).all()


def test_calls_in_the_wrong_state_are_one_line_and_change_nothing(cache):
    running, fresh = cache.alloc(), cache.alloc()
    lengths = [0] * 4
    lengths[running] = 200
    assert cache.step(lengths)
    ending = cache.alloc(slot=3)
    lengths[3] = 10
    assert cache.step(lengths)
    last = cache.last_step
    cache.free(ending, after=last)
    free = next(slot for slot in range(4) if cache.slot(slot).state == "free")
    hashes, prefix = PrefixCache(cache, 16), cache.share(running, 64)
    cases = {
        f"step {last + 3} has not been made yet; the last is {last}": [
            lambda: cache.free(running, after=last + 3), lambda: cache.truncate(running, 5, after=last + 3),
            lambda: cache.retire(last + 3),
        ],
        f"slot {ending} is being given up": [
            lambda: cache.free(ending), lambda: cache.free(ending, after=last), lambda: cache.truncate(ending, 1),
            lambda: cache.swap_out(ending), lambda: cache.share(ending, 1), lambda: hashes.add(ending, [b"1"]),
        ],
        "lengths[3] is 11, but the slot is being given up": [lambda: cache.step([0, 0, 0, 11])],
        f"slot {free} is free": [
            lambda: cache.free(free), lambda: cache.attach(free, prefix),
            lambda: hashes.attach(free, [b"1"]),
        ],
        f"slot {running} is not newly allocated": [
            lambda: cache.attach(running, prefix), lambda: hashes.attach(running, [b"1"]),
        ],
        f"slot {fresh} has 0 tokens": [lambda: hashes.add(fresh, [b"1"])],
        "created without events=True": [hashes.evicted],
    }  # fmt: skip
    cache.wait()
    before = cache.stats()
    for text, calls in cases.items():
        for call in calls:
            with pytest.raises(InvalidArgument) as raised:
                call()
            assert text in str(raised.value) and "\n" not in str(raised.value)
    assert cache.stats() == before
    with pytest.raises(ValueError, match="pool_min 5 needs a pool"):
        make(pool_min=5)


def test_numbers_out_of_range_are_named(cache):
    for wrong in (2**32, np.array(2**32 + 1), np.array(-1)):
        with pytest.raises(InvalidArgument, match="tokens"):
            cache.alloc(wrong)
    with pytest.raises(InvalidArgument, match="tokens 2147483648 is over max_tokens, 1024"):
        cache.alloc(2**31)
    with pytest.raises(InvalidArgument, match="row_bytes"):
        KVCache([TensorSpec("x", (2**40, 2**40), torch.int8)], 1, 10, MIB, backend="host", name=None)


def test_what_is_no_run_or_specification_is_named(cache):
    for call in (
        lambda runs: cache.attach(0, runs),
        cache.drop,
    ):
        with pytest.raises(TypeError, match="runs must be a sequence, not 7"):
            call(7)
        with pytest.raises(TypeError, match="runs must be a Run or a sequence of them, not of 7"):
            call([7])
    with pytest.raises(TypeError, match="specs must be a sequence, not None"):
        KVCache(None, 1, 10, MIB, backend="host", name=None)
    with pytest.raises(TypeError, match="specs must be a list of TensorSpec, not of 7"):
        KVCache([7], 1, 10, MIB, backend="host", name=None)
    for wrong in ("no", None, np.zeros(2)):
        with pytest.raises(TypeError, match="dry must be True or False"):
            cache.step([0] * 4, dry=wrong)
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, not ndarray of shape \(2, 2\)"):
        TensorSpec("x", (1,), np.zeros((2, 2)))
    gradient = torch.zeros(2, requires_grad=True)
    with pytest.raises(TypeError, match="lengths must be an integer or an array of integers, not Tensor"):
        cache.context.unmap(0, gradient)
    for wrong in (None, 5, "abc", [[1, 2]], [[1], [2, 3]], [1.5], gradient):
        with pytest.raises(TypeError, match="tokens must be a sequence of integers"):
            block_hashes(wrong, 16)
    assert cache.stats().active_slots == 0


def test_budgets_beyond_all_memory_are_refused_beside_another_cache():
    with (
        pyvmem.Context("host") as context,
        make(context=context, backend=None) as cache,
        make(context=context, backend=None),
    ):
        for budget in (2**64 - 1, 2**64 - 32 * MIB):
            with pytest.raises(OutOfMemory):
                make(context=context, backend=None).set_budget(budget)
            with pytest.raises(OutOfMemory):
                cache.set_budget(budget)
        assert cache.stats().budget_pages == 512


def test_budgets_beyond_the_limits_are_named(cache):
    with pytest.raises(InvalidArgument, match="bytes 5 is less than a page, 65536"):
        cache.set_budget(5)
    with pytest.raises(InvalidArgument, match="budget 5 is less than a page, 65536"):
        KVCache([TensorSpec("x", (8,), torch.int8)], 1, 10, 5, backend="host", name=None)
    with pytest.raises(OutOfMemory, match=f"budget {2**60}: "):
        KVCache([TensorSpec("x", (8,), torch.int8)], 1, 10, 2**60, backend="host", name=None)


# ---- events ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["reclaim", "truncate", "set_budget"])
def test_an_event_that_has_completed_frees_memory_for_every_call(call):
    """No step, nor another call that would look at the event, comes between."""
    with KVCache([TensorSpec("k", (8192,), torch.float32)], 2, 100, 10 * 65536, backend="host", name=None, check=True,
                 spare=Spare(overlap=False, generous=False, eager=False)) as cache:  # fmt: skip
        slot, other = cache.alloc(), cache.alloc()
        assert cache.step([5, 1])
        cache.share(slot, 5)
        assert cache.step([5, 14])  # no page is left for a copy of the shared ones
        assert not cache.truncate(slot, 1)
        event = Event()
        cache.free(other, after=event)
        event.come = True
        if call == "reclaim":
            assert cache.reclaim() == 7 * 65536
        elif call == "set_budget":
            cache.set_budget(3 * 65536)
            assert cache.stats().held_pages == 3
        else:
            assert cache.truncate(slot, 1)
            assert cache.slot(slot).tokens == 1


@pytest.mark.parametrize("call", ["alloc", "check"])
def test_calls_that_want_slots_or_memory_look_at_events(call):
    """An engine whose requests have all ended makes no step any more."""
    with make(slots=2) as cache:
        first, _ = cache.alloc(), cache.alloc()
        assert cache.step([1024, 10])
        event = Event()
        cache.free(first, after=event)
        cache.set_budget(cache.slot(first).pages * cache.page_size + 16 * cache.page_size)
        wanted = {
            "alloc": lambda: cache.alloc() == first,
            "check": lambda: cache.step([0, 1024], dry=True),
        }[call]
        assert not wanted()
        event.come = True
        assert wanted()


def test_two_threads_do_not_take_each_others_events():
    """One asks an event while the other takes it off the list: what it then takes off has not come."""
    with make(slots=3) as cache:
        slots = [cache.alloc() for _ in range(3)]
        assert cache.step([10, 10, 10])
        asked, go_on, other_came = threading.Event(), threading.Event(), threading.Event()

        class Polling:
            """Says that somebody waits."""

            lock = threading.Lock()

            def __enter__(self):
                if not self.lock.acquire(blocking=False):
                    other_came.set()
                    self.lock.acquire()

            def __exit__(self, *_):
                self.lock.release()

        class Slow(Event):
            def query(self):
                if threading.current_thread() is thread:
                    asked.set()
                    assert go_on.wait(60)
                elif asked.is_set():
                    other_came.set()
                return asked.is_set()

        cache._polling = Polling()
        slow, late = Slow(), Event()
        thread = threading.Thread(target=cache.step, args=([0] * 3,), kwargs={"dry": True})
        cache.free(slots[0], after=slow)
        assert cache.slot(slots[0]).after
        assert cache.step([0, 10, 10])
        cache.free(slots[1], after=late)
        thread.start()
        assert asked.wait(60)
        other = threading.Thread(target=cache.step, args=([0] * 3,), kwargs={"dry": True})
        other.start()
        assert other_came.wait(60)
        go_on.set()
        thread.join()
        other.join()
        assert not cache.slot(slots[0]).after and cache.slot(slots[1]).after == cache.last_step
        late.come = True
        assert cache.step([0] * 3, dry=True) and not cache.slot(slots[1]).after


def test_a_slot_that_another_thread_gets_keeps_its_swapped_rows(monkeypatch):
    from pyvmem.kv import cache as module

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def vmem_kv_free(self, *arguments):
            rc = lib.vmem_kv_free(*arguments)
            monkeypatch.undo()
            assert cache.alloc() == slot and cache.step([10])  # another thread, as soon as the slot is free
            cache.swap_out(slot)
            return rc

    with make(slots=1) as cache:
        slot = cache.alloc()
        monkeypatch.setattr(module, "lib", Library())
        cache.free(slot)
        assert cache.slot(slot).state == "swapped" and cache.swap_in(slot)
        with pytest.raises(InvalidArgument, match="slot 7"):
            cache.free(7)


class Closes:
    """An argument that closes the cache when the call looks at it, as another thread may at this moment."""

    def __init__(self, cache):
        self.cache = cache

    def __index__(self):
        self.cache.close()
        return 0


def test_a_cache_that_is_closed_while_steps_are_retired_ends_once():
    cache = make()
    with pytest.raises(ValueError, match="the cache is closed"):
        cache.retire(Closes(cache))
    assert cache.closed


def test_a_cache_that_is_closed_while_a_tensor_is_made_says_so():
    cache = make()
    with pytest.raises(ValueError, match="the KV cache is closed"):
        cache.flat(Closes(cache))


def test_a_signal_handler_may_call_while_events_are_queried(cache):
    class Interrupted(Event):
        calls = 0

        def query(self):
            self.calls += 1
            if self.calls == 1:  # as a handler would
                assert cache.alloc() is not None
            return True

    slot = cache.alloc()
    assert cache.step([1 if s == slot else 0 for s in range(4)])
    event = Interrupted()
    cache.free(slot, after=event)
    assert cache.step([0] * 4)
    calls = event.calls
    assert cache.step([0] * 4) and event.calls == calls  # it has come: nobody asks it again


def test_what_is_no_event_is_named(cache):
    slot = cache.alloc()
    cache.step([10, 0, 0, 0])

    class Answer:
        query = "a string"

    with pytest.raises(TypeError, match="after must be an integer"):
        cache.free(slot, after=Answer())

    class Asked(Event):
        def query(self):
            raise AssertionError("a refused call keeps no event")

    with pytest.raises(InvalidArgument, match="slot 9"):
        cache.free(9, after=Asked())
    assert cache.step([11, 0, 0, 0])
