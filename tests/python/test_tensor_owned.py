"""Virtual tensors beside others: closed ones, ones at the same addresses, copies, files, and other processes.

SPDX-License-Identifier: MIT
"""

import copy
import io
import pickle

import pytest
from conftest import python

import pyvmem

torch = pytest.importorskip("torch")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def empty(context, device):
    """virtual_empty on the backend under test."""

    def make(shape, dtype=torch.float32, **options):
        return pyvmem.virtual_empty(shape, dtype, device, context=context, **options)

    return make


def test_a_context_that_is_closed_while_a_tensor_is_made_says_so(empty, context, monkeypatch):
    def closed(*args, **options):  # as another thread may leave it at this moment
        range_ = pyvmem.core.Reservation(*args, **options)
        range_.close()
        return range_

    monkeypatch.setattr("pyvmem.tensor.Reservation", closed)
    with pytest.raises(ValueError, match="the reservation is closed"):
        empty(16)
    assert not context.stats().reserved


def test_a_closed_tensor_lets_the_next_one_at_its_address_be(empty):
    old = empty((64, 16384))
    old.commit()
    addr = old.addr
    old.close()
    new = []
    while not new or new[-1].addr != addr:
        new.append(empty((64, 16384)))
        assert len(new) < 100, "the address is not given out again"
    new = new[-1]
    new.commit()
    new.tensor.fill_(2.0)
    for call in (old.commit, old.decommit, old.backdrop, lambda: old.tensor):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert old.closed and old.resident_bytes == 0
    assert new.resident_bytes >= new.nbytes
    assert new.tensor.sum().item() == 2.0 * 64 * 16384


@pytest.mark.parametrize("shape", [(5, 0), (5, 0, 3), (5, 3, 0)])
def test_rows_of_no_bytes(empty, shape):
    v = empty(shape)
    for rows in (slice(0, 5), slice(2, 4), slice(5, 5), 4, None):
        assert v.commit(rows=rows) == v.decommit(rows=rows) == 0
    for rows in (5, slice(0, 6)):
        with pytest.raises(IndexError, match="rows .* must lie within 0:5"):
            v.commit(rows=rows)


@pytest.mark.parametrize("shape", [1 << 62, (1 << 62, 4), (0, 1 << 62), (0, 1 << 40, 1 << 40)])
def test_a_shape_that_no_address_space_holds(empty, shape):
    with pytest.raises(pyvmem.InvalidArgument, match=r"shape .*2\^46"):
        empty(shape)


# ---- copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_virtual_tensor_cannot_be_copied(empty, how):
    with pytest.raises(
        TypeError, match="VirtualTensor owns native memory and cannot be copied or pickled: copy a clone"
    ):
        how(empty((4, 4)))


def save(tensor):
    torch.save(tensor, io.BytesIO())


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps, save])
def test_a_tensor_that_is_backed_in_part_is_not_read_whole(empty, context, how):
    v = empty((1 << 30, 1024))  # 4 TiB
    v.commit(rows=slice(0, 16))
    with pytest.raises(RuntimeError, match=f"of which {v.resident_bytes} are backed: use a clone of the rows"):
        how(v.tensor)
    assert v.resident_bytes == context.stats().mapped


def test_a_tensor_that_is_backed_whole_is_copied_as_any_other(empty):
    v = empty((64, 1000))
    v.commit()
    v.tensor.normal_()
    twin = copy.deepcopy(v.tensor)
    file = io.BytesIO()
    torch.save(v.tensor, file)
    file.seek(0)
    for other in (twin, torch.load(file), pickle.loads(pickle.dumps(v.tensor))):
        assert torch.equal(other, v.tensor) and other.data_ptr() != v.addr
    v.tensor.requires_grad_()
    assert copy.deepcopy(v.tensor).requires_grad


def test_a_tensor_stays_on_its_pages(empty):
    v = empty((64, 16384))
    v.commit(rows=0)
    with pytest.raises(RuntimeError, match="share_memory_ would move"):
        v.tensor.share_memory_()
    assert v.tensor.data_ptr() == v.addr


# ---- other processes ----------------------------------------------------------------------------------------


def test_fork_beside_a_commit_of_another_thread():
    """The child neither hangs on a lock that the thread held nor uses what is its parent's."""
    python(
        """
        import os, threading
        import pytest
        import pyvmem, pyvmem.core
        from pyvmem.core import default_context

        v = pyvmem.virtual_empty((64, 16384))
        v.commit(rows=0)
        held, done = threading.Event(), threading.Event()

        def hold():
            with v._lock, pyvmem.core._defaults_lock:
                held.set()
                assert done.wait(900)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(900)
        child = os.fork()
        if child == 0:
            import signal
            signal.alarm(600)
            status = 1
            try:
                with default_context("host").reserve(1 << 21) as range_:
                    range_.commit()
                for call in (v.commit, v.decommit):
                    with pytest.raises(pyvmem.VmemError, match="belongs to the process"):
                        call()
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        done.set()
        thread.join()
        assert status == 0, status
        """
    )


def test_dataloader_workers_read_and_harm_nothing():
    """Forked workers read the rows that are backed; what they write stays theirs."""
    python(
        """
        import torch
        import pyvmem

        v = pyvmem.virtual_empty((1 << 20, 16384))
        v.commit(rows=slice(0, 64))
        v.tensor[:64] = torch.arange(64.0)[:, None]

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, i):
                row = v.tensor[i].clone()
                v.tensor[i] = -1.0
                try:
                    v.decommit(rows=i)
                except pyvmem.VmemError as error:
                    assert "belongs to the process" in str(error)
                    return row
                raise AssertionError("a worker gave up its parent's rows")

        loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            seen = torch.cat(list(loader))
            assert torch.equal(seen[:, 0], torch.arange(64.0)) and torch.equal(seen[:, -1], torch.arange(64.0))
        assert torch.equal(v.tensor[:64, 5], torch.arange(64.0))
        assert v.resident_bytes == 64 * 16384 * 4
        """
    )


def test_a_child_cannot_write_into_what_came_after():
    """The parent's next tensor is not the child's old one, though it has its memory."""
    python(
        """
        import os, signal
        import torch
        import pyvmem

        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        v = pyvmem.virtual_empty((64, 16384))
        v.commit()
        v.tensor.fill_(1.0)
        ask, told = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(600)
            status = 1
            try:
                os.read(ask, 1)
                v.tensor.fill_(9.0)
                v.close()
                del v
                status = 0
            finally:
                os._exit(status)
        v.close()
        new = pyvmem.virtual_empty((64, 16384))
        new.commit()
        new.tensor.fill_(2.0)
        os.write(told, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(new.tensor, torch.full((64, 16384), 2.0))
        """
    )
