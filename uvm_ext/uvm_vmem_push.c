// Begins pushes, keeps them within their room, chains them, ends them and waits for them.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_push.h"

#include "uvm_channel.h"
#include "uvm_hal.h"

// Room in a push for a PTE batch to write out its entries, in addition to the entries themselves, and for the end of a
// push (membars, two sets of invalidates). Both have a wide margin
#define FLUSH_SPACE 512
#define END_SPACE 4096

void uvm_vmem_push_init(struct uvm_vmem_push *push)
{
    memset(push, 0, sizeof(*push));
    uvm_tracker_init(&push->tracker);
}

void uvm_vmem_push_deinit(struct uvm_vmem_push *push) { uvm_tracker_deinit(&push->tracker); }

static NV_STATUS push_begin(struct uvm_vmem_push *push)
{
    // Only a fatal error is possible. Earlier pushes cannot be undone.
    push->fatal = uvm_push_begin_acquire(push->tree->gpu->channel_manager, UVM_CHANNEL_TYPE_MEMOPS, &push->tracker,
                                         &push->push, "vMem PTEs");
    if (push->fatal == NV_OK)
        push->pushes++;
    return push->fatal;
}

static void entries_begin(struct uvm_vmem_push *push)
{
    uvm_pte_batch_begin(&push->push, &push->ptes);
    push->batching = true;
}

NV_STATUS uvm_vmem_push_begin(struct uvm_vmem_push *push, uvm_page_tree_t *tree)
{
    push->tree = tree;

    // Without memory to extend the tracker, this waits for the tables here.
    uvm_mutex_lock(&tree->lock);
    push->fatal = uvm_tracker_add_tracker_safe(&push->tracker, &tree->tracker);
    uvm_mutex_unlock(&tree->lock);

    if (push->fatal == NV_OK && push_begin(push) == NV_OK)
        entries_begin(push);
    return push->fatal;
}

// Bytes that the PTE batch has gathered and will write into the push. uvm_push_has_space() does not count them until
// the batch writes them out, which it does by itself only after 32 KiB of adjacent entries.
static NvU32 entries_space(const struct uvm_vmem_push *push)
{
    return push->batching ? push->ptes.pte_count * push->ptes.pte_entry_size + FLUSH_SPACE : 0;
}

NV_STATUS uvm_vmem_push_reserve(struct uvm_vmem_push *push, NvU32 space)
{
    bool batching = push->batching;

    if (push->fatal != NV_OK)
        return push->fatal;

    // The check fails once a push is too long, because its subtraction wraps. No push may ever get there.
    if (uvm_push_has_space(&push->push, space + entries_space(push) + END_SPACE))
        return NV_OK;

    if (batching)
        uvm_vmem_push_entries_end(push);
    else
        uvm_hal_wfi_membar(&push->push, UVM_MEMBAR_SYS);

    // The membar above orders these writes before the next push.
    uvm_push_set_flag(&push->push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
    uvm_vmem_push_end(push);
    if (push_begin(push) == NV_OK && batching)
        entries_begin(push);
    return push->fatal;
}

void uvm_vmem_push_entries_end(struct uvm_vmem_push *push)
{
    uvm_pte_batch_end(&push->ptes);
    push->batching = false;
}

void uvm_vmem_push_invalidate_begin(struct uvm_vmem_push *push) { uvm_tlb_batch_begin(push->tree, &push->tlb); }

static void pending_flush(struct uvm_vmem_push *push)
{
    NvU64 sizes = UVM_PAGE_SIZE_64K | (push->pending_huge ? UVM_PAGE_SIZE_2M : 0);

    if (!push->pending_end)
        return;
    uvm_tlb_batch_invalidate(&push->tlb, push->pending_start, push->pending_end - push->pending_start + 1, sizes,
                             UVM_MEMBAR_NONE);
    push->pending_end = 0;
}

void uvm_vmem_push_invalidate_add(struct uvm_vmem_push *push, NvU64 start, NvU64 end, bool huge)
{
    if (push->pending_end && push->pending_end + 1 == start && push->pending_huge == huge) {
        push->pending_end = end;
        return;
    }
    pending_flush(push);
    push->pending_start = start;
    push->pending_end = end;
    push->pending_huge = huge;
}

void uvm_vmem_push_invalidate(struct uvm_vmem_push *push, uvm_membar_t membar)
{
    pending_flush(push);
    if (!push->tlb.count)
        return;

    // Beyond its limit, the batch becomes a single invalidate of the whole address space.
    push->invalidates += push->tlb.count > UVM_TLB_BATCH_MAX_ENTRIES ? 1 : push->tlb.count;
    uvm_tlb_batch_end(&push->tlb, &push->push, membar);
}

void uvm_vmem_push_end(struct uvm_vmem_push *push)
{
    uvm_push_end(&push->push);

    // The push acquired the tracker.
    uvm_tracker_overwrite_with_push(&push->tracker, &push->push);
}

NV_STATUS uvm_vmem_push_wait(struct uvm_vmem_push *push)
{
    NV_STATUS status;

    if (uvm_tracker_is_empty(&push->tracker))
        return push->fatal;
    push->waits++;
    status = uvm_tracker_wait(&push->tracker);
    return push->fatal != NV_OK ? push->fatal : status;
}
