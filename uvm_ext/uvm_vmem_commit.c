// From records to page tables: all changes of one call in one push, one TLB invalidate, one wait.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_commit.h"

#include "uvm_hal.h"

static NvU64 page_pte(struct uvm_vmem_call *call, const struct uvm_vmem_entry *entry)
{
    NvU64 address = uvm_vmem_handle_address(entry->handle) + entry->granule * UVM_VMEM_GRANULE;

    return call->tree->hal->make_pte(UVM_APERTURE_VID, address, UVM_PROT_READ_WRITE_ATOMIC, UVM_MMU_PTE_FLAGS_CACHED);
}

static NvU64 entry_pte(struct uvm_vmem_call *call, const struct uvm_vmem_overlay *overlay, NvU32 index)
{
    if (overlay->pages & (1U << index))
        return page_pte(call, &overlay->entries[index]);
    return overlay->sparse & (1U << index) ? call->tree->hal->make_sparse_pte() : 0;
}

static bool overlay_is_huge(const struct uvm_vmem_overlay *overlay)
{
    return !overlay->cut && uvm_vmem_overlay_page_size(overlay) == UVM_PAGE_SIZE_2M;
}

// The granules whose entries must be written.
static NvU32 overlay_write_mask(const struct uvm_vmem_overlay *overlay)
{
    if (overlay->opened || overlay->taken || overlay->cut)
        return uvm_vmem_range_mask(overlay->start, overlay->end);
    return overlay->changed_mask;
}

// True if the 2 MiB entry of a cut overlay must be made invalid before the table takes its place. A TLB must not hold an
// address in entries of two sizes, or accesses to it lose their order. UVM never switches in one step, either.
static bool overlay_needs_break(const struct uvm_vmem_overlay *overlay)
{
    return overlay->cut && (overlay->taken || overlay->pages_before);
}

static void huge_write(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    uvm_page_table_range_t *range = &UVM_VMEM_BASE(overlay->map)->pt_range_vec.ranges[0];
    uvm_gpu_phys_address_t address = uvm_page_table_range_entry_address(call->tree, range, 0);
    NvU32 size = uvm_mmu_pte_size(call->tree, UVM_PAGE_SIZE_2M);

    // All 2 MiB of one page, or nothing: everything else was cut.
    if (overlay->pages)
        uvm_pte_batch_write_pte(&call->push.ptes, address, page_pte(call, &overlay->entries[0]), size);
    else
        uvm_pte_batch_clear_ptes(&call->push.ptes, address, 0, size, 1);
}

static void entry_write(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index)
{
    NvU64 va = uvm_vmem_block(overlay->start) + index * UVM_VMEM_GRANULE;
    NvU32 size = uvm_mmu_pte_size(call->tree, UVM_PAGE_SIZE_64K);
    uvm_page_table_range_t *range;
    NvU64 start;

    if (overlay->cut) {
        range = &overlay->table;
        start = uvm_vmem_block(overlay->start);
    } else {
        range = &UVM_VMEM_BASE(overlay->map)->pt_range_vec.ranges[0];
        start = overlay->start;
    }
    uvm_pte_batch_write_pte(&call->push.ptes,
                            uvm_page_table_range_entry_address(call->tree, range, (va - start) / UVM_VMEM_GRANULE),
                            entry_pte(call, overlay, index), size);
}

static void entries_write(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 mask)
{
    for (; mask; mask &= mask - 1)
        entry_write(call, overlay, __ffs(mask));
}

// Write the entries of all overlays. Those of a cut overlay go to its new table, which the GPU does not reach yet.
static NV_STATUS stage_entries(struct uvm_vmem_call *call)
{
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status;

    list_for_each_entry(overlay, &call->touched, touched) {
        NvU32 mask = overlay_write_mask(overlay);

        if (!mask)
            continue;
        status = uvm_vmem_push_reserve(&call->push, UVM_VMEM_OVERLAY_SPACE);
        if (status != NV_OK)
            return status;
        if (overlay_is_huge(overlay))
            huge_write(call, overlay);
        else
            entries_write(call, overlay, mask);
    }
    return NV_OK;
}

