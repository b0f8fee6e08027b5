"""The owner of common weights: a process that keeps what engines read in common, so that it outlives each of them.

It keeps descriptors alone: of the parts on the device, of one copy in host memory, and of blocks that engines have
saved (`prefixes`). It has no context on the device,
imports no torch, and reads no weights. Engines talk to it over a Unix socket beside the pool's file (`link`). It is a
member of the pool, and counts the weights once, however many engines read them. While none is awake, it offers them to
the pool, part by part.

Its death harms nobody: the engines keep what they have mapped, start another one and hand it what they have.

An engine that finds no owner runs ``python -m pyvmem.sleep.owner PATH SECONDS``. Weights that no engine has for so many
seconds go, and the owner ends with the last ones. Begin with `Owner.serve`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import selectors
import socket
import struct
import sys
import time
from typing import Any, NamedTuple

from pyvmem.core import Context
from pyvmem.kv.pool import Hold, KVPool

MESSAGE = 1 << 17  # most bytes of a message
FDS = 200  # most descriptors of a message; the kernel allows 253
LOOK = 0.02  # seconds between looks at what others want, while something can be given
REST = 0.25  # and otherwise, at what has ended
ASK = 0.3  # seconds after which a question lapses that is not repeated
ALONE = 2.0  # seconds after which an owner of nothing ends
PAGE = 2 << 20
BOARD = struct.Struct("QQQ")  # of weights, for engines: bytes on the device, engines that are awake, and all of them


def socket_of(pool: str) -> str:
    """The owner's socket, by the pool's file."""
    return f"{pool}.owner"


class Peer:
    """An engine's worker, or whoever else asks."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.promised = 0  # bytes that the pool keeps for what it makes
        self.asks, self.until = 0, 0.0  # bytes more that it waits for, and until when

    def fileno(self) -> int:
        return self.sock.fileno()


class Weights:
    """What engines of one key read."""

    def __init__(self, loader: Peer | None) -> None:
        self.about: dict[str, Any] | None = None  # None: nobody has loaded them yet
        self.copy = -1  # descriptor of the copy in host memory
        self.parts: dict[int, tuple[int, str]] = {}  # on the device: descriptor, and who it is
        self.awake: set[Peer] = set()
        self.known: set[Peer] = set()  # awake or asleep
        self.maker = loader  # who loads them, or brings them back
        self.left = time.monotonic()  # when the last engine went
        self.board_fd = os.memfd_create("vmem-board", os.MFD_CLOEXEC)
        os.ftruncate(self.board_fd, mmap.PAGESIZE)
        self.board = mmap.mmap(self.board_fd, mmap.PAGESIZE)

    @property
    def ready(self) -> bool:
        return self.about is not None and self.copy >= 0

    @property
    def held(self) -> int:
        return len(self.parts) * int(self.about["part"]) if self.about else 0

    @property
    def idle(self) -> bool:
        return not self.awake and self.maker is None

    def publish(self) -> None:
        BOARD.pack_into(self.board, 0, self.held, len(self.awake), len(self.known))

    def drop_part(self, part: int) -> None:
        os.close(self.parts.pop(part)[0])

    def close(self) -> None:
        for part in list(self.parts):
            self.drop_part(part)
        if self.copy >= 0:
            os.close(self.copy)
        self.publish()
        os.close(self.board_fd)


class Prefixes(NamedTuple):
    """A file of saved blocks (`prefixes`) of an engine that lives or has ended."""

    key: str
    fd: int
    left: float  # when its engine ended


