// The module's ioctls as functions. Each returns rmStatus; the rest of the answer stays in the structure given.
//
// SPDX-License-Identifier: MIT
#ifndef CALLS_H
#define CALLS_H

#include "vmtest.h"

#include "uvm_vmem_ioctl.h"

#define BLOCK UVM_VMEM_BLOCK
#define GRANULE UVM_VMEM_GRANULE

// Where the cases map; nothing else lives there.
#define BASE 0x200000000000ull

struct uvm_vmem_query vm_query(const struct uvm *u, unsigned gpu);
NV_STATUS vm_create(const struct uvm *u, uint64_t page_size, uint32_t count, uint64_t *first);
NV_STATUS vm_create_on(const struct uvm *u, unsigned gpu, uint64_t page_size, uint32_t count, uint64_t *first);
NV_STATUS vm_release(const struct uvm *u, const uint64_t *handles, uint32_t count, struct uvm_vmem_release *out);
NV_STATUS vm_release_one(const struct uvm *u, uint64_t handle);

static inline struct uvm_vmem_op vm_op(uint64_t va, uint64_t length, uint64_t handle, uint64_t offset, uint32_t flags)
{
    return (struct uvm_vmem_op){.va = va, .length = length, .handle = handle, .offset = offset, .flags = flags};
}
NV_STATUS vm_map_ops(const struct uvm *u, unsigned gpu, const struct uvm_vmem_op *ops, uint32_t n,
                     struct uvm_vmem_batch *out);
NV_STATUS vm_unmap_ops(const struct uvm *u, unsigned gpu, const struct uvm_vmem_op *ops, uint32_t n,
                       struct uvm_vmem_batch *out);
NV_STATUS vm_map(const struct uvm *u, uint64_t va, uint64_t length, uint64_t handle, uint64_t offset, uint32_t flags);
NV_STATUS vm_unmap(const struct uvm *u, uint64_t va, uint64_t length);
// Overlays over the addresses, up to 4 GiB, all sparse: maps a page everywhere, and unmaps it.
NV_STATUS vm_open(const struct uvm *u, uint64_t va, uint64_t length);

// Starts a VA space on GPU 0 with an external range over [BASE, BASE + length), as CUDA makes them, between two guards.
void vm_start(struct uvm *u, uint64_t length);

// Everything of a file that a failed call must leave alone, in one value: what QUERY says and every entry of a range.
struct vm_state {
    struct uvm_vmem_query query;
    uint32_t count;
    struct simgpu_pte *ptes;
};
// overlays opened for a failed batch may stay: with `overlays`, invalid and sparse count as the same
void vm_state_take(const struct uvm *u, uint64_t va, uint64_t length, struct vm_state *s);
void vm_state_same(const struct uvm *u, uint64_t va, const struct vm_state *before, bool overlays);
void vm_state_free(struct vm_state *s);

#endif
