"""examples/vattention_loop.py: the calls of microsoft/vattention, and its demo's loop, on a KVCache.

SPDX-License-Identifier: MIT
"""

import re

import pytest

from test_examples import example

torch = pytest.importorskip("torch")


@pytest.fixture
def module():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield example("vattention_loop")
    torch.set_num_threads(threads)


@pytest.fixture
def made(module):
    """made(...): the calls, with a cache of 2 layers, 6 ids and pages of 64 tokens; and its tensors."""
    caches = []

    def make(bytes=4 << 20, **options):
        vattention = module.VAttention()
        tensors = vattention.init_kvcache(
            2, 4, 64, 6, 1000, 0, torch.float32, 64 << 10, backend="host", check=True, name=None, **options
        )
        caches.append(vattention)
        assert vattention.reserve_physical_pages(bytes) == bytes >> 16
        return vattention, tensors

    yield make
    for vattention in caches:
        vattention.cleanup()


def test_k_of_all_layers_comes_before_v(made):
    for megacache in (False, True):
        _, tensors = made(megacache=megacache)
        assert [tuple(t.shape) for t in tensors] == [(6, 1000, 4, 64)] * 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_demos_loop_leaks_nothing(module, made, asynchronous):
    """Requests end by a length of 0, and ids are chosen by the loop: more of them than there are ids."""
    vattention, tensors = made()
    lengths = module.demo(vattention, tensors, 6, 60, first=70, asynchronous=asynchronous)
    vattention.step(lengths, True)
    vattention.step(lengths, True)
    stats = vattention.kv.stats()
    assert stats.active_slots == sum(n > 0 for n in lengths) == len(vattention.live)
    assert stats.ending_slots == 0 and stats.worker_errors == 0


def test_the_servers_order(made):
    """Allocate, step, end: an id is free again, with its pages, once the kernels have ended."""
    vattention, tensors = made()
    free = vattention.num_free_kvblocks()
    ids = [vattention.alloc_new_batch_idx(100) for _ in range(6)]
    assert sorted(ids) == list(range(6)) and vattention.alloc_new_batch_idx(1) == -1
    vattention.step_async([100] * 6)
    tensors[0][ids[0], 99] = 1
    assert vattention.num_free_kvblocks() == free - 6 * 2
    vattention.free_batch_idx(ids[0])
    lengths = [101] * 6
    lengths[ids[0]] = 0
    vattention.step_async(lengths)
    vattention.step_async(lengths)
    assert vattention.alloc_new_batch_idx(10) == ids[0]


def test_too_little_memory_is_an_exception_and_changes_nothing(made):
    vattention, _ = made(bytes=8 << 16)
    vattention.step([64, 64, 0, 0, 0, 0])
    with pytest.raises(MemoryError, match="pages are missing"):
        vattention.step([64, 65, 0, 0, 0, 0])
    assert vattention.kv.tokens([0, 1]) == [64, 64]
    vattention.step([64, 0, 64, 0, 0, 0])  # instead of the one that ended


def test_the_demo_runs(module, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["vattention_loop.py", "--iterations", "40"])
    module.main()
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(step\w*): 40 iterations, (\d+) requests run, (\d+) slots .*", line) for line in lines]
    assert [m[1] for m in found] == ["step", "step_async"] and all(m[2] == m[3] for m in found)
