"""The file of saved blocks: what a record says that is not whole, and files of others.

SPDX-License-Identifier: MIT
"""

import fcntl
import mmap
import os

import pytest

from pyvmem.sleep.prefixes import FIRST, HEADER, RECORD, STRIDE, PrefixFile, Saved

KEY, BLOCK = "k" * 64, 5000


@pytest.fixture
def file():
    made = PrefixFile.create(KEY, BLOCK, 1 << 20)
    yield made
    made.close()


def record(place, order=1):
    return Saved(order, 16, -5, hash=b"name" * 9, parent=b"before", place=place)


def again(file, key=KEY, block=BLOCK):
    return PrefixFile(os.dup(file.fd), key, block)


def test_another_mapping_has_what_was_written(file):
    assert file.places == 123 and not file.saved()
    for order, place in enumerate((7, 0, 122), 1):
        file.clear(place)
        file.contents(place).fill_(place)
        file.write(record(place, order))
    other = again(file)
    assert [each.place for each in other.saved()] == [7, 0, 122] and other.saved()[0] == record(7, 1)
    assert all((other.contents(place) == place).all() for place in (7, 0, 122))
    file.clear(0)
    assert [each.place for each in other.saved()] == [7, 122]
    other.wipe()
    assert not file.saved()
    other.close()


def test_a_record_that_is_not_whole_counts_as_none(file):
    file.write(record(3))
    at = FIRST + 3 * STRIDE
    for byte in range(RECORD.size):
        file._memory[at + byte] ^= 0x41
        assert file.at(3) is None or file.at(3) == record(3)  # what is behind the end of a hash says nothing
        file._memory[at + byte] ^= 0x41
    assert file.saved() == [record(3)]
    file._memory[at + STRIDE : at + 2 * STRIDE] = file._memory[at : at + STRIDE]  # another place's
    assert file.saved() == [record(3)]


def test_host_memory_is_taken_as_blocks_come(file):
    before = os.fstat(file.fd).st_blocks * 512
    assert before <= FIRST + STRIDE * file.places + mmap.PAGESIZE
    file.clear(9)
    assert os.fstat(file.fd).st_blocks * 512 == before + 2 * mmap.PAGESIZE


def test_too_little_for_a_block_is_an_error():
    with pytest.raises(ValueError, match="4096 bytes are too few for a block of 5000"):
        PrefixFile.create(KEY, BLOCK, 4096)


def test_files_of_others_are_refused(file):
    for key, block in (("other", BLOCK), (KEY, BLOCK + 1), (KEY, 3 * BLOCK)):
        with pytest.raises(ValueError, match="another key or size"):
            again(file, key, block)
    for places in (0, 122, 124, 1 << 40):
        header = HEADER.pack(b"vmempre1", 5, BLOCK, 8192, places, KEY.encode())
        os.pwrite(file.fd, header, 0)
        with pytest.raises(ValueError, match="another key or size"):
            again(file)


def test_what_is_no_such_file_is_refused(tmp_path):
    def memory(size, seals):
        fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    (tmp_path / "file").write_bytes(bytes(1 << 20))
    open_fds = set(os.listdir("/proc/self/fd"))
    for make in (lambda: memory(100, fcntl.F_SEAL_SHRINK), lambda: memory(1 << 20, fcntl.F_SEAL_GROW),
                 lambda: memory(1 << 20, fcntl.F_SEAL_SHRINK), lambda: os.open(tmp_path / "file", os.O_RDWR),
                 lambda: os.open("/dev/null", os.O_RDWR)):  # fmt: skip
        with pytest.raises((ValueError, OSError)):
            PrefixFile(make(), KEY, BLOCK)
    assert set(os.listdir("/proc/self/fd")) == open_fds
