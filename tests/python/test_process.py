"""Fork, kill, exit: what stays whole, and what goes back to the system.

SPDX-License-Identifier: MIT
"""

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import python

import pyvmem

KIB, MIB = 1 << 10, 1 << 20


# ---- fork ---------------------------------------------------------------------------------------------------


def in_child(work):
    """Run work() in a forked child; returns its exit status: 0 where it returned."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused_and_harms_nothing(context):
    size = min(context.page_sizes)
    range_ = context.reserve(4 * size)
    pages = context.create(size, 4)
    range_.map(pages)
    context.fill(range_.addr, 5, 4 * size)
    before = context.stats()

    def child():
        calls = (context.stats, lambda: context.create(size), lambda: context.reserve(size), range_.unmap)
        for call in calls:
            with pytest.raises(pyvmem.VmemError) as caught:
                call()
            assert caught.value.errno == errno.EPERM
        pages.close()
        range_.close()
        context.close()

    assert in_child(child) == 0
    assert context.stats() == before
    assert context.read(range_.addr, 4 * size) == b"\5" * (4 * size)


def test_a_forked_child_has_its_own_default_context():
    parent = pyvmem.core.default_context("host")

    def child():
        own = pyvmem.core.default_context("host")
        assert own is not parent
        with own.reserve(2 * MIB) as range_:
            range_.map(own.create(64 * KIB, 2))

    assert in_child(child) == 0
    assert pyvmem.core.default_context("host") is parent


# ---- memory goes back ---------------------------------------------------------------------------------------


def memory_held(context):
    """Bytes of memory that this process's contexts hold, as the system counts them."""
    if context.backend != "host":
        return context.info().memory_total - context.memory_free
    # The machine's free memory is everybody's; a memfd's blocks are ours.
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    files = [d for d in descriptors if os.path.islink(d) and os.readlink(d).startswith("/memfd:")]
    return sum(os.stat(f).st_blocks * 512 for f in files)


def seen_once(check, tries=20):
    """True if check() is true at least once: a GPU's free memory also moves with what other processes do."""
    return any(check() for _ in range(tries))


