// From records to page tables: all changes of one call in one push, one TLB invalidate, one wait.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_window.h"

#include "uvm_channel.h"
#include "uvm_hal.h"
#include "uvm_kvmalloc.h"

// Room in a push that one window's entries take at most (32 separate writes), that one directory entry takes, that a
// PTE batch takes to write out what it has gathered beside the entries themselves, and that the end of a push takes
// (membars, two sets of invalidates): all with a wide margin
#define WINDOW_SPACE 6144
#define PDE_SPACE 1024
#define FLUSH_SPACE 512
#define END_SPACE 4096

static NV_STATUS push_begin(struct uvm_vmem_call *call)
{
    NV_STATUS status = uvm_push_begin_acquire(call->gpu->channel_manager,
                                              UVM_CHANNEL_TYPE_MEMOPS,
                                              &call->tracker,
                                              &call->push,
                                              "vMem PTEs of %u pieces",
                                              call->num_pieces);

    if (status != NV_OK) {
        // Only a fatal error gets here. What was pushed so far cannot be taken back.
        call->fatal = status;
        return status;
    }
    call->pushing = true;
    call->pushes++;
    return NV_OK;
}

static void push_end(struct uvm_vmem_call *call)
{
    uvm_push_end(&call->push);

    // The push acquired the tracker.
    uvm_tracker_overwrite_with_push(&call->tracker, &call->push);
    call->pushing = false;
}

static void ptes_begin(struct uvm_vmem_call *call)
{
    uvm_pte_batch_begin(&call->push, &call->ptes);
    call->batching = true;
}

// Ends with a membar that orders the writes with a PDE write or an invalidate after it.
static void ptes_end(struct uvm_vmem_call *call)
{
    uvm_pte_batch_end(&call->ptes);
    call->batching = false;
}

// What the PTE batch has gathered in the push, or will put there: uvm_push_has_space() counts none of it before the
// batch writes it out, which it does by itself only after 32 KiB of entries that lie side by side.
static NvU32 ptes_space(const struct uvm_vmem_call *call)
{
    return call->batching ? call->ptes.pte_count * call->ptes.pte_entry_size + FLUSH_SPACE : 0;
}

