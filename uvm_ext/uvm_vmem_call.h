// One MAP, UNMAP or RELEASE on one GPU, from the lock to the wait.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_CALL_H
#define UVM_VMEM_CALL_H

#include "uvm_vmem_push.h"
#include "uvm_vmem_space.h"

struct uvm_vmem_call {
    struct uvm_vmem_space *space;
    uvm_va_space_t *va_space;
    uvm_gpu_t *gpu;
    struct uvm_vmem_gpu *vgpu;
    uvm_page_tree_t *tree; // NULL (RELEASE alone): the GPU has no address space, so nothing is mapped

    struct list_head touched; // overlays
    struct uvm_vmem_piece *pieces;
    NvU32 num_pieces;
    NvU32 max_pieces;

    // Handles of mappings that were taken over, to be freed without the VA space lock
    struct list_head deferred_free;

    struct uvm_vmem_push push;
    bool downgrade;   // an entry that was valid loses its page
    bool sparse_goes; // a sparse entry becomes a page
};

// What the calls differ in. With the VA space lock in write mode: decide, and commit what there is to commit. A failure
// has changed no page. NV_WARN_MORE_PROCESSING_REQUIRED: there is more to do, which can wait for others in between.
typedef NV_STATUS (*uvm_vmem_change_t)(struct uvm_vmem_call *call, void *arg);

// With the VA space lock in read mode, when the GPU has done what was committed. Not after a failure.
typedef void (*uvm_vmem_changed_t)(struct uvm_vmem_call *call, void *arg);

void uvm_vmem_call_init(struct uvm_vmem_call *call, struct uvm_vmem_space *space);

// change under the lock, wait, changed; again while there is more to do. `changed` may be NULL. Adds to the file's
// counts; those of this call are in call->push.
//
// LOCKING: none.
NV_STATUS uvm_vmem_call_run(struct uvm_vmem_call *call, uvm_vmem_change_t change, uvm_vmem_changed_t changed,
                            void *arg);

// Frees what the call holds, but not the call.
//
// LOCKING: none.
void uvm_vmem_call_deinit(struct uvm_vmem_call *call);

#endif
