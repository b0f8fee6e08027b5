"""The end of whatever owns memory, while kernels that read it have not begun: on a GPU, over the fake driver, and on
the host.

SPDX-License-Identifier: MIT
"""

import gc

import pytest

import pyvmem
import pyvmem.kv.cache

torch = pytest.importorskip("torch")

from late import Kernels, Lag, fake_driver, tensors_of_the_fake_driver  # noqa: E402

from pyvmem import tensor as tensors  # noqa: E402
from pyvmem.blocks import BlockRange, Blocks  # noqa: E402
from pyvmem.kv.prefix import PrefixCache  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def late(backend, monkeypatch):
    if backend != "host" and fake_driver():
        tensors_of_the_fake_driver(monkeypatch)
    elif backend != "host" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    kernels = Kernels(backend)
    yield kernels
    kernels.close()


def over(range_, first=0, length=None):
    """A tensor over a reservation."""
    device = "cuda" if "gpu" in range_.context.capabilities else "cpu"
    at = range_.addr + first
    return tensors.tensor_at(range_._owned(), at, (length or range_.length - first,), torch.uint8, device)


# ---- what owns memory: each returns a tensor over it, and what ends it -----------------------------------------------


def virtual_tensor(context, closes):
    v = pyvmem.virtual_empty(4 * MIB, torch.uint8, "cpu" if context.backend == "host" else "cuda", context=context)
    v.commit()
    return v.tensor.view(-1), v.close if closes else [v].clear


def reservation(context, closes):
    range_ = context.reserve(4 * MIB)
    range_.commit()
    return over(range_), range_.close if closes else [range_].clear


def pages(context, closes):
    """The pages alone end: the addresses stay, with the tensor."""
    range_, one = context.reserve(4 * MIB), context.create(min(context.page_sizes), 1)
    range_.map(one)
    tensor = over(range_, 0, one.page_size)
    tensor.borrows = range_
    if not closes:
        range_._pages.clear()
    return tensor, one.close if closes else [one].clear


def pages_of_a_reservation(context, closes):
    """The reservation holds the last reference to pages that were mapped into it."""
    range_, size = context.reserve(4 * MIB), min(context.page_sizes)
    range_.map(context.create(size, 1))
    tensor = over(range_, 0, size)
    tensor.borrows = True
    return tensor, range_.close if closes else [range_].clear


def kv_cache(context, closes):
    cache = pyvmem.KVCache.for_model(1, 2, 64, 4, 4096, 16 * MIB, dtype=torch.float32, context=context)
    slot = cache.alloc(4096)
    assert cache.step([4096 if s == slot else 0 for s in range(4)])
    return cache.tensors[0][slot], cache.close if closes else [cache].clear


def kv_cache_with_prefixes(context, closes):
    cache = pyvmem.KVCache.for_model(1, 2, 64, 4, 4096, 16 * MIB, dtype=torch.float32, context=context)
    blocks, slot = PrefixCache(cache, 1024), cache.alloc(4096)
    assert cache.step([4096 if s == slot else 0 for s in range(4)])
    blocks.add(slot, [bytes([i]) * 16 for i in range(4)])
    view = cache.tensors[0][slot]
    cache.free(slot, after=cache.last_step)
    both = [cache, blocks]
    return view, cache.close if closes else both.clear


def kv_cache_of_an_error(context, closes):
    """A user's error leaves the block of a cache whose kernels are in flight."""
    cache = pyvmem.KVCache.for_model(1, 2, 64, 4, 4096, 16 * MIB, dtype=torch.float32, context=context)
    slot = cache.alloc(4096)
    assert cache.step([4096 if s == slot else 0 for s in range(4)])

    def end():
        with pytest.raises(ZeroDivisionError), cache:
            1 / 0  # noqa: B018

    return cache.tensors[0][slot], end


def blocks(context, closes):
    range_ = context.reserve(16 * MIB)
    size = max(context.page_sizes)
    numbered = Blocks(range_, [BlockRange(0, size, size)], 4, page_size=size)
    numbered.back([0, 1])
    tensor = over(range_, size, size)
    tensor.borrows = range_
    return tensor, numbered.close if closes else [numbered].clear


OWNERS = [
    virtual_tensor,
    reservation,
    pages,
    pages_of_a_reservation,
    kv_cache,
    kv_cache_with_prefixes,
    kv_cache_of_an_error,
    blocks,
]
each_owner = pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
closed_or_dropped = pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])


