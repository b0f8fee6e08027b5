"""The KV cache's calls, layouts and errors, on every backend.

SPDX-License-Identifier: MIT
"""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kv_caches import PAGE_TOKENS, Event, make, start, view_dim

import pyvmem
from pyvmem.kv.cache import KVCache, Spare, TensorSpec

MIB = 1 << 20


@pytest.fixture(params=["separate", "fused", "token-major"])
def layout(request):
    return request.param


def test_layouts_give_ordinary_tensors(backend, device, layout):
    with make(backend, layout=layout) as cache:
        slot, _ = start(cache, 100)
        for layer in range(2):
            assert cache.keys[layer].shape == cache.values[layer].shape == (4, 2000, 4, view_dim(cache))
            cache.keys[layer][slot, :100] = layer + 1
            cache.values[layer][slot, :100] = layer + 11
        for layer in range(2):
            view = cache.keys[layer][slot, :100]
            assert view.device.type == torch.device(device).type
            assert torch.equal(view.clone(), torch.full_like(view, layer + 1))
            assert torch.equal(cache.values[layer][slot, :100].cpu(), torch.full_like(view, layer + 11).cpu())


def test_flat_rows_are_the_slots_one_after_another(backend, device):
    with make(backend) as cache:
        start(cache, 3)
        slot, _ = start(cache, 50)
        rows = cache.layout(0)[3]
        cache.keys[0][slot, :50] = 3
        assert cache.flat(0).shape == (4 * rows, 4, cache.specs[0].shape[1])
        assert torch.equal(cache.flat(0)[slot * rows : slot * rows + 50], cache.keys[0][slot, :50])


def test_layers_may_differ(backend, device):
    specs = [
        TensorSpec("full", (2, 128), torch.bfloat16),
        TensorSpec("window", (2, 128), torch.bfloat16, window=64),
        TensorSpec("latent", (576,), torch.bfloat16),
        TensorSpec("fp8", (656,), torch.uint8),
        TensorSpec("encoder", (8,), torch.float32, max_tokens=100),
    ]
    with KVCache(specs, 3, 1000, 256 * MIB, backend=backend, check=True, name=None) as cache:
        slot = cache.alloc()
        for n in (1, 300, 301, 999, 1000):
            values = [0] * 3
            values[slot] = n
            assert cache.step(values)
            for spec, tensor in zip(specs, cache.tensors):
                assert tensor.shape == (3, spec.max_tokens or 1000, *spec.shape)
                tensor[slot, min(n, tensor.shape[1]) - 1] = 1
                assert (tensor[slot, min(n, tensor.shape[1]) - 1] == 1).all()


def test_a_step_that_fails_says_what_is_missing_and_changes_nothing(backend):
    with make(backend, pages=20) as cache:
        slot, values = start(cache, 1)
        cache.wait()
        before = cache.slot(slot)
        values[slot] = 10 * PAGE_TOKENS
        assert not cache.step(values)
        assert cache.shortage.missing_pages == 4 * 10 - 20
        assert cache.slot(slot) == before
        values[slot] = 5 * PAGE_TOKENS
        assert cache.step(values, dry=True) and cache.step(values)
        other = cache.alloc()
        values[other] = 1
        assert not cache.step(values) and cache.shortage.missing_pages == 4
        cache.free(slot)
        values[slot] = 0
        assert cache.step(values)


def test_a_new_request_takes_the_kept_pages_that_fit_best(backend):
    with make(backend, overlap=False, generous=False) as cache:
        page_tokens = PAGE_TOKENS
        slots = {n: start(cache, n * page_tokens)[0] for n in (1, 3, 2)}
        for slot in slots.values():
            cache.free(slot)
        mapped = cache.stats().step_mapped_pages
        slot, _ = start(cache, 2 * page_tokens)
        assert slot == slots[2]
        assert start(cache, 2 * page_tokens)[0] == slots[3]
        assert cache.stats().step_mapped_pages == mapped
        assert cache.stats().adopted_slots == 2


def test_a_request_can_have_the_slot_it_wants(backend):
    with make(backend) as cache:
        assert cache.alloc(10, slot=2) == 2
        assert cache.alloc(10, slot=0) == 0
        with pytest.raises(pyvmem.VmemError, match="slot 2 is taken") as caught:
            cache.alloc(10, slot=2)
        assert caught.value.errno == errno.EBUSY
        with pytest.raises(ValueError, match="slot 4 is out of range: the cache has 4 slots"):
            cache.alloc(10, slot=4)
        assert sorted(cache.alloc() for _ in range(2)) == [1, 3]
        assert cache.alloc() is None
        assert cache.stats().active_slots == 4
        cache.free(2)
        assert cache.alloc() == 2


