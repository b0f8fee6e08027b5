// RELEASE unmaps pages everywhere and then frees them. It needs no memory, so it cannot fail for lack of it, and it
// holds the VA space lock for a bounded time however many mappings there are.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_api.h"
#include "uvm_vmem_check.h"
#include "uvm_vmem_commit.h"
#include "uvm_vmem_file.h"
#include "uvm_vmem_memory.h"

#include <linux/uaccess.h>

// Entries unmapped under one hold of the VA space lock
#define UNMAP_AT_ONCE 4096

// One RELEASE.
struct release {
    const NvU64 *ids;
    NvU32 count;
    NvU32 failed;
    bool claimed;   // all handles were found, and other calls no longer find them
    NvU32 unmapped; // how many handles, from the first, no entry maps any more
    NvU32 freed;    // how many of these are freed
};

// Hide the handles from other calls, all or none. Sets call->vgpu.
static NV_STATUS handles_claim(struct uvm_vmem_call *call, struct release *r)
{
    NvU32 i;

    for (i = 0; i < r->count; i++) {
        struct uvm_vmem_handle *handle = uvm_vmem_handle_find(call->space, r->ids[i]);

        if (!handle || (call->vgpu && handle->slab->owner != call->vgpu))
            break;
        call->vgpu = handle->slab->owner;
        handle->hidden = true;
    }
    if (i == r->count) {
        r->claimed = true;
        return NV_OK;
    }
    r->failed = i;
    while (i)
        uvm_vmem_handle_find_hidden(call->space, r->ids[--i])->hidden = false;
    return NV_ERR_INVALID_OBJECT_HANDLE;
}

// Unmap a whole overlay with a 2 MiB entry, which belongs to a single page.
static NvU32 huge_unmap(struct uvm_vmem_call *call, struct uvm_vmem_overlay *overlay)
{
    // There is no sparse 2 MiB entry. Without memory for a table, the addresses become invalid instead.
    bool invalid = uvm_vmem_overlay_cut(call, overlay) != NV_OK;
    NvU32 i;

    for (i = 0; i < UVM_VMEM_GRANULES; i++)
        uvm_vmem_entry_unmap(call, overlay, i, invalid);
    return UVM_VMEM_GRANULES;
}

// Unmap up to *budget entries of the page. False if there are more.
static bool handle_unmap(struct uvm_vmem_call *call, struct uvm_vmem_handle *handle, NvU32 *budget)
{
    while (!list_empty(&handle->entries)) {
        struct uvm_vmem_entry *entry = list_first_entry(&handle->entries, struct uvm_vmem_entry, node);
        struct uvm_vmem_overlay *overlay = uvm_vmem_entry_overlay(entry);
        NvU32 done = 1;

        if (!*budget)
            return false;

        uvm_vmem_overlay_touch(call, overlay);
        if (uvm_vmem_overlay_page_size(overlay) == UVM_PAGE_SIZE_2M && !overlay->cut)
            done = huge_unmap(call, overlay);
        else
            uvm_vmem_entry_unmap(call, overlay, entry->index, false);

        *budget -= min(*budget, done);
        if (!(*budget % 64))
            cond_resched();
    }
    return true;
}

// LOCKING: the VA space lock in write mode.
static NV_STATUS release_change(struct uvm_vmem_call *call, void *arg)
{
    struct release *r = arg;
    NvU32 budget = UNMAP_AT_ONCE;
    uvm_gpu_va_space_t *gpu_va_space;
    NV_STATUS status;

    if (!r->claimed) {
        status = handles_claim(call, r);
        if (status != NV_OK)
            return status;
        call->gpu = call->vgpu->gpu;
    }

    // Between two steps the GPU can be unregistered. Its handles, and perhaps the GPU itself, are then gone.
    call->tree = NULL;
    if (uvm_vmem_handle_find_hidden(call->space, r->ids[r->unmapped])) {
        gpu_va_space = uvm_gpu_va_space_get(call->va_space, call->gpu);
        call->tree = gpu_va_space ? &gpu_va_space->page_tables : NULL;
    }

    for (; r->unmapped < r->count; r->unmapped++) {
        struct uvm_vmem_handle *handle = uvm_vmem_handle_find_hidden(call->space, r->ids[r->unmapped]);

        if (handle && !handle_unmap(call, handle, &budget))
            break;
    }
    status = uvm_vmem_call_commit(call);
    if (status == NV_OK && r->unmapped < r->count)
        status = NV_WARN_MORE_PROCESSING_REQUIRED;
    return status;
}

// Handle lookup requires the VA-space write lock, so these handles cannot have been looked up since the unmap. After a
// fatal error the GPU may still reach the pages, so they stay until the GPU is unregistered.
//
// LOCKING: the VA space lock in read mode.
static void release_free_pages(struct uvm_vmem_call *call, void *arg)
{
    struct release *r = arg;

    mutex_lock(&call->space->lock);
    for (; r->freed < r->unmapped; r->freed++) {
        struct uvm_vmem_handle *handle = xa_erase(&call->space->handles, r->ids[r->freed]);

        if (handle)
            uvm_vmem_handle_free(handle);
    }
    mutex_unlock(&call->space->lock);
}

static bool ids_copy(NvU64 *to, const struct uvm_vmem_release *p)
{
    return !copy_from_user(to, u64_to_user_ptr(p->handles), p->count * sizeof(*to));
}

NV_STATUS uvm_vmem_api_release(void *params, struct file *filp)
{
    struct uvm_vmem_release *p = params;
    struct uvm_vmem_space *space;
    struct uvm_vmem_reserve *reserve;
    struct release r = {.count = p->count, .failed = UVM_VMEM_NO_OP};
    NvU64 *ids;
    NV_STATUS status;

    p->out_failed = UVM_VMEM_NO_OP;
    p->out_pushes = 0;
    p->out_invalidates = 0;
    p->out_waits = 0;

    status = uvm_vmem_check_release(p);
    if (status != NV_OK)
        return status;

    space = uvm_vmem_file_space(filp);
    if (!space)
        return NV_ERR_NO_MEMORY;
    reserve = space->reserve;

    // The caller's memory can keep the copy waiting for as long as it likes, so nothing is locked meanwhile. Only when
    // memory is short is it copied to where other calls of RELEASE wait for it, which a signal that kills can end.
    ids = uvm_vmem_zalloc(p->count * sizeof(*ids));
    status = NV_ERR_INVALID_POINTER;
    if (ids && !ids_copy(ids, p))
        goto out;
    if (mutex_lock_killable(&reserve->lock)) {
        status = NV_ERR_SIGNAL_PENDING;
        goto out;
    }
    if (ids || ids_copy(reserve->ids, p)) {
        r.ids = ids ? ids : reserve->ids;
        uvm_vmem_call_init(&reserve->call, space);
        status = uvm_vmem_call_run(&reserve->call, release_change, release_free_pages, &r);
        p->out_failed = r.failed;
        p->out_pushes = reserve->call.push.pushes;
        p->out_invalidates = reserve->call.push.invalidates;
        p->out_waits = reserve->call.push.waits;
        uvm_vmem_call_deinit(&reserve->call);
    }
    mutex_unlock(&reserve->lock);
out:
    uvm_vmem_free(ids);
    return status;
}
