// Physical memory: 2 MiB slabs cut into pages, and the table of handles.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_MEMORY_H
#define UVM_VMEM_MEMORY_H

#include "uvm_vmem_space.h"

// The handle with this id, or NULL. Does not find hidden ones.
//
// LOCKING: the VA space lock in write mode.
struct uvm_vmem_handle *uvm_vmem_handle_find(struct uvm_vmem_space *space, NvU64 id);

// The hidden handle with this id, or NULL if its GPU was unregistered meanwhile.
//
// LOCKING: the VA space lock, and space->lock unless it is held in write mode.
struct uvm_vmem_handle *uvm_vmem_handle_find_hidden(struct uvm_vmem_space *space, NvU64 id);

// Create `count` pages of `granules` each, all zero, for handles that the caller has allocated and the table owns from
// then on. Their ids are consecutive, from *first, and hidden. Waits for the GPU. A failure changes nothing.
//
// LOCKING: space->lock and the VA space lock in read mode.
NV_STATUS uvm_vmem_pages_create(struct uvm_vmem_gpu *vgpu, NvU32 granules, struct uvm_vmem_handle **handles,
                                NvU32 count, NvU64 *first);

// Free a page that no PTE and no TLB entry reaches and that is no longer in the table.
//
// LOCKING: space->lock and the VA space lock.
void uvm_vmem_handle_free(struct uvm_vmem_handle *handle);

// Free all pages of a GPU. Its overlays must have been dropped.
//
// LOCKING: space->lock and the VA space lock in write mode.
void uvm_vmem_memory_free_all(struct uvm_vmem_gpu *vgpu);

#endif