def test_a_request_with_a_prefix_leaves_kept_pages_to_others(backend):
    with make(backend, overlap=False, generous=False) as cache:
        first, _ = start(cache, 2 * PAGE_TOKENS)
        prefix = cache.share(first, 2 * PAGE_TOKENS)
        kept, _ = start(cache, 3 * PAGE_TOKENS)
        cache.free(kept)
        slot = cache.alloc(3 * PAGE_TOKENS, prefix_tokens=prefix.tokens)
        assert slot != kept
        assert cache.attach(slot, prefix) == prefix.tokens
        assert cache.stats().kept_pages == 4 * 3
        assert cache.alloc(3 * PAGE_TOKENS) == kept


@pytest.mark.parametrize("defer", [True, False])
def test_freed_pages_are_kept_only_if_asked(backend, defer):
    with make(backend, defer=defer, overlap=False) as cache:
        slot, _ = start(cache, 100)
        held = cache.stats().held_pages
        cache.free(slot)
        assert cache.stats().held_pages == (held if defer else 0)
        assert cache.stats().kept_pages == (held if defer else 0)


def test_zero_hides_what_an_earlier_request_left(backend, device):
    for overlap in (False, True):
        with make(backend, zero=True, overlap=overlap) as cache:
            slot, _ = start(cache, 200)
            cache.keys[0][slot, :200] = 7
            if device != "cpu":
                torch.cuda.synchronize()
            cache.free(slot)
            assert overlap or cache.stats().kept_pages == 0
            # By name: the background thread may have prepared another slot that fits as well.
            start(cache, 150, slot)
            assert not cache.keys[0][slot, :150].any()


def test_the_background_thread_maps_what_the_next_steps_need(backend):
    with make(backend, max_tokens=20000, pages=16384 if backend != "cuda" else 1024) as cache:
        slot, values = start(cache, 100)
        cache.wait()
        mapped = cache.stats().step_mapped_pages
        for n in range(101, 6000, 50):
            values[slot] = n
            assert cache.step(values)
            cache.wait()
        assert cache.stats().step_mapped_pages == mapped
        assert cache.stats().ahead_mapped_pages > 0


def test_kept_pages_give_way_to_a_running_request(backend):
    with make(backend, pages=40, max_tokens=1280) as cache:
        tokens = 4 * PAGE_TOKENS
        for _ in range(2):
            slots = [start(cache, tokens)[0] for _ in range(2)]
            for slot in slots:
                cache.free(slot)
        slot, values = start(cache, 1280)
        assert cache.slot(slot).needed_pages == 40
        assert cache.stats().held_pages == 40


def test_a_request_that_waits_is_reported(backend):
    with make(backend) as cache:
        (waits, _), (runs, _) = start(cache, 10), start(cache, 10)
        assert [cache.slot(slot).absent_steps for slot in (waits, runs)] == [1, 0]
        assert cache.stats().absent_slots == 1


def test_a_request_ends_when_its_kernels_have(backend):
    with make(backend, overlap=False, steps_in_flight=2, pages=12) as cache:
        first = cache.last_step
        slot, lengths = start(cache, PAGE_TOKENS)
        assert cache.last_step == first + 1
        cache.free(slot, after=cache.last_step)
        assert cache.slot(slot).state == "free" and cache.slot(slot).after
        with pytest.raises(ValueError, match=f"slot {slot} is being given up"):
            cache.free(slot)
        with pytest.raises(ValueError, match="being given up"):
            cache.step(lengths)
        other = cache.alloc()
        lengths = [3 * PAGE_TOKENS if s == other else 0 for s in range(4)]
        assert not cache.step(lengths) and cache.shortage.ending_pages == 4
        for _ in range(2):  # at the third step after its own, its kernels must have ended
            assert cache.slot(slot).state == "free" and cache.slot(slot).after
            assert cache.step([1 if s == other else 0 for s in range(4)])
        assert cache.step(lengths)
        assert cache.slot(slot).state == "free" and not cache.slot(slot).after


