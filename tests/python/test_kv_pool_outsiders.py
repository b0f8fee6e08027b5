"""Outsiders of a pool: processes that stop, hold its file's lock, or write to its file.

SPDX-License-Identifier: MIT
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import resource
import signal
import struct
import threading
import time

import pytest
from kv_pools import MIB, TOKENS, Child, free, load, make, member

from conftest import python
from pyvmem import KVPool, VmemError
from pyvmem._ffi import lib

BUDGET, REVISION, HEAD = 16, 24, 64  # offsets in the file


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()


def lock(file, kind):
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, 0, 0, 1, 0))


def stop(child, path):
    """Stop it while it does not hold the lock of the pool's file."""
    with open(path, "r+b") as file:
        lock(file, fcntl.F_WRLCK)
        child.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
        lock(file, fcntl.F_UNLCK)


def verify(cache, slots):
    assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in slots)


def serve(cache, pool, requests):
    """The engine's loop of docs/kv-cache.md; returns the slots that it could begin, and why there are no more."""
    slots = []
    while len(slots) < requests:
        slot = cache.alloc(TOKENS)
        lengths = [TOKENS if s == slot else 0 for s in range(cache.slots)]
        while not (fits := cache.step(lengths)) and cache.shortage.coming_pages and pool.wait(cache, 0.1) != "refused":
            pass
        if not fits:
            cache.free(slot)
            return slots, member_reason(pool)
        cache.keys[0][slot, :TOKENS] = slot + 1
        slots.append(slot)
    return slots, None


def shortage(cache):
    """The answer to a step while the refusal stands; its slot stays."""
    slot = cache.alloc(TOKENS)
    while not cache.shortage.refusal:
        assert not cache.step([TOKENS if s == slot else 0 for s in range(cache.slots)])
    return cache.shortage


def member_reason(pool):
    try:
        return member(pool, "kv").reason
    except VmemError as error:
        return error.errno


