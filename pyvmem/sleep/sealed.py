"""A model's weights in host memory that nobody can change, which processes hand each other as a file descriptor.

Each process maps it read-only. To copy it at the link's rate, a GPU's driver pins it, in each process anew but only
once in memory. `common` calls it.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import warnings

import torch

from pyvmem.sleep.image import Image, as_bytes

READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY: without it, the driver pins no memory that is mapped read-only


class SealedCopy:
    """A copy that is mapped in this process.

    Parameters
    ----------
    fd : int
        Becomes this object's.
    device : torch.device
        Where the copy goes.

    Attributes
    ----------
    fd : int
    bytes : torch.Tensor
        uint8[n], which must not be written.
    unpinned : int
        Bytes that are still to be pinned; 0 also where that is not possible.
    error : int
        CUDA's, if the driver would not pin it.
    """

    def __init__(self, fd: int, device: torch.device) -> None:
        self.fd, self._device, self.error = fd, device, 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, as nobody can write there
            memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned: list[int] = []  # addresses
        self.unpinned = len(self.bytes) if device.type == "cuda" else 0

    @classmethod
    def of(cls, image: Image, size: int, device: torch.device) -> SealedCopy:
        """Copy the storages of an image to `size` bytes. Raises OSError if the host has too little memory."""
        fd = os.memfd_create("vmem-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            with mmap.mmap(fd, size) as memory:
                host = torch.frombuffer(memory, dtype=torch.uint8)
                for storage, place in zip(image.storages, image.places):
                    host[place : place + storage.nbytes()].copy_(as_bytes(storage))
                del host
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, device)
        except BaseException:
            os.close(fd)
            raise

    def pin(self, size: int) -> None:
        """Have the driver pin the next `size` bytes. A copy must not cross the borders of what was pinned at once."""
        address = self.bytes.data_ptr() + len(self.bytes) - self.unpinned
        size = min(size, self.unpinned)
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().query()  # the device's context becomes this thread's
            self.error = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(size), READ_ONLY
            )
        if self.error:
            self.unpinned = 0
        else:
            self._pinned.append(address)
            self.unpinned -= size

    def close(self) -> None:
        """Let it go, which no copy in flight may read."""
        with contextlib.suppress(OSError):
            for address in self._pinned:
                ctypes.CDLL("libcuda.so.1").cuMemHostUnregister(ctypes.c_void_p(address))
        self._pinned, self.unpinned = [], 0
        del self.bytes  # the mapping goes with its last tensor
        os.close(self.fd)
