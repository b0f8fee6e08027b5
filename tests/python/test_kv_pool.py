"""One budget for several KV caches: of a process, and of several processes.

SPDX-License-Identifier: MIT
"""

import errno
import fcntl
import json
import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kv_caches import run_top
from kv_pools import MIB, TOKENS, Child, ask, free, load, make, member

from pyvmem import InvalidArgument, KVPool, OutOfMemory, VmemError
from pyvmem._ffi import ffi, lib
from pyvmem.kv import view as kv_view


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pyvmem"


# ---- one process --------------------------------------------------------------------------------------------------


def test_the_members_are_described_as_of_one_moment():
    pool = KVPool(40 * MIB)
    with make(pool, "a") as a, make(pool, "b") as b, ThreadPoolExecutor() as threads:

        def exchange():
            for _ in range(25):
                for cache in (a, b):
                    free(cache, load(cache, 8, pool))

        work = threads.submit(exchange)
        while not work.done():
            assert sum(m.has for m in pool.members()) <= 40 * MIB
        work.result()


def test_what_requests_hold_is_not_given():
    pool = KVPool(32 * MIB)
    with make(pool, "a") as a, make(pool, "b", pool_min=4 * MIB) as b:
        slots = load(a, 8, pool)
        assert len(slots) == 7
        assert len(load(b, 8, pool)) == 1  # its minimum
        while not (reason := member(pool, "b").reason):  # on a slow machine the question has lapsed
            assert not load(b, 1, pool)
        assert reason == "in use"
        assert member(pool, "a").why == "in use"
        free(a, slots[:3])
        more = []
        while len(more) < 2:  # a refusal stands for a moment
            more += load(b, 2 - len(more), pool)
        assert all((a.keys[0][s, :TOKENS] == s + 1).all() for s in slots[3:])


def test_asking_before_it_is_needed():
    pool = KVPool(40 * MIB)
    with make(pool, "a") as a, make(pool, "b") as b:
        free(a, load(a, 8, pool))
        while True:
            ask(b, 5)
            if (answer := pool.wait(b, 60)) != "unasked":  # on a slow machine the question has lapsed
                break
        assert answer == "applied"
        assert b.stats().budget_pages * b.page_size >= 20 * MIB
        assert len(load(b, 5)) == 5


def test_an_idle_member_keeps_its_minimum_only():
    pool = KVPool(64 * MIB)
    with make(pool, pool_min=8 * MIB, idle_seconds=0.01) as cache:
        free(cache, load(cache, 8, pool))
        while pool.free != 56 * MIB or cache.stats().held_pages:  # it needs no step, and nobody asks
            os.sched_yield()
        assert len(load(cache, 8, pool)) == 8


def test_shares_change():
    pool = KVPool(64 * MIB)
    with make(pool, "a") as a, make(pool, "b") as b:
        slots = load(a, 4, pool)
        free(a, slots[2:])
        pool.set_share(a, 0, 10 * MIB)
        while member(pool, "a").has > 10 * MIB:
            os.sched_yield()
        assert all((a.keys[0][s, :TOKENS] == s + 1).all() for s in slots[:2])
        with pytest.raises(InvalidArgument, match="min 20971520 is over max, 10485760"):
            pool.set_share(a, 20 * MIB, 10 * MIB)
        pool.set_share(a, 10 * MIB, 10 * MIB)
        with pytest.raises(OutOfMemory, match="the minimums of all members would be"):
            pool.set_share(b, 60 * MIB, 64 * MIB)
        assert member(pool, "b").min == 0


