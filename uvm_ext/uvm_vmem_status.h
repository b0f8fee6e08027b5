// The NV_STATUS values that user space needs: those that vMem's calls return, and those of the stock driver's calls
// that libvmem makes. The module takes them from NVIDIA's nvstatuscodes.h, and a test compares the two.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_STATUS_H
#define UVM_VMEM_STATUS_H

#ifdef __KERNEL__
#include "nvstatus.h"
#else
#include <linux/types.h>

typedef __u32 NV_STATUS;

enum {
    NV_OK = 0x00,
    NV_ERR_BUSY_RETRY = 0x03,
    NV_ERR_CARD_NOT_PRESENT = 0x05,
    NV_ERR_GPU_IS_LOST = 0x0F,
    NV_ERR_GPU_UUID_NOT_FOUND = 0x12,
    NV_ERR_ILLEGAL_ACTION = 0x16,
    NV_ERR_IN_USE = 0x17,
    NV_ERR_INSUFFICIENT_RESOURCES = 0x1A,
    NV_ERR_INSUFFICIENT_PERMISSIONS = 0x1B,
    NV_ERR_INVALID_ADDRESS = 0x1E,
    NV_ERR_INVALID_ARGUMENT = 0x1F,
    NV_ERR_INVALID_CLASS = 0x22,
    NV_ERR_INVALID_DEVICE = 0x26,
    NV_ERR_INVALID_LIMIT = 0x2E,
    NV_ERR_INVALID_OBJECT_HANDLE = 0x33,
    NV_ERR_INVALID_OFFSET = 0x37,
    NV_ERR_INVALID_PARAM_STRUCT = 0x3A,
    NV_ERR_INVALID_POINTER = 0x3D,
    NV_ERR_NO_MEMORY = 0x51,
    NV_ERR_NOT_SUPPORTED = 0x56,
    NV_ERR_OBJECT_NOT_FOUND = 0x57,
    NV_ERR_OUT_OF_RANGE = 0x5B,
    NV_ERR_STATE_IN_USE = 0x63,
    NV_ERR_SIGNAL_PENDING = 0x64,
    NV_ERR_TIMEOUT = 0x65,
    NV_ERR_TIMEOUT_RETRY = 0x66,
    NV_ERR_UVM_ADDRESS_IN_USE = 0x68,
};
#endif

#endif
