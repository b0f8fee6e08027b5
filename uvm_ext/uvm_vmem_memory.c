// Physical memory: pages of 2 MiB, and the table of handles.
//
// A page is a kernel chunk of the PMM, which is pinned and never evicted.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_memory.h"

#include "uvm_channel.h"
#include "uvm_hal.h"
#include "uvm_kvmalloc.h"
#include "uvm_pmm_gpu.h"
#include "uvm_push.h"
#include "uvm_tracker.h"

// Chunks that one call of the PMM allocates
#define CHUNKS_AT_ONCE 64

// Room for one memset in a push, with a margin
#define MEMSET_SPACE 1024

// One uvm_vmem_pages_create().
struct create {
    struct uvm_vmem_gpu *vgpu;
    struct uvm_vmem_handle **handles;
    NvU32 count;
    NvU32 num_chunks; // handles that have memory
    NvU32 num_stored; // handles in the table

    uvm_tracker_t tracker;
    uvm_push_t push;
    bool pushing;
};

struct uvm_vmem_handle *uvm_vmem_handle_find(struct uvm_vmem_space *space, NvU64 id)
{
    struct uvm_vmem_handle *handle = xa_load(&space->handles, id);

    return handle && !handle->releasing ? handle : NULL;
}

struct uvm_vmem_handle *uvm_vmem_handle_find_releasing(struct uvm_vmem_space *space, NvU64 id)
{
    struct uvm_vmem_handle *handle = xa_load(&space->handles, id);

    return handle && handle->releasing ? handle : NULL;
}

static void chunk_free(struct uvm_vmem_handle *handle)
{
    handle->owner->bytes_held -= UVM_VMEM_BLOCK;
    uvm_pmm_gpu_free(&handle->owner->gpu->pmm, handle->chunk, NULL);
}

void uvm_vmem_handle_free(struct uvm_vmem_handle *handle)
{
    lockdep_assert_held(&handle->owner->space->lock);
    UVM_ASSERT(list_empty(&handle->entries));

    handle->owner->space->num_handles--;
    chunk_free(handle);
    uvm_kvfree(handle);
}

void uvm_vmem_memory_free_all(struct uvm_vmem_gpu *vgpu)
{
    struct uvm_vmem_handle *handle;
    unsigned long id;

    lockdep_assert_held(&vgpu->space->lock);

    xa_for_each(&vgpu->space->handles, id, handle) {
        if (handle->owner != vgpu)
            continue;
        xa_erase(&vgpu->space->handles, id);
        uvm_vmem_handle_free(handle);
        cond_resched();
    }
    UVM_ASSERT(!vgpu->bytes_held);
}

static NV_STATUS chunks_alloc(struct create *c)
{
    uvm_gpu_chunk_t *chunks[CHUNKS_AT_ONCE];

    while (c->num_chunks < c->count) {
        NvU32 n = min_t(NvU32, c->count - c->num_chunks, CHUNKS_AT_ONCE);
        NvU32 i;
        NV_STATUS status = uvm_pmm_gpu_alloc_kernel(&c->vgpu->gpu->pmm, n, UVM_CHUNK_SIZE_2M, UVM_PMM_ALLOC_FLAGS_EVICT,
                                                    chunks, &c->tracker);

        if (status != NV_OK)
            return status;
        for (i = 0; i < n; i++) {
            struct uvm_vmem_handle *handle = c->handles[c->num_chunks++];

            handle->owner = c->vgpu;
            handle->chunk = chunks[i];
            c->vgpu->bytes_held += UVM_VMEM_BLOCK;
        }
        cond_resched();
    }
    return NV_OK;
}

static void push_end(struct create *c)
{
    if (!c->pushing)
        return;
    uvm_push_end(&c->push);
    uvm_tracker_overwrite_with_push(&c->tracker, &c->push);
    c->pushing = false;
}

// The memsets of one CREATE share a push while there is room.
static NV_STATUS chunk_zero(struct create *c, uvm_gpu_chunk_t *chunk)
{
    uvm_gpu_t *gpu = c->vgpu->gpu;
    NV_STATUS status;

    if (c->pushing && !uvm_push_has_space(&c->push, MEMSET_SPACE))
        push_end(c);

    if (!c->pushing) {
        status = uvm_push_begin_acquire(gpu->channel_manager, UVM_CHANNEL_TYPE_GPU_INTERNAL, &c->tracker, &c->push,
                                        "vMem zero from 0x%llx", chunk->address);
        if (status != NV_OK)
            return status;
        c->pushing = true;
    }

    // Nobody uses the memory yet, so the memsets need no order other than the end of the push, which the call waits
    // for.
    uvm_push_set_flag(&c->push, UVM_PUSH_FLAG_CE_NEXT_PIPELINED);
    uvm_push_set_flag(&c->push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
    gpu->parent->ce_hal->memset_8(&c->push,
                                  uvm_gpu_address_copy(gpu, uvm_gpu_phys_address(UVM_APERTURE_VID, chunk->address)), 0,
                                  UVM_VMEM_BLOCK);
    return NV_OK;
}

static NV_STATUS pages_zero(struct create *c)
{
    NV_STATUS status = NV_OK;
    NvU32 i;

    for (i = 0; i < c->count && status == NV_OK; i++) {
        if (!c->handles[i]->chunk->is_zero)
            status = chunk_zero(c, c->handles[i]->chunk);
    }
    push_end(c);
    return status;
}

static NV_STATUS handles_store(struct create *c)
{
    struct uvm_vmem_space *space = c->vgpu->space;

    for (; c->num_stored < c->count; c->num_stored++) {
        struct uvm_vmem_handle *handle = c->handles[c->num_stored];

        handle->id = space->next_handle + c->num_stored;
        if (xa_err(xa_store(&space->handles, handle->id, handle, NV_UVM_GFP_FLAGS)))
            return NV_ERR_NO_MEMORY;
    }
    return NV_OK;
}

// Undo everything. The GPU may still be zeroing.
static void create_unwind(struct create *c)
{
    (void)uvm_tracker_wait(&c->tracker);

    while (c->num_stored)
        xa_erase(&c->vgpu->space->handles, c->handles[--c->num_stored]->id);
    while (c->num_chunks)
        chunk_free(c->handles[--c->num_chunks]);
}

// Allocate, zero and store the pages, or undo everything.
static NV_STATUS create_run(struct create *c)
{
    NV_STATUS status = chunks_alloc(c);

    if (status == NV_OK)
        status = handles_store(c);
    if (status == NV_OK)
        status = pages_zero(c);
    if (status == NV_OK)
        status = uvm_tracker_wait(&c->tracker);
    if (status != NV_OK) {
        create_unwind(c);
        return status;
    }

    c->vgpu->space->next_handle += c->count;
    c->vgpu->space->num_handles += c->count;
    return NV_OK;
}

NV_STATUS uvm_vmem_pages_create(struct uvm_vmem_gpu *vgpu, struct uvm_vmem_handle **handles, NvU32 count, NvU64 *first)
{
    struct create *c = uvm_kvmalloc_zero(sizeof(*c));
    NV_STATUS status;

    lockdep_assert_held(&vgpu->space->lock);

    if (!c)
        return NV_ERR_NO_MEMORY;

    c->vgpu = vgpu;
    c->handles = handles;
    c->count = count;
    uvm_tracker_init(&c->tracker);

    status = create_run(c);
    if (status == NV_OK)
        *first = handles[0]->id;
    uvm_tracker_deinit(&c->tracker);
    uvm_kvfree(c);
    return status;
}
