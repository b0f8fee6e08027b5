// From records to page tables.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_COMMIT_H
#define UVM_VMEM_COMMIT_H

#include "uvm_vmem_overlay.h"

// What one piece of an element puts into one overlay.
struct uvm_vmem_piece {
    struct uvm_vmem_overlay *overlay;
    struct uvm_vmem_handle *handle; // NULL: no page
    NvU8 first;
    NvU8 count;
    NvU8 granule;
    bool invalid; // without a page: invalid instead of sparse
};

// Add a piece to the call, joined to the last one where it continues it.
NV_STATUS uvm_vmem_piece_add(struct uvm_vmem_call *call, const struct uvm_vmem_piece *piece);

// Put no page at an entry of an overlay that the call touches.
void uvm_vmem_entry_unmap(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index, bool invalid);

// Apply the pieces in order to the records, then bring the page tables to where the records are, for all overlays that
// the call touches. Fails fatally (space->dead) or not at all. When it returns, the push is on its way.
//
// LOCKING: the VA space lock in write mode.
NV_STATUS uvm_vmem_call_commit(struct uvm_vmem_call *call);

// Give up instead: leave every page as it is. Overlays that were to be cut are, since their tables cannot be taken back
// without passing through an invalid entry; those taken over and cut are open and all sparse.
//
// LOCKING: the VA space lock in write mode.
void uvm_vmem_call_undo(struct uvm_vmem_call *call);

#endif
