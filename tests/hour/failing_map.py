# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Mappings that fail inside UVM, then some of CUDA's that work: calls of the stock driver that pass vMem's hooks.

CUDA itself refuses bad arguments before it makes a call. So UVM_MAP_EXTERNAL_ALLOCATION is called directly, on CUDA's
own descriptor, with memory that RM does not know: UVM then closes a mapping that it has only begun.
"""

import ctypes
import fcntl
import os
import re
import struct
from pathlib import Path

cuda = ctypes.CDLL("libcuda.so.1")
SIZE = 2 << 20
MAP_EXTERNAL_ALLOCATION, CREATE_EXTERNAL_RANGE = 33, 73
NO_MEMORY = 0xDEAD  # a handle that names none


class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", ctypes.c_int * 2),
                ("security", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]  # fmt: skip


def check(name, *args):
    """Call CUDA's driver API, which must succeed."""
    rc = getattr(cuda, name)(*args)
    if rc:
        raise SystemExit(f"{name} answered {rc}")


def descriptors(path):
    """The descriptors of `path` that this process, so CUDA, has opened."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                found.append(int(fd))
        except OSError:
            pass  # the one of listdir
    return found


def release():
    """The driver's release, as a tuple of numbers."""
    for name in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        path = Path(name)
        if path.is_file():
            return tuple(map(int, re.search(r"\d+\.\d+(\.\d+)?", path.read_text())[0].split(".")))
    raise SystemExit("no driver is loaded")


def uvm(fd, number, params, status):
    """Make one of UVM's calls; the status at that offset of its parameters."""
    buffer = bytearray(params)
    fcntl.ioctl(fd, number, buffer)
    return struct.unpack_from("=I", buffer, status)[0]


device, context, uuid = ctypes.c_int(), ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
check("cuInit", 0)
check("cuDeviceGet", ctypes.byref(device), 0)
check("cuDeviceGetUuid", ctypes.byref(uuid), device)
check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
check("cuCtxPushCurrent_v2", context)
va, handle = ctypes.c_uint64(), ctypes.c_uint64()
check("cuMemAddressReserve", ctypes.byref(va), ctypes.c_size_t(2 * SIZE), ctypes.c_size_t(0), ctypes.c_uint64(0),
      ctypes.c_uint64(0))  # fmt: skip

# The address space is the descriptor on which a range can be made.
there = va.value + SIZE
new_range = struct.pack("=QQII", there, SIZE, 0, 0)
spaces = [fd for fd in descriptors("/dev/nvidia-uvm") if uvm(fd, CREATE_EXTERNAL_RANGE, new_range, 16) == 0]
if len(spaces) != 1:
    raise SystemExit(f"{len(spaces)} descriptors of /dev/nvidia-uvm are address spaces")
gpus = 256 if release() >= (550, 40, 53) else 32
attributes = bytes(uuid) + bytes(36 * gpus - 16)
tail = struct.pack("=QiIII", 1, descriptors("/dev/nvidiactl")[0], NO_MEMORY, NO_MEMORY, 0)
params = struct.pack("=QQQ", there, SIZE, 0) + attributes + tail
for i in range(100):
    status = uvm(spaces[0], MAP_EXTERNAL_ALLOCATION, params, len(params) - 4)
    if not status:
        raise SystemExit("UVM mapped memory that does not exist")
print(f"{i + 1} mappings failed in UVM, the last with NV_STATUS 0x{status:x}")

prop = Prop(type=1, location=(1, 0))
check("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(SIZE), ctypes.byref(prop), ctypes.c_uint64(0))
for _ in range(10):
    check("cuMemMap", va, ctypes.c_size_t(SIZE), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    check("cuMemUnmap", va, ctypes.c_size_t(SIZE))
check("cuMemRelease", handle)
