// A client of NVIDIA's resource manager with one device: physical memory that UVM can map, allocated without CUDA.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_RM_H
#define VMEM_STOCK_RM_H

#include <stdbool.h>

#include "driver/abi.h"

struct vmem__rm {
    const struct vmem__abi *abi;
    int fd; // /dev/nvidiactl; RM frees the client, and all that belongs to it, with its last close
    uint32_t client;
    _Atomic uint32_t handles; // given out so far
};

// The errno of an RM or UVM status, negative, with the error text "what: ...". 0 stays 0.
int vmem__rm_error(uint32_t status, const char *what);

// The GPU must be open in this process, as it is while a CUDA context on it lives: RM asks for that.
int vmem__rm_open(struct vmem__rm *rm, const struct vmem__abi *abi, const uint8_t uuid[16]);
// In a forked child too: there it closes the child's descriptor, and the parent's keeps the client alive.
void vmem__rm_close(struct vmem__rm *rm);

// size: a multiple of 2 MiB. In 2 MiB pieces, which need not be next to each other in the device. Contents undefined.
int vmem__rm_memory_new(struct vmem__rm *rm, uint64_t size, uint32_t *handle);
// False: the driver did not take it back, which it says of memory in use, or when the GPU is lost. Then it goes when the
// client does, with the descriptor.
bool vmem__rm_memory_free(struct vmem__rm *rm, uint32_t handle);

#endif
