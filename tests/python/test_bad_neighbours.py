"""Files that other processes of this user put beside ours: control pages, views of caches, and files of pools.

Whatever they hold, nobody who reads them crashes, hangs or answers with an error, and what is good is still found.
VMEM_FUZZ_SECONDS sets how long each fuzzer runs (1).

SPDX-License-Identifier: MIT
"""

import contextlib
import fcntl
import json
import mmap
import multiprocessing
import os
import random
import socket
import struct
import time

import numpy as np
import pytest
from kv_caches import run_top

from pyvmem import KVCache, KVPool, TensorSpec, VmemError, _clock
from pyvmem._ffi import ffi
from pyvmem.engine import control, metrics, pool_policy, pools
from pyvmem.engine.settings import Settings
from pyvmem.kv import view
from pyvmem.sleep import turns
from pyvmem.sleep.admission import Admission
from pyvmem.sleep.leader import Leader
from pyvmem.sleep.pages import ServerPages
from pyvmem.tools import models, top

torch = pytest.importorskip("torch")

SECONDS = float(os.environ.get("VMEM_FUZZ_SECONDS", "1"))
PAGE = 64 << 10
POOL = pools.number_of("p")
FILE = 'pool = "p"\nsize = "1G"\n[models.chat]\npath = "m"\nport = 8000\n[models.evil]\npath = "m"\nport = 8001\n'
ODD = (0, 1, 2, 3, 5, 7, 63, 64, 65, 1 << 15, (1 << 31) - 1, 1 << 32, (1 << 62) - 1, (1 << 63) - 1, -1, -2, -3, -64,
       -(1 << 62), -(1 << 63))  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return view.view_folder()


@pytest.fixture
def good():
    """The page of an engine of this process, in a pool."""
    page = control.open_page("good", 0)
    control.claim(page, "chat", 8000)
    page[control.RANKS_USED] = page[control.BLOCKS] = 1
    page[control.BLOCK_BYTES], page[control.POOL], page[control.STATE] = 1 << 20, POOL, control.State.AWAKE
    page[control.USED], page[control.POOL_BYTES], page[control.POOL_OF] = 3, 1 << 30, POOL
    yield page
    page.unlink()


def names():
    return [engine.name for engine, _ in control.engines()]


def read_everything(good):
    """All that reads control pages of others; whatever they hold, the good one is there."""
    (found,) = [engine for engine, _ in control.engines() if engine.name == "good"]
    assert found.used == 3 << 20 and found.model == "chat"
    told = top.screen(view.read_views(), 200)
    assert "chat" in told and all(char.isprintable() or char == "\n" for char in told)
    assert b"vmem_kv_used_bytes" in metrics.text("x:", os.getpid)
    json.dumps([vars(engine) for engine, _ in control.engines()])
    peers = pool_policy.PoolPeers(good)
    peers.look(0)
    for _, page in control.engines():
        assert page.state in list(control.State) and page.pools() and 1 <= page.ranks <= control.RANKS
    decide_as_a_server()
    rows = [line.split()[:3] for line in models.listing_text(models.read(FILE)).splitlines()]
    assert ["chat", "awake", "8000"] in rows
    for which in ("good", "bad", str(os.getpid())):
        for size in ("1", "8M", "50%"):
            with contextlib.suppress(ValueError):  # a limit that the page's own words do not allow
                for one in top.limit(f"{which}={size}"):
                    top.set_engine(*one)


def decide_as_a_server():
    """What the server of an engine makes of all pages, whichever of the models is its own."""
    settings = Settings("VMEM_VLLM")
    pages = ServerPages(os.getpid, 0, lambda: ("chat", 8000))
    leader = Leader(pages, Admission(pages, 1.0, bool), None, settings)
    seen = [leader._model_of(page) for _, page in control.engines()]
    for now in (0.0, _clock.now_us() / 1e6):
        for me in seen:
            turns.decide(seen, me, now, 2.0, 1.0)
            turns.weights_suffice(seen, me, now, 2.0)
    every = [page for _, page in control.engines()]
    for page in every:
        leader._pages.mine, leader._pages.others, leader._published = [page], every, (None, 0.0)
        leader._publish_wait()
        assert 0 <= page[control.WAIT] <= 10**12 and 0 <= page[control.ROOM] <= control.NO_LIMIT


# ---- files that are no pages ----------------------------------------------------------------------------------------


