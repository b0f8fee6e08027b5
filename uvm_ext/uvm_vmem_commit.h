// From records to page tables.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_COMMIT_H
#define UVM_VMEM_COMMIT_H

#include "uvm_vmem_overlay.h"

// The part of one element that falls into one overlay
struct uvm_vmem_piece {
    struct uvm_vmem_overlay *overlay;
    struct uvm_vmem_handle *handle; // NULL: no page
    NvU8 first;
    NvU8 count;
    NvU8 granule;
};

// Add a piece to the call. A piece that continues the last one is joined to it.
NV_STATUS uvm_vmem_piece_add(struct uvm_vmem_call *call, const struct uvm_vmem_piece *piece);

// Unmap an entry of an overlay that the call touches.
void uvm_vmem_entry_unmap(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index, bool invalid);

// Apply the pieces to the records in order, then update the page tables of all overlays that the call touches. It
// either succeeds or fails fatally (space->fatal). When it returns, the push has been submitted.
//
// LOCKING: the VA space lock in write mode.
NV_STATUS uvm_vmem_call_commit(struct uvm_vmem_call *call);

// Abandon the call before its commit. Every entry is as it was.
//
// LOCKING: the VA space lock in write mode.
void uvm_vmem_call_undo(struct uvm_vmem_call *call);

#endif