def test_memory_goes_back(context):
    size = max(context.page_sizes)
    context.reserve(size).map(context.create(size))

    def taken_and_given_back():
        before = memory_held(context)
        pages = context.create(size, (1 << 30) // size)
        range_ = context.reserve(1 << 30)
        range_.map(pages)
        context.fill(range_.addr, 1, 1 << 30)
        taken = memory_held(context) - before
        pages.close()
        range_.close()
        context.trim()
        # Some of it may have been held in reserve before.
        return taken >= 900 << 20 and memory_held(context) < before + (300 << 20)

    assert seen_once(taken_and_given_back)


def test_stale_memory_is_never_seen_by_another_process(backend):
    code = """
    import sys
    import pyvmem
    with pyvmem.Context(sys.argv[1]) as context:
        size = max(context.page_sizes)
        range_ = context.reserve(32 * size)
        range_.map(context.create(size, 32))
        assert not any(context.read(range_.addr, 32 * size)), "memory of another process"
        context.fill(range_.addr, 0xEE, 32 * size)
    """
    python(code, backend)
    python(code, backend)


def test_a_kill_in_the_middle_leaves_nothing(backend):
    code = """
    import sys
    import pyvmem
    context = pyvmem.Context(sys.argv[1])
    size = min(context.page_sizes)
    range_ = context.reserve(1 << 30)
    held = context.create(size, (256 << 20) // size)
    range_.map(held)
    context.fill(range_.addr, 3, 256 << 20)
    print("running", flush=True)
    while True:
        pages = context.create(size, 64)
        range_.map(pages, 512 << 20)
        range_.unmap(512 << 20, 64 * size)
        pages.close()
    """
    with pyvmem.Context(backend) as context:

        def killed_after(delay):
            before = memory_held(context)
            process = subprocess.Popen(
                [sys.executable, "-c", "\n".join(line[4:] for line in code.splitlines()), backend],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout.readline() == "running\n"
            time.sleep(delay)  # somewhere in the loop
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            for _ in range(50):  # the driver cleans up after the process is gone
                if memory_held(context) < before + (200 << 20):
                    return True
                time.sleep(0.1)
            return False

        for delay in (0.0, 0.013, 0.05):
            assert seen_once(lambda: killed_after(delay), 5)
        size = max(context.page_sizes)
        range_ = context.reserve(size)
        range_.map(context.create(size))
        assert not any(context.read(range_.addr, size))


# ---- order of garbage collection and exit -------------------------------------------------------------------


def test_children_keep_their_context(backend):
    context = pyvmem.Context(backend)
    size = min(context.page_sizes)
    range_, pages = context.reserve(size), context.create(size)
    range_.map(pages)
    del context
    gc.collect()
    range_.context.write(range_.addr, b"alive")
    assert pages.context.read(range_.addr, 5) == b"alive"


def test_a_reservation_keeps_the_pages_mapped_in_it(context):
    size = min(context.page_sizes)
    range_ = context.reserve(4 * size)
    range_.map(context.create(size, 4))
    gc.collect()
    context.fill(range_.addr, 1, 4 * size)
    range_.close()
    gc.collect()
    assert context.stats().created == 0


def test_dropped_pages_are_released(context):
    pages = context.create(min(context.page_sizes), 4)
    assert context.stats().created
    del pages
    gc.collect()
    assert context.stats().created == 0


def test_pages_released_one_by_one_do_not_hold_the_rest(context):
    size = min(context.page_sizes)
    pages = context.create(size, 4)
    context.release(pages.handles[1])
    pages.close()
    assert context.stats().created == 0


@pytest.mark.parametrize("seed", range(6))
def test_objects_may_go_in_any_order(backend, seed):
    context = pyvmem.Context(backend)
    size = min(context.page_sizes)
    ranges = [context.reserve(8 * size) for _ in range(3)]
    pages = [context.create(size, 2) for _ in range(3)]
    for i, r in enumerate(ranges):
        for j, p in enumerate(pages):
            r.map(p, 2 * j * size)
    objects = {str(i): o for i, o in enumerate([context, *ranges, *pages])}
    del context, ranges, pages, r, p
    order = list(objects)
    random.Random(seed).shuffle(order)
    for name in order:
        if random.Random(seed + int(name)).random() < 0.5:
            objects[name].close()
        del objects[name]
        gc.collect()


EXITS = {
    "everything is left open": "",
    "the context is closed first": "context.close()",
    "the context is dropped first": "del context",
    "a thread is still running": """
import threading
def work():
    while True:
        try:
            range_.unmap(0, size); range_.map(pages, 0)
        except Exception:
            return
threading.Thread(target=work, daemon=True).start()
""",
    "a cycle holds everything": """
range_.cycle = pages.cycle = context.cycle = [range_, pages, context]
del range_, pages, context
""",
    "an exception ends it": "import os; sys.excepthook = lambda *e: os.write(1, b'seen'); raise RuntimeError",
}


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_exits_cleanly(backend, how):
    code = """
import sys
import pyvmem
context = pyvmem.Context(sys.argv[1])
size = min(context.page_sizes)
range_, pages = context.reserve(64 * size), context.create(size, 4)
range_.map(pages)
pyvmem.core.default_context(sys.argv[1]).reserve(size)
"""
    done = python(code + EXITS[how], backend, check=False)
    assert done.stderr == ""
    assert done.returncode == (1 if "exception" in how else 0)


def test_what_tests_of_engines_start_ends_with_them():
    """However they end, and whatever their engines have started."""
    program = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
import ends

made = ends.start("sh", "-c", "sleep 1000 & echo $!; exec sleep 1000", stdout=subprocess.PIPE, text=True)
print(made.pid, made.stdout.readline(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = os.path.join(os.path.dirname(__file__), os.pardir, "engines")
    told = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    assert told.returncode == -signal.SIGKILL
    left = [f"/proc/{pid}" for pid in told.stdout.split()]
    assert len(left) == 2
    end = time.monotonic() + 60
    while any(map(os.path.exists, left)):
        assert time.monotonic() < end
        time.sleep(0.01)
