# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""CUDA's mappings that fail, then one that works: the calls of the stock driver that pass vMem's hooks unfinished."""

import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
SIZE = 2 << 20


class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", ctypes.c_int * 2),
                ("security", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]  # fmt: skip


def check(name, *args, fails=False):
    """Call the driver; the answer must be success, or with `fails` an error."""
    rc = getattr(cuda, name)(*args)
    if (rc != 0) != fails:
        raise SystemExit(f"{name} answered {rc}")


device, context = ctypes.c_int(), ctypes.c_void_p()
check("cuInit", 0)
check("cuDeviceGet", ctypes.byref(device), 0)
check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
check("cuCtxPushCurrent_v2", context)
prop = Prop(type=1, location=(1, 0))
va, handle = ctypes.c_uint64(), ctypes.c_uint64()
check("cuMemAddressReserve", ctypes.byref(va), ctypes.c_size_t(2 * SIZE), ctypes.c_size_t(0), ctypes.c_uint64(0),
      ctypes.c_uint64(0))  # fmt: skip
check("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(SIZE), ctypes.byref(prop), ctypes.c_uint64(0))
for _ in range(100):  # twice as long as the memory
    check("cuMemMap", va, ctypes.c_size_t(2 * SIZE), ctypes.c_size_t(0), handle, ctypes.c_uint64(0), fails=True)
check("cuMemMap", va, ctypes.c_size_t(SIZE), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
check("cuMemMap", va, ctypes.c_size_t(SIZE), ctypes.c_size_t(0), handle, ctypes.c_uint64(0), fails=True)
check("cuMemUnmap", va, ctypes.c_size_t(SIZE))
check("cuMemRelease", handle)
check("cuMemAddressFree", va, ctypes.c_size_t(2 * SIZE))
