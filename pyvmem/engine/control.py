"""The control page of an engine: shared memory in which its scheduler, its workers and its owner meet.

The page is memory of the process that made it, which nobody can shorten: 64-bit integers. A link in the folder of
`pyvmem.kv.view`, ``ENGINE-RANK-NAMESPACE.engine``, leads there through the process's descriptor. It holds:

- what the owner sets: a limit, the engine's share (minimum, maximum, priority), a request to lend everything;
- what the scheduler publishes: blocks used, cached, spare and wanted;
- what each worker publishes, and the board of its `pyvmem.blocks.Blocks`: bytes held, orders carried out;
- what the model's server publishes: whether it sleeps, and the requests that run and wait (`pyvmem.sleep.serve`);
- a ring of blocks that the scheduler gave up while no step ran.

Every process writes only its own words, and each word is written whole, so writing needs no lock. Processes whose
numbers belong to another namespace, as in another container, do not see it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import functools
import logging
import mmap
import os
import re
import stat
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyvmem._checks import shown
from pyvmem._clock import now_us, started
from pyvmem._ffi import lib
from pyvmem.engine import pools
from pyvmem.kv.view import view_folder

_log = logging.getLogger(__name__)

MAGIC, VERSION = 0x6D656D76_6C6C6D00, 12
RANKS = 64  # workers of one engine that have a column in the page
RING = 1 << 15  # words

# Words that the owner sets. 0 means "not set", except for LIMIT.
_MAGIC, _VERSION = 0, 1
LIMIT = 2  # bytes that blocks may take now; NO_LIMIT: no limit
MIN = 3  # bytes that are not lent to other members of the pool
MAX = 4  # bytes that blocks may ever take
PRIORITY = 5  # engines of a lower one give way to this one
LEND = 6  # 1: the engine is to give up every block
NAME = 8  # number of the page's engine and rank
PATIENCE = 7  # milliseconds that waking waits for memory before it fails; set by the server, which tries again

# Words that the scheduler publishes. Those without a unit are numbers of blocks.
PID = 16  # process of the scheduler
STARTED = 17  # start of that process, in /proc's ticks
BLOCKS = 18
BLOCK_BYTES = 19  # bytes of a block, all layers
LEAST = 20  # blocks of one request of the greatest length
LOW = 21  # blocks that one step may take
RANKS_USED = 22  # workers
ALLOWED = 23  # blocks that may be backed now
USED = 24  # blocks of running requests
CACHED = 25  # blocks of the prefix cache that no request uses
SPARE = 26  # free blocks without contents
COMING = 27  # blocks that workers are backing
WANTED = 28  # blocks that requests lack
STEP = 29  # number of the last step
PREEMPTED = 30  # preemptions
REFUSED = 31  # orders for which there was no memory
LENT = 32  # 1: everything is lent, as LEND asks for
POSITION = 33  # end of the ring's records
POOL = 34  # number of the pool's name (`pools.number_of`); 0: no pool
OFFERED = 35  # blocks that other members of the pool may have
STARVED = 36  # 1: requests lack blocks, and at most one runs meanwhile
WAITED = 37  # microseconds that steps have waited for blocks
AHEAD = 38  # blocks that the engine asks for before requests lack them
HEAD = 39  # microseconds since 1970: when the first request came that lacks blocks; 0: none; < 0: others go first
GROWS = 40  # 1: running requests lack blocks; HEAD is of the last of them
BEAT = 41  # changes while the process runs
PARTS = 42  # pools of several kinds of layers in each worker, whose bytes add up; 0: one. The first pool's come first
PORT = 46  # port of the server; 0: unknown
_MODEL, _MODEL_WORDS = 47, 16  # name of the model, UTF-8

# Words that the model's server publishes. Times are microseconds of the machine's monotonic clock (`_clock.now_us`).
STATE = 1984  # `State`
RUNNING = 1985  # requests that run
QUEUED = 1986  # requests that wait until the model is awake
SINCE = 1987  # when the first of these came
USED_AT = 1988  # when a request last ended
CHANGED_AT = 1989  # when the model last woke or fell asleep
LACKS = 1990  # bytes that waking lacks
LACKING = 1991  # since when
SERVER_BEAT = 1992  # changes while the server runs
WAKES = 1993  # times that the model woke
SLEEPS = 1994  # times that it fell asleep
WAKING = 1995  # microseconds that the first request of each wake has waited, in all
UNSERVED = 1996  # requests that waited in vain or met a drained model
STARVING = 1997  # since when the model's requests cannot go on for lack of KV memory
DRAINED = 1998  # 1: an operator has closed the model: no further request begins, in whatever state it is
WAIT = 1999  # microseconds that a request which comes now is expected to wait for the model
ROOM = 2000  # bytes of the pool that the model could have at once
STARTING = 2001  # since when the engine's workers load the model and warm up; 0: they have, or share no weights

# Words that each worker publishes in its own column: the word of rank r is at NAME + r.
ATTACHED = 64  # 0 until the worker has its memory, then 1
FINISHED = 64 + RANKS  # the last step that was executed
RING_DONE = 64 + 2 * RANKS  # position in the ring up to which blocks have been given up
STEP_MAPS = 64 + 3 * RANKS  # blocks that steps had to map themselves
RESIDENT = 64 + 4 * RANKS  # bytes of pages
NULL = 64 + 5 * RANKS  # bytes of pages under the null block
PAGE_BYTES = 64 + 6 * RANKS  # bytes of blocks that share a page, or one page of each layer
POOL_BYTES = 64 + 7 * RANKS  # size of the pool
POOL_MAY = 64 + 8 * RANKS  # bytes that the worker may hold before other members of the pool must give any
OWN_BLOCK = 64 + 9 * RANKS  # bytes of a block here: stages of a pipeline may differ in their layers
POOL_OF = 64 + 10 * RANKS  # number of the pool of this worker's device
WEIGHTS = 64 + 11 * RANKS  # bytes of weights in the pool
WEIGHTS_HELD = 64 + 12 * RANKS  # of these, bytes on the device
ASLEEP = 64 + 13 * RANKS  # `Sleeps` while the worker sleeps, and reserves nothing; else 0
KEPT = 64 + 14 * RANKS  # times that the worker went to sleep and kept its blocks
SHORT = 64 + 15 * RANKS  # bytes that the worker lacked when it last failed to wake
WOKE = 64 + 16 * RANKS  # attempts to wake, times two; odd if the last one failed
GIVES = 64 + 17 * RANKS  # bytes of weights on the device that others can have while the worker sleeps

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


class Sleeps(enum.IntEnum):
    """What a worker that sleeps has of the memory that it needs."""

    LACKS = 1  # a part, or nothing
    CLAIMED = 2  # all: it wakes, unless the device, another worker or another engine fails it
    KEEPS = 3  # a part, or nothing: it begins to wake, and its cache stays, as other members have what it lacks


class State(enum.IntEnum):
    """State of a model: it says what its server does with requests."""

    NONE = 0  # nobody holds requests: the model takes no part
    ASLEEP = 1  # requests wait, and other models may have the memory of the weights
    WAKING = 2  # requests wait, and the model takes its memory back
    AWAKE = 3  # requests run
    CLOSING = 4  # requests wait, and those that run end


@functools.lru_cache(1)
def _namespace() -> int:
    """The number of the namespace to which process numbers here belong."""
    return os.stat("/proc/self/ns/pid").st_ino


def path_of(engine: str, rank: int) -> Path | None:
    """The link to a control page; None if no folder is this user's only."""
    folder = view_folder()
    return None if folder is None else folder / f"{engine}-{rank}-{_namespace()}.engine"