// Make the 2 MiB entries that become tables invalid. Ends the PTE batch.
static NV_STATUS stage_break(struct uvm_vmem_call *call)
{
    NvU32 size = uvm_mmu_pte_size(call->tree, UVM_PAGE_SIZE_2M);
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status;

    uvm_vmem_push_invalidate_begin(&call->push);
    list_for_each_entry(overlay, &call->touched, touched) {
        uvm_page_table_range_t *range;

        if (!overlay_needs_break(overlay))
            continue;
        range = &UVM_VMEM_BASE(overlay->map)->pt_range_vec.ranges[0];
        status = uvm_vmem_push_reserve(&call->push, UVM_VMEM_PDE_SPACE);
        if (status != NV_OK)
            return status;
        uvm_pte_batch_clear_ptes(&call->push.ptes, uvm_page_table_range_entry_address(call->tree, range, 0), 0, size,
                                 1);
        uvm_vmem_push_invalidate_add(&call->push, overlay->start, overlay->end, true);
    }
    uvm_vmem_push_entries_end(&call->push);
    uvm_vmem_push_invalidate(&call->push, uvm_hal_downgrade_membar_type(call->gpu, true));
    return NV_OK;
}

// Point the page directory at the new tables.
static NV_STATUS stage_directories(struct uvm_vmem_call *call)
{
    uvm_membar_t membar = UVM_MEMBAR_NONE;
    struct uvm_vmem_overlay *overlay;
    NV_STATUS status;

    list_for_each_entry(overlay, &call->touched, touched) {
        uvm_page_table_range_t *single;

        if (!overlay->cut)
            continue;
        single = &UVM_VMEM_BASE(overlay->map)->pt_range_vec.ranges[0];
        status = uvm_vmem_push_reserve(&call->push, UVM_VMEM_PDE_SPACE);
        if (status != NV_OK)
            return status;
        if (uvm_page_table_range_aperture(single) == UVM_APERTURE_VID)
            membar = max(membar, UVM_MEMBAR_GPU);
        else
            membar = UVM_MEMBAR_SYS;

        // Directory writes are independent of each other. A membar has ordered them after the entries.
        uvm_push_set_flag(&call->push.push, UVM_PUSH_FLAG_CE_NEXT_PIPELINED);
        uvm_push_set_flag(&call->push.push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
        uvm_page_tree_write_pde(call->tree, single, &call->push.push);
    }
    if (membar != UVM_MEMBAR_NONE)
        uvm_hal_wfi_membar(&call->push.push, membar);
    return NV_OK;
}

static void stage_invalidate(struct uvm_vmem_call *call)
{
    uvm_membar_t membar = UVM_MEMBAR_NONE;
    struct uvm_vmem_overlay *overlay;

    uvm_vmem_push_invalidate_begin(&call->push);
    list_for_each_entry(overlay, &call->touched, touched) {
        NvU32 mask = overlay_write_mask(overlay);
        NvU64 block = uvm_vmem_block(overlay->start);

        if (!mask)
            continue;
        if (uvm_vmem_overlay_page_size(overlay) == UVM_PAGE_SIZE_2M)
            uvm_vmem_push_invalidate_add(&call->push, overlay->start, overlay->end, true);
        else
            uvm_vmem_push_invalidate_add(&call->push, block + __ffs(mask) * UVM_VMEM_GRANULE,
                                         block + (__fls(mask) + 1) * UVM_VMEM_GRANULE - 1, false);
    }

    // Memory that loses its mapping is local vidmem, also in a takeover. Accesses through the old entries must reach it
    // before it gets another owner. Writes to sparse entries stay on the GPU and need the membar that UVM uses for
    // them. An entry that was invalid needs none.
    if (call->downgrade)
        membar = uvm_hal_downgrade_membar_type(call->gpu, true);
    else if (call->replaces_sparse)
        membar = UVM_MEMBAR_GPU;
    uvm_vmem_push_invalidate(&call->push, membar);
}

static NV_STATUS push_all(struct uvm_vmem_call *call)
{
    NV_STATUS status = uvm_vmem_push_begin(&call->push, call->tree);

    if (status == NV_OK)
        status = stage_entries(call);
    if (status == NV_OK)
        status = stage_break(call);
    if (status == NV_OK)
        status = stage_directories(call);
    if (status == NV_OK) {
        stage_invalidate(call);
        uvm_vmem_push_end(&call->push);
    }
    return status;
}

// Update the records to what the page tables are, or will be when the push completes.
static void overlay_settle(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    list_del_init(&overlay->touched);

    // UVM waits for the tracker before it touches the mapping. Without memory to extend it, this call waits itself. Any
    // other failure is a fatal error, which the call's wait reports.
    (void)uvm_tracker_add_tracker_safe(&overlay->map->tracker, &call->push.tracker);

    if (overlay->cut) {
        uvm_page_table_range_vec_t *vec = &UVM_VMEM_BASE(overlay->map)->pt_range_vec;
        uvm_page_table_range_t single = vec->ranges[0];

        vec->page_size = UVM_PAGE_SIZE_64K;
        vec->ranges[0] = overlay->table;
        memset(&overlay->table, 0, sizeof(overlay->table));

        // The new table holds the directory, so this frees and writes nothing.
        uvm_page_tree_put_ptes_async(call->tree, &single);
    }

    if (overlay->former_map) {
        uvm_gpu_retain(overlay->former_map->owning_gpu);
        uvm_deferred_free_object_add(&call->deferred_free, &overlay->former_map->deferred_free,
                                     UVM_DEFERRED_FREE_OBJECT_TYPE_EXTERNAL_ALLOCATION);
        overlay->former_map = NULL;
    }
}

// Update the page tables of all overlays that the call touches to their records.
static NV_STATUS tables_write(struct uvm_vmem_call *call)
{
    struct uvm_vmem_overlay *overlay, *next;
    bool work = false;

    list_for_each_entry(overlay, &call->touched, touched) {
        work = work || overlay_write_mask(overlay);
        call->downgrade = call->downgrade || overlay->former_map;
        call->replaces_sparse = call->replaces_sparse || overlay->taken;
    }
    if (work)
        call->space->fatal = push_all(call);

    list_for_each_entry_safe(overlay, next, &call->touched, touched)
        overlay_settle(call, overlay);
    return call->space->fatal;
}

void uvm_vmem_entry_unmap(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay, NvU32 index, bool invalid)
{
    NvU32 bit = 1U << index;

    if (overlay->pages & bit) {
        uvm_vmem_entry_clear(overlay, index);
        call->downgrade = true;
    } else if (!(overlay->sparse & bit) == invalid) {
        return;
    }
    overlay->changed_mask |= bit;
    overlay->sparse &= ~bit;
    if (!invalid)
        overlay->sparse |= bit;
}

static void granule_map(struct uvm_vmem_call *call, const struct uvm_vmem_piece *piece, NvU32 n)
{
    struct uvm_vmem_overlay *overlay = piece->overlay;
    NvU32 index = piece->first + n;
    struct uvm_vmem_entry *entry = &overlay->entries[index];
    NvU32 bit = 1U << index;

    if (overlay->pages & bit) {
        if (entry->handle == piece->handle && entry->granule == piece->granule + n)
            return;
        uvm_vmem_entry_clear(overlay, index);
        call->downgrade = true;
    }
    if (overlay->sparse & bit)
        call->replaces_sparse = call->replaces_sparse || !overlay->opened;
    overlay->changed_mask |= bit;
    overlay->sparse &= ~bit;

    entry->handle = piece->handle;
    entry->granule = piece->granule + n;
    list_add_tail(&entry->node, &piece->handle->entries);
    overlay->pages |= bit;
    atomic64_add(UVM_VMEM_GRANULE, &overlay->vgpu->bytes_mapped);
}

NV_STATUS uvm_vmem_call_commit(struct uvm_vmem_call *call)
{
    NvU32 i, n;

    for (i = 0; i < call->num_pieces; i++) {
        const struct uvm_vmem_piece *piece = &call->pieces[i];

        for (n = 0; n < piece->count; n++) {
            if (piece->handle)
                granule_map(call, piece, n);
            else
                uvm_vmem_entry_unmap(call, piece->overlay, piece->first + n, false);
        }
        cond_resched();
    }
    return tables_write(call);
}

void uvm_vmem_call_undo(struct uvm_vmem_call *call)
{
    struct uvm_vmem_overlay *overlay, *next;

    list_for_each_entry_safe(overlay, next, &call->touched, touched)
        uvm_vmem_overlay_undo(call, overlay);
}

NV_STATUS uvm_vmem_piece_add(struct uvm_vmem_call *call, const struct uvm_vmem_piece *piece)
{
    struct uvm_vmem_piece *last = call->num_pieces ? &call->pieces[call->num_pieces - 1] : NULL;

    if (last && last->overlay == piece->overlay && last->handle == piece->handle &&
        last->first + last->count == piece->first &&
        (!piece->handle || last->granule + last->count == piece->granule)) {
        last->count += piece->count;
        return NV_OK;
    }

    if (call->num_pieces == call->max_pieces) {
        NvU32 max = max_t(NvU32, 128, call->max_pieces * 2);
        struct uvm_vmem_piece *pieces = uvm_vmem_zalloc(max * sizeof(*pieces));

        if (!pieces)
            return NV_ERR_NO_MEMORY;
        if (call->num_pieces)
            memcpy(pieces, call->pieces, call->num_pieces * sizeof(*pieces));
        uvm_vmem_free(call->pieces);
        call->pieces = pieces;
        call->max_pieces = max;
    }
    call->pieces[call->num_pieces++] = *piece;
    return NV_OK;
}
