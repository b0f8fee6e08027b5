// The stock UVM driver's calls that map and unmap memory in the address space of this process's CUDA contexts.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_UVM_H
#define VMEM_STOCK_UVM_H

#include "driver/rm.h"

// ioctl() on /dev/nvidia-uvm. While the driver is suspended, UVM refuses every call with EAGAIN before it does anything;
// this repeats the call until the driver has resumed. It cannot be interrupted: what is to be undone must be possible.
int vmem__uvm_ioctl(int fd, unsigned long request, void *params);

struct vmem__uvm_space {
    int fd; // a duplicate of the descriptor that CUDA opened
    uint8_t uuid[16];
};

// Maps slice [offset, offset + length) of an RM allocation at [addr, addr + length), and replaces whatever is mapped
// there. UVM uses 2 MiB entries if addr, length and offset are all multiples of 2 MiB, otherwise 64 KiB entries. The
// addresses must lie inside one external range, which is one cuMemMap() of CUDA's. An older mapping can be replaced in
// part only at multiples of its own entries' size. The addresses are invalid for a moment, and stay invalid on failure.
int vmem__uvm_map_external(const struct vmem__uvm_space *space, struct vmem__rm *rm, uint64_t addr, uint64_t length,
                           uint32_t memory, uint64_t offset);
// Maps [addr, addr + length) sparse, in 64 KiB entries: reads return zero, writes are dropped. On return, no access
// through the addresses reaches the former memory.
int vmem__uvm_map_sparse(const struct vmem__uvm_space *space, uint64_t addr, uint64_t length);
// The same with invalid entries: accesses fault. A later mapping has nothing to replace.
int vmem__uvm_unmap_external(const struct vmem__uvm_space *space, uint64_t addr, uint64_t length);

#endif