def _place(path: Path) -> tuple[str, int] | None:
    """Engine and rank of a link; None if it is of another namespace of process numbers, or none of ours."""
    name = re.fullmatch(r"([0-9A-Za-z_.]+)-([0-9]{1,9})-([0-9]+)\.engine", path.name)
    return (name[1], int(name[2])) if name and name[3] == str(_namespace()) else None


def _number(engine: str, rank: int) -> int:
    """The number that stands for an engine in its page."""
    return zlib.crc32(f"{engine}-{rank}".encode()) | 1 << 32


_left_out: set[tuple[str, int]] = set()  # bad pages of which the log has a line


def _no_page(path: Path, inode: int, why: str) -> Words | None:
    if (path.name, inode) not in _left_out and len(_left_out) < 1000:
        _left_out.add((path.name, inode))
        _log.warning("vMem: %s is left out: %s", "".join(c if c.isprintable() else "?" for c in str(path)), why)
    return None


def _map(path: Path, place: tuple[str, int]) -> Words | None:
    """The words of the page of an engine that lives, or None. This is where a page is checked.

    Other processes of this user may have put anything there. Only memory that nobody can shorten is mapped. What its
    words say may change at any time, so each reader takes them within bounds.
    """
    try:
        if not stat.S_ISREG((about := path.stat()).st_mode):
            return _no_page(path, about.st_ino, "it is no file of memory")
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # its process has ended
        return None
    try:
        about = os.fstat(file)
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            return _no_page(path, about.st_ino, "others than this user may access it")
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed or about.st_size != WORDS * 8:
            return _no_page(path, about.st_ino, "it is no control page of this release")
        words: Words = np.frombuffer(mmap.mmap(file, WORDS * 8), np.int64)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    if words[_MAGIC] != MAGIC or words[_VERSION] != VERSION:
        return _no_page(path, about.st_ino, "it is no control page of this release")
    # Numbers of processes and descriptors come again: the link may lead to a page that was made later.
    return words if words[NAME] == _number(*place) else None


