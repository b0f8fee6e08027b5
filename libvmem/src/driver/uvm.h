// The calls of the stock UVM driver that put memory behind addresses and take it away, in the VA space of this
// process' CUDA contexts.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_STOCK_UVM_H
#define VMEM_STOCK_UVM_H

#include "driver/rm.h"

struct vmem__uvm_space {
    int fd; // a duplicate of the descriptor that CUDA opened
    uint8_t uuid[16];
};

// Slice [offset, offset + length) of an RM allocation behind [addr, addr + length), in place of whatever is there.
// UVM uses 2 MiB entries if addr, length and offset all are multiples of that, else 64 KiB entries. The addresses
// must lie inside one external range, one cuMemMap() of CUDA's; an older mapping is replaced in part only at
// multiples of its own entries' size. The addresses pass through a moment in which they are invalid, and stay invalid
// on failure.
int vmem__uvm_map_external(const struct vmem__uvm_space *space, struct vmem__rm *rm, uint64_t addr, uint64_t length,
                           uint32_t memory, uint64_t offset);
// Nothing behind [addr, addr + length), in 64 KiB entries: reads give zero, writes are dropped. On return no access
// through the addresses reaches what was there before.
int vmem__uvm_map_sparse(const struct vmem__uvm_space *space, uint64_t addr, uint64_t length);
// The same with invalid entries: accesses fault. Whatever comes next needs to replace nothing.
int vmem__uvm_unmap_external(const struct vmem__uvm_space *space, uint64_t addr, uint64_t length);

#endif