def test_a_process_that_is_stopped_is_not_waited_for_without_end(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    with Child(tmp_path / "pool") as child, make(pool) as cache:
        child.ask("load 8")
        child.ask("free")
        stop(child, tmp_path / "pool")
        for _ in range(2):
            slots, reason = serve(cache, pool, 8)
            assert len(slots) < 8 and reason == "no answer"
            free(cache, slots)
        slots = serve(cache, pool, 8)[0]
        assert str(shortage(cache)).endswith("continue or end the process that does not answer")
        child.process.send_signal(signal.SIGCONT)
        free(cache, [s for s in range(8) if cache.slot(s).state == "active"])
        slots = []
        while len(slots) < 8:
            slots += load(cache, 8 - len(slots), pool)
        verify(cache, slots)


def test_a_lock_that_stays_is_not_waited_for_without_end(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    with make(pool) as cache, open(tmp_path / "pool", "r+b") as file:
        lock(file, fcntl.F_WRLCK)
        assert serve(cache, pool, 1) == ([], errno.EAGAIN)
        assert shortage(cache).refusal == "no answer"
        with pytest.raises(VmemError, match="another process holds the pool.s lock"):
            KVPool(path=tmp_path / "pool")
        lock(file, fcntl.F_UNLCK)
        slots = []
        while len(slots) < 7:
            slots += load(cache, 7 - len(slots), pool)


def test_a_budget_that_somebody_else_wrote_is_not_believed(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(8 * MIB, path=path)
    with make(pool) as cache, make(pool, "other") as other, open(path, "r+b", 0) as file:
        before = os.pread(file.fileno(), 8, BUDGET)
        assert int.from_bytes(before, "little") == 8 * MIB
        mine = load(cache, 1)
        for budget in (80 * MIB, 4 * MIB, 1 << 63):
            os.pwrite(file.fileno(), budget.to_bytes(8, "little"), BUDGET)
            slots, reason = serve(cache, pool, 4)
            assert reason == errno.EBADMSG
            theirs, reason = serve(other, pool, 4)
            assert reason == errno.EBADMSG
            assert cache.stats().budget_pages + other.stats().budget_pages <= 8 * 16
            free(cache, slots)
            free(other, theirs)
        os.pwrite(file.fileno(), before, BUDGET)
        assert pool.budget == 8 * MIB
        verify(cache, mine)


def test_a_member_that_cannot_write_takes_no_budget(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with Child(path) as child, make(pool) as cache:
        assert child.ask("load 2") == "2"
        resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        theirs = int(child.ask("load 6"))
        mine = load(cache, 10, pool)
        assert 2 <= theirs and (theirs + len(mine)) * 4 * MIB <= 40 * MIB
        assert child.ask("verify") == str(theirs)
        verify(cache, mine)
        free(cache, mine)
        resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert int(child.ask(f"load {8 - theirs}")) == 8


@contextlib.contextmanager
def no_writes():
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_row_that_cannot_be_written_is_an_error_that_changes_nothing(tmp_path, monkeypatch):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def vmem_kv_pool_join(self, *arguments):
            with no_writes():
                return lib.vmem_kv_pool_join(*arguments)

    with make(pool) as cache:
        monkeypatch.setattr("pyvmem.kv.pool.lib", Library())
        with pytest.raises(VmemError, match="the table cannot be written"):
            make(pool, "late", pool_min=4 * MIB)
        monkeypatch.undo()
        with no_writes(), pytest.raises(VmemError, match="the table cannot be written"):
            pool.set_share(cache, 4 * MIB, 8 * MIB)
        with make(pool, "late", pool_min=4 * MIB):
            assert sorted(m.name for m in pool.members()) == ["kv", "late"]
            assert (member(pool, "kv").min, member(pool, "kv").max) == (0, 40 * MIB)


def test_a_count_at_its_end_makes_nobody_invisible(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with make(pool) as cache, open(path, "r+b", 0) as file:
        os.pwrite(file.fileno(), b"\xff" * 8, REVISION)
        with make(pool, "late") as late:
            slots = load(late, 6)
            assert member(pool, "late").has >= 24 * MIB
            mine = serve(cache, pool, 8)[0]
            assert len(mine) <= 4
            verify(late, slots)


def test_a_row_that_somebody_overwrote_is_written_again(tmp_path):
    path = tmp_path / "pool"
    with Child(path, budget=40 * MIB) as child:
        assert child.ask("load 8") == "8"
        pool = KVPool(path=path)
        for wrong in (b"\0", b"\xff", b"\x7f"):
            with open(path, "r+b", 0) as file:
                os.pwrite(file.fileno(), wrong * ((path.stat().st_size - HEAD) // 32), HEAD)
            while [(m.name, m.max) for m in pool.members() if m.held >= 32 * MIB] != [("child", 40 * MIB)]:
                os.sched_yield()
        with make(pool) as cache:
            assert len(serve(cache, pool, 8)[0]) <= 2
        assert child.ask("verify") == "8"


def test_a_file_that_was_emptied_can_be_used_again_when_all_have_left(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with make(pool) as cache, make(pool, "other"):
        mine = load(cache, 2, pool)
        os.truncate(path, 0)
        with pytest.raises(VmemError, match="(does not hold|no longer holds) a pool"):
            pool.members()
        verify(cache, mine)
    pool.close()
    with KVPool(20 * MIB, path=path) as again, make(again) as cache:
        assert len(load(cache, 4, again)) == 4


def test_members_keep_a_pool_whose_file_was_replaced(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with Child(path) as child, make(pool) as cache:
        assert child.ask("load 8") == "8"
        child.ask("free")
        (tmp_path / "new").touch(0o600)
        os.replace(tmp_path / "new", path)
        slots = load(cache, 8, pool)
        assert len(slots) == 8
        with KVPool(20 * MIB, path=path) as other:
            assert other.members() == [] and len(pool.members()) == 2
        verify(cache, slots)


def test_a_pool_that_cannot_begin_leaves_no_file(tmp_path):
    code = f"""
        import os, resource
        from pyvmem import KVPool, VmemError
        free = os.open("/", os.O_RDONLY)
        os.close(free)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for more in (0, 1):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, most))
            try:
                KVPool(1 << 20, path={str(tmp_path / "pool")!r})
            except VmemError as error:
                print(error.errno)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        print([name for name in os.listdir({str(tmp_path)!r}) if name != "run"])
        KVPool(1 << 20, path={str(tmp_path / "pool")!r}).close()
    """
    assert python(code).stdout.split() == [str(errno.EMFILE)] * 2 + ["[]"]


def test_a_child_forked_while_a_pool_is_closed_does_not_keep_it(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    children = []
    runs, running = os.pipe()
    with open(path, "r+b") as file:
        lock(file, fcntl.F_WRLCK)  # the pool waits for it before it closes the file
        closing = threading.Thread(target=pool.close)
        closing.start()
        while closing.is_alive():
            children.append(os.fork())
            if not children[-1]:
                os.write(running, b"x")  # until it runs, a child has what its parent had
                signal.pause()
        closing.join()
        lock(file, fcntl.F_UNLCK)
    for _ in children:
        os.read(runs, 1)
    try:
        KVPool(20 * MIB, path=path).close()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(runs)
        os.close(running)


def test_64_have_a_pool_open_and_no_more(tmp_path):
    path = tmp_path / "pool"
    pools = [KVPool(MIB, path=path) for _ in range(64)]
    with pytest.raises(VmemError, match="64 others have the pool open") as error:
        KVPool(path=path)
    assert error.value.errno == errno.ENOSPC
    pools.pop(10).close()
    pools.append(KVPool(path=path))
    for pool in pools:
        pool.close()
    assert not path.exists()


# ---- clocks ----------------------------------------------------------------------------------------------------------


def cont(child):
    child.process.send_signal(signal.SIGCONT)


def sleeps(child):
    """How often the threads of a process but its first have slept so far; those of pools do it 10 times a second."""
    tasks = pathlib.Path(f"/proc/{child.process.pid}/task").iterdir()
    texts = (task.joinpath("status").read_text() for task in tasks if int(task.name) != child.process.pid)
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def test_time_in_which_the_asker_was_stopped_is_nobodys_silence(tmp_path):
    """As docker pause, or a snapshot of a machine, stops all members while a question is open."""
    path = tmp_path / "pool"
    with Child(path, budget=40 * MIB, name="a") as a, Child(path, budget=40 * MIB, name="b") as b:
        assert a.ask("load 8") == "8"
        a.ask("free")  # the pages are kept: they may go
        stop(a, path)
        b.process.stdin.write("load 8\n")
        b.process.stdin.flush()
        with KVPool(path=path) as pool:
            while member(pool, "b").answer != "deferred":
                pass
        stop(b, path)
        time.sleep(3)  # more than a silent member is waited for
        before = sleeps(b)
        cont(b)
        while sleeps(b) < before + 4:  # it looks at the table before the other one does
            os.sched_yield()
        cont(a)
        assert b.process.stdout.readline() == "8\n"


def test_a_refusal_of_another_clock_lapses(tmp_path):
    """Processes of another time namespace have clocks that are days away, and a file may say anything."""
    path = tmp_path / "pool"
    with KVPool(40 * MIB, path=path) as pool, KVPool(path=path) as other:
        cache = make(pool)
        neighbour = make(other, "neighbour")
        for word in (2**64 - 1, 1, 2**63):
            with open(path, "r+b") as file:
                file.seek(64)  # struct pool_head: refused, and the word after it
                file.write(struct.pack("<QQ", 40 * MIB, word))
            while len(slots := load(cache, 8, pool)) < 8:
                free(cache, slots)
            free(cache, slots)
            cache.reclaim()
        neighbour.close()
        cache.close()