def test_an_event_is_a_fence(backend):
    with make(backend) as cache:
        event = Event()
        slot, lengths = start(cache, 10)
        assert cache.truncate(slot, 5, after=event)
        assert cache.slot(slot).tokens == 5
        cache.free(slot, after=event)
        lengths[slot] = 0
        cache.step(lengths)
        assert cache.slot(slot).state == "free" and cache.slot(slot).after
        event.come = True
        cache.step(lengths)
        assert cache.slot(slot).state == "free" and not cache.slot(slot).after
        assert cache.stats().ending_slots == 0


def test_shared_rows_are_not_truncated_before_kernels_end(backend):
    with make(backend) as cache:
        slot, _ = start(cache, 10)
        saved = cache.share(slot, 10)
        with pytest.raises(pyvmem.VmemError, match="shared") as caught:
            cache.truncate(slot, 5, after=cache.last_step)
        assert caught.value.errno == errno.EBUSY
        cache.retire()
        assert cache.truncate(slot, 5, after=cache.last_step)
        cache.drop(saved)


def test_a_shortage_says_why(backend):
    with make(backend, pages=20, overlap=False, generous=False) as cache:
        for _ in range(4):
            slot = cache.alloc()
        assert cache.alloc() is None and cache.shortage.reason == "slots" and cache.shortage.missing_pages == 0
        assert str(cache.shortage) == "all slots are taken: end a request"
        assert cache.step([PAGE_TOKENS] * 4)
        saved = cache.share(slot, PAGE_TOKENS)
        cache.free(slot)
        lengths = [10 * PAGE_TOKENS if s == 0 else 0 for s in range(4)]
        assert not cache.step(lengths)
        assert cache.shortage == pyvmem.Shortage("budget", cache.shortage.missing_pages, 4, 3)
        assert "drop prefixes" in str(pyvmem.kv.cache.ffi.string(pyvmem.kv.cache.lib.vmem_last_error()))
        assert str(cache.shortage) == (
            f"{cache.shortage.missing_pages} pages are missing: the budget is used up; drop prefixes, which hold 4, or "
            "end or swap out a request, or raise the budget"
        )
        cache.drop(saved)
        cache.free(0, after=cache.last_step)
        lengths[1], lengths[0] = lengths[0], 0
        assert not cache.step(lengths) and "retire the steps of requests that end, which hold 4" in str(cache.shortage)
        cache.retire()
        stats = cache.stats()
        assert (stats.short_slots, stats.short_budget, stats.short_device) == (1, 2, 0)
    page = min(pyvmem.core.default_context(backend).page_sizes)
    with pyvmem.Context(backend, budget=4 * page) as context, make(backend, 20, context=context, lazy=True) as cache:
        slot = cache.alloc()
        assert cache.step([0] * 4, dry=True) and str(cache.shortage) == "nothing is short"
        assert not cache.step([2 * PAGE_TOKENS if s == slot else 0 for s in range(4)])
        assert "the device has less memory than the budget; free memory elsewhere" in str(cache.shortage)


def test_a_shortage_is_the_caches_own(backend):
    """No other cache changes it, in whatever thread."""
    with make(backend, pages=20) as cache, make(backend, pages=40) as other:
        slot = cache.alloc()
        lengths = [10 * PAGE_TOKENS if s == slot else 0 for s in range(4)]
        assert not cache.step(lengths)
        why = cache.shortage
        assert (why.reason, why.missing_pages) == ("budget", 20)
        for _ in range(4):
            other.alloc()
        assert other.alloc() is None and other.shortage.reason == "slots" and other.step([1] * 4)
        assert cache.shortage is why and other.shortage.reason is None
        with ThreadPoolExecutor(1) as thread:
            assert not thread.submit(other.step, [15 * PAGE_TOKENS] * 4).result()
        assert cache.shortage is why and other.shortage.reason is None
        assert not other.step([15 * PAGE_TOKENS] * 4)
        assert cache.shortage is why and other.shortage.missing_pages > 20
        assert cache.step([1 if s == slot else 0 for s in range(4)]) and cache.shortage.reason is None


def test_a_dry_step_answers_and_changes_nothing(backend):
    with make(backend, pages=20, overlap=False, generous=False) as cache:
        slot = cache.alloc()
        only = lambda tokens: [tokens if s == slot else 0 for s in range(4)]  # noqa: E731
        before, last = cache.stats().held_pages, cache.last_step
        assert cache.step(only(2 * PAGE_TOKENS), dry=True) and not cache.step(only(10 * PAGE_TOKENS), dry=True)
        assert cache.shortage.missing_pages == 20
        assert (cache.stats().held_pages, cache.last_step, cache.slot(slot).tokens) == (before, last, 0)
        assert cache.step(only(PAGE_TOKENS + 1))
        prefix, new = cache.share(slot, PAGE_TOKENS + 1), cache.alloc()
        with pytest.raises(TypeError, match="slot must be an integer, not None"):
            cache.attach(None, prefix)
        assert cache.attach(new, prefix) == PAGE_TOKENS + 1