def sealed(words, mode=0o600, seals=fcntl.F_SEAL_SHRINK, size=control.WORDS * 8):
    """A file of memory with these words, and the way to it."""
    fd = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.ftruncate(fd, size)
    os.pwrite(fd, words.tobytes()[:size], 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def a_page(name="bad", **words):
    page = control.private_page()
    control.claim(page, "evil", 8001)
    page[control.NAME] = control._number(name, 0)
    page[control.RANKS_USED], page[control.BLOCK_BYTES], page[control.POOL] = 1, 1 << 20, POOL
    for word, value in words.items():
        page[getattr(control, word)] = value
    return page.words


def plain(path):
    path.write_bytes(a_page().tobytes())


def readable_by_others(path):
    path.symlink_to(sealed(a_page(), 0o644)[1])


def not_sealed(path):
    path.symlink_to(sealed(a_page(), seals=fcntl.F_SEAL_GROW)[1])


def short(path):
    path.symlink_to(sealed(a_page(), size=4096)[1])


def of_another_release(path):
    words = a_page()
    words[1] += 1
    path.symlink_to(sealed(words)[1])


def of_another_engine(path):
    path.symlink_to(sealed(a_page("other"))[1])


def locked(path):
    plain(path)
    locked.file = open(path, "r+b")
    fcntl.flock(locked.file, fcntl.LOCK_EX)


def listens(path):
    listens.socket = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH)  # the path itself may be too long for a socket's address
    listens.socket.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


BAD = [plain, readable_by_others, not_sealed, short, of_another_release, of_another_engine, locked, listens,
       lambda path: os.mkfifo(path), lambda path: path.mkdir(), lambda path: path.symlink_to(path),
       lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("nowhere"),
       lambda path: path.write_bytes(b"")]  # fmt: skip
IDS = [*(bad.__name__ for bad in BAD[:8]), "fifo", "folder", "loop", "device", "dangling", "empty"]


@pytest.mark.parametrize("bad", BAD, ids=IDS)
def test_a_file_that_is_no_page_is_left_out_with_one_line(good, caplog, bad):
    path = control.path_of("bad", 0)
    bad(path)
    for _ in range(3):
        read_everything(good)
        control.sweep()
        assert names() == ["good"]
    assert sum("bad-0" in record.getMessage() for record in caplog.records) <= 1


@pytest.mark.parametrize("bad", BAD, ids=IDS)
def test_an_engine_begins_whatever_lies_in_its_place(bad):
    """Its restart waits for nobody."""
    path = control.path_of("bad", 0)
    bad(path)
    page = control.open_page("bad", 0)
    assert page.shared and page[control.PID] == 0 and page.model == ""
    control.claim(page, "mine")
    assert names() == ["bad"]
    assert control.open_page("bad", 0).model == "mine"


def test_nobody_can_shorten_a_page(good):
    for change in (lambda: os.truncate(good.path, 0), lambda: os.truncate(good.path, 1 << 30)):
        with pytest.raises(OSError):
            change()
    assert good.model == "chat"


def test_a_folder_that_others_can_read_is_not_used(folder):
    folder.chmod(0o755)
    assert view.view_folder() is None and control.path_of("bad", 0) is None and not control.open_page("a", 0).shared
    folder.chmod(0o700)
    assert view.view_folder() == folder


def test_a_name_reaches_no_terminal_as_it_is(good):
    page = control.Page(a_page(), None)
    control.serves(page, "\x1b[2J\x1b]0;owned\x07\x1b[31mEVIL\nfake-row\u202e", 8000)
    fd, way = sealed(page.words)
    control.path_of("bad", 0).symlink_to(way)
    read_everything(good)
    assert "EVIL" in top.screen([], 400)
    os.close(fd)


# ---- pages with anything in them ------------------------------------------------------------------------------------


def test_a_page_with_anything_in_it_hides_no_other(good):
    """Also one that changes after it was opened."""
    seed = random.randrange(1 << 32)
    draw, end, rounds = random.Random(seed), time.monotonic() + SECONDS, 0
    fd, way = sealed(a_page())
    control.path_of("bad", 0).symlink_to(way)
    words = np.frombuffer(mmap.mmap(fd, control.WORDS * 8), np.int64)
    first = [word for word in range(2, 2048) if word != control.NAME]
    while time.monotonic() < end or rounds < 20:
        rounds += 1
        words[:] = a_page()
        for _ in range(draw.choice((1, 3, 50, 2000))):
            words[draw.choice(first) if draw.random() < 0.9 else draw.randrange(2048, control.WORDS)] = draw.choice(ODD)
        words[control.NAME] = control._number("bad", 0)
        try:
            read_everything(good)
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {rounds}") from error
    os.close(fd)


def test_a_ring_with_anything_in_it_ends():
    seed = random.randrange(1 << 32)
    draw, end, rounds = random.Random(seed), time.monotonic() + SECONDS, 0
    while time.monotonic() < end or rounds < 20:
        rounds += 1
        page = control.private_page()
        for step in range(3):
            assert page.push(step, [1, 2, 3], 1)
        for _ in range(draw.randrange(4)):
            page.words[control._RING + draw.randrange(16)] = draw.choice(ODD)
        if draw.random() < 0.3:
            page[control.RING_DONE] = draw.choice(ODD)
        taken = list(page.pull(0, page[control.POSITION], 4))
        assert all(0 < i < 4 for _, ids in taken for i in ids), f"seed {seed}, round {rounds}"
        assert sum(len(ids) + 2 for _, ids in taken) <= control.RING, f"seed {seed}, round {rounds}"
        assert page[control.RING_DONE] == page[control.POSITION]


