// The state of one open file and of its GPUs, which the parts of the extension share.
//
// Locking, in the order of uvm_lock.h with one lock added:
//
//   VA space lock   write mode: MAP, UNMAP and RELEASE while they change overlays, entries and the handle table; GPU
//                   unregister. Not held while user memory is copied. No RM call is made under it.
//                   read mode: CREATE and QUERY; waiting for a push, after a downgrade.
//   space->lock     protects the handle table, slabs and byte counts, which CREATE changes with the VA space lock in
//                   read mode only.
//   ext. range tree, page tree, push, PMM   UVM's own, as its functions require. No range tree or page tree lock is
//                   taken while a push is open.
//
// RELEASE takes the lock of the file's uvm_vmem_reserve before all others. Only other calls of RELEASE wait for it, and
// a signal that kills ends the wait.
//
// Lifetime. An overlay ends with its uvm_ext_gpu_map_t, which UVM may close whenever the VA space lock is not held in
// write mode: as a whole, and only after it has cleared and invalidated the PTEs and waited. Memory is freed only when
// no record is left.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_SPACE_H
#define UVM_VMEM_SPACE_H

#include "uvm_vmem_compat.h"
#include "uvm_vmem_pure.h"

#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/xarray.h>

// Page sizes: 64K, 128K, 256K, 2M
#define UVM_VMEM_CLASSES 4

// One file's pages and overlays on one GPU.
struct uvm_vmem_gpu {
    struct list_head node; // in uvm_vmem_space.gpus
    struct uvm_vmem_space *space;
    uvm_gpu_t *gpu;

    // Slabs by page size; those with a free page come first
    struct list_head slabs[UVM_VMEM_CLASSES];

    NvU64 bytes_held;
    NvU64 bytes_created;

    // These two change under the VA space lock in write mode, and are read without locks
    atomic64_t bytes_mapped;
    atomic64_t overlays;
};

struct uvm_vmem_space {
    uvm_va_space_t *va_space;
    struct mutex lock;

    struct list_head gpus;
    struct xarray handles;
    NvU64 next_handle;
    NvU64 last_origin;                // of uvm_ext_gpu_map_t.vmem_origin. VA space lock in write mode
    struct uvm_vmem_reserve *reserve; // uvm_vmem_call.h

    // Protects overlays and entries while the VA space lock is held in read mode only. No lock is taken under it
    spinlock_t records;

    // NV_OK, or the fatal error that interrupted a batch or the closing of an overlay. After it, every call but the last
    // close fails. Protected like overlays
    NV_STATUS fatal;

    // Totals over the file's life, for QUERY
    atomic64_t pushes;
    atomic64_t invalidates;
    atomic64_t waits;
};

// 2 MiB of physical memory, cut into pages of one size
struct uvm_vmem_slab {
    struct list_head node;
    struct uvm_vmem_gpu *owner;
    uvm_gpu_chunk_t *chunk;
    NvU32 granules; // per page
    NvU32 used;     // granules that belong to a handle
    NvU32 dirty;    // granules not known to be zero
};

// A page of physical memory, and the file's handle of it.
struct uvm_vmem_handle {
    NvU64 id;
    struct uvm_vmem_slab *slab;
    NvU8 first; // granule of the slab at which the page begins
    NvU8 granules;

    // Calls do not find it: a RELEASE works on it, or its CREATE has not answered yet. Changes under the VA space lock in
    // write mode, or in read mode with space->lock
    bool hidden;

    // The entries that map the page (uvm_vmem_entry.node). They change under the VA space lock in write mode
    struct list_head entries;
};

static inline NvU64 uvm_vmem_handle_address(const struct uvm_vmem_handle *handle)
{
    return handle->slab->chunk->address + handle->first * UVM_VMEM_GRANULE;
}

// Memory of the extension's own, zeroed. It is charged to the caller's memory cgroup, which UVM's allocators cannot do.
// What UVM will free comes from UVM's.
static inline void *uvm_vmem_zalloc(size_t size) { return kvzalloc(size, NV_UVM_GFP_FLAGS_ACCOUNT); }

static inline void uvm_vmem_free(const void *memory) { kvfree(memory); }

// A new state of the file's VA space, which takes over the reserve. NULL if there is no memory.
struct uvm_vmem_space *uvm_vmem_space_alloc(uvm_va_space_t *va_space, struct uvm_vmem_reserve *reserve);

// Free a state. No GPU and no handle is left in it.
void uvm_vmem_space_free(struct uvm_vmem_space *space);

// The file's record of the GPU, or NULL.
//
// LOCKING: space->lock and the VA space lock.
struct uvm_vmem_gpu *uvm_vmem_gpu_find(struct uvm_vmem_space *space, uvm_gpu_t *gpu);

// The file's record of the GPU, which is added if missing. NULL if there is no memory.
//
// LOCKING: space->lock and the VA space lock.
struct uvm_vmem_gpu *uvm_vmem_gpu_find_or_add(struct uvm_vmem_space *space, uvm_gpu_t *gpu);

// NV_OK if vMem supports this GPU.
NV_STATUS uvm_vmem_gpu_check(uvm_gpu_t *gpu);

// The registered GPU and, with tree, its address space, checked by uvm_vmem_gpu_check().
//
// LOCKING: the VA space lock.
NV_STATUS uvm_vmem_gpu_lookup(uvm_va_space_t *va_space, const NvU8 *uuid, uvm_gpu_t **gpu, uvm_page_tree_t **tree);

#endif
