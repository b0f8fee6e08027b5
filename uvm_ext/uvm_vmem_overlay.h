// Overlays: what is mapped in a 2 MiB block of address space.
//
// An overlay stands behind one uvm_ext_gpu_map_t, through the memory handle that it lends: a handle without an RM
// object, so that UVM's own destroy path clears the PTEs, invalidates, and makes no RM call for it. Its page table is
// one table of 64 KiB entries, or one 2 MiB entry.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_OVERLAY_H
#define UVM_VMEM_OVERLAY_H

#include "uvm_vmem_call.h"

// The page behind 64 KiB of an overlay.
struct uvm_vmem_entry {
    struct list_head node; // in uvm_vmem_handle.entries
    struct uvm_vmem_handle *handle;
    NvU8 granule; // of the page
    NvU8 index;   // of this entry
};

// The memory handle that an overlay lends to its mappings: one reference is the overlay's, one is UVM's per mapping.
// UVM frees it as its own if its reference is the last one.
struct uvm_vmem_loan {
    uvm_ext_gpu_mem_handle mem; // first
    struct uvm_vmem_overlay *overlay;
};

struct uvm_vmem_overlay {
    struct uvm_vmem_loan *loan;
    struct list_head node; // in uvm_vmem_space.overlays
    struct uvm_vmem_gpu *vgpu;

    // Inclusive, in one block
    NvU64 start;
    NvU64 end;

    // Bits by 64 KiB of the block: pages have an entry below; what is in neither mask is invalid
    NvU32 pages;
    NvU32 sparse;
    struct uvm_vmem_entry entries[UVM_VMEM_GRANULES];

    // The rest is used by one call at a time, under the VA space lock in write mode.
    struct list_head touched; // in uvm_vmem_call.touched
    uvm_vmem_range_t *range;
    uvm_ext_gpu_map_t *map; // NULL (RELEASE alone): UVM left pieces of the overlay, each with a mapping
    NvU32 occupied;         // the pages there would be after the elements so far
    NvU32 had_pages;        // the pages there were when the call began
    NvU32 changed;
    bool fresh; // opened by this call: the PTEs are invalid still
    bool taken; // taken over by this call: the PTEs are the former mapping's still

    // The call needs 64 KiB entries where there is a 2 MiB one
    bool cut_wanted;
    bool cut;
    uvm_page_table_range_t table; // when cut: the 64 KiB entries, not yet in the page directory

    // When taken: the former mapping's handle, on its way out. NULL for a sparse mapping, which has none
    uvm_ext_gpu_map_t *former;
};

typedef enum {
    UVM_VMEM_LOOK, // only an overlay that is there
    UVM_VMEM_OPEN, // open one where nothing is mapped
    UVM_VMEM_TAKE, // and where something is
} uvm_vmem_open_t;

// Of an overlay that a call touches. Of 2 MiB entries UVM leaves no pieces.
static inline uvm_vmem_page_size_t uvm_vmem_overlay_page_size(const struct uvm_vmem_overlay *overlay)
{
    return overlay->map ? overlay->map->pt_range_vec.page_size : UVM_PAGE_SIZE_64K;
}

// The overlay that maps, or NULL when the mapping is not vMem's.
static inline struct uvm_vmem_overlay *uvm_vmem_overlay_of(uvm_ext_gpu_map_t *map)
{
    // Every other mapping has an RM object, or no handle at all.
    if (!map->mem_handle || map->mem_handle->rm_handle)
        return NULL;
    return container_of(map->mem_handle, struct uvm_vmem_loan, mem)->overlay;
}

static inline struct uvm_vmem_overlay *uvm_vmem_entry_overlay(struct uvm_vmem_entry *entry)
{
    return container_of(entry - entry->index, struct uvm_vmem_overlay, entries[0]);
}

// The mapping at va, or NULL.
//
// LOCKING: the VA space lock in write mode, for this and all below.
uvm_ext_gpu_map_t *uvm_vmem_map_at(uvm_vmem_range_t *range, uvm_gpu_t *gpu, NvU64 va);

// Add the overlay at va to the call, opened if need be. With huge, a new one gets a 2 MiB entry if it fills its block.
// *overlay is NULL, and the status NV_OK, when UVM_VMEM_LOOK finds none. What was done is undone by
// uvm_vmem_overlay_undo().
NV_STATUS uvm_vmem_overlay_touch(struct uvm_vmem_call *call, uvm_vmem_range_t *range, NvU64 va, uvm_vmem_open_t open,
                                 bool huge, struct uvm_vmem_overlay **overlay);

// For RELEASE, which needs no memory: add the overlay to the call, if it still maps the entry. False when UVM has
// unmapped it since.
bool uvm_vmem_overlay_touch_entry(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index);

// The mapping behind an entry of an overlay that the call touches.
uvm_ext_gpu_map_t *uvm_vmem_overlay_map(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index);

// Get a page table for an overlay that is to be cut.
NV_STATUS uvm_vmem_overlay_cut(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay);

// The same for all overlays of the call with cut_wanted. The last step of a MAP or UNMAP that can fail.
NV_STATUS uvm_vmem_overlays_cut(struct uvm_vmem_call *call);

// Forget that the call touched the overlay, which is not cut.
void uvm_vmem_overlay_undo(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay);

// Take the page out of an entry's record. The PTE is changed already, or will be before the page is freed.
void uvm_vmem_entry_clear(struct uvm_vmem_overlay *overlay, NvU32 index);

// Drop our side of an overlay that UVM destroyed or that is about to be.
void uvm_vmem_overlay_drop(struct uvm_vmem_overlay *overlay);

// Whether UVM has destroyed its side of the overlay.
static inline bool uvm_vmem_overlay_is_dead(const struct uvm_vmem_overlay *overlay)
{
    return nv_kref_read(&overlay->loan->mem.ref_count) == 1;
}

// Look at `count` overlays, those longest not looked at, and drop the dead ones.
void uvm_vmem_overlays_reap(struct uvm_vmem_space *space, NvU32 count);

// Overlays to look at in each call that changes some
#define UVM_VMEM_REAP_PER_CALL 8

// Drop all overlays of a GPU whose mappings are gone.
void uvm_vmem_overlays_forget(struct uvm_vmem_gpu *vgpu);

#endif
