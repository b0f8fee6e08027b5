// What one call says to the GPU: page-table writes in pushes that are chained, and TLB invalidates behind them.
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
    NvU64 run_start; // addresses to invalidate, gathered while they are contiguous
    NvU64 run_end;
    bool run_huge;

    // UVM's channels are broken: the page tables are in a state that nobody knows
    NV_STATUS fatal;

    NvU32 pushes;
    NvU32 invalidates;
    NvU32 waits;
};

// Room in a push that the 64 KiB entries of one overlay take at most (32 separate writes), and a directory entry or a
// 2 MiB entry
#define UVM_VMEM_OVERLAY_SPACE 6144
#define UVM_VMEM_PDE_SPACE 1024

void uvm_vmem_push_init(struct uvm_vmem_push *push);
void uvm_vmem_push_deinit(struct uvm_vmem_push *push);

// Begin a push that waits for tables in the making, and in it a batch of entries. Fails fatally or not at all, as all
// below: no memory is needed.
//
// LOCKING: the VA space lock. Until the push ends, no range tree or page tree lock.
NV_STATUS uvm_vmem_push_begin(struct uvm_vmem_push *push, uvm_page_tree_t *tree);

// Make sure of room for `space` bytes and for all that may follow to the end, in a new push chained to this one if need
// be. To be called before each write of entries or directories.
NV_STATUS uvm_vmem_push_reserve(struct uvm_vmem_push *push, NvU32 space);

// End the batch of entries, with a membar that orders them with a directory write or an invalidate after it.
void uvm_vmem_push_entries_end(struct uvm_vmem_push *push);

// Gather addresses, then invalidate them: one by one up to four runs, else everything at once.
void uvm_vmem_push_invalidate_begin(struct uvm_vmem_push *push);
void uvm_vmem_push_invalidate_add(struct uvm_vmem_push *push, NvU64 start, NvU64 end, bool huge);
void uvm_vmem_push_invalidate(struct uvm_vmem_push *push, uvm_membar_t membar);

void uvm_vmem_push_end(struct uvm_vmem_push *push);

// Wait for what was pushed since the last wait.
NV_STATUS uvm_vmem_push_wait(struct uvm_vmem_push *push);

#endif