def test_a_check_beside_steps_takes_no_answer_from_them(backend):
    with make(backend, pages=20, overlap=False) as cache:
        slot, lengths = start(cache, 10)
        much = [1000 if s == slot else 0 for s in range(4)]
        stop, answers = threading.Event(), set()

        def check():
            while not stop.is_set():
                answers.add(cache.step(lengths, dry=True))

        thread = threading.Thread(target=check)
        thread.start()
        steps = {cache.step(much) for _ in range(2000)}
        stop.set()
        thread.join()
        assert (answers, steps) == ({True}, {False})


def test_a_prefix_is_shared_and_never_written(backend, device):
    with make(backend) as cache:
        page_tokens = PAGE_TOKENS
        tokens = 2 * page_tokens + 10
        slot, values = start(cache, tokens)
        for i, tensor in enumerate(cache.tensors):
            tensor[slot, :tokens] = i + 1
        if device != "cpu":
            torch.cuda.synchronize()
        prefix = cache.share(slot, tokens)
        cache.wait()
        held = cache.stats().held_pages
        other = cache.alloc()
        assert cache.attach(other, prefix) == tokens
        assert cache.stats().attached_pages == tokens // page_tokens * 4
        assert cache.stats().held_pages - held <= 4 + 4 * 32
        values[other] = tokens + 5
        values[slot] = tokens + 3
        assert cache.step(values)
        for tensor in cache.tensors:
            tensor[other, tokens : tokens + 5] = -1
            tensor[slot, tokens : tokens + 3] = -2
        for i, tensor in enumerate(cache.tensors):
            for s in (slot, other):
                assert (tensor[s, :tokens] == i + 1).all()
        with pytest.raises(ValueError, match="shared"):
            cache.step([tokens - 1 if s == other else 0 for s in range(4)])
        cache.free(slot)
        cache.free(other)
        cache.drop(prefix)
        assert cache.stats().shared_pages == cache.stats().prefix_pages == 0


def test_truncation_copies_a_shared_page_before_it_is_written_again(backend, device):
    with make(backend) as cache:
        tokens = 3 * PAGE_TOKENS
        slot, values = start(cache, tokens)
        for tensor in cache.tensors:
            tensor[slot, :tokens] = 5
        if device != "cpu":
            torch.cuda.synchronize()
        prefix = cache.share(slot, tokens)
        assert cache.truncate(slot, tokens - 20)
        values[slot] = tokens
        assert cache.step(values)
        for tensor in cache.tensors:
            assert (tensor[slot, : tokens - 20] == 5).all()
            tensor[slot, tokens - 20 : tokens] = 6
        if device != "cpu":
            torch.cuda.synchronize()
        other = cache.alloc()
        assert cache.attach(other, prefix) == tokens
        for tensor in cache.tensors:
            assert (tensor[other, :tokens] == 5).all()


def test_a_window_gives_up_the_front(backend):
    spec = [TensorSpec("w", (4, 64), torch.float16, window=100)]
    with KVCache(spec, 2, 20000, 256 * MIB, backend=backend, check=True, name=None) as cache:
        slot = cache.alloc()
        for n in range(1, 20000, 90):
            values = [0, 0]
            values[slot] = n
            assert cache.step(values)
            cache.tensors[0][slot, max(n - 90, 0) : n] = 1
            assert (cache.tensors[0][slot, max(n - 90, 0) : n] == 1).all()
        cache.wait()
        assert cache.slot(slot).pages * cache.page_size < 20000 * 512 / 2
        assert cache.stats().window_pages > 0


def test_rejected_tokens_are_truncated_before_a_longer_step_and_their_windows_stay(backend):
    """Kernels run late. They read from the first token that is computed again, at every place in a page."""
    page = min(pyvmem.core.default_context(backend).page_sizes)
    spec = [TensorSpec("w", (page >> 13, 128), torch.float32, window=40)]  # 16 rows to a page
    options = {"page_size": page, "steps_in_flight": 3, "backend": backend, "check": True, "name": None}
    with KVCache(spec, 2, 1000, 512 * page, **options) as cache:
        rows = cache.tensors[0][cache.alloc(slot=0)]
        n, running = 0, []
        while n < 150:
            assert cache.step([n + 5, 0])
            cache.wait()
            if len(running) == 3:
                begin = running.pop(0)
                first = max(begin - 39, 0)
                assert torch.equal(rows[first:begin, 0, 0].cpu(), torch.arange(first, begin).float())
                rows[begin : begin + 5] = torch.arange(begin, begin + 5, device=rows.device).view(-1, 1, 1)
            running.append(n)
            n += 1
            assert cache.truncate(0, n, after=cache.last_step)
        if rows.is_cuda:
            torch.cuda.synchronize()  # close() is for a cache that no kernel accesses


