// Physical memory: 2 MiB slabs cut into pages, and the table of handles.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_MEMORY_H
#define UVM_VMEM_MEMORY_H

#include "uvm_vmem_space.h"

// The handle with this id, or NULL. Does not find handles that a RELEASE is working on.
//
// LOCKING: the VA space lock in write mode.
struct uvm_vmem_handle *uvm_vmem_handle_find(struct uvm_vmem_space *space, NvU64 id);

// The handle with this id that a RELEASE is working on, or NULL if its GPU was unregistered meanwhile.
//
// LOCKING: the VA space lock in write mode.
struct uvm_vmem_handle *uvm_vmem_handle_leaving(struct uvm_vmem_space *space, NvU64 id);

// Free a page that no PTE and no TLB entry reaches and that is no longer in the table.
//
// LOCKING: space->lock and the VA space lock.
void uvm_vmem_handle_free(struct uvm_vmem_handle *handle);

// Free all pages of a GPU. Its overlays must have been dropped.
//
// LOCKING: space->lock and the VA space lock in write mode.
void uvm_vmem_memory_free_all(struct uvm_vmem_gpu *vgpu);

#endif
