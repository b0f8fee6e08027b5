"""Engines that have weights in common: forked processes with a small model, told what to do over a socket.

SPDX-License-Identifier: MIT
"""

import errno
import faulthandler
import json
import os
import signal
import socket
import sys
import traceback

import torch

from pyvmem import Context
from pyvmem.common import Common
from pyvmem.errors import OutOfMemory
from pyvmem.kv.pool import KVPool
from pyvmem.sleep.common import CommonWeights
from pyvmem.sleep.image import Different, Trace
from pyvmem.sleep.link import Link
from pyvmem.sleep.prefixes import PrefixFile, Saved

POOL = 64 << 20

with Trace(torch.device("cpu"), lambda size: None):  # the first one imports what would take each child seconds
    torch.empty(1).copy_(torch.zeros(1))


class Model(torch.nn.Module):
    """Layers whose parameters nobody fills until `load`, a tied one, and a buffer that comes from the configuration."""

    def __init__(self, width=512, layers=3, scale=1.0):
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(torch.empty(width, width))
            layer.bias = torch.nn.Parameter(torch.empty(width))
            self.layers.append(layer)
        self.head = torch.nn.Parameter(torch.empty(width, width))
        self.tied = self.head
        self.gain = torch.nn.Parameter(torch.ones(width))  # as norms are made, before the file is read
        self.register_buffer("angles", torch.arange(width) * scale)

    def fill(self, tensor):
        """Have a function fill each parameter, as an engine's loader does, and do what it does then."""
        with torch.no_grad():
            for parameter in self.parameters():
                tensor(parameter)
            self.loaded()

    def loaded(self):
        pass

    def load(self, seed):
        draw = torch.Generator().manual_seed(seed)
        self.fill(lambda p: p.copy_(torch.randn(p.shape, generator=draw) / 16))

    def tokens(self):
        x = self.angles.sin()
        for layer in self.layers:
            x = torch.tanh(layer.weight @ x + layer.bias)
        return int((self.tied @ (self.gain * x)).sum() * 1e6)


class Engine:
    """An engine's side, in its process."""

    def __init__(self, path):
        self.pool = KVPool(POOL, path=path)
        self.weights = CommonWeights(self.pool, Context("host"), f"weights {os.getpid()}", seconds=30)
        self.model = None

    def start(self, key, seed, model="Model", **shape):
        """Take the weights of a key, or load and offer them; returns which."""
        make, took = globals()[model], self.weights.find(key)
        if took:
            try:
                with self.weights.trace() as trace:
                    self.model = make(**shape)
                    self.model.fill(trace.forget)
                self.weights.take([self.model], trace)
                return "took"
            except Different as why:
                self.model = None
                self.weights.leave()
                took = str(why)
        self.model = make(**shape)
        self.model.load(seed)
        self.weights.adopt([self.model])
        return took or "loaded"

    def tokens(self):
        with torch.no_grad():
            return self.model.tokens()

    def sleep(self):
        self.weights.park()

    def wake(self, seconds=20):
        return self.weights.wake(seconds)

    def write(self, value):
        """Change the weights, as a trainer does."""
        self.weights.part_from_others([self.model])
        with torch.no_grad():
            self.model.head.add_(value)

    def stray(self):
        """Change them without a word."""
        with torch.no_grad():
            self.model.head.add_(1.0)

    def short(self, times):
        """Have the device refuse memory so often, although the pool has it."""
        new = Common.new

        def refuse(common):
            nonlocal times
            times -= 1
            if times >= 0:
                raise OutOfMemory(errno.ENOMEM, "the device has no memory")
            return new(common)

        Common.new = refuse

    def look(self):
        self.weights.copy_again()
        w = self.weights
        return dict(bytes=w.bytes, held=w.held, gives=w.gives, common=w.is_common, alone=w.lease.stats().bytes,
                    owner=w._link.owner)  # fmt: skip

    def save(self, key, value):
        """Have a file of saved blocks, with one of this value, outlive this engine."""
        file = PrefixFile.create(key, 100, 1 << 16)
        file.contents(0).fill_(value)
        file.write(Saved(1, 16, 0, hash=b"name", parent=b"", place=0))
        self.weights.save(key, file)

    def saved(self, key):
        """Take over such a file of an engine that has ended; returns its value."""
        file = self.weights.saved(key, 100)
        return file and [int(file.contents(each.place)[0]) for each in file.saved()]

    def members(self):
        return [[m.name.split()[0], m.has, m.held] for m in self.pool.members()]


class Process:
    """The other side: a forked engine."""

    all = []

    def __init__(self, path):
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            signal.alarm(600)
            self._sock.close()
            try:
                serve(theirs, path)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        theirs.close()
        Process.all.append(self)

    def begin(self, what, *args, **kwargs):
        """Tell it to do something; `answer` waits for it."""
        self._sock.send(json.dumps([what, args, kwargs]).encode())

    def answer(self):
        data = self._sock.recv(1 << 16)
        if not data:
            raise EOFError(f"the engine's process {self.pid} has ended")
        told = json.loads(data)
        if "error" in told:
            raise RuntimeError(told["error"])
        return told["result"]

    def __call__(self, what, *args, **kwargs):
        self.begin(what, *args, **kwargs)
        return self.answer()

    def kill(self, sig=signal.SIGKILL):
        """End it, and return its status."""
        if self.pid:
            os.kill(self.pid, sig)
            return self.ended()
        return None

    def ended(self):
        _, status = os.waitpid(self.pid, 0)
        self._sock.close()
        self.pid = 0
        return status


def serve(sock, path):
    torch.set_num_threads(1)
    faulthandler.disable()  # a process that is to end by a fault says nothing
    engine = Engine(path)
    while data := sock.recv(1 << 16):
        what, args, kwargs = json.loads(data)
        try:
            told = dict(result=getattr(engine, what)(*args, **kwargs))
        except Exception:
            told = dict(error=traceback.format_exc())
        sock.send(json.dumps(told).encode())


def expected(seed, model=Model, **shape):
    made = model(**shape)
    made.load(seed)
    with torch.no_grad():
        return made.tokens()


def state(path):
    """What the owner has; [] if there is none."""
    link = Link(path, "", 30)
    try:
        link._open()
    except OSError:
        return []
    told = link.ask("state")[0]
    link.close()
    return told


def owner(path):
    """The owner's process; 0 if there is none."""
    link = Link(path, "", 30)
    try:
        link._open()
    except OSError:
        return 0
    link.close()
    return link.owner
