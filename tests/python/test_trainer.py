"""A trainer in its engine's pool: over a stand-in for PyTorch's allocator, and the program that runs scripts in it.

SPDX-License-Identifier: MIT
"""

import os
import subprocess
import sys
import types

import pytest
import torch
from caching_allocator import MIB, FakeCuda, words
from kv_pools import free, load, make

from pyvmem import KVPool
from pyvmem.engine import trainer
from pyvmem.engine.trainer import Trainer
from pyvmem.lease import Lease

POOLS = dict(VMEM_VLLM="1", VMEM_VLLM_POOL="gpu0", VMEM_VLLM_POOL_SIZE="1G")


@pytest.fixture
def pool():
    with KVPool(budget=64 * MIB) as pool:
        yield pool


@pytest.fixture
def made(pool):
    """A trainer, PyTorch's stand-in, and the KV cache of an engine beside it."""
    cache, cuda = make(pool), FakeCuda()
    sizes = dict(page_size=64 << 10, most=64 * MIB)
    lease = Lease(pool, cache.context, cuda, name="trainer", wait=60.0, alloc_wait=60.0, **sizes)
    made = Trainer(lease)
    yield made, cuda, cache
    made.leave()
    lease.close()
    cache.close()


def test_what_a_trainer_does_not_use_is_the_engines_while_requests_run(pool, made):
    it, cuda, cache = made
    it.enter()
    it.enter()  # an engine without requests says so more than once
    kept, activations = cuda.alloc(3 * MIB), cuda.alloc(40 * MIB)
    words(kept)[0] = 9
    cuda.free(activations)
    it.leave()
    it.leave()
    slots = load(cache, 8, pool)  # 32 MiB
    assert it.lease.stats().held_bytes < 40 * MIB and words(kept)[0] == 9 and cuda.routes == []
    free(cache, slots)
    it.enter()
    again = cuda.alloc(40 * MIB)  # what was cached comes back: no segment is allocated
    assert again[1].addr == activations[1].addr and it.lease.stats().allocs == 2
    cuda.free(again)
    cuda.free(kept)


def test_what_a_trainer_had_cached_and_requests_keep_is_dropped(pool, made):
    it, cuda, cache = made
    it.enter()
    cuda.free(cuda.alloc(40 * MIB))
    it.leave()
    load(cache, 8, pool)
    it.enter()
    assert it.inside and it.lease.stats().bytes == 0
    cuda.free(cuda.alloc(8 * MIB))


def test_an_engine_that_wakes_has_what_the_trainer_caches(pool, made):
    it, cuda, cache = made
    it.enter()
    cuda.free(cuda.alloc(40 * MIB))
    with it.away():
        assert not it.inside and cuda.routes == []
        slots = load(cache, 8, pool)
        free(cache, slots)
    assert it.inside
    it.leave()
    with it.away():
        pass
    assert not it.inside
    with pytest.raises(ZeroDivisionError), it.away():
        1 / 0  # noqa: B018


def test_an_emptied_cache_is_the_pools(pool, made):
    """torch.cuda.empty_cache in a lease leaves its segments, and PyTorch's own, as they are."""
    it, cuda, cache = made
    it.enter()
    kept = cuda.alloc(100)
    words(kept)[0] = 3
    cuda.free(cuda.alloc(40 * MIB))
    seen = []
    it.empty_cache(lambda: seen.append(list(cuda.routes)))
    assert seen == [[]] and it.inside and words(kept)[0] == 3
    assert it.lease.stats().held_bytes <= 2 * MIB
    load(cache, 8, pool)
    cuda.free(kept)


def test_a_storage_that_others_are_to_see_leaves_with_all_its_views():
    lease = types.SimpleNamespace(closed=False)
    whole = torch.arange(1000.0)
    part, storage = whole[10:20], whole.untyped_storage()
    before = storage.data_ptr()
    Trainer(lease).take_out(storage)
    assert storage.data_ptr() != before
    assert torch.equal(whole, torch.arange(1000.0)) and torch.equal(part, torch.arange(10.0, 20.0))
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    part.fill_(7)  # a buffer that is shared once, and filled again and again
    assert whole[15] == 7


class Memory:
    """A storage as torch has them, on a device whose nth allocation from now on fails."""

    def __init__(self, data, fails):
        self.data, self.fails, self.moved = data, fails, False
        self.device = torch.device("cpu")

    def nbytes(self):
        return len(self.data)

    def allocate(self):
        self.fails -= 1
        if not self.fails:
            raise torch.OutOfMemoryError("no memory")

    def clone(self):
        self.allocate()
        return Memory(self.data, 0)

    def copy_(self, other):
        self.data = other.data

    def resize_(self, size):
        if size:
            self.allocate()
        self.data, self.moved = self.data[:size].ljust(size, b"?"), True


def test_a_storage_for_which_there_is_no_memory_outside_stays():
    trainer, failed = Trainer(types.SimpleNamespace(closed=False)), 0
    for n in range(1, 5):
        storage = Memory(b"weights", n)
        try:
            trainer.take_out(storage)
            assert storage.moved
        except torch.OutOfMemoryError:
            failed += 1
        assert storage.data == b"weights"
    assert failed


