// Windows: what is mapped in a 2 MiB slot of address space, and the work of one call on them.
//
// A window stands behind one uvm_ext_gpu_map_t, through the memory handle that both share: a handle without an RM
// object, so that UVM's own destroy path clears the PTEs, invalidates, and makes no RM call for it. Its page table is
// one table of 64 KiB entries, or one 2 MiB entry.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#ifndef UVM_VMEM_WINDOW_H
#define UVM_VMEM_WINDOW_H

#include "uvm_vmem_space.h"

#include "uvm_pte_batch.h"
#include "uvm_push.h"
#include "uvm_tlb_batch.h"
#include "uvm_tracker.h"

// The page behind 64 KiB of a window.
struct uvm_vmem_entry {
    struct list_head node; // in uvm_vmem_handle.entries
    struct uvm_vmem_handle *handle;
    NvU8 unit;  // of the page
    NvU8 index; // of this entry
};

struct uvm_vmem_window {
    // First: UVM frees it as the start of an allocation if its reference is the last one.
    uvm_ext_gpu_mem_handle mem;

    struct list_head node; // in uvm_vmem_space.windows
    struct uvm_vmem_gpu *vgpu;

    // Inclusive, in one slot
    NvU64 start;
    NvU64 end;

    // Bits by 64 KiB of the slot: pages have an entry below; what is in neither mask is invalid
    NvU32 pages;
    NvU32 sparse;
    struct uvm_vmem_entry entries[UVM_VMEM_UNITS];

    // The rest is used by one call at a time, under the VA space lock in write mode.
    struct list_head touched; // in uvm_vmem_call.touched
    uvm_vmem_range_t *range;
    uvm_ext_gpu_map_t *map;
    NvU32 occupied; // the pages there would be after the elements so far
    NvU32 had_pages; // the pages there were when the call began
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

// What one piece of an element puts into one window.
struct uvm_vmem_piece {
    struct uvm_vmem_window *window;
    struct uvm_vmem_handle *handle; // NULL: no page
    NvU8 first;
    NvU8 count;
    NvU8 unit;
    bool invalid; // without a page: invalid instead of sparse
};

// One MAP, UNMAP or RELEASE on one GPU.
struct uvm_vmem_call {
    struct uvm_vmem_space *space;
    uvm_va_space_t *va_space;
    uvm_gpu_t *gpu;
    struct uvm_vmem_gpu *vgpu;
    uvm_page_tree_t *tree;

    struct list_head touched;
    struct uvm_vmem_piece *pieces;
    NvU32 num_pieces;
    NvU32 max_pieces;

    // Handles of mappings that were taken over, to be freed without the VA space lock
    struct list_head deferred_free;

    // The commit's. An open push is not complete, a closed one is in the tracker.
    uvm_tracker_t tracker;
    uvm_push_t push;
    bool pushing;
    bool batching;
    uvm_pte_batch_t ptes;
    uvm_tlb_batch_t tlb;
    NvU64 run_start; // addresses to invalidate, gathered while they are contiguous
    NvU64 run_end;
    bool run_huge;
    bool downgrade; // an entry that was valid loses its page
    NV_STATUS fatal;

    NvU32 pushes;
    NvU32 invalidates;
    NvU32 waits;
};

typedef enum
{
    UVM_VMEM_LOOK, // only a window that is there
    UVM_VMEM_OPEN, // open one where nothing is mapped
    UVM_VMEM_TAKE, // and where something is
} uvm_vmem_open_t;

static inline uvm_vmem_page_size_t uvm_vmem_window_page_size(const struct uvm_vmem_window *window)
{
    return window->map->pt_range_vec.page_size;
}

// The window that maps, or NULL when the mapping is not vMem's.
static inline struct uvm_vmem_window *uvm_vmem_window_of(uvm_ext_gpu_map_t *map)
{
    // Every other mapping has an RM object, or no handle at all.
    if (!map->mem_handle || map->mem_handle->rm_handle)
        return NULL;
    return container_of(map->mem_handle, struct uvm_vmem_window, mem);
}

static inline struct uvm_vmem_window *uvm_vmem_entry_window(struct uvm_vmem_entry *entry)
{
    return container_of(entry - entry->index, struct uvm_vmem_window, entries[0]);
}

// The mapping at va, or NULL.
//
// LOCKING: the VA space lock in write mode, for this and all below.
uvm_ext_gpu_map_t *uvm_vmem_map_at(uvm_vmem_range_t *range, uvm_gpu_t *gpu, NvU64 va);

// Add the window at va to the call, opened if need be. With huge, a new one gets a 2 MiB entry if it fills its slot.
// *window is NULL, and the status NV_OK, when UVM_VMEM_LOOK finds none. What was done is undone by
// uvm_vmem_call_undo().
NV_STATUS uvm_vmem_window_touch(struct uvm_vmem_call *call,
                                uvm_vmem_range_t *range,
                                NvU64 va,
                                uvm_vmem_open_t open,
                                bool huge,
                                struct uvm_vmem_window **window);

// Add a piece to the call, joined to the last one where it continues it.
NV_STATUS uvm_vmem_piece_add(struct uvm_vmem_call *call, const struct uvm_vmem_piece *piece);

// Get page tables for all windows of the call that are to be cut. The last step before uvm_vmem_call_commit().
NV_STATUS uvm_vmem_call_cut(struct uvm_vmem_call *call);

// Give up: leave every page as it is. Windows that were to be cut are, since their tables cannot be taken back without
// passing through an invalid entry; those taken over and cut are open and all sparse.
void uvm_vmem_call_undo(struct uvm_vmem_call *call);

// Apply the pieces in order to the records and the page tables. Fails before any change, or fatally (space->dead).
// When it returns, the push is on its way: downgrade the lock, call uvm_vmem_call_wait(), release the lock, then call
// uvm_vmem_call_end().
NV_STATUS uvm_vmem_call_commit(struct uvm_vmem_call *call);

// LOCKING: the VA space lock in read mode.
NV_STATUS uvm_vmem_call_wait(struct uvm_vmem_call *call);

NV_STATUS uvm_vmem_call_begin(struct uvm_vmem_call **call, uvm_va_space_t *va_space);

// LOCKING: none.
void uvm_vmem_call_end(struct uvm_vmem_call *call);

// Commit what the windows in call->touched need without a piece applied: the second half of uvm_vmem_call_undo().
void uvm_vmem_call_commit_cuts(struct uvm_vmem_call *call);

// Take the page out of an entry's record. The PTE is changed already, or will be before the page is freed.
void uvm_vmem_entry_clear(struct uvm_vmem_window *window, NvU32 index);

// Drop our side of a window that UVM destroyed or that is about to be.
void uvm_vmem_window_drop(struct uvm_vmem_window *window);

// Whether UVM has destroyed its side of the window.
static inline bool uvm_vmem_window_is_dead(const struct uvm_vmem_window *window)
{
    return nv_kref_read(&window->mem.ref_count) == 1;
}

// Look at `count` windows, those longest not looked at, and drop the dead ones.
void uvm_vmem_windows_reap(struct uvm_vmem_space *space, NvU32 count);

// Windows to look at in each call that changes some
#define UVM_VMEM_REAP_PER_CALL 8

// Drop all windows of a GPU whose mappings are gone.
void uvm_vmem_windows_forget(struct uvm_vmem_gpu *vgpu);

#endif
