// The functions that PyTorch calls by their addresses: a pair for each place. PyTorch looks them up by name in whatever
// library they are compiled into, which may hide all other names.
//
// SPDX-License-Identifier: MIT
#include "torch/pairs.h"

#include "vmem_torch.h"

#define PAIR(n)                                                                                                        \
    __attribute__((visibility("default"))) void *vmem_torch_alloc_##n(size_t size, int device, void *stream)           \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return vmem__torch_alloc(n, size, device);                                                                     \
    }                                                                                                                  \
    __attribute__((visibility("default"))) void vmem_torch_free_##n(void *addr, size_t size, int device, void *stream) \
    {                                                                                                                  \
        (void)size, (void)device, (void)stream;                                                                        \
        vmem__torch_free(n, addr);                                                                                     \
    }

PAIR(0)
PAIR(1)
PAIR(2)
PAIR(3)
PAIR(4)
PAIR(5)
PAIR(6)
PAIR(7)
PAIR(8)
PAIR(9)
PAIR(10)
PAIR(11)
PAIR(12)
PAIR(13)
PAIR(14)
PAIR(15)
