"""Pools in which engines lend each other memory: their names and numbers, and their other members.

SPDX-License-Identifier: MIT
"""

import contextlib
import zlib

from pyvmem.core import Context
from pyvmem.engine.settings import Settings
from pyvmem.errors import VmemError
from pyvmem.kv.pool import KVPool
from pyvmem.kv.view import view_folder

ENGINE = "engine "  # how the names of members begin that are workers of an engine


def number_of(pool: str) -> int:
    """The number that stands for a pool's name in a control page; 0 for none."""
    return zlib.crc32(pool.encode()) | 1 << 32 if pool else 0


def names() -> dict[int, str]:
    """The pools of this user on this machine, by their numbers. A GPU's has a part of its UUID in its name."""
    folder = view_folder()
    return {number_of(path.stem): path.stem for path in (folder.glob("*.pool") if folder else ())}


def open_pool(chosen: Settings, context: Context) -> KVPool:
    """Open the pool that an engine's settings name, on a context's device.

    There is one for each GPU, whose name ends in ``-`` and the first 12 hex digits of the device's UUID, and one for
    the memory of the host. Engines of different kinds share the pool that all of them name.

    Raises
    ------
    ValueError
        The settings name no pool.
    InvalidArgument
        The pool exists with another size, or it does not exist and the settings have no size.
    VmemError
        As for `KVPool`.
    """
    if not chosen.pool:
        raise ValueError(f"{chosen.switch}_POOL must name a pool, and {chosen.switch} must be 1")
    uuid = context.info().device_uuid.hex() if context.backend != "host" else ""
    return KVPool(chosen.pool_size or None, name=f"{chosen.pool}-{uuid[:12]}" if uuid else chosen.pool)


def minimums_of_others(number: int) -> int:
    """Bytes of the minimums of a pool's members that are no engines, such as KV caches and leases."""
    folder, found = view_folder(), 0
    for path in folder.glob("*.pool") if folder else ():
        if number_of(path.stem) == number:
            with contextlib.suppress(VmemError, MemoryError), KVPool(path=path) as pool:
                found += sum(member.min for member in pool.members() if not member.name.startswith(ENGINE))
    return found
