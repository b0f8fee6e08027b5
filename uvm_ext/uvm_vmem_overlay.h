// Overlays record what is mapped in a 2 MiB block of address space.
//
// An overlay stands behind one uvm_ext_gpu_map_t, whose field `vmem` names it, and lends it a memory handle without an
// RM object. UVM's own destroy path therefore clears the PTEs, invalidates, and makes no RM call. An overlay's page
// table is one table of 64 KiB entries, or one 2 MiB entry.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_OVERLAY_H
#define UVM_VMEM_OVERLAY_H

#include "uvm_vmem_call.h"

// The page behind 64 KiB of an overlay
struct uvm_vmem_entry {
    struct list_head node; // in uvm_vmem_handle.entries
    struct uvm_vmem_handle *handle;
    NvU8 granule; // of the page that the entry maps
    NvU8 index;   // of this entry in the overlay
};

struct uvm_vmem_overlay {
    struct uvm_vmem_gpu *vgpu;
    uvm_vmem_range_t *range;
    uvm_ext_gpu_map_t *map;

    // Inclusive bounds, in one block
    NvU64 start;
    NvU64 end;

    // One bit for each 64 KiB of the block. Each page has an entry below. Addresses in neither mask are invalid
    NvU32 pages;
    NvU32 sparse;
    struct uvm_vmem_entry entries[UVM_VMEM_GRANULES];

    // The remaining fields are used by one call at a time, under the VA space lock in write mode.
    struct list_head touched; // in uvm_vmem_call.touched
    NvU32 pages_after;        // the pages after the elements processed so far
    NvU32 pages_before;       // the pages when the call began
    NvU32 changed_mask;       // the granules whose records differ from their PTEs
    bool opened;              // this call made the overlay, and its PTEs are still invalid
    bool taken;               // this call took a mapping over, and the PTEs are still the former mapping's

    // The call needs 64 KiB entries instead of a 2 MiB entry, and writes them
    bool needs_cut;
    bool cut;

    // If taken: the former mapping's handle, to be freed. NULL for a sparse mapping, which has none
    uvm_ext_gpu_map_t *former_map;

    // A page table of 64 KiB entries that no directory entry leads to yet, if table.table is set. To free one means to
    // clear the directory entry, where the 2 MiB entry is. So after a call that fails, it stays until the next cut, or
    // until the mapping closes.
    uvm_page_tree_t *tree;
    uvm_page_table_range_t table;

    // Such a table is all that is left of a takeover that failed: the mapping is its owner's again, and no overlay
    bool given_back;
};

static inline uvm_vmem_page_size_t uvm_vmem_overlay_page_size(const struct uvm_vmem_overlay *overlay)
{
    return UVM_VMEM_BASE(overlay->map)->pt_range_vec.page_size;
}

// The overlay behind a mapping, or NULL if the mapping is not vMem's. Nothing else of a mapping tells the two apart: UVM
// also closes mappings that it has not finished, whose memory handle has no RM object yet.
static inline struct uvm_vmem_overlay *uvm_vmem_overlay_of(const uvm_ext_gpu_map_t *map)
{
    return map->vmem && !map->vmem->given_back ? map->vmem : NULL;
}

// True if both are, or were before a takeover, parts of one mapping.
static inline bool uvm_vmem_same_origin(const uvm_ext_gpu_map_t *a, const uvm_ext_gpu_map_t *b)
{
    return a->vmem_origin && a->vmem_origin == b->vmem_origin;
}

static inline struct uvm_vmem_overlay *uvm_vmem_entry_overlay(struct uvm_vmem_entry *entry)
{
    return container_of(entry - entry->index, struct uvm_vmem_overlay, entries[0]);
}

// The mapping at va, or NULL.
//
// LOCKING: the VA space lock in write mode, for this function and all below.
uvm_ext_gpu_map_t *uvm_vmem_map_at(uvm_vmem_range_t *range, uvm_gpu_t *gpu, NvU64 va);

// Add the overlay at va to the call. Open one where nothing is mapped or, with take, take over what is. With huge, a new
// overlay that fills its block gets a 2 MiB entry. uvm_vmem_overlay_undo() undoes it.
NV_STATUS uvm_vmem_overlay_prepare(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, bool take, bool huge,
                                   struct uvm_vmem_overlay **overlay);

// Add an existing overlay to the call, without allocating.
void uvm_vmem_overlay_touch(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay);

// Allocate a page table for an overlay that will be cut.
NV_STATUS uvm_vmem_overlay_cut(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay);

// Allocate page tables for all overlays of the call with needs_cut. This is the last step of a MAP or UNMAP that can
// fail.
NV_STATUS uvm_vmem_overlays_cut(struct uvm_vmem_call *call);

// Undo the call's changes to an overlay, none of which the GPU has seen.
void uvm_vmem_overlay_undo(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay);

// Remove the page from an entry's record. The PTE is already changed, or will be before the page is freed.
void uvm_vmem_entry_clear(struct uvm_vmem_overlay *overlay, NvU32 index);

#endif
