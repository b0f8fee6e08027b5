// A client of NVIDIA's resource manager with one device: physical memory that UVM can map, allocated without CUDA.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_RM_H
#define VMEM_STOCK_RM_H

#include <stdbool.h>

#include "driver/abi.h"

struct vmem__rm {
    const struct vmem__abi *abi;
    int fd; // /dev/nvidiactl; the last close frees the client and all its objects
    uint32_t client;
    _Atomic uint32_t handles; // given out so far
};

// The errno of an RM or UVM status, negative, with the error text "what: ...". 0 stays 0.
int vmem__rm_error(uint32_t status, const char *what);

// RM requires that the GPU is open in this process, as it is while a CUDA context exists.
int vmem__rm_open(struct vmem__rm *rm, const struct vmem__abi *abi, const uint8_t uuid[16]);
// In a forked child, this closes the child's descriptor; the parent's keeps the client.
void vmem__rm_close(struct vmem__rm *rm);

// True if memory that RM allocates is zero, because RM clears what anybody frees before it hands it out again. RM says so
// for each GPU and mode; if it does not answer, the memory counts as undefined.
bool vmem__rm_memory_is_zero(struct vmem__rm *rm);
// The same for a GPU of which no client is open.
bool vmem__rm_gpu_memory_is_zero(const uint8_t uuid[16]);

// size: a multiple of 2 MiB. The 2 MiB pieces need not be adjacent in the device.
int vmem__rm_memory_new(struct vmem__rm *rm, uint64_t size, uint32_t *handle);
// False if the driver refuses, because the memory is in use or the GPU is lost. The memory is then freed with the
// client, when the descriptor is closed.
bool vmem__rm_memory_free(struct vmem__rm *rm, uint32_t handle);

#endif