def test_what_is_no_pool_or_no_member_is_refused(folder):
    pool = KVPool(64 * MIB)
    with pytest.raises(TypeError, match="pool must be a KVPool"):
        make("pool")
    with pytest.raises(OutOfMemory, match="minimums of all members would be 68157440, over"):
        with make(pool, pool_min=MIB):
            make(pool, pool_min=64 * MIB)
    with make(pool) as cache, make(None, lazy=True) as other:
        with pytest.raises(InvalidArgument, match="the cache is in a pool, which sets its budget"):
            cache.set_budget(MIB)
        for call in (lambda: pool.wait(other, 0), lambda: pool.set_share(other, 0, 0)):
            with pytest.raises(InvalidArgument, match="is a member of no pool"):
                call()
        with pytest.raises(ValueError, match="seconds must be a number between"):
            pool.wait(cache, -1)
        with pytest.raises(ValueError, match="seconds must be a number between 0 and 1000000, not 'x'"):
            pool.wait(cache, "x")
        assert pool.wait(cache, np.int8(3)) == "unasked"
        with pytest.raises(TypeError, match="path must be a path, not 5"):
            KVPool(MIB, path=5)
    for wrong in (dict(), dict(budget=0), dict(budget=1 << 47), dict(name="a/b"), dict(name=".."),
                  dict(budget=1, path=f"{folder}\0x")):  # fmt: skip
        with pytest.raises(ValueError):
            KVPool(**wrong)
    with pytest.raises(TypeError, match="exclude"):
        KVPool(1 << 20, name="a", path="b")
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.members()


def test_a_pool_may_be_closed_before_its_members():
    pool = KVPool(40 * MIB)
    cache = make(pool)
    pool.close()
    assert len(load(cache, 8)) == 8
    cache.close()


# ---- several processes --------------------------------------------------------------------------------------------


