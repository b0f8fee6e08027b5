"""The bell of the servers of all models: who rings is heard by each process that watches, and by none that cannot.

SPDX-License-Identifier: MIT
"""

import asyncio
import ctypes
import os
import subprocess
import sys
import types

import pytest

from pyvmem.engine import control
from pyvmem.engine.settings import Settings
from pyvmem.kv.view import view_folder
from pyvmem.sleep import leader
from pyvmem.sleep.bell import Bell, ring

RINGS = "import pathlib, sys; from pyvmem.sleep.bell import ring; ring(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return control.open_page("rings", 0)


def test_all_who_watch_hear_who_rings_in_another_process(page):
    async def run():
        heard = [asyncio.Event(), asyncio.Event()]
        bells = [Bell(view_folder(), each.set) for each in heard]
        for _ in range(3):
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", RINGS, str(page.path)], check=True)
            for each in heard:
                await asyncio.wait_for(each.wait(), 30)
                each.clear()
        before = len(os.listdir("/proc/self/fd"))
        for bell in bells:
            bell.close()
            bell.close()
        assert len(os.listdir("/proc/self/fd")) == before - 2

    asyncio.run(run())


@pytest.mark.parametrize("rest, again", [(3600, False), (1e-3, True)])
def test_who_rings_without_end_is_heard_once_in_each_rest(page, monkeypatch, rest, again):
    monkeypatch.setattr("pyvmem.sleep.bell.REST", rest)

    async def run():
        heard, rung = [], 0
        bell = Bell(view_folder(), lambda: heard.append(rung))
        while len(heard) < 1 + again or rung < 1000:
            ring(page.path)
            rung += 1
            await asyncio.sleep(0)
        bell.close()
        assert again or len(heard) == 1

    asyncio.run(run())


def test_a_leader_ends_although_others_ring(page):
    """asyncio.wait_for loses a cancellation that comes together with a ring, until Python 3.11."""

    async def run():
        admission = types.SimpleNamespace(news=asyncio.Event())
        leads = leader.Leader(types.SimpleNamespace(find=bool), admission, None, Settings("VMEM_VLLM"))

        async def rings():
            while True:
                admission.news.set()
                await asyncio.sleep(0)

        noise = asyncio.create_task(rings())
        for turn in range(60):
            task = asyncio.create_task(leads.run())
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=30)
            assert done and task.cancelled()
        noise.cancel()

    asyncio.run(run())


def test_without_inotify_or_a_folder_nobody_hears_and_nothing_fails(page, tmp_path, monkeypatch):
    none = types.SimpleNamespace(inotify_init1=lambda flags: -1)

    async def run():
        before, rung = len(os.listdir("/proc/self/fd")), asyncio.Event()
        deaf = [Bell(None, pytest.fail), Bell(tmp_path / "missing", pytest.fail)]
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda name: none)
            deaf.append(Bell(view_folder(), pytest.fail))
        assert len(os.listdir("/proc/self/fd")) == before
        hears = Bell(view_folder(), rung.set)
        ring(None)
        ring(tmp_path / "missing")
        ring(page.path)
        await asyncio.wait_for(rung.wait(), 30)
        for bell in (*deaf, hears):
            bell.close()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(run())