# ---- views ----------------------------------------------------------------------------------------------------------


def cache_of(pool=None, name="good"):
    return KVCache([TensorSpec("row", (PAGE,), torch.uint8)], 2, 32, 32 * PAGE, backend="host", page_size=PAGE,
                   name=name, pool=pool)  # fmt: skip


def test_a_view_with_anything_in_it_hides_no_other(folder):
    seed = random.randrange(1 << 32)
    draw, end, rounds = random.Random(seed), time.monotonic() + SECONDS, 0
    cache = cache_of()
    (path,) = folder.glob("*.kv")
    whole = path.read_bytes()[: ffi.sizeof("struct vmem_kv_view")]
    bad = folder / (path.name.rpartition("-")[0] + "-999.kv")
    while time.monotonic() < end or rounds < 20:
        rounds += 1
        data = bytearray(whole)
        for _ in range(draw.choice((1, 4, 100))):
            at = draw.randrange(2, len(data) // 8) * 8
            struct.pack_into("<q", data, at, draw.choice(ODD))
        struct.pack_into("<Q", data, 16, 0)  # the sequence: nobody is writing
        if draw.random() < 0.1:
            del data[draw.randrange(len(data)) :]
        bad.unlink(missing_ok=True)
        bad.write_bytes(data)
        bad.chmod(0o600)
        try:
            told = [found.name for found in view.read_views()]
            assert "good" in told
            assert "good" in run_top("--once") and all(c.isprintable() or c == "\n" for c in run_top("--once"))
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {rounds}") from error
    bad.unlink()
    cache.close()


def test_a_view_that_others_can_read_is_left_out(folder):
    cache = cache_of()
    (path,) = folder.glob("*.kv")
    other = folder / (path.name.rpartition("-")[0] + "-999.kv")
    other.write_bytes(path.read_bytes())
    other.chmod(0o644)
    assert len(view.read_views()) == 1
    other.chmod(0o600)
    assert len(view.read_views()) == 2
    cache.close()


# ---- files of pools -------------------------------------------------------------------------------------------------


def test_a_pools_file_with_anything_in_it_stops_nobody(tmp_path):
    """Two members step while the file is overwritten; afterwards a pool at another path works as ever."""
    seed = random.randrange(1 << 32)
    draw, end, rounds = random.Random(seed), time.monotonic() + SECONDS, 0
    while time.monotonic() < end or rounds < 4:
        rounds += 1
        path = tmp_path / f"{rounds}.pool"
        pools = [KVPool(32 * PAGE, path=path) for _ in range(2)]
        caches = [cache_of(pool, name=None) for pool in pools]
        slots = [cache.alloc() for cache in caches]
        size = path.stat().st_size
        with open(path, "r+b") as file:
            for _ in range(12):
                for _ in range(draw.choice((0, 1, 1, 40))):
                    file.seek(draw.randrange(size // 8) * 8)
                    file.write(struct.pack("<q", draw.choice(ODD)))
                if draw.random() < 0.05:
                    file.truncate(draw.randrange(size))
                file.flush()
                for cache, slot, pool in zip(caches, slots, pools):
                    lengths = [0, 0]
                    lengths[slot] = draw.randrange(33)
                    try:
                        if not cache.step(lengths):
                            pool.wait(cache, 0.01)
                        pool.members()
                    except VmemError as error:
                        assert "pool" in str(error), f"seed {seed}"
        for each in (*caches, *pools):
            each.close()
    with KVPool(32 * PAGE, path=tmp_path / "whole.pool") as pool:
        cache = cache_of(pool, name=None)
        slot = cache.alloc()
        assert cache.step([32 if s == slot else 0 for s in range(2)])
        cache.close()


# ---- several processes ----------------------------------------------------------------------------------------------


def _opens(results, number):
    """One of the processes of an engine: it opens the page, and stays until all have."""
    page = control.open_page("many", 0)
    page[control.ATTACHED + number] = 1
    while not page.attached(8):
        time.sleep(0.001)
    results.put(page.shared)
    while not page[control.LEND]:
        time.sleep(0.001)


@pytest.mark.parametrize("before", ["nothing", "a dead link", "a file"])
def test_processes_that_begin_at_once_share_one_page(before):
    path = control.path_of("many", 0)
    if before == "a dead link":
        path.symlink_to("/proc/1/fd/none")
    elif before == "a file":
        path.write_bytes(b"x")
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    processes = [fork.Process(target=_opens, args=(results, number)) for number in range(8)]
    for process in processes:
        process.start()
    assert all(results.get() for _ in processes)
    page = control.open_page("many", 0)
    assert page.attached(8)
    control.claim(page)
    assert names() == ["many"]
    page[control.LEND] = 1
    for process in processes:
        process.join()
        assert process.exitcode == 0
    control.sweep()
    assert names() == [] and not list(path.parent.iterdir())
