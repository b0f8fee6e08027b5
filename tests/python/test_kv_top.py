"""Published statistics of KV caches, and ``pyvmem top``.

SPDX-License-Identifier: MIT
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from kv_caches import run_top

from conftest import python
from pyvmem.kv import view as kv_view
from pyvmem.kv.cache import KVCache, Spare, TensorSpec

MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pyvmem"


def make(name="kv", **options):
    options = {"idle_seconds": math.inf, **options}  # no answers but those of calls
    return KVCache.for_model(2, 4, 64, 4, 1000, 32 * MIB, dtype=torch.float16, backend="host", name=name, **options)


def test_a_cache_shows_its_statistics_to_others():
    with make("chat") as cache:
        slot = cache.alloc()
        cache.step([700 if s == slot else 0 for s in range(4)])
        cache.wait()
        code = """
            from pyvmem.kv import view as kv_view
            (v,) = kv_view.read_views()
            print(v.name, v.pid, v.stats["live_bytes"], v.stats["steps"])
        """
        assert python(code).stdout.split() == ["chat", str(os.getpid()), str(700 * 4 * 512), "1"]
        assert kv_view.read_views()[0].stats == {k: getattr(cache.stats(), k) for k in kv_view.read_views()[0].stats}
    assert kv_view.read_views() == []


def test_names_cannot_write_to_the_terminal():
    with make("chat\n\x1b[2J"):
        assert kv_view.read_views()[0].name == "chat??[2J"
        assert "chat??[2J" in run_top("--once")


def test_views_are_for_the_user_alone(folder):
    with make():
        (file,) = folder.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_dead_process_leaves_no_view(folder):
    code = """
        import os, signal
        from pyvmem.kv.cache import KVCache
        cache = KVCache.for_model(1, 1, 64, 1, 100, 1 << 20, backend="host")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    python(code, check=False)
    assert len(list(folder.iterdir())) == 1
    assert kv_view.read_views() == []
    assert list(folder.iterdir()) == []


def test_a_dead_view_that_cannot_be_removed_harms_nobody(monkeypatch, folder):
    """As in a folder that has become read-only."""

    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    folder.mkdir(mode=0o700)
    (folder / f"{10**30}-1-0.kv").symlink_to("/proc/1/fd/99999")
    monkeypatch.setattr(type(folder), "unlink", refuse)
    with make("alive"):
        assert [v.name for v in kv_view.read_views()] == ["alive"]


def test_nobody_can_cut_a_view_short(folder):
    """The cache writes to it without a system call, and would die of a file that has become shorter."""
    with make() as cache:
        (file,) = folder.iterdir()
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.truncate(file, size)
        slot = cache.alloc(10)
        assert cache.step([10 if s == slot else 0 for s in range(4)])
        cache.free(slot)
        assert kv_view.read_views()[0].stats["allocs"] == 1