// Make sure of room for `space` bytes and for ending the push, in a new push chained to this one if need be. The check
// is good for nothing once a push is too long, since its subtraction wraps: no push may ever get there.
static NV_STATUS push_reserve(struct uvm_vmem_call *call, NvU32 space)
{
    bool batching = call->batching;
    NV_STATUS status;

    if (call->fatal != NV_OK)
        return call->fatal;
    if (uvm_push_has_space(&call->push, space + ptes_space(call) + END_SPACE))
        return NV_OK;

    if (batching)
        ptes_end(call);
    else
        uvm_hal_wfi_membar(&call->push, UVM_MEMBAR_SYS);

    // The membar just pushed is enough to order these writes with what the next push does.
    uvm_push_set_flag(&call->push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
    push_end(call);
    status = push_begin(call);
    if (status == NV_OK && batching)
        ptes_begin(call);
    return status;
}

static NvU64 page_pte(struct uvm_vmem_call *call, const struct uvm_vmem_entry *entry)
{
    NvU64 address = uvm_vmem_handle_address(entry->handle) + entry->unit * UVM_VMEM_GRANULE;

    return call->tree->hal->make_pte(UVM_APERTURE_VID, address, UVM_PROT_READ_WRITE_ATOMIC, UVM_MMU_PTE_FLAGS_CACHED);
}

static NvU64 entry_pte(struct uvm_vmem_call *call, const struct uvm_vmem_window *window, NvU32 index)
{
    if (window->pages & (1U << index))
        return page_pte(call, &window->entries[index]);
    return window->sparse & (1U << index) ? call->tree->hal->make_sparse_pte() : 0;
}

static bool window_is_huge(const struct uvm_vmem_window *window)
{
    return !window->cut && uvm_vmem_window_page_size(window) == UVM_PAGE_SIZE_2M;
}

// 64 KiB units whose entries are to be written.
static NvU32 window_writes(const struct uvm_vmem_window *window)
{
    if (window->fresh || window->taken || window->cut)
        return uvm_vmem_cover(window->start, window->end);
    return window->changed;
}

// Whether the 2 MiB entry of a window that is cut goes first, and the table comes after an invalidate. A TLB must not
// hold an address in entries of two sizes, or accesses to it lose their order; UVM never goes in one step. With
// uvm_vmem_one_step it is done where no page stays, so that there is no order to lose: not seen on hardware.
static bool window_breaks(const struct uvm_vmem_window *window)
{
    bool valid = window->taken || window->had_pages;
    bool keeps = !window->taken && (window->had_pages & window->pages & ~window->changed);

    return window->cut && valid && (keeps || !uvm_vmem_is_one_step());
}

static void huge_write(struct uvm_vmem_call *call, struct uvm_vmem_window *window)
{
    uvm_page_table_range_t *range = &window->map->pt_range_vec.ranges[0];
    uvm_gpu_phys_address_t address = uvm_page_table_range_entry_address(call->tree, range, 0);
    NvU32 size = uvm_mmu_pte_size(call->tree, UVM_PAGE_SIZE_2M);

    // All 2 MiB of one page, or nothing: everything else was cut.
    if (window->pages)
        uvm_pte_batch_write_pte(&call->ptes, address, page_pte(call, &window->entries[0]), size);
    else
        uvm_pte_batch_clear_ptes(&call->ptes, address, 0, size, 1);
}

static void entries_write(struct uvm_vmem_call *call, struct uvm_vmem_window *window, NvU32 mask)
{
    uvm_page_table_range_vec_t *vec = &window->map->pt_range_vec;
    uvm_page_table_range_t *range = window->cut ? &window->table : &vec->ranges[0];
    NvU32 base = uvm_vmem_index(window->cut ? uvm_vmem_slot(window->start) : vec->start);
    NvU32 size = uvm_mmu_pte_size(call->tree, UVM_PAGE_SIZE_64K);
    unsigned int first, count;

    while (uvm_vmem_next_run(&mask, &first, &count)) {
        for (; count; first++, count--) {
            uvm_gpu_phys_address_t address = uvm_page_table_range_entry_address(call->tree, range, first - base);

            uvm_pte_batch_write_pte(&call->ptes, address, entry_pte(call, window, first), size);
        }
    }
}

static void run_flush(struct uvm_vmem_call *call)
{
    NvU64 sizes = UVM_PAGE_SIZE_64K | (call->run_huge ? UVM_PAGE_SIZE_2M : 0);

    if (!call->run_end)
        return;
    uvm_tlb_batch_invalidate(&call->tlb,
                             call->run_start,
                             call->run_end - call->run_start + 1,
                             sizes,
                             UVM_MEMBAR_NONE);
    call->run_end = 0;
}

static void run_add(struct uvm_vmem_call *call, NvU64 start, NvU64 end, bool huge)
{
    if (call->run_end && call->run_end + 1 == start && call->run_huge == huge) {
        call->run_end = end;
        return;
    }
    run_flush(call);
    call->run_start = start;
    call->run_end = end;
    call->run_huge = huge;
}

static void tlb_end(struct uvm_vmem_call *call, uvm_membar_t membar)
{
    run_flush(call);
    if (!call->tlb.count)
        return;

    // Beyond its limit the batch becomes a single invalidate of the whole address space.
    call->invalidates += call->tlb.count > UVM_TLB_BATCH_MAX_ENTRIES ? 1 : call->tlb.count;
    uvm_tlb_batch_end(&call->tlb, &call->push, membar);
}

// The entries of all windows. Those of a cut window go to its new table, which the GPU does not reach yet.
static NV_STATUS stage_entries(struct uvm_vmem_call *call)
{
    struct uvm_vmem_window *window;
    NV_STATUS status;

    list_for_each_entry(window, &call->touched, touched) {
        NvU32 mask = window_writes(window);

        if (!mask)
            continue;
        status = push_reserve(call, WINDOW_SPACE);
        if (status != NV_OK)
            return status;
        if (window_is_huge(window))
            huge_write(call, window);
        else
            entries_write(call, window, mask);
    }
    return NV_OK;
}

// Take the 2 MiB entries away that become tables. Ends the PTE batch.
static NV_STATUS stage_break(struct uvm_vmem_call *call)
{
    NvU32 size = uvm_mmu_pte_size(call->tree, UVM_PAGE_SIZE_2M);
    struct uvm_vmem_window *window;
    NV_STATUS status;

    uvm_tlb_batch_begin(call->tree, &call->tlb);
    list_for_each_entry(window, &call->touched, touched) {
        uvm_page_table_range_t *range = &window->map->pt_range_vec.ranges[0];

        if (!window_breaks(window))
            continue;
        status = push_reserve(call, PDE_SPACE);
        if (status != NV_OK)
            return status;
        uvm_pte_batch_clear_ptes(&call->ptes,
                                 uvm_page_table_range_entry_address(call->tree, range, 0),
                                 0,
                                 size,
                                 1);
        run_add(call, window->start, window->end, true);
    }
    ptes_end(call);
    tlb_end(call, uvm_hal_downgrade_membar_type(call->gpu, true));
    return NV_OK;
}

// Point the page directory at the new tables.
static NV_STATUS stage_directories(struct uvm_vmem_call *call)
{
    uvm_membar_t membar = UVM_MEMBAR_NONE;
    struct uvm_vmem_window *window;
    NV_STATUS status;

    list_for_each_entry(window, &call->touched, touched) {
        uvm_page_table_range_t *single = &window->map->pt_range_vec.ranges[0];

        if (!window->cut)
            continue;
        status = push_reserve(call, PDE_SPACE);
        if (status != NV_OK)
            return status;
        if (uvm_page_table_range_aperture(single) == UVM_APERTURE_VID)
            membar = max(membar, UVM_MEMBAR_GPU);
        else
            membar = UVM_MEMBAR_SYS;

        // Independent of each other, and of the entries since the membar after these.
        uvm_push_set_flag(&call->push, UVM_PUSH_FLAG_CE_NEXT_PIPELINED);
        uvm_push_set_flag(&call->push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
        uvm_page_tree_write_pde(call->tree, single, &call->push);
    }
    if (membar != UVM_MEMBAR_NONE)
        uvm_hal_wfi_membar(&call->push, membar);
    return NV_OK;
}

static void stage_invalidate(struct uvm_vmem_call *call)
{
    uvm_membar_t membar = UVM_MEMBAR_NONE;
    struct uvm_vmem_window *window;

    uvm_tlb_batch_begin(call->tree, &call->tlb);
    list_for_each_entry(window, &call->touched, touched) {
        NvU32 mask = window_writes(window);
        NvU64 slot = uvm_vmem_slot(window->start);

        if (!mask)
            continue;
        if (uvm_vmem_window_page_size(window) == UVM_PAGE_SIZE_2M)
            run_add(call, window->start, window->end, true);
        else
            run_add(call,
                    slot + __ffs(mask) * UVM_VMEM_GRANULE,
                    slot + (__fls(mask) + 1) * UVM_VMEM_GRANULE - 1,
                    false);
    }

    // Memory that goes away is local vidmem, also that of a mapping taken over: accesses by the old entries must have
    // reached it before it can be somebody else's. New memory needs no membar.
    if (call->downgrade)
        membar = uvm_hal_downgrade_membar_type(call->gpu, true);
    tlb_end(call, membar);
}

static NV_STATUS push_all(struct uvm_vmem_call *call)
{
    NV_STATUS status;

    // Tables that windows were opened with may be in the making.
    uvm_mutex_lock(&call->tree->lock);
    status = uvm_tracker_add_tracker_safe(&call->tracker, &call->tree->tracker);
    uvm_mutex_unlock(&call->tree->lock);
    if (status != NV_OK) {
        call->fatal = status;
        return status;
    }

    status = push_begin(call);
    if (status != NV_OK)
        return status;

    ptes_begin(call);
    status = stage_entries(call);
    if (status == NV_OK)
        status = stage_break(call);
    if (status == NV_OK)
        status = stage_directories(call);
    if (status == NV_OK) {
        stage_invalidate(call);
        push_end(call);
    }
    return status;
}

// Bring the books to where the page tables are, or will be when the push is done.
static void window_settle(struct uvm_vmem_call *call, struct uvm_vmem_window *window)
{
    uvm_page_table_range_vec_t *vec = &window->map->pt_range_vec;

    list_del_init(&window->touched);

    // UVM waits for it before it touches the mapping. A failure to add is a fatal error, which the wait reports.
    (void)uvm_tracker_add_tracker_safe(&window->map->tracker, &call->tracker);

    if (window->cut) {
        uvm_page_table_range_t single = vec->ranges[0];

        vec->page_size = UVM_PAGE_SIZE_64K;
        vec->ranges[0] = window->table;

        // The directory is held by the new table: this frees nothing, and writes nothing.
        uvm_page_tree_put_ptes_async(call->tree, &single);
    }

    if (window->former) {
        uvm_gpu_retain(window->former->owning_gpu);
        uvm_deferred_free_object_add(&call->deferred_free,
                                     &window->former->deferred_free,
                                     UVM_DEFERRED_FREE_OBJECT_TYPE_EXTERNAL_ALLOCATION);
        window->former = NULL;
    }
    window->map = NULL;
    window->range = NULL;
}

static NV_STATUS commit(struct uvm_vmem_call *call)
{
    struct uvm_vmem_window *window, *next;
    bool work = false;

    list_for_each_entry(window, &call->touched, touched) {
        work = work || window_writes(window);
        call->downgrade = call->downgrade || window->former;
    }
    if (work)
        (void)push_all(call);

    list_for_each_entry_safe(window, next, &call->touched, touched)
        window_settle(call, window);

    if (call->fatal != NV_OK)
        call->space->dead = call->fatal;
    return call->fatal;
}

static void unit_apply(struct uvm_vmem_call *call, const struct uvm_vmem_piece *piece, NvU32 n)
{
    struct uvm_vmem_window *window = piece->window;
    NvU32 index = piece->first + n;
    struct uvm_vmem_entry *entry = &window->entries[index];
    NvU32 bit = 1U << index;

    if (window->pages & bit) {
        if (entry->handle == piece->handle && entry->unit == piece->unit + n)
            return;
        uvm_vmem_entry_clear(window, index);
        call->downgrade = true;
    }
    else if (!piece->handle && !(window->sparse & bit) == piece->invalid) {
        return;
    }
    window->changed |= bit;
    window->sparse &= ~bit;

    if (piece->handle) {
        entry->handle = piece->handle;
        entry->unit = piece->unit + n;
        list_add_tail(&entry->node, &piece->handle->entries);
        piece->handle->mapped++;
        window->pages |= bit;
        atomic64_add(UVM_VMEM_GRANULE, &window->vgpu->bytes_mapped);
    }
    else if (!piece->invalid) {
        window->sparse |= bit;
    }
}

NV_STATUS uvm_vmem_call_commit(struct uvm_vmem_call *call)
{
    NvU32 i, n;

    for (i = 0; i < call->num_pieces; i++) {
        for (n = 0; n < call->pieces[i].count; n++)
            unit_apply(call, &call->pieces[i], n);
    }
    return commit(call);
}

void uvm_vmem_call_commit_cuts(struct uvm_vmem_call *call)
{
    (void)commit(call);
}

NV_STATUS uvm_vmem_call_wait(struct uvm_vmem_call *call)
{
    if (!call->pushes)
        return NV_OK;
    call->waits++;
    return uvm_tracker_wait(&call->tracker);
}

NV_STATUS uvm_vmem_piece_add(struct uvm_vmem_call *call, const struct uvm_vmem_piece *piece)
{
    struct uvm_vmem_piece *last = call->num_pieces ? &call->pieces[call->num_pieces - 1] : NULL;

    if (last && last->window == piece->window && last->handle == piece->handle && last->invalid == piece->invalid &&
        last->first + last->count == piece->first && (!piece->handle || last->unit + last->count == piece->unit)) {
        last->count += piece->count;
        return NV_OK;
    }

    if (call->num_pieces == call->max_pieces) {
        NvU32 max = max_t(NvU32, 128, call->max_pieces * 2);
        struct uvm_vmem_piece *pieces = uvm_kvrealloc(call->pieces, max * sizeof(*pieces));

        if (!pieces)
            return NV_ERR_NO_MEMORY;
        call->pieces = pieces;
        call->max_pieces = max;
    }
    call->pieces[call->num_pieces++] = *piece;
    return NV_OK;
}

NV_STATUS uvm_vmem_call_begin(struct uvm_vmem_call **out_call, uvm_va_space_t *va_space)
{
    struct uvm_vmem_space *space = uvm_vmem_space_get(va_space);
    struct uvm_vmem_call *call = space ? uvm_kvmalloc_zero(sizeof(*call)) : NULL;

    if (!call)
        return NV_ERR_NO_MEMORY;

    call->space = space;
    call->va_space = va_space;
    INIT_LIST_HEAD(&call->touched);
    INIT_LIST_HEAD(&call->deferred_free);
    uvm_tracker_init(&call->tracker);
    *out_call = call;
    return NV_OK;
}

void uvm_vmem_call_end(struct uvm_vmem_call *call)
{
    atomic64_add(call->pushes, &call->space->pushes);
    atomic64_add(call->invalidates, &call->space->invalidates);
    atomic64_add(call->waits, &call->space->waits);

    // Frees RM objects: no VA space lock may be held. Each GPU involved was retained for it.
    uvm_deferred_free_object_list(&call->deferred_free);

    uvm_tracker_deinit(&call->tracker);
    uvm_kvfree(call->pieces);
    uvm_kvfree(call);
}
