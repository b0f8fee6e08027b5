"""Published statistics of KV caches, and ``pyvmem top``.

SPDX-License-Identifier: MIT
"""

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
from pyvmem.kv.cache import KVCache

MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pyvmem"


def make(name="kv", **options):
    options = {"idle_seconds": math.inf, **options}
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


@pytest.mark.parametrize("text, error", [
    ("x=16G", "no engine or model has the name 'x'"),
    ("1=16G", "process 1 has no engine"),
    ("x=120%", "120% must lie between 0 and 100 %"),  # before anybody of that name is looked for
    ("x=inf%", "inf% must lie between 0 and 100 %"),
    ("x=0%", "must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%"),
    ("x=y%", "must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%"),
    ("x=0", "must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%"),
    ("x=nan%", "must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%"),
    ("=1G", "must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%"),
    ("16M", "must be PID=SIZE or NAME=SIZE, such as 1234=16G or chat=60%"),
])  # fmt: skip
def test_a_limit_that_nobody_can_have_says_why(text, error):
    with pytest.raises(ValueError, match=f"^--limit {text}:? {error}$"):
        run_top("--limit", text)


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