def launch(late, tensor):
    tensor.view(-1).view(torch.uint8).fill_(7)
    late.read(tensor)
    if late.backend == "host" and hasattr(tensor, "borrows"):
        late.end()  # it holds addresses, not what is mapped there, and nobody can wait for a thread


def finish(box, end):
    """End an owner whose tensor is in the box, and drop the tensor."""
    end()
    gc.collect()
    box.clear()
    gc.collect()


@each_owner
@closed_or_dropped
@pytest.mark.parametrize("last", ["the owner", "the tensor"])
def test_memory_stays_until_kernels_have_read_it(context, late, owner, closes, last):
    tensor, end = owner(context, closes)
    launch(late, tensor)
    box = [tensor]
    del tensor
    if last == "the owner":
        box.clear()
    finish(box, end)
    late.end()
    assert context.stats().mapped == 0


@each_owner
@closed_or_dropped
def test_memory_that_ends_while_a_graph_is_captured_stays(context, late, owner, closes, monkeypatch):
    tensor, end = owner(context, closes)
    launch(late, tensor)
    box = [tensor]
    del tensor
    with late.capture(monkeypatch):
        finish(box, end)
        assert context.backend == "host" or context.stats().mapped
    late.end()
    context.trim()
    assert context.stats().mapped == 0


@closed_or_dropped
def test_a_closed_context_waits_for_all_that_it_has(backend, late, closes):
    context = pyvmem.Context(backend)
    range_ = context.reserve(4 * MIB)
    range_.commit()
    tensor = over(range_).fill_(7)
    late.read(tensor)
    del tensor
    if closes:
        context.close()
    del range_, context
    gc.collect()
    late.end()


def test_a_swap_that_is_interrupted_waits_for_its_copies(context, late, monkeypatch):
    """Ctrl-C comes when the copies are queued, and before they have ended."""
    cache = pyvmem.KVCache.for_model(1, 2, 64, 4, 4096, 16 * MIB, dtype=torch.float32, context=context)
    slot = cache.alloc(4096)
    assert cache.step([4096 if s == slot else 0 for s in range(4)])
    cache.tensors[0][slot].fill_(7)
    cache.swap_out(slot)
    copy = pyvmem.kv.cache._copy

    def interrupted(to, source):
        copy(to, source)
        if late.backend != "host":  # where copies have ended when torch returns
            late.read(to[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pyvmem.kv.cache, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.swap_in(slot)
    late.end()
    assert cache.slot(slot).state == "swapped"
    assert cache.swap_in(slot) and bool((cache.tensors[0][slot] == 7).all())
    cache.close()


def test_an_owner_that_ends_costs_one_wait(context, late):
    if not late.fake:
        pytest.skip("the fake driver counts waits")
    tensor, end = kv_cache(context, True)
    before = late.fake.fakegpu_waits()
    end()
    assert late.fake.fakegpu_waits() == before  # the tensor has the memory
    del tensor
    assert late.fake.fakegpu_waits() == before + 1


def test_steps_never_wait(context, late):
    cache = pyvmem.KVCache.for_model(1, 2, 64, 4, 4096, 16 * MIB, dtype=torch.float32, context=context)
    slot = cache.alloc()
    before = late.fake and late.fake.fakegpu_waits()
    for length in range(1, 600):
        assert cache.step([length if s == slot else 0 for s in range(4)])
    cache.free(slot, after=cache.last_step)
    assert late.fake is None or late.fake.fakegpu_waits() == before
    cache.close()


def test_a_gpu_is_late_in_every_test(monkeypatch):
    """The stream sleeps when memory has come and before modules run, as long as the test has credit."""
    slept, cuda = [], {"is_initialized": True, "_is_in_bad_fork": False, "is_current_stream_capturing": False}
    for name, answer in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(Lag, "SHARE", 0)
    plain = pyvmem.KVCache.step
    with (
        pyvmem.KVCache.for_model(1, 2, 64, 1, 64, 1 * MIB, dtype=torch.float32, backend="host") as cache,
        Lag().everywhere(),
    ):
        cache.alloc()
        for length in range(1, 64):
            assert cache.step([length])
        assert len(slept) == Lag.CREDIT // Lag.STEP
    with Lag().everywhere():
        torch.nn.Linear(2, 2)(torch.ones(2))
    assert pyvmem.KVCache.step is plain and slept[-1] < slept[0]
    before = len(slept)
    torch.nn.Linear(2, 2)(torch.ones(2))
    assert len(slept) == before