_made: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()  # by where links lead


def _make(engine: str, rank: int, path: Path) -> Words:
    """Make a page and the link to it. The page and its descriptor last as long as its words. Raises `OSError`."""
    fd = os.memfd_create("vmem-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, WORDS * 8)  # a lack of memory is an error now, and not a signal later
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, WORDS * 8)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(memory, os.close, fd)
    words: Words = np.frombuffer(memory, np.int64)
    words[:] = _fresh()
    words[NAME] = _number(engine, rank)
    target = f"/proc/{os.getpid()}/fd/{fd}"
    os.symlink(target, path)
    _made[target] = memory
    return words


def _known(path: Path) -> Words | None:
    """The words of a page that this process made, which this then keeps; None if the link leads elsewhere."""
    try:
        memory = _made.get(os.readlink(path))
    except OSError:
        return None
    return None if memory is None else np.frombuffer(memory, np.int64)


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
        """The name of the engine's model, without what a terminal would not print."""
        text = self.words[_MODEL : _MODEL + _MODEL_WORDS].tobytes().rstrip(b"\0").decode(errors="ignore")
        return "".join(char if char.isprintable() else "?" for char in text)

    @property
    def ranks(self) -> int:
        """Workers of the engine, at least one."""
        return max(min(self[RANKS_USED], RANKS), 1)

    @property
    def state(self) -> State:
        """The model's state; `State.NONE` if the word is none."""
        state = self[STATE]
        return State(state) if state in list(State) else State.NONE

    @property
    def port(self) -> int:
        """The port of the engine's server; 0 if the word is none."""
        return self[PORT] if 0 < self[PORT] < 1 << 16 else 0

    @property
    def asleep(self) -> bool:
        """True if one of the engine's workers sleeps, or all do."""
        return any(self.cells[ASLEEP : ASLEEP + self.ranks])

    @property
    def claimed(self) -> bool:
        """True if each of the engine's workers is awake, or has claimed what it needs to wake."""
        return set(self.cells[ASLEEP : ASLEEP + self.ranks].tolist()) <= {0, Sleeps.CLAIMED}

    @property
    def gives(self) -> int:
        """Bytes of each worker's weights on the device that others can have while the model sleeps."""
        return int(min(self.cells[GIVES : GIVES + self.ranks]))

    @property
    def short(self) -> int:
        """Bytes that the worker which lacked most did when it last failed to wake."""
        return max(self.cells[SHORT : SHORT + self.ranks])

    def pools(self) -> list[int]:
        """Numbers of the workers' pools (`pools.number_of`); until a worker has joined, the scheduler's."""
        return [pool for pool in self.cells[POOL_OF : POOL_OF + self.ranks].tolist() if pool] or [self[POOL]]

    # ---- servers ---------------------------------------------------------------------------------------------

    def server(self, number: int) -> memoryview:
        """The words of one of the processes that serve the engine: S_PID and the following."""
        begin = _SERVERS + number * SERVER_WORDS
        return self.cells[begin : begin + SERVER_WORDS]

    # ---- orders ----------------------------------------------------------------------------------------------

    def boards(self, ranks: int) -> Words:
        """The boards of the first workers, int64[ranks, BOARD_WORDS]."""
        return self.words[_BOARDS : _BOARDS + ranks * BOARD_WORDS].reshape(ranks, BOARD_WORDS)

    def board_word(self, rank: int, word: int) -> int:
        """One word of a worker's board."""
        value: int = self.cells[_BOARDS + rank * BOARD_WORDS + word]
        return value

    def answer(self, order: int, rank: int) -> int:
        """A rank's answer to an order: -1 nothing yet, 0 carried out, 1 refused."""
        word = self.board_word(rank, _FIRST_ANSWER + order % ANSWERS)
        return word & 1 if word >> 1 == order else -1

    # ---- the ring --------------------------------------------------------------------------------------------

    def push(self, step: int, ids: list[int], ranks: int) -> bool:
        """Add blocks to give up once `step` has run. Returns False, and adds nothing, if the ring is full."""
        position = self[POSITION]
        slowest = int(self.words[RING_DONE : RING_DONE + ranks].min())
        if position - slowest + len(ids) + 2 > RING:
            return False
        record = np.array([step, len(ids), *ids], np.int64)
        self.words[_RING + (position + np.arange(len(record))) % RING] = record
        lib.pv_fence()  # nobody reads the record before POSITION covers it
        self[POSITION] = position + len(record)
        return True

    def pull(self, rank: int, upto: int, blocks: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the records (step, ids) before position `upto`; one is taken off when the next is asked for.

        blocks: how many the engine has. Where another process has written into the ring, or a record names a block that
        cannot be given up, what is left of the ring is dropped.
        """
        done = int(self.words[RING_DONE + rank])
        lib.pv_fence()  # after `upto` was read from the page
        begin = done
        while done != upto:
            step, n = (int(self.words[_RING + (done + k) % RING]) for k in range(2))
            sound = 0 <= n <= upto - done - 2 and upto - begin <= RING
            # Checked is the copy that is used.
            ids = self.words[_RING + (done + 2 + np.arange(n)) % RING].tolist() if sound else []
            if not sound or not all(0 < i < blocks for i in ids):
                self.words[RING_DONE + rank] = upto
                return
            yield step, ids
            done += n + 2
            lib.pv_fence()  # the record may be overwritten from here on
            self.words[RING_DONE + rank] = done

    # ---- the end ---------------------------------------------------------------------------------------------

    def unlink(self) -> None:
        """Remove the file. Processes that have the page mapped keep using it."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def private_page() -> Page:
    """A page that no other process sees."""
    return Page(_fresh(), None)


def open_page(engine: str, rank: int) -> Page:
    """The control page of an engine on this machine, made by the process that asks first."""
    path = path_of(engine, rank)
    if path is not None:
        sweep()
    for _ in range(100 if path is not None else 0):
        assert path is not None
        words = _known(path)
        words = _map(path, (engine, rank)) if words is None else words
        if words is not None:
            return Page(words, path)
        _remove(path)  # of one that died, if this engine has the configuration of an earlier one
        try:
            return Page(_make(engine, rank, path), path)
        except FileExistsError:  # another process was first
            continue
        except OSError:
            break
    return private_page()


def _remove(path: Path) -> None:
    """Remove a link that leads to no page, but not one that another process has just put in its place."""
    aside = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    place = _place(path)
    with contextlib.suppress(OSError):
        path.rename(aside)
        try:
            if place is not None and _map(aside, place) is not None:
                os.link(aside, path, follow_symlinks=False)
        finally:
            aside.unlink()


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


def sweep() -> None:
    """Remove the links of engines that ended without removing them, some of them before they had a scheduler."""
    folder = view_folder()
    for path in folder.glob("*.engine") if folder else ():
        if _place(path) is not None and path.is_symlink() and not path.exists():
            _remove(path)


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
    """An engine as its control page describes it. Sizes are in bytes of one worker, the one with the most."""

    name: str  # as its page has it
    rank: int  # data-parallel
    pid: int  # of its scheduler
    workers: int
    block_bytes: int  # of a block in all layers
    blocks: int
    limit: int | None  # the most that blocks may take now; None: no limit
    min: int  # its share among engines; 0: not set
    max: int
    priority: int
    least: int  # of one request of the greatest length; a lower limit counts as this
    allowed: int  # that blocks may take now
    used: int  # of running requests
    cached: int  # of the prefix cache
    spare: int  # of free blocks without contents
    wanted: int  # that waiting requests lack
    backed: int  # of the pages of backed blocks
    resident: int  # of all pages
    step_maps: int  # blocks that a step had to map itself
    steps: int
    preempted: int
    refused: int  # orders for which there was no memory
    lent: bool  # it has lent everything, as LEND asks for
    waited: float  # seconds that steps have waited for blocks on their way
    model: str = ""  # the name of its model; "": it does not say
    port: int = 0  # of its server; 0: unknown
    state: str = ""  # "asleep", "waking", "awake", "closing" or "drained"; "": no server says it
    running: int = 0  # requests that it has
    queued: int = 0  # requests that wait until it is awake
    weights: int = 0  # in the pool
    weights_held: int = 0  # of these, on the device now
    lacks: int = 0  # that waking lacks
    wakes: int = 0
    sleeps: int = 0
    waking: float = 0.0  # seconds that the first request of each wake has waited, in all
    unserved: int = 0  # requests refused with status 503, because it was drained or did not wake in time
    room: int = 0  # of the pool that the model could have at once: idle models sleep for it
    wait: float = 0.0  # seconds that a request which comes now is expected to wait for the model; 0: it is awake

    @classmethod
    def of(cls, name: str, rank: int, page: Page) -> Engine:
        """Read an engine from its page."""
        block, ranks = page[BLOCK_BYTES], page.ranks
        parts = page[PARTS] if 0 < page[PARTS] <= ranks and not ranks % page[PARTS] else 1

        def most_of(words: Words) -> int:
            return int(words.reshape(parts, -1).max(1).sum())

        columns = (RESIDENT, STEP_MAPS, WEIGHTS, WEIGHTS_HELD)
        most = {f: most_of(page.words[f : f + ranks]) for f in columns}
        state = page.state.name.lower() if page.state else ""
        state = "drained" if state and page[DRAINED] else state
        return cls(
            name, rank, pid=page[PID], workers=ranks // parts, block_bytes=block, blocks=page[BLOCKS],
            limit=None if page[LIMIT] >= NO_LIMIT else page[LIMIT], min=page[MIN], max=page[MAX],
            priority=page[PRIORITY], least=page[LEAST] * block, allowed=page[ALLOWED] * block,
            used=page[USED] * block, cached=page[CACHED] * block, spare=page[SPARE] * block,
            wanted=page[WANTED] * block, backed=most_of(page.boards(ranks)[:, HELD]), resident=most[RESIDENT],
            step_maps=most[STEP_MAPS], steps=page[STEP], preempted=page[PREEMPTED], refused=page[REFUSED],
            lent=bool(page[LENT]), waited=page[WAITED] / 1e6, model=page.model, port=page.port, state=state,
            running=page[RUNNING], queued=page[QUEUED], weights=most[WEIGHTS], weights_held=most[WEIGHTS_HELD],
            lacks=page[LACKS], wakes=page[WAKES], sleeps=page[SLEEPS], waking=page[WAKING] / 1e6,
            unserved=page[UNSERVED], room=page[ROOM], wait=page[WAIT] / 1e6,
        )  # fmt: skip


def is_here(page: Page) -> bool:
    """Return whether the number of the scheduler's process is valid here, and not in another container."""
    return started(str(page[PID])) == str(page[STARTED])


def engines() -> list[tuple[Engine, Page]]:
    """The engines of this user that run on this machine, each with its page."""
    folder, found = view_folder(), []
    for path in sorted(folder.glob("*.engine")) if folder else ():
        place = _place(path)
        words = _map(path, place) if place else None
        if place and words is not None and words[PID]:
            page = Page(words, path)
            found.append((Engine.of(*place, page), page))
    return found


def lacks_to_start(page: Page, rank: int, size: int, begin: int) -> None:
    """Publish that a worker of an engine that starts lacks so many bytes, as a model that wakes does; 0: none.

    begin: since when, by `pyvmem._clock.now_us`.
    """
    page.cells[SHORT + rank] = size
    if lacks := max(page.cells[SHORT : SHORT + RANKS]):
        if not page[PID]:
            claim(page)  # until the scheduler does
        page[LACKING] = page[LACKING] or now_us()
        page[STATE], page[QUEUED], page[SINCE] = State.WAKING, 1, begin
        page[LACKS] = lacks
        page[BEAT] += 1
        page[SERVER_BEAT] += 1
    elif page[LACKS]:
        for word in (STATE, QUEUED, SINCE, LACKS, LACKING):
            page[word] = 0


def starting_before(page: Page, pool: int, seconds: float) -> list[int]:
    """What other engines lack in a pool that began to start before this one, and in the last so many seconds; in bytes.

    pool: its number. Processes of one engine do not wait for each other.
    """
    begin, oldest = (page[STARTING], str(page.path)), max(now_us() - 1e6 * seconds, 0)
    return [max(0, *p.cells[SHORT : SHORT + RANKS]) for p in others(page, pool)
            if oldest < p[STARTING] and (p[STARTING], str(p.path)) < begin]  # fmt: skip


def others(page: Page, pool: int) -> list[Page]:
    """The pages of the other engines of a pool. pool: its number. To find five takes a millisecond."""
    name = _engine_name(page)
    return [p for e, p in engines() if e.name != name and pool in p.cells[POOL_OF : POOL_OF + RANKS].tolist()]


def any_computes(pages: Sequence[Page]) -> bool:
    """Return whether one of these engines has running requests, and does not sleep."""
    return any(p[USED] and not p.asleep for p in pages)


def any_rests(pages: Sequence[Page]) -> bool:
    """Return whether one of these models is awake, has no requests, and gives weights at once if it sleeps."""
    return any(p.state in (State.AWAKE, State.CLOSING) and not p[RUNNING] and p.gives for p in pages)


def any_wakes(pages: Sequence[Page]) -> bool:
    """Return whether one of these models wakes, and lacks memory or begins to take it."""
    return any((p.state == State.WAKING and not p.claimed) or Sleeps.KEEPS in p.cells[ASLEEP : ASLEEP + p.ranks]
               for p in pages)  # fmt: skip


def _engine_name(page: Page) -> str:
    place = _place(page.path) if page.path is not None else None
    return place[0] if place else ""


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


def check_change(*pages: Page, **settings: int | bool | None) -> dict[int, int]:
    """The words that `change` would write, and what. Raises as `change` does."""
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
        limit = max(values.get("limit", page[LIMIT]), page[LEAST] * page[BLOCK_BYTES])
        if least > limit and ("min" in values or "limit" in values):
            raise ValueError(f"min {least} is over limit {limit}")
    if values.get("min"):
        _check_minimums(pages, values["min"])
    return {words[name]: value for name, value in values.items()}


def change(*pages: Page, **settings: int | bool | None) -> None:
    """Set what the owner of one or more engines may set, all or nothing.

    limit : bytes that the blocks of a worker may take now; None for no limit. What one request of the greatest length
        needs is always allowed. At least the minimum.
    max : a permanent limit, in bytes; 0: none.
    min : bytes that are not lent to other members of its pool; 0: all may be. Those of all members fit the pool.
    priority : engines of the pool with a lower one give way if this one lacks memory.
    lend : whether the engine gives up every block. Its requests wait, and later compute their rows again.

    Raises `ValueError` and `TypeError`, naming the setting.
    """
    for word, value in check_change(*pages, **settings).items():
        for page in pages:
            page[word] = value