def test_kept_pages_of_a_process_that_does_nothing_come(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    assert path.stat().st_mode & 0o777 == 0o600
    with Child(path, pool_min=2 * MIB) as child, make(pool, pool_min=2 * MIB) as cache:
        for _ in range(2):
            assert child.ask("load 8") == "8"
            child.ask("free")
            slots = load(cache, 8, pool)
            assert len(slots) == 8
            assert member(pool, "child").has >= 2 * MIB
            free(cache, slots)
        assert child.ask("load 8") == "8"
        child.ask("verify")


def test_what_a_killed_process_had_is_free(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    with Child(tmp_path / "pool") as child, make(pool) as cache:
        assert child.ask("load 8") == "8"
        mine = load(cache, 8, pool)
        assert 1 <= len(mine) <= 2  # beside a little that a member keeps to grow into
        child.kill()
        while len(mine) < 8:  # a refusal stands for a moment
            mine += load(cache, 8 - len(mine), pool)
        assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in mine)
        assert [m.name for m in pool.members()] == ["kv"]


def _layout(data):
    """Bytes of a pool's head, which says how many it has with its rows, and of a row."""
    row = ffi.sizeof("struct vmem_kv_pool_member")
    return struct.unpack_from("I", data, 8)[0] - 32 * row, row


def _has(path):
    """The bytes of the members, by their place, read at one moment: under the table's lock."""
    with open(path, "r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
        data = file.read()
    head, row = _layout(data)
    rows = [struct.unpack_from("2I3Q", data, head + i * row) for i in range(32)]
    return {i: has for i, (size, _, _, _, has) in enumerate(rows) if size}


@pytest.mark.parametrize("late", [False, True])
def test_a_giver_killed_in_the_middle_takes_nothing_along(tmp_path, late):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    with Child(tmp_path / "pool", pool_min=2 * MIB) as child, make(pool, pool_min=2 * MIB) as cache:
        assert child.ask("load 8") == "8"
        child.ask("free")
        mine = load(cache, 1, pool) if late else []
        while not member(pool, "child").giving and member(pool, "child").has > 36 * MIB:
            ask(cache, 8 - len(mine))
        child.kill()
        while len(mine) < 8:
            mine += load(cache, 8 - len(mine), pool)
        assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in mine)
        assert [m.name for m in pool.members()] == ["kv"]
        while pool.free + member(pool, "kv").has != 40 * MIB:  # it may move between two looks
            os.sched_yield()


def test_a_getter_killed_in_the_middle_leaves_what_it_had_not_used(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    with make(pool, pool_min=2 * MIB) as cache:
        running = load(cache, 1, pool)
        free(cache, load(cache, 7, pool))
        with Child(tmp_path / "pool", pool_min=2 * MIB) as child:
            child.process.stdin.write("ask 8\nload 8\n")
            child.process.stdin.flush()
            while member(pool, "child").has <= 2 * MIB:
                os.sched_yield()
            child.kill()
        while len(running) < 8:
            running += load(cache, 8 - len(running), pool)
        assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in running)


def test_both_ask_at_once_and_neither_falls_below_its_minimum(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    lowest, most, over = {}, [0], threading.Event()

    def look():
        while not over.is_set():
            has = _has(tmp_path / "pool")
            most[0] = max(most[0], sum(has.values()))
            for number, bytes in has.items():
                lowest[number] = min(lowest.get(number, bytes), bytes)

    with Child(tmp_path / "pool", pool_min=6 * MIB) as child, make(pool, pool_min=10 * MIB) as cache:
        watch = threading.Thread(target=look, daemon=True)
        watch.start()
        for _ in range(5):
            child.process.stdin.write("ask 8\nload 8\n")
            child.process.stdin.flush()
            ask(cache, 8)
            mine = load(cache, 8, pool)
            child.process.stdout.readline()
            theirs = int(child.process.stdout.readline())
            assert len(mine) >= 2 and theirs >= 1  # what their minimums are for
            assert len(mine) + theirs <= 10  # what fits
            assert child.ask("verify") == str(theirs)
            assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in mine)
            free(cache, mine)
            child.ask("free")
        over.set()
        watch.join()
    assert most[0] <= 40 * MIB
    assert sorted(lowest.values())[0] >= 6 * MIB and sorted(lowest.values())[1] >= 10 * MIB


def test_a_limit_lowered_in_the_middle_holds(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    with Child(tmp_path / "pool", pool_min=2 * MIB) as child, make(pool, pool_min=2 * MIB) as cache:
        assert child.ask("load 8") == "8"
        child.ask("free")
        ask(cache, 8)
        pool.set_share(cache, 2 * MIB, 16 * MIB)
        mine = load(cache, 8, pool)
        assert 3 <= len(mine) <= 4
        while member(pool, "kv").has > 16 * MIB:  # what came before the limit goes again
            os.sched_yield()
        assert cache.shortage.coming_pages == 0
        assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in mine)


def test_a_question_of_a_killed_process_lapses(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")
    with make(pool) as cache:
        slots = load(cache, 8, pool)
        with Child(tmp_path / "pool") as child:
            while not member(pool, "child").needs:
                child.ask("ask 8")
            child.kill()
        assert [m.name for m in pool.members()] == ["kv"]
        free(cache, slots)
        assert len(load(cache, 8, pool)) == 8


@pytest.mark.parametrize("zombie", [False, True])
@pytest.mark.parametrize("how", ["fork", "raw_fork"])
def test_a_forked_child_does_not_stand_for_its_parent(tmp_path, how, zombie):
    """Neither in the table nor for the file, which ends with the last process that opened it."""
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with Child(path) as child:
        assert child.ask("load 8") == "8"
        word, pid = child.ask(how).split()
        assert word == "forked"
        try:
            with make(pool) as cache:
                assert sorted(m.name for m in pool.members()) == ["child", "kv"]
                child.process.kill()
                os.waitid(os.P_PID, child.process.pid, os.WEXITED | (os.WNOWAIT if zombie else 0))
                mine = []
                while len(mine) < 8:
                    mine += load(cache, 8 - len(mine), pool)
            pool.close()
            assert not path.exists()
            KVPool(20 * MIB, path=path).close()
        finally:
            os.kill(int(pid), signal.SIGKILL)


def test_a_process_that_is_slow_with_the_lock_is_waited_for(tmp_path):
    pool = KVPool(40 * MIB, path=tmp_path / "pool")

    def waits(call):
        with open(tmp_path / "pool", "r+b") as file:  # its end drops the lock
            fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
            threading.Timer(0.2, file.close).start()
            try:
                call()
            except VmemError as error:
                assert "lock" in str(error)
                return False
            return True

    for call in (pool.members, lambda: make(pool).close(), lambda: KVPool(path=tmp_path / "pool").close()):
        assert any(waits(call) for _ in range(10))  # where the timer's thread loses its core, it may take too long


def test_the_file_goes_with_the_last_member(tmp_path):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with make(pool):
        again = KVPool(path=path)
        assert again.budget == 40 * MIB
        with pytest.raises(
            InvalidArgument, match="budget 1048576: the pool at .* has 41943040, and all that use it give the same"
        ):
            KVPool(MIB, path=path)
        pool.close()
    again.close()
    assert not path.exists()
    with pytest.raises(InvalidArgument, match="there is no pool at"):
        KVPool(path=path)


def test_a_pool_that_is_over_is_begun_anew(tmp_path):
    with Child(tmp_path / "pool", budget=40 * MIB) as child:
        child.kill()
    assert (tmp_path / "pool").exists()
    pool = KVPool(20 * MIB, path=tmp_path / "pool")
    assert pool.budget == pool.free == 20 * MIB


def test_pools_have_names(folder):
    with make(KVPool(40 * MIB, name="chat")), make(KVPool(name="chat"), "b"):
        assert (folder / "chat.pool").exists()
        assert len(KVPool(name="chat").members()) == 2


def test_files_that_are_no_pools_are_refused(tmp_path):
    (tmp_path / "junk").write_bytes(b"x" * 100000)
    (tmp_path / "junk").chmod(0o600)
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "open").touch(0o666)
    (tmp_path / "open").chmod(0o666)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name, error in {
        "junk": errno.EBADMSG, "fifo": errno.EINVAL, "open": errno.EPERM, "link": errno.ELOOP, ".": errno.EISDIR,
        "no/where": errno.ENOENT,
    }.items():  # fmt: skip
        with pytest.raises((VmemError, ValueError), match="path ") as found:
            KVPool(MIB, path=tmp_path / name)
        assert found.value.errno == error
    assert (tmp_path / "junk").read_bytes() == b"x" * 100000


def spoil(path, how):
    size = path.stat().st_size
    if how == "cut":
        os.truncate(path, 100)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(255 if how == "ones" else (i * 37 + i // 7) % 256 for i in range(size)))


def test_a_call_of_a_pool_takes_its_own_members_alone():
    pool, stranger = KVPool(40 * MIB), KVPool(40 * MIB)
    calls = (lambda p, c: p.wait(c, 0), lambda p, c: p.set_share(c, min=MIB, max=2 * MIB))
    with make(pool, pool_min=4 * MIB) as cache, make(None) as alone:
        before = pool.members()
        for call in calls:
            with pytest.raises(ValueError, match="a member of another pool"):
                call(stranger, cache)
            with pytest.raises(ValueError, match="a member of no pool"):
                call(pool, alone)
            with pytest.raises(TypeError, match="cache must be a KVCache, not 3"):
                call(pool, 3)
        assert [(m.min, m.max) for m in pool.members()] == [(m.min, m.max) for m in before]


@pytest.mark.parametrize("how", ["cut", "empty", "gone", "ones", "noise"])
def test_a_spoilt_file_ends_the_pool_and_no_process(tmp_path, how):
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with make(pool, pool_min=4 * MIB) as cache:
        mine = load(cache, 3, pool)
        spoil(path, how)
        for _ in range(3):
            slot = cache.alloc(TOKENS)
            cache.step([TOKENS if s == slot else 0 for s in range(8)])
            cache.free(slot)
            pool.wait(cache, 0.02)
        if how != "gone":
            with pytest.raises(VmemError, match="(does not hold|no longer holds) a pool"):
                pool.members()
            # Nobody will read what the cache asks for: an engine that waits for the answer must hear so.
            lengths = [TOKENS if s in mine else 0 for s in range(8)]
            for slot in range(8):
                if slot not in mine and cache.alloc(TOKENS, slot=slot) == slot:
                    lengths[slot] = TOKENS
            assert not cache.step(lengths) and pool.wait(cache, 60) == "refused"
            assert not cache.step(lengths) and not cache.shortage.coming_pages
            assert cache.shortage.refusal == "file damaged"
        assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in mine)


def test_rows_that_nobody_stands_behind_count_for_nothing(tmp_path):
    """The table has the right form, and wild numbers in all rows but ours."""
    path = tmp_path / "pool"
    pool = KVPool(40 * MIB, path=path)
    with make(pool) as cache:
        data = bytearray(path.read_bytes())
        head, row = _layout(data)
        for place in range(1, 32):
            data[head + place * row : head + (place + 1) * row] = b"\xff" * row
        path.write_bytes(data)
        assert len(load(cache, 8, pool)) == 8
        assert [m.name for m in pool.members()] == ["kv"]


def test_32_members_and_no_more():
    pool = KVPool(64 * MIB)
    caches = [make(pool, str(i), pool_min=MIB) for i in range(32)]
    with pytest.raises(VmemError, match="32 members") as found:
        make(pool)
    assert found.value.errno == errno.ENOSPC
    for cache in caches:
        cache.close()
    assert pool.members() == []


# ---- pyvmem top ---------------------------------------------------------------------------------------------------


def test_top_shows_pools(tmp_path):
    pool = KVPool(40 * MIB, name="chat")
    with make(pool, "target", pool_min=8 * MIB) as cache, make(KVPool(16 * MIB), "draft"):
        free(cache, load(cache, 4, pool))
        cache.reclaim(0)
        text = run_top("--once")
        (line,) = [line for line in text.splitlines() if line.split()[:1] == ["chat"]]
        assert line.split()[1:5] == [str(os.getpid()), "target", "8", "64"[:0] or "40"]
        assert f"of {os.getpid()}" in text
        found = {v["name"]: v["pool"] for v in json.loads(run_top("--json"))}
        assert found["target"]["min"] == 8 * MIB and found["draft"]["max"] == 16 * MIB


def test_views_that_are_cut_short_or_spoilt_are_passed_over(folder):
    with make(None, "kv"):
        (path,) = folder.glob("*.kv")
        view = path.read_bytes()
        for i in range(0, len(view), 97):
            (folder / f"{os.getpid()}-{i}.kv").write_bytes(view[:i])
            (folder / f"x{i}.kv").write_bytes(view[:i] + b"\xff" * (len(view) - i))
        os.mkfifo(folder / "fifo.kv")
        (folder / "link.kv").symlink_to(path)
        (folder / "folder.kv").mkdir()
        (folder / f"{os.getpid()}-gone.kv").symlink_to("/proc/1/fd/99999")
        names = [v.name for v in kv_view.read_views()]
        assert "kv" in names
        run_top("--once")
        run_top("--json")


def test_a_shortage_says_why_the_pool_gives_no_more():
    with KVPool(32 * MIB) as pool, make(pool, budget=8 * MIB) as cache, make(pool, "other", pool_min=28 * MIB) as other:
        load(cache, 1)
        assert load(cache, 1, pool) == [] or cache.slot(1).state == "active"
        assert cache.step([TOKENS] * 1 + [0] * 7)
        for maximum, refusal, helps in (
            (4, "at maximum", "raise its share's maximum"),
            (32, "at minimum", "use a pool with a larger budget, or lower the minimum of another member"),
        ):
            pool.set_share(cache, 0, maximum * MIB)
            assert load(cache, 1, pool) == []
            slot = cache.alloc(TOKENS)
            while True:  # a refusal stands for a moment, and then a step asks again
                assert not cache.step([TOKENS if s == slot else 0 for s in range(8)])
                if cache.shortage.refusal:
                    break
                assert pool.wait(cache, 60) != "applied"
            assert cache.shortage.refusal == refusal and str(cache.shortage).endswith(helps)
            cache.free(slot)
        cache.share(0, TOKENS - 1)
        assert not cache.truncate(0, TOKENS - 1)
        assert "raise the cache's share of the pool" in ffi.string(lib.vmem_last_error()).decode()
        assert other.stats().held_pages == 0


def test_a_closed_cache_holds_no_more_of_the_budget_than_memory():
    """A view keeps memory; the rest, and the minimum, are the others' at once."""
    with KVPool(32 * MIB) as pool, make(pool) as other:
        cache = make(pool, pool_min=24 * MIB)
        view, slots = cache.keys[0], load(cache, 2)
        cache.free(slots[0])
        cache.reclaim()
        cache.close()
        assert [(m.has, m.min) for m in pool.members() if m.held or m.has] == [(4 * MIB, 0)]
        running = load(other, 8, pool)
        assert len(running) == 7 and view[slots[1], 0, 0, 0] == slots[1] + 1
        del view
        assert [m.name for m in pool.members()] == ["kv"] and len(load(other, 1, pool)) == 1
        free(other, running)
        other.reclaim()
        assert len(pool.members()) == 1
