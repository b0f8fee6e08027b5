// The commands of one call to the GPU: page-table writes in chained pushes, followed by TLB invalidates.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_PUSH_H
#define UVM_VMEM_PUSH_H

#include "uvm_vmem_compat.h"

#include "uvm_pte_batch.h"
#include "uvm_push.h"
#include "uvm_tlb_batch.h"
#include "uvm_tracker.h"

struct uvm_vmem_push {
    uvm_page_tree_t *tree;

    // The pushes that have ended
    uvm_tracker_t tracker;

    uvm_push_t push;
    uvm_pte_batch_t ptes;
    bool batching;
    uvm_tlb_batch_t tlb;
    NvU64 pending_start; // first and last of the contiguous addresses that the next invalidate covers
    NvU64 pending_end;
    bool pending_huge;

    // NV_OK, or the error of UVM's channels that left the page tables in an unknown state
    NV_STATUS fatal;

    NvU32 pushes;
    NvU32 invalidates;
    NvU32 waits;
};

// Upper bounds of the room in a push for the 64 KiB entries of one overlay (32 separate writes), and for a directory
// entry or a 2 MiB entry
#define UVM_VMEM_OVERLAY_SPACE 6144
#define UVM_VMEM_PDE_SPACE 1024

void uvm_vmem_push_init(struct uvm_vmem_push *push);
void uvm_vmem_push_deinit(struct uvm_vmem_push *push);

// Begin a push that waits until new tables are ready, and a batch of entries in it. Like all functions below, it needs
// no memory and can only fail fatally.
//
// LOCKING: the VA space lock. Until the push ends, no range tree or page tree lock.
NV_STATUS uvm_vmem_push_begin(struct uvm_vmem_push *push, uvm_page_tree_t *tree);

// Reserve room for `space` bytes and for the end of the push. If necessary, begin a new push that is chained to this
// one. Must be called before each write of entries or directories.
NV_STATUS uvm_vmem_push_reserve(struct uvm_vmem_push *push, NvU32 space);

// End the batch of entries with a membar that orders it before later directory writes and invalidates.
void uvm_vmem_push_entries_end(struct uvm_vmem_push *push);

// Gather addresses, then invalidate them. Up to four ranges are invalidated one by one, and more by a single invalidate
// of the address space.
void uvm_vmem_push_invalidate_begin(struct uvm_vmem_push *push);
void uvm_vmem_push_invalidate_add(struct uvm_vmem_push *push, NvU64 start, NvU64 end, bool huge);
void uvm_vmem_push_invalidate(struct uvm_vmem_push *push, uvm_membar_t membar);

void uvm_vmem_push_end(struct uvm_vmem_push *push);

// Wait for all pushes since the last wait.
NV_STATUS uvm_vmem_push_wait(struct uvm_vmem_push *push);

#endif