def test_a_folder_that_others_can_write_to_is_not_used(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with make():
        assert list(folder.iterdir()) == []


def test_top_prints_a_row_for_each_cache():
    with make("one"), make("two"):
        text = run_top("--once")
        assert "one" in text and "two" in text and str(os.getpid()) in text
        assert [v["name"] for v in json.loads(run_top("--json"))] == ["one", "two"]


def test_another_process_can_set_the_budget(capsys):
    with make() as cache:
        run_top("--limit", f"{os.getpid()}=16M", "--wait", "0.01")
        assert "deferred: it is taken over at the next step" in capsys.readouterr().err
        assert cache.stats().budget_pages == 512
        cache.step([0] * 4)
        assert cache.stats().budget_pages == 256
        run_top("--limit", f"{os.getpid()}=8M", "--wait", "0.01")
        cache.step([0] * 4, dry=True)
        assert cache.stats().budget_pages == 128


def test_an_idle_cache_answers_without_a_step(capsys):
    with make(idle_seconds=0.01) as cache:
        run_top("--limit", f"{os.getpid()}=16M", "--wait", "60")
        assert "kv: applied: 16 MiB" in capsys.readouterr().err
        assert cache.stats().budget_pages == 256


def test_a_budget_below_what_requests_hold_says_so(capsys):
    with make(spare=Spare(overlap=False)) as cache:
        slot = cache.alloc(1000)
        assert cache.step([1000 if s == slot else 0 for s in range(4)])
        view = kv_view.read_views()[0]
        kv_view.request_budget(view, MIB)
        cache.step([0] * 4, dry=True)
        held = cache.stats().held_pages * cache.page_size >> 20
        answer = kv_view.await_budget(view, MIB, 60)
        assert answer == f"applied: 1 MiB; requests hold {held - 1} MiB more until they end"
    assert kv_view.await_budget(view, MIB, 0).startswith("gone")


def test_pages_that_no_request_needs_are_not_said_to_be_held_by_requests(monkeypatch):
    """As of an idle member of a pool, which gives its kept pages back by itself."""
    with make(spare=Spare(overlap=False)) as cache:
        slot = cache.alloc(1000)
        assert cache.step([1000 if s == slot else 0 for s in range(4)])
        cache.free(slot)
        view = kv_view.read_views()[0]
        stats = {**view.stats, "held_pages": 40, "needed_pages": 0, "page_size": MIB}
        idle = dataclasses.replace(view, stats=stats, answer="applied", answers=view.answers + 1, answered=24 * MIB)
        monkeypatch.setattr(kv_view, "read_view", lambda path: idle)
        assert kv_view.await_budget(view, 24 * MIB, 0) == (
            "applied: 24 MiB; 16 MiB that no request needs are being given back")  # fmt: skip
        busy = dataclasses.replace(idle, stats={**stats, "needed_pages": 30})
        monkeypatch.setattr(kv_view, "read_view", lambda path: busy)
        answer = kv_view.await_budget(view, 24 * MIB, 0)
        assert answer == "applied: 24 MiB; requests hold 6 MiB more until they end"


def test_a_cache_that_is_closed_meanwhile_is_gone(monkeypatch, capsys):
    """Between the look at all the limits and the first request."""
    with make("alive", idle_seconds=0.01), contextlib.ExitStack() as stack:
        closed = stack.enter_context(make("closed"))

        def want(view, size):
            closed.close()
            kv_view.request_budget(view, size)

        monkeypatch.setattr("pyvmem.tools.top.request_budget", want)
        run_top("--limit", "closed=16M", "--limit", "alive=16M", "--wait", "60")
        said = capsys.readouterr().err
        assert "closed: gone: " in said and "alive: applied: 16 MiB" in said


def test_a_request_reaches_no_other_file(monkeypatch, tmp_path):
    """A cache that is closed gives its descriptor's number back, and the process may open a file of its own with it."""
    other = tmp_path / "other"
    other.write_bytes(bytes(100000))
    with make():
        (view,) = kv_view.read_views()
        opened = os.open

        def open_and_replace(path, *how):
            file = opened(path, *how)
            view.path.unlink(missing_ok=True)
            view.path.symlink_to(other)
            return file

        monkeypatch.setattr(os, "open", open_and_replace)
        kv_view.request_budget(view, 16 * MIB)
        assert other.read_bytes() == bytes(100000)
        assert kv_view.read_views() == []


def test_a_budget_that_takes_long_to_adopt_is_deferred():
    """The cache has read the request, and is still taking the memory."""
    with make():
        view = kv_view.read_views()[0]
        assert not view.wanted  # it was read; the answer is still to come
        assert kv_view.await_budget(view, MIB, 0).startswith("deferred: it is being taken over")


def test_limits_that_no_cache_can_have_are_refused():
    with make("kv") as cache:
        for size in ("1", "900T"):
            with pytest.raises(ValueError, match=f"--limit {os.getpid()}={size}: bytes .* must lie between"):
                run_top("--limit", f"{os.getpid()}={size}")
        cache.step([0] * 4)
        assert cache.stats().budget_pages == 512


@pytest.mark.parametrize("text, error", [
    ("x=16G", "no KV cache, engine or model has the name 'x'"),
    ("1=16G", "process 1 has no KV cache and no engine"),
    ("x=120%", "120% must lie between 0 and 100 %"),  # before anybody of that name is looked for
    ("x=inf%", "inf% must lie between 0 and 100 %"),
])  # fmt: skip
def test_a_limit_that_nobody_can_have_says_why(text, error):
    with pytest.raises(ValueError, match=f"^--limit {text}: {error}$"):
        run_top("--limit", text)


def test_a_wrong_limit_leaves_the_others_unasked():
    with (
        make("small") as cache,
        KVCache(
            [TensorSpec("x", (2048,), torch.float16)], 2, 1000, 64 * MIB, backend="host", page_size=2 * MIB
        ) as large,
    ):
        for words in (
            ("--limit", f"{os.getpid()}=3M"),
            ("--limit", f"{os.getpid()}=32M", "--limit", "1=1G"),
        ):
            with pytest.raises(ValueError, match="--limit"):
                run_top(*words)
            cache.step([0] * 4, dry=True)
            large.step([0] * 2, dry=True)
            assert cache.stats().budget_pages == 512 and large.stats().budget_pages == 32


def test_a_process_may_have_a_number_that_another_had(folder):
    """As in containers, where the numbers are the same ones at each start."""
    with make("first"):
        (file,) = folder.iterdir()
        view = file.read_bytes()
    start, number = file.name.split("-", 1)[1].rsplit("-", 1)
    for n in range(int(number[:-3]), int(number[:-3]) + 3):
        (folder / f"{os.getpid()}-{int(start) - 1}-{n}.kv").write_bytes(view)
    (folder / f"{10**30}-1-0.kv").write_bytes(view)
    with make("second"):
        assert [v.name for v in kv_view.read_views()] == ["second"]
        assert len(list(folder.iterdir())) == 1


def test_a_process_that_has_ended_but_was_not_waited_for_is_gone(folder):
    code = """
        import os
        from pyvmem.kv.cache import KVCache
        cache = KVCache.for_model(1, 1, 64, 1, 100, 1 << 20, backend="host")
        print("made", flush=True)
        os._exit(0)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert child.stdout.read() == b"made\n"  # its end: the process has closed it
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert len(list(folder.iterdir())) == 1
    assert kv_view.read_views() == []
    child.wait()


def test_a_cache_that_cannot_be_published_works(monkeypatch, folder):
    """As on a full disk, or where the folder went away meanwhile."""
    monkeypatch.setattr("pyvmem.kv.cache.new_view_path", lambda: str(folder / "gone" / "1-1-1.kv"))
    with make("name of \udcff") as cache:
        cache.alloc()
        assert cache.step([50, 0, 0, 0])


@pytest.mark.parametrize("parent, where", [("", "in {}/pyvmem"), ("missing", "anywhere: XDG_RUNTIME_DIR")])
def test_the_command_line_has_top_and_says_where_it_looked(tmp_path, parent, where):
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / parent)}
    done = subprocess.run([sys.executable, "-m", "pyvmem", "top", "--once"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and f"No caches and no engines {where.format(tmp_path)}" in done.stdout
