// RELEASE: pages unmapped wherever they are, then freed.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_memory.h"
#include "uvm_vmem_window.h"

#include "uvm_kvmalloc.h"

#include <linux/uaccess.h>

#define MAX_MAPPED (UVM_VMEM_MAX_BYTES / UVM_VMEM_GRANULE)

// Whether the window is still what maps at va.
static bool window_is_live(struct uvm_vmem_call *call,
                           struct uvm_vmem_window *window,
                           NvU64 va,
                           uvm_vmem_range_t **range)
{
    uvm_ext_gpu_map_t *map;

    *range = uvm_vmem_range_find(call->va_space, va);
    if (!*range)
        return false;
    map = uvm_vmem_map_at(*range, call->gpu, va);
    return map && uvm_vmem_window_of(map) == window;
}

// Add a piece for everywhere that the handle is mapped.
static NV_STATUS handle_collect(struct uvm_vmem_call *call, struct uvm_vmem_handle *handle)
{
    struct uvm_vmem_window *window, *touched;
    struct uvm_vmem_entry *entry, *next;
    struct uvm_vmem_piece piece;
    uvm_vmem_range_t *range;
    NV_STATUS status;
    NvU64 va;

restart:
    list_for_each_entry_safe(entry, next, &handle->entries, node) {
        window = uvm_vmem_entry_window(entry);
        va = uvm_vmem_slot(window->start) + entry->index * UVM_VMEM_GRANULE;

        // UVM has unmapped the address since.
        if (!call->tree || !window_is_live(call, window, va, &range)) {
            uvm_vmem_entry_clear(window, entry->index);
            continue;
        }

        status = uvm_vmem_window_touch(call, range, va, UVM_VMEM_LOOK, false, &touched);
        if (status != NV_OK)
            return status;

        // What UVM left of a window got a window of its own; the entries moved there, so the list is another.
        if (touched != window)
            goto restart;
    }

    list_for_each_entry(entry, &handle->entries, node) {
        window = uvm_vmem_entry_window(entry);
        if (uvm_vmem_window_page_size(window) == UVM_PAGE_SIZE_2M)
            window->cut_wanted = true;

        piece.window = window;
        piece.handle = NULL;
        piece.first = entry->index;
        piece.count = 1;
        piece.unit = 0;
        piece.invalid = false;
        status = uvm_vmem_piece_add(call, &piece);
        if (status != NV_OK)
            return status;
    }
    return NV_OK;
}

// Find the handles. Sets call->vgpu and call->gpu, and call->tree when the GPU has an address space.
static NV_STATUS handles_find(struct uvm_vmem_call *call,
                              struct uvm_vmem_handle **handles,
                              const NvU64 *ids,
                              struct uvm_vmem_release *p)
{
    uvm_gpu_va_space_t *gpu_va_space;
    NV_STATUS status = NV_OK;
    NvU64 mapped = 0;
    NvU32 i, found;

    for (found = 0; found < p->count; found++) {
        struct uvm_vmem_handle *handle = uvm_vmem_handle_find(call->space, ids[found]);

        if (!handle || handle->marked || (call->vgpu && handle->slab->owner != call->vgpu)) {
            status = NV_ERR_INVALID_OBJECT_HANDLE;
            break;
        }
        mapped += handle->mapped;
        if (mapped > MAX_MAPPED) {
            status = NV_ERR_INVALID_LIMIT;
            break;
        }
        call->vgpu = handle->slab->owner;
        handle->marked = true;
        handles[found] = handle;
    }
    for (i = 0; i < found; i++)
        handles[i]->marked = false;

    if (status != NV_OK) {
        p->out_failed = found;
        return status;
    }

    call->gpu = call->vgpu->gpu;
    gpu_va_space = uvm_gpu_va_space_get(call->va_space, call->gpu);
    call->tree = gpu_va_space ? &gpu_va_space->page_tables : NULL;
    return NV_OK;
}

// LOCKING: the VA space lock in write mode.
static NV_STATUS release_locked(struct uvm_vmem_call *call,
                                struct uvm_vmem_handle **handles,
                                const NvU64 *ids,
                                struct uvm_vmem_release *p)
{
    NV_STATUS status;
    NvU32 i;

    uvm_vmem_windows_reap(call->space, UVM_VMEM_REAP_PER_CALL);

    status = call->space->dead;
    if (status == NV_OK)
        status = handles_find(call, handles, ids, p);
    if (status != NV_OK)
        return status;

    for (i = 0; i < p->count && status == NV_OK; i++) {
        status = handle_collect(call, handles[i]);
        if (status != NV_OK)
            p->out_failed = i;
    }
    if (status == NV_OK)
        status = uvm_vmem_call_cut(call);
    if (status != NV_OK) {
        uvm_vmem_call_undo(call);
        return status;
    }

    return uvm_vmem_call_commit(call);
}

NV_STATUS uvm_vmem_api_release(void *params, struct file *filp)
{
    struct uvm_vmem_release *p = params;
    uvm_va_space_t *va_space = uvm_va_space_get(filp);
    struct uvm_vmem_handle **handles;
    struct uvm_vmem_call *call;
    NV_STATUS status, wait;
    NvU64 *ids;
    NvU32 i;

    p->out_failed = UVM_VMEM_NO_OP;
    p->out_pushes = 0;
    p->out_invalidates = 0;
    p->out_waits = 0;

    status = uvm_vmem_check_release(p);
    if (status != NV_OK)
        return status;

    handles = uvm_kvmalloc(p->count * sizeof(*handles));
    ids = uvm_kvmalloc(p->count * sizeof(*ids));
    if (!handles || !ids) {
        status = NV_ERR_NO_MEMORY;
        goto out;
    }
    if (copy_from_user(ids, u64_to_user_ptr(p->handles), p->count * sizeof(*ids))) {
        status = NV_ERR_INVALID_POINTER;
        goto out;
    }
    status = uvm_vmem_call_begin(&call, va_space);
    if (status != NV_OK)
        goto out;

    uvm_va_space_down_write(va_space);
    status = release_locked(call, handles, ids, p);
    uvm_va_space_downgrade_write(va_space);
    wait = uvm_vmem_call_wait(call);

    // Who looks for a handle needs the VA space lock in write mode, so nobody found these since they were unmapped.
    // After a fatal error the GPU may reach the pages still: they stay until it is unregistered.
    if (status == NV_OK && wait == NV_OK) {
        mutex_lock(&call->space->lock);
        for (i = 0; i < p->count; i++) {
            xa_erase(&call->space->handles, ids[i]);
            uvm_vmem_handle_free(handles[i]);
        }
        mutex_unlock(&call->space->lock);
    }
    uvm_va_space_up_read(va_space);

    if (status == NV_OK)
        status = wait;
    p->out_pushes = call->pushes;
    p->out_invalidates = call->invalidates;
    p->out_waits = call->waits;
    uvm_vmem_call_end(call);

out:
    uvm_kvfree(ids);
    uvm_kvfree(handles);
    return status;
}
