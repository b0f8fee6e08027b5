"""The control page of an engine: shared memory in which its scheduler, its workers and its owner meet.

The page is a file in the folder of `pyvmem.kv.view`, ``ENGINE-RANK.engine``, which holds 64-bit integers:

- what the owner sets: a limit, the engine's share (minimum, maximum, priority), a request to lend everything;
- what the scheduler publishes: blocks used, cached, spare and wanted;
- what each worker publishes, and the board of its `pyvmem.blocks.Blocks`: bytes held, orders carried out;
- what the model's server publishes: whether it sleeps, and the requests that run and wait (`pyvmem.sleep.serve`);
- a ring of blocks that the scheduler gave up while no step ran.

Every process writes only its own words, and each word is written whole, so writing needs no lock. The processes of an
engine hold a lock on its file as long as they live: their numbers mean nothing in other containers.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyvmem._checks import shown
from pyvmem.engine import pools
from pyvmem.kv.view import started, view_folder

MAGIC, VERSION = 0x6D656D76_6C6C6D00, 9
RANKS = 64  # workers of one engine that have a column in the page
RING = 1 << 15  # words

# The owner's words. Sizes in bytes; 0 means "not set" for all but LIMIT. PATIENCE: milliseconds that waking waits for
# memory before it fails, which the server that wakes sets, as it can try again.
_MAGIC, _VERSION, LIMIT, MIN, MAX, PRIORITY, LEND, PATIENCE = range(8)
# The scheduler's words. Blocks, unless it says otherwise. WANTED: what requests lack; AHEAD: what it asks for
# before they do. WAITED: microseconds that steps waited for blocks. HEAD: when the first request came that lacks some,
# in microseconds; 0: none does; negative: others come first for a while. GROWS: whether running requests lack some, of
# which the last came then. STARVED: whether at most one request runs meanwhile. BEAT: changes while the process runs.
# PARTS: pools of several kinds of layers in each worker, whose bytes add up; 0: one. The columns of the first pool's
# workers come first.
(PID, STARTED, BLOCKS, BLOCK_BYTES, LEAST, LOW, RANKS_USED, ALLOWED, USED, CACHED, SPARE, COMING, WANTED, STEP,
 PREEMPTED, REFUSED, LENT, POSITION, POOL, OFFERED, STARVED, WAITED, AHEAD, HEAD, GROWS,
 BEAT, PARTS) = range(16, 43)  # fmt: skip
# The port of its server, or 0, and the name of its model, as UTF-8 in so many words.
PORT, _MODEL, _MODEL_WORDS = 46, 47, 16
# The words of the model's server, times in microseconds of the machine's monotonic clock. STATE: `State`.
# RUNNING, QUEUED: requests. SINCE: when the first of the queued came. USED_AT, CHANGED_AT: when a request last ended,
# and when the model last woke or fell asleep. LACKS: bytes for waking. LACKING: since when. SERVER_BEAT: as BEAT.
# WAKES, SLEEPS: how often it did. WAKING: how long the first request of each wake has waited, in all. UNSERVED:
# requests that waited in vain or met a drained model. STARVING: since when its requests cannot go on, as KV memory is
# lacking.
(STATE, RUNNING, QUEUED, SINCE, USED_AT, CHANGED_AT, LACKS, LACKING, SERVER_BEAT,
 WAKES, SLEEPS, WAKING, UNSERVED, STARVING) = range(1984, 1998)  # fmt: skip
# The words of each worker, in its own column. ATTACHED is 0 until its memory is there, and then how that is kept.
# NULL: bytes of pages under the null block. SPAN: bytes of blocks that share a page, or a page of each layer.
# OWN_BLOCK: bytes of a block here: stages of a pipeline may have different numbers of layers. POOL_MAY: bytes that it
# may hold without that others of the pool give any up. POOL_OF: what stands for the pool of this worker's device.
# WEIGHTS, WEIGHTS_HELD: bytes of the weights that are in the pool, and of these on the device. ASLEEP: 1 while the
# worker sleeps, and so reserves nothing. KEPT: how often it went to sleep and kept its blocks. SHORT: bytes for which
# it last failed to wake. WOKE: how often it has tried to, twice, and one more if the last one failed.
IN_BLOCKS, IN_SLOTS = 1, 2
(ATTACHED, FINISHED, RING_DONE, STEP_MAPS, RESIDENT, NULL, SPAN, POOL_BYTES,
 POOL_MAY, OWN_BLOCK, POOL_OF, WEIGHTS, WEIGHTS_HELD, ASLEEP, KEPT,
 SHORT, WOKE) = range(64, 64 + 17 * RANKS, RANKS)  # fmt: skip
# The boards of the workers' blocks, which a thread of libvmem's writes (struct vmem_blocks_board).
BOARD_WORDS, ANSWERS = 264, 256
DONE, _REFUSED, HELD, MOST_HELD, _BACKED, LEAVING, BUDGET, SHRINK_TO, _FIRST_ANSWER = range(9)
_BOARDS = 2048
_RING = _BOARDS + RANKS * BOARD_WORDS
# The processes that serve one engine, each with what it adds to RUNNING, QUEUED and SINCE.
SERVERS, SERVER_WORDS = 16, 8
_SERVERS = _RING + RING
S_PID, S_STARTED, S_UNSERVED, S_RUNNING, S_QUEUED, S_SINCE, S_USED_AT, S_ORDER = range(8)
WORDS = _SERVERS + SERVERS * SERVER_WORDS
NO_LIMIT = (1 << 62) - 1

Words = npt.NDArray[np.int64]


class State(enum.IntEnum):
    """How the server of a model treats requests."""

    NONE = 0  # nobody holds requests: the model takes no part
    ASLEEP = 1  # requests wait; the weights are for whoever asks
    WAKING = 2  # the same, and it takes its memory
    AWAKE = 3
    CLOSING = 4  # requests wait, those that run end
    DRAINED = 5  # an operator has closed it: requests are refused


def path_of(engine: str, rank: int) -> Path | None:
    """The file of a control page; None if no folder is writable by this user only."""
    folder = view_folder()
    return None if folder is None else folder / f"{engine}-{rank}.engine"


def _map(path: Path, hold: bool = False) -> Words | None:
    """The words of a page. hold: hold its lock as long as they are mapped, as a mapping keeps the open file."""
    try:
        with open(path, "r+b") as file:
            if hold:
                fcntl.flock(file, fcntl.LOCK_SH)
            found = os.fstat(file.fileno())
            if found.st_size != WORDS * 8 or not found.st_nlink:  # it was swept before it was locked
                return None
            words: Words = np.frombuffer(mmap.mmap(file.fileno(), WORDS * 8), np.int64)
    except (OSError, ValueError):
        return None
    return words if words[_MAGIC] == MAGIC and words[_VERSION] == VERSION else None


class Page:
    """A control page, or private memory with the same words if none can be shared.

    Attributes
    ----------
    words : numpy.ndarray
        int64[WORDS].
    cells : memoryview
        The same words, of which one is read or written in a fraction of numpy's time.
    shared : bool
        Other processes see it.
    """

    def __init__(self, words: Words, path: Path | None) -> None:
        self.words = words
        self.cells = memoryview(words)  # type: ignore[arg-type]
        self.path = path
        self.shared = path is not None

    def __getitem__(self, word: int) -> int:
        value: int = self.cells[word]
        return value

    def __setitem__(self, word: int, value: int) -> None:
        self.cells[word] = value

    def attached(self, ranks: int) -> bool:
        """Return whether each of the first workers has its memory and sees the page."""
        return 0 not in self.cells[ATTACHED : ATTACHED + ranks]

    @property
    def model(self) -> str:
        """The name of the engine's model."""
        return self.words[_MODEL : _MODEL + _MODEL_WORDS].tobytes().rstrip(b"\0").decode(errors="ignore")

    @property
    def asleep(self) -> bool:
        """A worker of the engine sleeps."""
        return any(self.cells[ASLEEP : ASLEEP + max(min(self[RANKS_USED], RANKS), 1)])

    def pools(self) -> list[int]:
        """The number of each worker's pool (`pools.number_of`); of the scheduler's pool, until a worker has joined."""
        ranks = max(min(self[RANKS_USED], RANKS), 1)
        return [pool for pool in self.cells[POOL_OF : POOL_OF + ranks].tolist() if pool] or [self[POOL]]

    # ---- servers ---------------------------------------------------------------------------------------------

    def server(self, number: int) -> memoryview:
        """The words of one of the processes that serve the engine: S_PID and the following."""
        begin = _SERVERS + number * SERVER_WORDS
        return self.cells[begin : begin + SERVER_WORDS]

    # ---- orders ----------------------------------------------------------------------------------------------

    def boards(self, ranks: int) -> Words:
        """The boards of the first workers, int64[ranks, BOARD_WORDS]."""
        return self.words[_BOARDS : _BOARDS + ranks * BOARD_WORDS].reshape(ranks, BOARD_WORDS)

    def told(self, rank: int, word: int) -> int:
        """One word of a worker's board."""
        value: int = self.cells[_BOARDS + rank * BOARD_WORDS + word]
        return value

    def answer(self, order: int, rank: int) -> int:
        """A rank's answer to an order: -1 none yet, 0 carried out, 1 refused."""
        told = self.told(rank, _FIRST_ANSWER + order % ANSWERS)
        return told & 1 if told >> 1 == order else -1

    # ---- the ring --------------------------------------------------------------------------------------------

    def push(self, step: int, ids: list[int], ranks: int) -> bool:
        """Add blocks to give up once `step` has run. Returns False, and adds nothing, if the ring is full."""
        position = self[POSITION]
        slowest = int(self.words[RING_DONE : RING_DONE + ranks].min())
        if position - slowest + len(ids) + 2 > RING:
            return False
        record = np.array([step, len(ids), *ids], np.int64)
        self.words[_RING + (position + np.arange(len(record))) % RING] = record
        self[POSITION] = position + len(record)  # last: until then, nobody reads the record
        return True

    def pull(self, rank: int, upto: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the records (step, ids) before position `upto`; one is taken off when the next is asked for."""
        done = int(self.words[RING_DONE + rank])
        while done < upto:
            step, n = (int(self.words[_RING + (done + k) % RING]) for k in range(2))
            yield step, self.words[_RING + (done + 2 + np.arange(n)) % RING].tolist()
            done += n + 2
            self.words[RING_DONE + rank] = done

    # ---- the end ---------------------------------------------------------------------------------------------

    def unlink(self) -> None:
        """Remove the file. Who has the page mapped keeps it."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def private_page() -> Page:
    """A page that no other process sees."""
    return Page(_fresh(), None)


def open_page(engine: str, rank: int) -> Page:
    """The control page of an engine on this machine, made by the process that asks first."""
    path = path_of(engine, rank)
    if path is None:
        return private_page()
    _ended(path, remove=True)  # one that died, if this engine has the configuration of an earlier one
    words = _map(path, hold=True)
    if words is None:
        mine = path.with_suffix(f".{os.getpid()}")
        try:
            with open(mine, "w+b") as file:
                _fresh().tofile(file)
                fcntl.flock(file, fcntl.LOCK_SH)
                with contextlib.suppress(FileExistsError):
                    os.link(mine, path)  # whole, and once
                words = _map(path, hold=True)
        except OSError:
            return private_page()
        finally:
            mine.unlink(missing_ok=True)
    return private_page() if words is None else Page(words, path)


def _fresh() -> Words:
    words: Words = np.zeros(WORDS, np.int64)
    words[_MAGIC], words[_VERSION], words[LIMIT] = MAGIC, VERSION, NO_LIMIT
    return words


def rest(event: threading.Event, seconds: float, look: float, stirred: Callable[[], bool]) -> None:
    """Wait until the event is set, for so many seconds, or until `stirred`, which is asked every `look` seconds."""
    end = time.monotonic() + seconds
    while not event.wait(look):
        if time.monotonic() >= end or stirred():
            return


def _ended(path: Path, remove: bool = False) -> bool:
    """Return whether no process of a page's engine lives. remove: remove it then, before another may open it."""
    try:
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove:
                path.unlink()
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def sweep() -> None:
    """Remove the pages of engines that ended without removing them, some of them before they had a scheduler."""
    folder = view_folder()
    for path in folder.glob("*.engine") if folder else ():
        if _map(path) is not None:
            _ended(path, remove=True)


def serves(page: Page, model: str, port: int) -> None:
    """The engine serves this model at this port; "" and 0 if they are not known."""
    text = model.encode()[: 8 * _MODEL_WORDS].ljust(8 * _MODEL_WORDS, b"\0")
    page.words[_MODEL : _MODEL + _MODEL_WORDS] = np.frombuffer(text, np.int64)
    page[PORT] = port


def claim(page: Page, model: str = "", port: int = 0) -> None:
    """This process has the scheduler of an engine that serves a model at a port."""
    serves(page, model, port)
    page[PID], page[STARTED] = os.getpid(), int(started("self") or 0)


# ---- for owners ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """The memory of an engine, and the limits that its owner set. Sizes are in bytes, of one worker: of the largest.

    Attributes
    ----------
    name : str
        The engine's name, as its page has it.
    rank : int
        Its data-parallel rank.
    pid : int
        The process of its scheduler.
    workers : int
    block_bytes, blocks : int
        Bytes of a block in all layers, and how many there are.
    limit : int or None
        The most that blocks may take now; None for no limit.
    min, max, priority : int
        Its share among engines; 0: not set.
    least : int
        Bytes that one request of the greatest length needs. A limit below it counts as this.
    allowed, used, cached, spare, wanted : int
        Bytes that blocks may take, and those that running requests, the prefix cache and free blocks take; those that
        waiting requests need.
    backed, resident : int
        Bytes that are backed, in the worker that has most.
    step_maps : int
        Blocks that a step had to map itself.
    steps, preempted, refused : int
        Steps so far, preemptions, and orders for which there was no memory.
    lent : bool
        The engine has lent everything, as LEND asks for.
    waited : float
        Seconds that steps have waited for blocks on their way.
    model : str
        The name of its model; "" if it does not say.
    port : int
        The port of its server; 0 if it does not know.
    state : str
        "asleep", "waking", "awake", "closing" or "drained"; "" if no server says it.
    running, queued : int
        Requests that the engine has, and that wait until it is awake.
    weights, weights_held : int
        Bytes of the weights that are in the pool, and of these on the device now.
    lacks : int
        Bytes that it lacks to wake.
    wakes, sleeps : int
        How often it did.
    waking : float
        Seconds that the first request of each wake has waited, in all.
    unserved : int
        Requests that were refused with status 503, because it was drained or did not wake in time.
    """

    name: str
    rank: int
    pid: int
    workers: int
    block_bytes: int
    blocks: int
    limit: int | None
    min: int
    max: int
    priority: int
    least: int
    allowed: int
    used: int
    cached: int
    spare: int
    wanted: int
    backed: int
    resident: int
    step_maps: int
    steps: int
    preempted: int
    refused: int
    lent: bool
    waited: float
    model: str = ""
    port: int = 0
    state: str = ""
    running: int = 0
    queued: int = 0
    weights: int = 0
    weights_held: int = 0
    lacks: int = 0
    wakes: int = 0
    sleeps: int = 0
    waking: float = 0.0
    unserved: int = 0

    @classmethod
    def of(cls, name: str, rank: int, page: Page) -> Engine:
        """Read a control page."""
        block, ranks = page[BLOCK_BYTES], max(min(page[RANKS_USED], RANKS), 1)
        parts = max(page[PARTS], 1)

        def whole(words: Words) -> int:
            return int(words.reshape(parts, -1).max(1).sum())

        columns = (RESIDENT, STEP_MAPS, WEIGHTS, WEIGHTS_HELD)
        most = {f: whole(page.words[f : f + ranks]) for f in columns}
        state = State(page[STATE]).name.lower() if page[STATE] in list(State)[1:] else ""
        return cls(
            name, rank, page[PID], ranks // parts, block, page[BLOCKS],
            None if page[LIMIT] >= NO_LIMIT else page[LIMIT], page[MIN], page[MAX], page[PRIORITY],
            page[LEAST] * block, page[ALLOWED] * block, page[USED] * block,
            page[CACHED] * block, page[SPARE] * block, page[WANTED] * block, whole(page.boards(ranks)[:, HELD]),
            most[RESIDENT], most[STEP_MAPS], page[STEP], page[PREEMPTED], page[REFUSED], bool(page[LENT]),
            page[WAITED] / 1e6, page.model, page[PORT], state, page[RUNNING], page[QUEUED], most[WEIGHTS],
            most[WEIGHTS_HELD], page[LACKS], page[WAKES], page[SLEEPS], page[WAKING] / 1e6, page[UNSERVED],
        )  # fmt: skip


def is_here(page: Page) -> bool:
    """Return whether the process of an engine's scheduler has its number here, and not in another container."""
    return started(str(page[PID])) == str(page[STARTED])


def engines() -> list[tuple[Engine, Page]]:
    """The engines of this user that run on this machine, each with its page."""
    folder, found = view_folder(), []
    for path in sorted(folder.glob("*.engine")) if folder else ():
        name = re.fullmatch(r"([0-9a-z]+)-([0-9]+)\.engine", path.name)
        words = _map(path) if name else None
        if name and words is not None and words[PID] and not _ended(path):
            page = Page(words, path)
            found.append((Engine.of(name[1], int(name[2]), page), page))
    return found


def _check_minimums(pages: Sequence[Page], least: int) -> None:
    """Raise `ValueError` if these engines cannot have this minimum, because the minimums of a pool would exceed it."""
    changed = [page.path for page in pages]
    others = [page for _, page in engines() if page.path not in changed]
    for page in pages:
        for rank, pool in enumerate(page.pools()):
            size = page[POOL_BYTES + rank]
            own = sum(least * one.pools().count(pool) for one in pages)
            beside = sum(other[MIN] * other.pools().count(pool) for other in others) + pools.minimums_of_others(pool)
            if least > page[MIN] and 0 < size < own + beside:
                raise ValueError(f"min {least}: the minimums of all members of the pool would be {own + beside}, over "
                                 f"its {size} bytes")  # fmt: skip


def change(*pages: Page, **settings: int | bool | None) -> None:
    """Set what the owner of one or more engines may set, all or nothing.

    limit : bytes that the blocks of a worker may take now; None for no limit. What one request of the greatest length
        needs is always allowed.
    max : as a limit, which stays; 0: none.
    min : bytes that are not lent to other members of its pool; 0: all may be. Those of all members fit the pool.
    priority : engines of the pool with a lower one give way if this one lacks memory.
    lend : whether the engine gives up every block. Its requests wait, and later compute their rows again.

    Raises `ValueError` and `TypeError`, naming the setting.
    """
    words = {"limit": LIMIT, "min": MIN, "max": MAX, "priority": PRIORITY, "lend": LEND}
    values = {}
    for name, value in settings.items():
        if name not in words:
            raise ValueError(f"unknown setting {name[:40]}: the settings are {', '.join(words)}")
        if name == "limit" and value is None:
            value = NO_LIMIT
        if (name == "lend") != isinstance(value, bool) or not isinstance(value, int):
            kind = "true or false" if name == "lend" else "a whole number"
            raise TypeError(f"{name} {shown(value)} must be {kind}")
        if not 0 <= value <= NO_LIMIT:
            raise ValueError(f"{name} {shown(value)} must be 0 to {NO_LIMIT}")
        values[name] = int(value)
    for page in pages:
        least, most = values.get("min", page[MIN]), values.get("max", page[MAX])
        if most and least > most:
            raise ValueError(f"min {least} is over max {most}")
        for name in ("min", "priority"):
            if values.get(name) and not page[POOL]:
                raise ValueError(f"{name} {values[name]} needs a pool, and the engine's settings named none when it "
                                 "started")  # fmt: skip
    if values.get("min"):
        _check_minimums(pages, values["min"])
    for page in pages:
        for name, value in values.items():
            page[words[name]] = value
