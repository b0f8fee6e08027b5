// The state of one open file, and what the parts of the extension share.
//
// Locking. In the order of uvm_lock.h, with ours between:
//
//   VA space lock   write mode: MAP, UNMAP, RELEASE while they change overlays, entries and the handle table; GPU
//                   unregister. Never while user memory is copied, and no RM calls below it.
//                   read mode: CREATE and QUERY; waiting for a push, after a downgrade.
//   space->lock     what CREATE changes while it holds the VA space lock in read mode only: handle table, slabs, byte
//                   counts. Taken also by readers that hold no VA space lock (the proc file), so whoever changes these
//                   takes it, in write mode too.
//   ext. range tree, page tree, push, PMM   UVM's own, as its functions ask. No range tree or page tree lock is taken
//                   while a push is open.
//
// A RELEASE takes the lock of the file's room for it before all others. The lock of the list of files is taken for
// steps in the list alone, with none of these inside: a reader of the proc file holds nobody up.
//
// Lifetime. An overlay's UVM side (uvm_ext_gpu_map_t) can be destroyed by UVM at any time that the VA space lock is not
// held; its PTEs are cleared and invalidated by then. Our side is told by the reference count of the memory handle that
// both share: one reference is ours, one is UVM's per piece of mapping. So what we record as mapped is a superset of
// the PTEs that are live, and memory is freed only when no record is left, or after our own clear, invalidate and wait.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_SPACE_H
#define UVM_VMEM_SPACE_H

#include "uvm_vmem_account.h"
#include "uvm_vmem_compat.h"
#include "uvm_vmem_pure.h"

#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/xarray.h>

// Size classes of pages: 64K, 128K, 256K, 2M
#define UVM_VMEM_CLASSES 4

// What a file holds on one GPU.
struct uvm_vmem_gpu {
    struct list_head node; // in uvm_vmem_space.gpus
    struct uvm_vmem_space *space;
    uvm_gpu_t *gpu;

    // Slabs by class; those with a free page first
    struct list_head slabs[UVM_VMEM_CLASSES];

    NvU64 bytes_held;
    NvU64 bytes_created;

    // Changed under the VA space lock in write mode, read anywhere
    atomic64_t bytes_mapped;
    atomic64_t overlays;
};

struct uvm_vmem_space {
    struct list_head node; // in the list of all
    nv_kref_t refs;        // the file's, and that of each reader of the proc file
    uvm_va_space_t *va_space;
    struct mutex lock;

    struct list_head gpus;
    struct xarray handles;
    NvU64 next_handle;
    NvU64 num_handles;
    struct uvm_vmem_user *user; // whose limits apply: who opened the file
    struct uvm_vmem_release_room *release;

    // All overlays, those longest not looked at first. VA space lock in write mode
    struct list_head overlays;

    // NV_OK, or the fatal error that left a batch half done: nothing but the last close is possible. VA space lock in
    // write mode
    NV_STATUS dead;

    // Over the file's life
    atomic64_t pushes;
    atomic64_t invalidates;
    atomic64_t waits;
    atomic64_t looks; // at records of entries, by RELEASE

    // Who made the first call, for a reader of the proc file
    pid_t tgid;
    char comm[TASK_COMM_LEN];
};

// 2 MiB of physical memory, cut into pages of one size.
struct uvm_vmem_slab {
    struct list_head node;
    struct uvm_vmem_gpu *owner;
    uvm_gpu_chunk_t *chunk;
    NvU32 granules; // of a page
    NvU32 used;     // granules that belong to a handle
    NvU32 dirty;    // granules not known to be zero
};

// A page.
struct uvm_vmem_handle {
    NvU64 id;
    struct uvm_vmem_slab *slab;
    NvU8 first; // granule in the slab
    NvU8 granules;
    bool leaving; // a RELEASE is at it: no other call finds it. VA space lock in write mode

    // Where it is mapped: uvm_vmem_entry.node. VA space lock in write mode
    struct list_head entries;
};

static inline NvU64 uvm_vmem_handle_address(const struct uvm_vmem_handle *handle)
{
    return handle->slab->chunk->address + handle->first * UVM_VMEM_GRANULE;
}

// The state of the file, made on first use. NULL when out of memory.
struct uvm_vmem_space *uvm_vmem_space_get(struct file *filp);

// The file's record of the GPU; with make, made when there is none yet. NULL when there is none or no memory.
//
// LOCKING: space->lock and the VA space lock.
struct uvm_vmem_gpu *uvm_vmem_gpu_find(struct uvm_vmem_space *space, uvm_gpu_t *gpu, bool make);

// NV_OK when vMem can work on this GPU.
NV_STATUS uvm_vmem_gpu_status(uvm_gpu_t *gpu);

// The registered GPU and, with tree, its address space, checked by uvm_vmem_gpu_status().
//
// LOCKING: the VA space lock.
NV_STATUS uvm_vmem_gpu_lookup(uvm_va_space_t *va_space, const NvU8 *uuid, uvm_gpu_t **gpu, uvm_page_tree_t **tree);

// Whether a 2 MiB entry may become a table without an invalid entry between.
bool uvm_vmem_is_one_step(void);

// The nth file with state, NULL behind the last. It stays until uvm_vmem_space_put(), but what it holds may go.
struct uvm_vmem_space *uvm_vmem_space_nth(loff_t n);
void uvm_vmem_space_put(struct uvm_vmem_space *space);

#endif
