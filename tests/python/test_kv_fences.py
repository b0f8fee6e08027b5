"""A KV cache beside kernels in flight: what is asked for after a step or an event, and what comes of it.

SPDX-License-Identifier: MIT
"""

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


def test_a_fence_of_the_future_changes_nothing(context):
    with make(context) as cache:
        slot = cache.alloc()
        assert cache.step([60, 0])
        last = cache.last_step
        for call in (
            lambda: cache.free(slot, after=last + 1),
            lambda: cache.truncate(slot, 5, after=last + 1),
            lambda: cache.retire(last + 1),
        ):
            with pytest.raises(InvalidArgument, match=f"step {last + 1} has not been made yet; the last is {last}"):
                call()
        for wrong in (-1, 1.5, "1"):
            with pytest.raises((InvalidArgument, TypeError), match="after"):
                cache.free(slot, after=wrong)
        assert not cache.closed and cache.slot(slot).tokens == 60
        assert cache.step([61, 0])


def test_a_slot_that_is_being_given_up_is_left_alone(context):
    with make(context) as cache:
        slot = cache.alloc()
        assert cache.step([60, 0])
        step = cache.last_step
        cache.free(slot, after=step)
        for call in (
            lambda: cache.free(slot),
            lambda: cache.free(slot, after=step),
            lambda: cache.swap_out(slot),
            lambda: cache.truncate(slot, 5, after=step),
            lambda: cache.step([61, 0]),
            lambda: cache.share(slot, 5),
        ):
            with pytest.raises(InvalidArgument, match="is being given up"):
                call()
        assert cache.slot(slot).state == "free" and cache.slot(slot).after
        cache.retire()
        assert cache.slot(slot).state == "free" and not cache.slot(slot).after


@pytest.mark.parametrize("call", ["reclaim", "truncate", "set_budget"])
def test_an_event_that_has_completed_frees_memory_for_every_call(context, call):
    """No step, nor another call that would look at the event, comes between."""
    with KVCache([TensorSpec("k", (ROWS // 2,), torch.float32)], 2, 100, 10 * 65536, context=context, name=None,
                 check=True, spare=Spare(overlap=False, generous=False, eager=False)) as cache:  # fmt: skip
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


@pytest.mark.parametrize("other", ["last_step", "before", "one"])
def test_a_step_of_another_cache_is_refused(context, other):
    """A target and its draft are such a pair: the kernels of one have ended before those of the other."""
    with make(context) as draft:
        assert draft.step([0, 0]) and draft.step([0, 0])
        step = {"last_step": draft.last_step, "before": draft.last_step - 2, "one": 1}[other]
        cache = make(context)
        slot, ending = cache.alloc(), cache.alloc()
        assert cache.last_step != draft.last_step and cache.step([60, 5])
        cache.free(ending, after=cache.last_step)
        for call in (
            lambda: cache.free(slot, after=step),
            lambda: cache.truncate(slot, 5, after=step),
            lambda: cache.retire(step),
        ):
            with pytest.raises(InvalidArgument, match=f"step {step} is no step of this cache; its last one is "):
                call()
        assert cache.slot(slot).tokens == 60 and cache.slot(ending).after == cache.last_step
        cache.close()
