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
    uvm_page_tree_t *tree; // NULL (RELEASE only): the GPU has no address space, so nothing is mapped

    struct list_head touched; // overlays
    struct uvm_vmem_piece *pieces;
    NvU32 num_pieces;
    NvU32 max_pieces;

    // Memory handles of mappings that were taken over. They are freed when the VA space lock is no longer held
    struct list_head deferred_free;

    struct uvm_vmem_push push;
    bool downgrade;       // a valid entry loses its page
    bool replaces_sparse; // a sparse entry becomes a page
};

// The working memory of RELEASE. It is allocated with the file's state, so that RELEASE itself needs no memory.
struct uvm_vmem_reserve {
    struct mutex lock; // one RELEASE at a time
    struct uvm_vmem_call call;
    NvU64 ids[UVM_VMEM_MAX_OPS]; // if there is no memory for a copy of the caller's own
};

// The part in which the calls differ. With the VA space lock in write mode, decide on the changes and commit them. A
// failure must change no page. NV_WARN_MORE_PROCESSING_REQUIRED: there is more to do, and other calls may come first.
typedef NV_STATUS (*uvm_vmem_change_t)(struct uvm_vmem_call *call, void *arg);

// The second part, with the VA space lock in read mode, after the GPU has completed the commit. A failure skips it.
typedef void (*uvm_vmem_complete_t)(struct uvm_vmem_call *call, void *arg);

void uvm_vmem_call_init(struct uvm_vmem_call *call, struct uvm_vmem_space *space);

// Runs `change` under the lock, waits, runs `complete` (which may be NULL), and repeats while there is more to do. Adds
// to the file's counts. The counts of this call are in call->push.
//
// LOCKING: none.
NV_STATUS uvm_vmem_call_run(struct uvm_vmem_call *call, uvm_vmem_change_t change, uvm_vmem_complete_t complete,
                            void *arg);

// Frees what the call holds, but not the call itself.
//
// LOCKING: none.
void uvm_vmem_call_deinit(struct uvm_vmem_call *call);

#endif
