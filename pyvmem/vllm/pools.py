"""Pools in which engines lend each other memory: what stands for one in a control page, and who else is a member.

SPDX-License-Identifier: MIT
"""

import contextlib
import zlib

from pyvmem.errors import VmemError
from pyvmem.kv.pool import KVPool
from pyvmem.kv.view import view_folder

ENGINE = "vllm "  # how the names of members begin that are workers of an engine


def number_of(pool: str) -> int:
    """What stands for a pool in a control page; 0 for none."""
    return zlib.crc32(pool.encode()) | 1 << 32 if pool else 0


def minimums_of_others(number: int) -> int:
    """Bytes of the minimums of a pool's members that are no engines, such as KV caches and leases."""
    folder, found = view_folder(), 0
    for path in folder.glob("*.pool") if folder else ():
        if number_of(path.stem) == number:
            with contextlib.suppress(VmemError, MemoryError), KVPool(path=path) as pool:
                found += sum(member.min for member in pool.members() if not member.name.startswith(ENGINE))
    return found
