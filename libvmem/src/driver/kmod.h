// The calls of the patched nvidia-uvm.ko, on the descriptor of the address space of this process's CUDA contexts.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_UVM_KMOD_H
#define VMEM_UVM_KMOD_H

#include <stdint.h>

#include "../../uvm_ext/uvm_vmem_ioctl.h"

struct vmem__kmod {
    int fd; // a duplicate of the descriptor that CUDA opened
    uint8_t uuid[16];
    uint64_t max_bytes; // limits of one call
    uint32_t max_ops;
    uint64_t caps;              // UVM_VMEM_CAP_*
    uint64_t page_sizes;        // that CREATE accepts
    _Atomic uint64_t *syscalls; // where calls are counted; set before open
};

// 0 if the loaded module contains vMem. Needs no CUDA context. -ENODEV: no module; -EOPNOTSUPP: the stock module.
int vmem__kmod_probe(void);
// Finds the process's descriptor in whose address space CUDA has mapped something at addr.
int vmem__kmod_open(struct vmem__kmod *k, const uint8_t uuid[16], uint64_t addr);
// Also for a forked child. The parent's descriptor keeps what it created.
void vmem__kmod_close(struct vmem__kmod *k);

// Creates `count` zeroed pages with consecutive handles from *first; at most as many as one call accepts.
int vmem__kmod_create(struct vmem__kmod *k, uint64_t page_size, uint32_t count, uint64_t *first);
// Releases pages. On failure, the first *done are released, and the others are unchanged.
int vmem__kmod_release(struct vmem__kmod *k, uint64_t first, uint32_t count, uint32_t *done);
// request: UVM_VMEM_MAP or UVM_VMEM_UNMAP. On failure nothing changed; *failed is the op at fault or UVM_VMEM_NO_OP.
int vmem__kmod_batch(struct vmem__kmod *k, unsigned long request, const struct uvm_vmem_op *ops, uint32_t count,
                     uint32_t *failed);

#endif
