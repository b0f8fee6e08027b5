"""Tensors that torch moves off their pages: what follows would work on pages that nobody reads.

SPDX-License-Identifier: MIT
"""

import pytest

from pyvmem import KVCache, virtual_empty

torch = pytest.importorskip("torch")

MIB = 1 << 20


def through_a_queue(tensor):
    queue = torch.multiprocessing.get_context("fork").Queue()
    queue.put(tensor[:4])
    assert queue.get(timeout=60) is not None


def shared_storage(tensor):
    tensor.untyped_storage().share_memory_()


def shared_parameter(tensor):
    torch.nn.Parameter(tensor.view(tensor.shape), requires_grad=False).share_memory_()


each_way = pytest.mark.parametrize("move", [through_a_queue, shared_storage, shared_parameter])


@each_way
def test_a_virtual_tensor_that_was_moved_is_refused(move):
    v = virtual_empty((1024, 1024))
    v.commit(slice(0, 64))
    move(v.tensor)
    resident = v.resident_bytes
    for call in (v.commit, v.decommit, lambda: v.commit(3), v.backdrop):
        with pytest.raises(RuntimeError, match="torch has moved the tensor off its pages"):
            call()
    assert v.resident_bytes == resident
    v.close()
    assert v.resident_bytes == 0


@each_way
@pytest.mark.parametrize("which", [0, 3])
def test_a_cache_whose_tensor_was_moved_is_refused(move, which):
    with KVCache.for_model(2, 2, 64, 4, 512, 4 * MIB, backend="host", dtype=torch.float32) as cache:
        slot, other = cache.alloc(), cache.alloc()
        lengths = [100 if s == slot else 0 for s in range(4)]
        assert cache.step(lengths)
        run, out = cache.share(slot, 64), cache.alloc()
        assert cache.step([length or 9 * (s == out) for s, length in enumerate(lengths)])
        cache.swap_out(out)
        move(cache.tensors[which])
        for call in (
            lambda: cache.step(lengths), lambda: cache.attach(other, run), lambda: cache.swap_out(slot),
            lambda: cache.swap_in(out), lambda: cache.truncate(slot, 9), lambda: cache.alloc(),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=rf"torch has moved {cache.specs[which].name} off its pages"):
                call()
        cache.free(slot)


def test_views_that_end_are_no_moves():
    with KVCache.for_model(2, 2, 64, 4, 512, 4 * MIB, backend="host", dtype=torch.float32) as cache:
        slot = cache.alloc()
        for length in range(1, 9):
            cache.flat(0), cache.keys[0][slot, :3], cache.tensors[1].view(torch.uint8)
            assert cache.step([length if s == slot else 0 for s in range(4)])