class Owner:
    """The server of one pool.

    Parameters
    ----------
    path : str
        The pool's file.
    seconds : float
        How long weights stay that no engine has.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self._seconds = seconds
        self._pool = KVPool(path=path)
        self._context = Context("host")
        self._hold: Hold | None = None
        self._held = 0  # bytes that it holds
        self._models: dict[str, Weights] = {}
        self._peers: set[Peer] = set()
        self._prefixes: dict[Peer, Prefixes] = {}  # of engines that live
        self._left: list[Prefixes] = []  # of those that have ended, the last one last
        self._since = time.monotonic()  # when it last had weights or engines
        self._select = selectors.DefaultSelector()
        self._path = socket_of(path)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        mask = os.umask(0o177)
        try:
            self._server.bind(self._path)
        finally:
            os.umask(mask)
        self._server.listen(64)
        self._server.setblocking(False)
        self._select.register(self._server, selectors.EVENT_READ)

    # ---- the loop --------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until nothing is left."""
        while self._peers or self._models or self._left or time.monotonic() - self._since < ALONE:
            offers = any(w.idle and w.parts for w in self._models.values())
            for key, _ in self._select.select(LOOK if offers else REST):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
            self._tend()
        os.unlink(self._path)  # nobody else has bound it: see main

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            if struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
                sock.close()
                return
            sock.setblocking(False)
            peer = Peer(sock)
            self._peers.add(peer)
            self._select.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: Peer) -> None:
        fds: list[int] = []
        try:
            data, fds, flags, _ = socket.recv_fds(peer.sock, MESSAGE, FDS, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise ConnectionError
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError("a message is too long")
            asked = json.loads(data)
            reply, given = getattr(self, f"_do_{asked['do']}")(peer, asked, fds)
            socket.send_fds(peer.sock, [json.dumps(reply).encode()], given)
        except BlockingIOError:
            return
        except Exception:  # it has gone, reads no answers, or speaks another language
            self._leave(peer)
        finally:
            for fd in fds:  # those that were kept have been taken off the list
                os.close(fd)

    def _leave(self, peer: Peer) -> None:
        self._select.unregister(peer)
        self._peers.discard(peer)
        peer.sock.close()
        if prefixes := self._prefixes.pop(peer, None):
            self._left.append(prefixes._replace(left=time.monotonic()))
        for key, w in list(self._models.items()):
            if w.maker is peer:
                w.maker = None
                if not w.ready:
                    self._drop(key)
                    continue
            self._forget(w, peer)

    def _forget(self, w: Weights, peer: Peer) -> None:
        w.awake.discard(peer)
        if peer in w.known:
            w.known.discard(peer)
            w.left = time.monotonic()
        w.publish()

    def _drop(self, key: str) -> None:
        self._models.pop(key).close()

    def _tend(self) -> None:
        """Count, offer, and give what others want."""
        now = time.monotonic()
        for key, w in list(self._models.items()):
            if not w.known and w.maker is None and now - w.left >= self._seconds:
                self._drop(key)
        while self._left and now - self._left[0].left >= self._seconds:
            os.close(self._left.pop(0).fd)
        if self._peers or self._models:
            self._since = now
        self._count()
        if self._hold is None:
            return
        self._give(self._hold.offer(sum(w.held for w in self._models.values() if w.idle)))

    def _give(self, wanted: int) -> None:
        """Drop so many bytes of parts that nobody reads, of the weights first that have been asleep for longest."""
        for w in sorted((w for w in self._models.values() if w.idle and w.parts), key=lambda w: w.left):
            while wanted > 0 and w.parts:
                w.drop_part(max(w.parts))
                wanted -= int(w.about["part"])  # type: ignore[index]
            w.publish()
        self._count()

    def _count(self) -> int:
        """Have the pool count what is held and promised, and ask for the rest; returns the bytes that it lacks."""
        now, hold = time.monotonic(), self._hold
        has = sum(w.held for w in self._models.values()) + sum(p.promised for p in self._peers)
        has = -(-has // PAGE) * PAGE
        want = has + -(-sum(p.asks for p in self._peers if now < p.until) // PAGE) * PAGE
        if hold is None or want == self._held:
            return 0
        if has < self._held:  # its memory has gone
            hold.set(has)
            self._held = has
        missing = hold.set(want) if want > has or want > self._held else 0
        self._held = self._held if missing else want
        return missing

    def _promise(self, peer: Peer, size: int) -> int:
        """Promise a peer so many bytes altogether, or nothing more; returns how many the pool has not got."""
        if size > peer.promised:
            peer.asks, peer.until = size - peer.promised, time.monotonic() + ASK
            if missing := self._count():
                self._give(missing)
                if missing := self._count():
                    return missing
        peer.promised, peer.asks = size, 0
        self._count()
        return 0

    # ---- what engines ask: each has the peer, the question and its descriptors, and returns an answer with some -----

    def _do_hello(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Which device the weights are on."""
        if self._hold is None:
            device = bytes.fromhex(asked["device"]) or None
            self._hold = Hold(self._pool, self._context, f"common {os.getpid()}", device)
        return {"pid": os.getpid()}, []

    def _do_find(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Have the weights of a key, or the order to load them. "wait": another engine loads them."""
        key = asked["key"]
        w = self._models.get(key)
        if w is None:
            w = self._models[key] = Weights(peer)
        if w.ready:
            w.known.add(peer)
            return {"about": w.about}, [w.copy, w.board_fd]
        if w.maker is not peer:
            return {"wait": True}, []
        return {"load": True}, [w.board_fd]

    def _do_promise(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Keep so many bytes of the pool for what this engine loads."""
        return {"missing": self._promise(peer, asked["bytes"])}, []

    def _do_offer(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Take weights, and their copy in host memory, of who loaded them or, after an owner has died, of anyone."""
        key, about = asked["key"], asked["about"]
        w = self._models.get(key)
        if w is None or not (w.maker is peer or w.ready):
            w = self._models[key] = w or Weights(None)
        if not w.ready:
            w.about, w.copy = about, fds.pop(0)
        same = w.about == about
        if same:
            w.known.add(peer)
        return {"same": same}, [w.board_fd]

    def _do_parts(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Take parts that are on the device, filled. Another one in a part's place stays: the answer names those."""
        w = self._models[asked["key"]]
        other = []
        for part, name in asked["parts"]:
            fd = fds.pop(0)
            if part not in w.parts:
                w.parts[part] = fd, name
            else:
                os.close(fd)
                if w.parts[part][1] != name:
                    other.append(part)
        if peer.promised:
            peer.promised = max(peer.promised - len(asked["parts"]) * int(w.about["part"]), 0)  # type: ignore[index]
        self._count()
        w.publish()
        return {"other": other}, []

    def _do_wake(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Have everything: which parts to take, and which to bring. "missing": bytes that the pool has not got."""
        w = self._models[asked["key"]]
        if w.maker not in (None, peer):
            return {"wait": True}, []
        about: dict[str, Any] = w.about  # type: ignore[assignment]
        lacks = [i for i in range(about["parts"]) if i not in w.parts]
        w.maker = peer  # nobody is given its parts meanwhile
        missing = self._promise(peer, len(lacks) * about["part"])
        if missing:
            w.maker = None
            return {"missing": missing}, []
        return {"bring": lacks}, []

    def _do_take(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Have the descriptors of some parts, and their names."""
        w = self._models[asked["key"]]
        found = [w.parts[i] for i in asked["parts"]]
        return {"names": [name for _, name in found]}, [fd for fd, _ in found]

    def _do_done(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """The engine has mapped everything, or, with "asleep", nothing any more."""
        w = self._models[asked["key"]]
        if w.maker is peer:
            w.maker = None
        peer.promised = peer.asks = 0
        if asked.get("asleep"):
            w.awake.discard(peer)
            w.left = time.monotonic()
        else:
            w.awake.add(peer)
        w.publish()
        return {}, []

    def _do_leave(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """The engine has weights of its own from now on, or could not load these."""
        peer.promised = peer.asks = 0
        if (w := self._models.get(asked["key"])) is not None:
            if w.maker is peer:
                w.maker = None
            self._forget(w, peer)
            if not w.ready:
                self._drop(asked["key"])
        return {}, []

    def _do_save(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Keep an engine's file of saved blocks beyond its end, in the place of the one before."""
        self._have(peer, Prefixes(asked["key"], fds.pop(0), 0.0))
        return {}, []

    def _do_saved(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """Have the file of the engine of this key that ended last, which is this one's from now on; or nothing."""
        found = [each for each in self._left if each.key == asked["key"]][-1:]
        for each in found:
            self._left.remove(each)
            self._have(peer, each)
        return {}, [each.fd for each in found]

    def _have(self, peer: Peer, prefixes: Prefixes) -> None:
        if before := self._prefixes.pop(peer, None):
            os.close(before.fd)
        self._prefixes[peer] = prefixes

    def _do_state(self, peer: Peer, asked: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """What there is, for people."""
        return [
            dict(key=key, model=w.about and w.about.get("model"), bytes=w.about["bytes"] if w.about else 0, held=w.held,
                 awake=len(w.awake), engines=len(w.known), loading=w.maker is not None)
            for key, w in self._models.items()
        ], []  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Serve a pool, unless somebody does."""
    path, seconds = arguments or sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    lock = os.open(f"{path}.owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    Owner(path, float(seconds)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
