"""KV caches in a pool, of this process and of children, for tests.

SPDX-License-Identifier: MIT
"""

import ctypes
import json
import math
import os
import platform
import signal
import subprocess
import sys
import textwrap

import torch
from kv_caches import grouped

from pyvmem.kv.cache import KVCache

MIB = 1 << 20
TOKENS = 1024  # of a request: 4 MiB


def make(pool, name="kv", budget=64 * MIB, pool_min=0, **options):
    options = {"idle_seconds": math.inf, "generous": False, "eager": False, "check": True, **options}
    return KVCache.for_model(
        2, 4, 128, 8, TOKENS, budget, dtype=torch.bfloat16, backend="host", page_size=64 << 10, name=name, pool=pool,
        pool_min=pool_min, **grouped(options),
    )  # fmt: skip


def load(cache, requests, pool=None):
    """Start requests, waiting for the pool where there is one; returns their slots."""
    slots = []
    for _ in range(requests):
        slot = cache.alloc(TOKENS)
        lengths = [0] * cache.slots
        lengths[slot] = TOKENS
        while not cache.step(lengths):
            assert pool is not None and cache.shortage.reason == "budget"
            if not cache.shortage.coming_pages or pool.wait(cache, 60) == "refused":
                cache.free(slot)
                return slots
        cache.keys[0][slot, :TOKENS] = slot + 1
        slots.append(slot)
    return slots


def ask(cache, requests):
    """Ask the pool for the memory of so many requests."""
    slots = [cache.alloc(TOKENS) for _ in range(requests)]
    cache.step([TOKENS if slot in slots else 0 for slot in range(cache.slots)], dry=True)
    free(cache, slots)


def raw_fork():
    """Fork by the system call alone, as runtimes and sandboxes do: no handler runs."""
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    return ctypes.CDLL(None).syscall(clone, int(signal.SIGCHLD), 0, 0, 0, 0)


def free(cache, slots):
    for slot in slots:
        cache.free(slot)


CHILD = f"""
    import json, os, signal, sys
    sys.path.insert(0, {os.path.dirname(__file__)!r})
    from kv_pools import *
    from pyvmem import KVPool
    about = json.loads(sys.argv[1])
    pool = KVPool(path=about["path"], budget=about.get("budget"))
    cache = make(pool, about.get("name", "child"), pool_min=about.get("pool_min", 0), **about.get("options", {{}}))
    slots = []
    print("ready", flush=True)
    for line in sys.stdin:
        do, _, number = line.strip().partition(" ")
        if do == "load":
            slots += load(cache, int(number), pool)
        elif do == "free":
            free(cache, slots)
            slots = []
        elif do == "ask":
            ask(cache, int(number))
        elif do == "verify":
            assert all((cache.keys[0][s, :TOKENS] == s + 1).all() for s in slots)
        elif do == "fork":
            if not os.fork():
                print("forked", os.getpid(), flush=True)
                signal.pause()
            continue
        elif do == "raw_fork":
            if not raw_fork():
                print("forked", os.getpid(), flush=True)
                signal.pause()
            continue
        elif do == "close":
            cache.close()
        print(len(slots), flush=True)
"""


class Child:
    def __init__(self, path, **about):
        about = {"path": str(path), **about}
        command = [sys.executable, "-c", textwrap.dedent(CHILD), json.dumps(about)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, do):
        self.process.stdin.write(do + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def member(pool, name):
    (found,) = [m for m in pool.members() if m.name == name]
    return found
