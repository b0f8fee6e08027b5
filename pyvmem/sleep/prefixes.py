"""Blocks of a prefix cache in host memory that outlives its engine, even by `kill -9`.

The file has no name: the engine and the owner of common weights (`owner`) have its descriptor. It has places of equal
size, and a record of each: which block is there, and the sum of its contents. A record is written last and goes first,
and has a sum of itself, so one that was being written when the process died counts as none. Contents are compared with
their sum before anybody uses them.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import warnings
from typing import NamedTuple

import torch

MAGIC = b"vmempre1"
HEADER = struct.Struct("<8sQQQQ64s")  # magic, salt of the sums, bytes of a block, of a place, places, key
RECORD = struct.Struct("<QQqHH64s64s16s")  # as in `Saved`, with the bytes of the two hashes, and the sum of all this
STRIDE, FIRST = 256, 4096  # bytes from record to record, and before the first one
LONGEST = 64  # bytes of a hash
EMPTY = bytes(STRIDE)


def _whole(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Saved(NamedTuple):
    """What a record says."""

    order: int  # later ones were saved later; from 1 on
    tokens: int  # from the beginning of the prompt to the end of the block
    sum: int  # of the contents
    hash: bytes
    parent: bytes  # the hash of the block before it in the prompt; b"" for the first one
    place: int


class PrefixFile:
    """The file, mapped. One process writes it.

    Parameters
    ----------
    fd : int
        Becomes this object's, also if it raises. Raises ValueError if it is no such file of this key and size of block.
    key : str
        At most 64 characters.
    block : int
        Bytes.
    """

    def __init__(self, fd: int, key: str, block: int) -> None:
        self.fd = fd
        try:
            size = os.fstat(fd).st_size
            if size < FIRST or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("no prefix file")
            self._memory = mmap.mmap(fd, 0)
            magic, self.salt, self.block, self._place, self.places, name = HEADER.unpack_from(self._memory)
            self._begin = _whole(FIRST + STRIDE * self.places)
            fits = size == self._begin + self.places * self._place and self._place == _whole(block)
            same = (magic, self.block, name.rstrip(b"\0")) == (MAGIC, block, key.encode())
            if not (same and fits and self.salt and self.places):
                raise ValueError("a prefix file of another key or size")
        except BaseException:
            os.close(fd)
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    @classmethod
    def create(cls, key: str, block: int, size: int) -> PrefixFile:
        """A file without blocks, of at most `size` bytes, which it takes as blocks come. Raises ValueError, OSError."""
        place = _whole(block)
        places = (size - FIRST - mmap.PAGESIZE) // (place + STRIDE)
        if places < 1:
            raise ValueError(f"{size} bytes are too few for a block of {block}")
        fd = os.memfd_create("vmem-prefixes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            begin = _whole(FIRST + STRIDE * places)
            os.ftruncate(fd, begin + places * place)
            os.posix_fallocate(fd, 0, begin)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            salt = secrets.randbits(62) | 1 << 62
            os.pwrite(fd, HEADER.pack(MAGIC, salt, block, place, places, key.encode()), 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, key, block)

    def _digest(self, saved: Saved) -> bytes:
        numbers = struct.pack("<QQQQqH", self.salt, saved.place, saved.order, saved.tokens, saved.sum, len(saved.hash))
        return hashlib.blake2b(numbers + saved.hash + saved.parent, digest_size=16).digest()

    def at(self, place: int) -> Saved | None:
        """The record of a place; None if there is none, or not a whole one."""
        at = FIRST + STRIDE * place
        order, tokens, total, n, n_parent, name, parent, digest = RECORD.unpack_from(self._memory, at)
        saved = Saved(order, tokens, total, hash=name[:n], parent=parent[:n_parent], place=place)
        return saved if order and digest == self._digest(saved) else None

    def saved(self) -> list[Saved]:
        """All records: the beginnings of prompts first."""
        found = filter(None, map(self.at, range(self.places)))
        return sorted(found, key=lambda saved: (saved.tokens, saved.order))

    def contents(self, place: int) -> torch.Tensor:
        """The memory of a place, uint8[block]."""
        begin = self._begin + place * self._place
        return self._bytes[begin : begin + self.block]

    def clear(self, place: int) -> None:
        """Forget the block of a place, and take memory for another one. Raises OSError if the host has none."""
        self._memory[FIRST + STRIDE * place : FIRST + STRIDE * (place + 1)] = EMPTY
        os.posix_fallocate(self.fd, self._begin + place * self._place, self._place)

    def write(self, saved: Saved) -> None:
        """Write the record of a place that is clear, and whose contents are whole."""
        RECORD.pack_into(self._memory, FIRST + STRIDE * saved.place, *saved[:3], len(saved.hash), len(saved.parent),
                         saved.hash, saved.parent, self._digest(saved))  # fmt: skip

    def wipe(self) -> None:
        """Forget every block."""
        self._memory[FIRST : self._begin] = bytes(self._begin - FIRST)

    def close(self) -> None:
        """Let it go. Whoever else has its descriptor keeps it."""
        del self._bytes  # the mapping goes with its last tensor
        os.close(self.fd)
