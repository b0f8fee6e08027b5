"""Signals in the middle of long calls: handlers run there, and one that raises ends the call as if it had not begun.

SPDX-License-Identifier: MIT
"""

import contextlib
import errno
import gc
import os
import signal
import sys
import threading
import time

import paper
import pytest

import pyvmem
from pyvmem import errors
from pyvmem._ffi import ffi, lib

MIB = 1 << 20
LENGTH = 160 * MIB
APART = 0.02  # seconds between two looks of pyvmem for signals; 50 calls of a quick driver take less
# (backend, call) that takes its memory from the driver in one piece and is done: such a call has no middle.
ONE_STEP = {("stock", "prealloc")}


def may_be_quick(context):
    """True if every call may be done in one step: a driver that clears what is freed leaves nothing to zero."""
    return context.backend == "stock" and "fakegpu" not in os.environ.get("LD_PRELOAD", "")


def long_calls(context):
    """Calls that take long, by name; each returns what undoes it."""
    size = min(context.page_sizes)
    range_ = context.reserve(LENGTH)

    def create():
        return context.create(size, LENGTH // size).close

    def handles():
        pages = paper.vMemCreate(context, size, LENGTH // size)
        return lambda: context.release(pages)

    def commit():
        range_.commit()
        return range_.decommit

    def commit_by_address():
        context.commit(range_.addr, LENGTH, size)
        return range_.decommit

    def prealloc():
        context.prealloc(LENGTH)
        return context.trim

    return {f.__name__: f for f in (create, handles, commit, commit_by_address, prealloc)}


def watch(number):
    """Raise signal `number` at every look for signals in the middle of a call; keep what is returned alive."""

    @ffi.callback("int(void)", error=1, onerror=errors.keep_raised)
    def run():
        signal.raise_signal(number)
        return errors.pv_run_handlers()

    lib.pv_watch_signals(threading.main_thread().ident, run)
    return run


def unwatch():
    """Look for signals as pyvmem does."""
    lib.pv_watch_signals(threading.main_thread().ident, lib.pv_run_handlers)


@pytest.fixture
def alarm():
    """alarm(handler): SIGALRM comes at every look for signals in the middle of a call."""
    before = signal.getsignal(signal.SIGALRM)
    kept = []

    def start(handler):
        signal.signal(signal.SIGALRM, handler)
        kept.append(watch(signal.SIGALRM))

    yield start
    unwatch()
    signal.signal(signal.SIGALRM, before)


def test_handlers_run_in_the_middle_of_a_call(context, alarm):
    frames = set()
    alarm(lambda number, frame: frames.add(frame.f_code.co_name))
    create = long_calls(context)["create"]
    for _ in range(20):  # memory that is there already is handed out in less than a step
        time.sleep(APART)
        create()()
        context.trim()
    assert frames == {"run"} or (may_be_quick(context) and not frames)


@pytest.fixture
def interrupting():
    """Every look for signals in the middle of a call finds Ctrl-C."""

    # A job in a shell's background starts with Ctrl-C ignored, and Python leaves it so.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    kept = watch(signal.SIGINT)
    yield
    unwatch()
    del kept
    signal.signal(signal.SIGINT, handler)
    with pyvmem.Context("host") as context:
        context.stats()  # raises what was left behind


@pytest.mark.parametrize("name", ["create", "handles", "commit", "commit_by_address", "prealloc"])
def test_an_interrupted_call_leaves_nothing(context, interrupting, name):
    call = long_calls(context)[name]
    context.trim()
    before = context.stats()
    if (context.backend, name) in ONE_STEP:
        call()()
        context.trim()
        assert context.stats().created == before.created
        return
    for _ in range(50):
        time.sleep(APART)
        try:
            undo = call()
        except KeyboardInterrupt:
            break
        undo()  # it was too quick to be interrupted
        context.trim()
    else:
        assert may_be_quick(context), "never interrupted"
    after = context.stats()
    assert (after.created, after.mapped, after.reserved) == (before.created, before.mapped, before.reserved)
    unwatch()
    call()()
    context.trim()
    after = context.stats()
    assert (after.created, after.mapped, after.reserved) == (before.created, before.mapped, before.reserved)


def test_an_interrupted_tensor_is_as_before(context, interrupting):
    pytest.importorskip("torch")
    if context.backend != "host":
        return
    size = min(context.page_sizes)
    v = pyvmem.virtual_empty((LENGTH // size, size // 4), context=context)
    v.commit(rows=slice(3, 5))
    for _ in range(200):
        try:
            v.commit()
        except KeyboardInterrupt:
            break
        v.decommit(rows=slice(0, 3))
        v.decommit(rows=slice(5, LENGTH // size))
    assert v.resident_bytes == context.stats().created == 2 * size


def test_other_threads_are_not_interrupted(context, interrupting):
    done = []

    def work():
        for call in long_calls(context).values():
            call()()
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
    assert done


def test_a_handler_may_use_the_context(context, alarm):
    """A handler that calls pyvmem in the middle of a call does not hang, and the call goes on."""
    size = min(context.page_sizes)
    range_ = context.reserve(LENGTH)
    seen = []

    def handler(number, frame):
        try:
            range_.commit(0, size)
        except pyvmem.VmemError as error:
            assert error.errno == errno.EBUSY
        with context.create(size, 2):
            seen.append(frame.f_code.co_name)

    alarm(handler)
    for _ in range(20):
        try:
            range_.commit()
        except pyvmem.VmemError as error:
            assert error.errno in (errno.EEXIST, errno.EBUSY)  # the handler was there first
        range_.decommit()
        context.trim()
    assert set(seen) == {"run"} or (may_be_quick(context) and not seen)


def memory_files():
    """The open memory files of this process: each context on the host has its own, until its last thread is gone."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                found.add(os.fstat(int(name)).st_ino)
    return found


@pytest.mark.parametrize("name", ["create", "commit", "commit_by_address"])
def test_a_context_that_another_thread_closes_in_the_middle_of_a_call(name):
    """close() does not wait; the call ends as if alone, and with it what it used."""
    before = memory_files()
    context = pyvmem.Context("host")
    files = memory_files() - before
    call = long_calls(context)[name]
    closed = []

    @ffi.callback("int(void)", error=1, onerror=errors.keep_raised)
    def run():
        if not closed:
            thread = threading.Thread(target=context.close)
            thread.start()
            thread.join()
            closed.append(files & memory_files())
        return 0

    lib.pv_watch_signals(threading.main_thread().ident, run)
    try:
        for _ in range(200):
            call()()
            if closed:
                break
    except ValueError as error:  # of undoing it; or, by address, of a reservation that is gone
        assert "closed" in str(error) or name == "commit_by_address"
    finally:
        unwatch()
    assert files and closed == [files]  # the context stood while the call ran
    with pytest.raises(ValueError, match="closed"):
        context.stats()
    del call
    gc.collect()
    while files & memory_files():  # its threads may still give memory back
        os.sched_yield()


class Stop(BaseException):
    pass


def stopped_at(n, call):
    """Call, with an exception before the n-th bytecode that pyvmem executes; whether there was one."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(os.path.dirname(pyvmem.__file__)):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        if event == "opcode" and count == n:
            raise Stop
        return trace

    sys.settrace(trace)
    try:
        call()
        return False
    except Stop:
        return True
    finally:
        sys.settrace(None)


def make_a_reservation(context):
    context.reserve(MIB).commit()


def make_pages(context):
    context.create(min(context.page_sizes))


def make_a_tensor(context):
    pyvmem.virtual_empty(16, context=context).commit()


@pytest.mark.parametrize("make", [make_a_reservation, make_pages, make_a_tensor])
def test_an_exception_at_any_moment_leaves_nothing(make):
    """As Ctrl-C may raise it, between any two steps of a constructor. Also the context itself must go in the end."""
    pytest.importorskip("torch")
    before = memory_files()
    context = pyvmem.Context("host")
    files = memory_files() - before
    stopped_at(0, lambda: make(context))  # at none: Python 3.13 reports bytecodes from the second traced call on
    collecting = gc.isenabled()
    gc.disable()
    try:
        n = 1
        while stopped_at(n, lambda: make(context)):
            stats = context.stats()
            assert stats.reserved == stats.created == 0, f"at bytecode {n}"
            n += 1
    finally:
        if collecting:
            gc.enable()
    assert n > 100 and files <= memory_files()
    context.close()
    assert files and not files & memory_files()


def swap_back(cache, slot):
    if cache.slot(slot).state == "swapped":
        assert cache.swap_in(slot)


CALLS = {
    "swap_out": (None, lambda cache, slot: cache.swap_out(slot)),
    "swap_in": (lambda cache, slot: cache.swap_out(slot), swap_back),
    "free": (lambda cache, slot: cache.swap_out(slot), lambda cache, slot: cache.free(slot)),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_survive_an_exception_at_any_moment(name):
    """Ctrl-C during a native call comes right after it. A request then has its rows or is free; no page is lost."""
    torch = pytest.importorskip("torch")
    before, call = CALLS[name]
    spare = pyvmem.Spare(overlap=False, generous=False)
    with pyvmem.KVCache.for_model(1, 2, 32, 2, 512, 1 << 20, dtype=torch.float32, backend="host", spare=spare) as cache:
        n, stopped = 0, True
        while stopped:
            slot = cache.alloc(300)
            assert slot == 0 and cache.step([300, 0])
            cache.keys[0][slot, :300], cache.values[0][slot, :300] = n, -n
            if before:
                before(cache, slot)
            stopped = stopped_at(n, lambda: call(cache, slot)) or not n
            swap_back(cache, slot)
            if cache.slot(slot).state == "active":
                assert cache.step([301, 0]), f"at bytecode {n}"
                assert (cache.keys[0][slot, :300] == n).all(), f"at bytecode {n}"
                assert (cache.values[0][slot, :300] == -n).all(), f"at bytecode {n}"
                cache.free(slot)
            cache.reclaim()
            assert not cache.stats().held_pages, f"at bytecode {n}"
            n += 1
        assert n > 50


def test_an_interrupted_share_holds_nothing():
    torch = pytest.importorskip("torch")
    runs, n = [], 0
    with pyvmem.KVCache.for_model(1, 1, 64, 2, 64, 1 << 20, dtype=torch.float32, backend="host") as cache:
        slot = cache.alloc(64)
        assert cache.step([64, 0])
        while not cache.slot(slot).shared_tokens:
            assert stopped_at(n, lambda: runs.append(cache.share(slot, 64))) or not n
            cache.drop([runs.pop() for _ in range(len(runs))])
            n += 1
        # Nothing can be done about the last bytecodes, which leave the call.
        assert n > 200 and not stopped_at(n + 1, lambda: runs.append(cache.share(slot, 64)))


def test_an_interrupted_alloc_takes_no_slot():
    torch = pytest.importorskip("torch")
    slots, n = [], 0
    with pyvmem.KVCache.for_model(1, 1, 64, 2, 64, 1 << 20, dtype=torch.float32, backend="host") as cache:
        while not cache.stats().active_slots:
            assert stopped_at(n, lambda: slots.append(cache.alloc(16))) or not n
            for slot in slots:
                cache.free(slot)
            slots.clear()
            n += 1
        assert n > 100 and not stopped_at(n + 1, lambda: slots.append(cache.alloc(16)))


def test_a_table_of_blocks_forgets_all_of_them_after_an_exception_at_any_moment():
    torch = pytest.importorskip("torch")
    from pyvmem.kv.prefix import PrefixCache

    with pyvmem.KVCache.for_model(1, 1, 64, 2, 64, 8 << 20, dtype=torch.float32, backend="host") as cache:
        blocks, n, stopped = PrefixCache(cache, 16), 0, True
        slot = cache.alloc(32)
        assert cache.step([32, 0])
        while stopped:
            stopped = stopped_at(n, lambda: blocks.add(slot, [b"a", b"b"])) or not n
            blocks.add(slot, [b"a", b"b"])
            assert len(blocks) == 2 and blocks.peek([b"a", b"b"]) == 32, f"at bytecode {n}"
            blocks.clear()
            assert len(blocks) == 0, f"at bytecode {n}"
            n += 1
        assert n > 50