def test_a_prefix_that_a_window_has_passed_is_refused_and_the_error_says_when_to_share_it(backend):
    page = min(pyvmem.core.default_context(backend).page_sizes)
    row = (page >> 13, 128)  # 16 to a page
    specs = [TensorSpec("f", row, torch.float32), TensorSpec("w", row, torch.float32, window=40)]
    with KVCache(specs, 2, 1000, 512 * page, page_size=page, backend=backend, check=True, name=None) as cache:
        slot, values = cache.alloc(), [0, 0]
        for n in 100, 500, 501, 502:
            values[slot] = n
            assert cache.step(values)
            if n == 100:
                prefix = cache.share(slot, 100)
        with pytest.raises(pyvmem.VmemError, match="share when a step ends there") as refused:
            cache.share(slot, 200)
        assert refused.value.errno == errno.ENODATA and cache.stats().prefixes == 1
        cache.drop(prefix)


def test_a_budget_shrinks_and_grows_while_requests_run(backend):
    with make(backend, max_tokens=1000) as cache:
        slot, values = start(cache, 500)
        cache.free(start(cache, 900)[0])
        cache.wait()
        needed = cache.slot(slot).needed_pages
        cache.set_budget(needed * cache.page_size)
        assert cache.stats().held_pages == needed
        assert cache.step(values)
        other = cache.alloc()
        values[other] = 500
        assert not cache.step(values)
        cache.set_budget(1024 * cache.page_size)
        assert cache.step(values)


def test_memory_goes_back_to_the_system(backend):
    with pyvmem.Context(backend) as context:
        with make(backend, context=context, lazy=True) as cache:
            slot, _ = start(cache, 1000)
            cache.free(slot)
            cache.wait()
            assert cache.reclaim() > 0
            assert context.stats().created == 0
        assert context.stats().reserved == 0


def test_a_tensor_outlives_the_cache(backend, device):
    cache = make(backend)
    slot, _ = start(cache, 10)
    view = cache.keys[0][slot, :10]
    view.fill_(4)
    cache.close()
    cache.close()
    assert (view == 4).all()


def test_many_threads_at_once(backend):
    with make(backend, slots=8, max_tokens=500) as cache:
        errors = []

        def serve(seed):
            rng = np.random.default_rng(seed)
            try:
                for _ in range(30):
                    slot = cache.alloc(int(rng.integers(1, 500)))
                    if slot is None:
                        continue
                    values = [0] * 8
                    for n in range(1, int(rng.integers(2, 100)), 7):
                        values[slot] = n
                        cache.step(values)
                    cache.stats()
                    cache.free(slot)
            except Exception as error:  # noqa: BLE001 - reported below
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert cache.stats().active_slots == 0


def test_a_forked_child_is_refused_and_harms_nothing(backend):
    with make(backend) as cache:
        slot, values = start(cache, 10)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                cache.step(values)
            except pyvmem.VmemError as error:
                code = 0 if error.errno == 1 else 2
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        values[slot] = 700
        assert cache.step(values)


@pytest.mark.parametrize("plenty", [True, False])
def test_the_background_thread_backs_a_growing_request_seldom(plenty):
    """Whole stretches at a time, even where a page is only some tokens."""
    page = 2 << 20
    spare = Spare(eager=False, ahead_tokens=64, ahead_min=64, reclaim_percent=10 if plenty else 50)
    with KVCache([TensorSpec("kv", (page // 16,), torch.uint8)], 2, 512, 128 * page, backend="host", page_size=page,
                 lazy=True, name=None, spare=spare) as cache:  # fmt: skip
        slot = cache.alloc()
        lengths = [0, 0]
        for tokens in range(1, 401):
            lengths[slot] = tokens
            assert cache.step(lengths)
            cache.wait()
        stats = cache.stats()
    assert stats.step_maps == 1
    assert stats.ahead_jobs <= 400 // 64 + 1