@pytest.fixture
def replaced(monkeypatch):
    """PyTorch's functions with a trainer behind them, and what that is asked for."""
    asked = []
    it = types.SimpleNamespace(empty_cache=lambda own: asked.append("empty"), take_out=lambda s: asked.append("out"))
    for where in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(where, "empty_cache", where.empty_cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked.append)

    def share(storage):
        asked.append("share")
        if "out" not in asked:
            raise RuntimeError("CUDA error: invalid argument")
        return "shared"

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    trainer._replace(it)
    return asked


def test_pytorchs_functions_know_the_lease(replaced):
    torch.cuda.empty_cache()
    torch.cuda.memory.empty_cache()
    assert torch.zeros(1).untyped_storage()._share_cuda_() == "shared"
    assert replaced == ["empty", "empty", "share", "out", "share"]


def test_expandable_segments_that_a_framework_switches_on_are_not(replaced, caplog):
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    torch.cuda.memory._set_allocator_settings("max_split_size_mb:20, expandable_segments:True")
    assert replaced == ["expandable_segments:False"]
    assert "expandable segments are in no memory pool" in caplog.text


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_of_the_environment_are_refused_by_name(name):
    trainer.check_environment({name: "expandable_segments:False"})
    with pytest.raises(ValueError, match=f"^{name}=.*take expandable_segments:True out"):
        trainer.check_environment({name: "garbage_collection_threshold:0.8,expandable_segments:True"})


def run(*arguments, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VMEM_") and "ALLOC_CONF" not in k}
    return subprocess.run([sys.executable, "-m", "pyvmem.train", *map(str, arguments)], capture_output=True, text=True,
                          env={**clean, **environ})  # fmt: skip


SCRIPT = "import sys, beside; print(sys.argv[1:], __name__, beside.here)\n"


@pytest.mark.parametrize("module", [False, True])
def test_a_script_runs_as_python_runs_it(tmp_path, module):
    (tmp_path / "steps.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("here = 1\n")
    if module:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        told = run("-m", "steps", "--lr", 3, **POOLS, PYTHONPATH=path)
    else:
        told = run(tmp_path / "steps.py", "--lr", 3, **POOLS)
    assert told.stdout == "['--lr', '3'] __main__ 1\n", told.stderr


@pytest.mark.parametrize(
    "environ, says",
    [
        ({}, "no pool is named: set VMEM_VLLM=1 and VMEM_VLLM_POOL"),
        (dict(VMEM_VLLM="1"), "no pool is named"),
        (dict(POOLS, VMEM_SGLANG="1", VMEM_SGLANG_POOL="gpu1"), "must be equal"),
        (dict(POOLS, PYTORCH_ALLOC_CONF="expandable_segments:True"), "expandable segments are in no memory pool"),
    ],
)
def test_what_cannot_be_ends_with_one_line(tmp_path, environ, says):
    (tmp_path / "steps.py").write_text("print('ran')")
    told = run(tmp_path / "steps.py", **environ)
    assert told.returncode and "ran" not in told.stdout
    assert len(told.stderr.splitlines()) == 1 and says in told.stderr


def test_a_process_enters_when_it_uses_its_gpu_unless_it_is_an_engines(monkeypatch):
    for name, value in POOLS.items():
        monkeypatch.setenv(name, value)
    from pyvmem import train

    entered, waits = [], []
    monkeypatch.setattr(trainer, "start", lambda chosen, device: entered.append((chosen.pool, device)))
    monkeypatch.setattr(torch.cuda, "_lazy_call", waits.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for _ in range(2):
        train.start()
    assert not entered
    waits[0]()
    assert entered == [("gpu0", 0)]
    monkeypatch.setattr(os, "getpid", lambda: 0)  # a fork has what its parent waited for
    waits[1]()
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "start", lambda chosen, device: entered.append(device))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", types)
    waits[1]()
    assert len(entered) == 1


def test_without_a_script_it_says_what_it_takes():
    told = run()
    assert told.returncode and told.stderr.startswith("usage: python -m pyvmem.train")


def test_a_process_trains_on_the_device_of_its_rank(monkeypatch):
    for name, value in POOLS.items():
        monkeypatch.setenv(name, value)
    from pyvmem import train

    assert [train.device(n, dict(LOCAL_RANK="3")) for n in (1, 2, 8)] == [0, 1, 3]
    assert train.device(4, {}) == train.device(4, dict(LOCAL_RANK="")) == 0


def test_on_a_cpu_a_lease_is_refused(monkeypatch):
    from pyvmem.engine.settings import Settings

    monkeypatch.setenv("VMEM_BACKEND", "host")
    with pytest.raises(ValueError, match="host has memory of the CPU only"):
        trainer.start(Settings("VMEM_VLLM", on=True, pool="trainer-test", pool_size=64 * MIB), 0)
    assert trainer.here is None
