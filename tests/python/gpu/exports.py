"""CUDA's ways to hand memory to others, tried on an address with vMem's pages behind it.

CUDA knows the backdrop (or nothing) behind such an address, so a handle that it gave out would lead there, not to the
pages. Run as ``exports.py BACKEND``: one JSON line, a way each, with CUDA's result. test_exports.py runs it.

SPDX-License-Identifier: MIT
"""

import ctypes
import json
import sys

import torch

import pyvmem

CUDA_SUCCESS = 0
DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
LEGACY_IPC = 13  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
RDMA_TOKENS = 5  # CU_POINTER_ATTRIBUTE_P2P_TOKENS: what nvidia-peermem's users ask for


def main(backend):
    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    context = pyvmem.Context(backend)
    page = min(context.page_sizes)
    tensor = pyvmem.virtual_empty((64 << 20,), torch.uint8, "cuda", context=context)
    tensor.commit()
    tensor.tensor.fill_(7)
    torch.cuda.synchronize()
    addr = ctypes.c_uint64(tensor.tensor.data_ptr())
    said = {"page": page}

    ipc = (ctypes.c_char * 64)()
    said["ipc_handle"] = cuda.cuIpcGetMemHandle(ipc, addr)
    value = ctypes.c_int(-1)
    said["ipc_attribute"] = cuda.cuPointerGetAttribute(ctypes.byref(value), LEGACY_IPC, addr)
    said["ipc_capable"] = value.value
    tokens = (ctypes.c_char * 16)()
    said["p2p_tokens"] = cuda.cuPointerGetAttribute(tokens, RDMA_TOKENS, addr)

    fd = ctypes.c_int(-1)
    said["dma_buf"] = cuda.cuMemGetHandleForAddressRange(
        ctypes.byref(fd), addr, ctypes.c_size_t(2 << 20), DMA_BUF_FD, ctypes.c_ulonglong(0)
    )
    handle = ctypes.c_uint64()
    said["retain_handle"] = cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), addr)
    if said["retain_handle"] == CUDA_SUCCESS:
        shared = ctypes.c_int(-1)
        said["export_handle"] = cuda.cuMemExportToShareableHandle(
            ctypes.byref(shared), handle, POSIX_FD, ctypes.c_ulonglong(0)
        )
        cuda.cuMemRelease(handle)
    try:
        tensor.tensor.untyped_storage()._share_cuda_()
        said["torch_share"] = "shared"
    except Exception as e:  # whatever torch raises is the answer
        said["torch_share"] = str(e).splitlines()[0][:120]
    torch.cuda.synchronize()
    said["pages_whole"] = bool((tensor.tensor == 7).all())
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
