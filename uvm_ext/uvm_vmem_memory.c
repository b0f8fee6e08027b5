// Physical memory: 2 MiB slabs cut into pages, and the table of handles.
//
// Slabs are kernel chunks, which are pinned and never evicted. The extension cuts them into pages, because the PMM has
// no chunks of 128 or 256 KiB.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_memory.h"

#include "uvm_channel.h"
#include "uvm_hal.h"
#include "uvm_pmm_gpu.h"
#include "uvm_push.h"
#include "uvm_tracker.h"

// Chunks that one call of the PMM allocates
#define CHUNKS_AT_ONCE 64

// Room for one memset in a push, with a margin
#define MEMSET_SPACE 1024

// One uvm_vmem_pages_create().
struct create {
    struct uvm_vmem_space *space;
    struct uvm_vmem_gpu *vgpu;
    NvU32 granules; // per page
    NvU32 class;
    struct uvm_vmem_handle **handles;
    NvU32 count;
    NvU32 num_taken;  // handles that have a page
    NvU32 num_reused; // of these, the first so many have a page of an older slab
    NvU32 num_stored; // handles in the table

    struct list_head slabs; // new ones
    uvm_tracker_t tracker;
    uvm_push_t push;
    bool pushing;
};

struct uvm_vmem_handle *uvm_vmem_handle_find(struct uvm_vmem_space *space, NvU64 id)
{
    struct uvm_vmem_handle *handle = xa_load(&space->handles, id);

    return handle && !handle->hidden ? handle : NULL;
}

struct uvm_vmem_handle *uvm_vmem_handle_find_hidden(struct uvm_vmem_space *space, NvU64 id)
{
    struct uvm_vmem_handle *handle = xa_load(&space->handles, id);

    return handle && handle->hidden ? handle : NULL;
}

static NvU32 page_class(NvU32 granules)
{
    return granules == UVM_VMEM_GRANULES ? UVM_VMEM_CLASSES - 1 : ilog2(granules);
}

static NvU64 granules_size(NvU32 granules) { return granules * UVM_VMEM_GRANULE; }

static NvU32 handle_mask(const struct uvm_vmem_handle *handle)
{
    return uvm_vmem_mask(handle->first, handle->granules);
}

static void slab_free(struct uvm_vmem_slab *slab)
{
    struct uvm_vmem_gpu *vgpu = slab->owner;

    list_del(&slab->node);
    vgpu->bytes_held -= UVM_VMEM_BLOCK;
    uvm_pmm_gpu_free(&vgpu->gpu->pmm, slab->chunk, NULL);
    uvm_vmem_free(slab);
}

// Assign pages of the slab to handles without one, until the slab is full or all handles have one.
static void pages_take_from(struct create *c, struct uvm_vmem_slab *slab)
{
    while (c->num_taken < c->count) {
        struct uvm_vmem_handle *handle = c->handles[c->num_taken];
        int first = uvm_vmem_slab_first_free(slab->used, c->granules);

        if (first < 0)
            return;
        handle->slab = slab;
        handle->first = first;
        handle->granules = c->granules;
        handle->hidden = true;
        slab->used |= handle_mask(handle);
        c->vgpu->bytes_created += granules_size(c->granules);
        c->num_taken++;
    }
}

// Put the slab into the list of its page size. Slabs with a free page come first.
static void slab_sort(struct uvm_vmem_slab *slab)
{
    struct list_head *slabs = &slab->owner->slabs[page_class(slab->granules)];

    if (uvm_vmem_slab_first_free(slab->used, slab->granules) < 0)
        list_move_tail(&slab->node, slabs);
    else
        list_move(&slab->node, slabs);
}

void uvm_vmem_handle_free(struct uvm_vmem_handle *handle)
{
    struct uvm_vmem_slab *slab = handle->slab;

    lockdep_assert_held(&slab->owner->space->lock);
    UVM_ASSERT(list_empty(&handle->entries));

    slab->used &= ~handle_mask(handle);
    slab->owner->bytes_created -= granules_size(handle->granules);
    if (slab->used)
        slab_sort(slab);
    else
        slab_free(slab);
    uvm_vmem_free(handle);
}

void uvm_vmem_memory_free_all(struct uvm_vmem_gpu *vgpu)
{
    struct uvm_vmem_slab *slab, *next;
    struct uvm_vmem_handle *handle;
    unsigned long id;
    NvU32 i;

    lockdep_assert_held(&vgpu->space->lock);

    xa_for_each(&vgpu->space->handles, id, handle) {
        if (handle->slab->owner != vgpu)
            continue;
        xa_erase(&vgpu->space->handles, id);
        uvm_vmem_handle_free(handle);
        cond_resched();
    }

    // Those that a CREATE left behind when the GPU did not answer any more
    for (i = 0; i < UVM_VMEM_CLASSES; i++)
        list_for_each_entry_safe(slab, next, &vgpu->slabs[i], node)
            slab_free(slab);
    UVM_ASSERT(!vgpu->bytes_held);
}

// Allocate chunks for the pages that do not fit into existing slabs. The new slabs go to c->slabs, and into the list of
// their page size only when nothing can fail any more.
static NV_STATUS slabs_alloc(struct create *c)
{
    uvm_gpu_chunk_t *chunks[CHUNKS_AT_ONCE];
    struct uvm_vmem_slab *slab;
    NvU32 per_slab = UVM_VMEM_GRANULES / c->granules;
    NvU32 free = 0;
    NvU32 left;
    NV_STATUS status = NV_OK;

    list_for_each_entry(slab, &c->vgpu->slabs[c->class], node) {
        NvU32 n = uvm_vmem_slab_num_free(slab->used, c->granules);

        if (!n || free >= c->count)
            break;
        free += n;
    }
    left = free >= c->count ? 0 : DIV_ROUND_UP(c->count - free, per_slab);

    while (left && status == NV_OK) {
        NvU32 n = min_t(NvU32, left, CHUNKS_AT_ONCE);
        NvU32 i;

        status = uvm_pmm_gpu_alloc_kernel(&c->vgpu->gpu->pmm, n, UVM_CHUNK_SIZE_2M, UVM_PMM_ALLOC_FLAGS_EVICT, chunks,
                                          &c->tracker);
        if (status != NV_OK)
            break;

        for (i = 0; i < n; i++) {
            slab = uvm_vmem_zalloc(sizeof(*slab));
            if (!slab) {
                while (i < n)
                    uvm_pmm_gpu_free(&c->vgpu->gpu->pmm, chunks[i++], NULL);
                status = NV_ERR_NO_MEMORY;
                break;
            }
            slab->owner = c->vgpu;
            slab->chunk = chunks[i];
            slab->granules = c->granules;
            slab->dirty = chunks[i]->is_zero ? 0 : ~0U;
            list_add_tail(&slab->node, &c->slabs);
            c->vgpu->bytes_held += UVM_VMEM_BLOCK;
        }
        left -= n;
        cond_resched();
    }
    return status;
}

static void push_end(struct create *c)
{
    if (!c->pushing)
        return;
    uvm_push_end(&c->push);
    uvm_tracker_overwrite_with_push(&c->tracker, &c->push);
    c->pushing = false;
}

// Zero granules of a slab. The memsets of one CREATE share a push while there is room.
static NV_STATUS granules_zero(struct create *c, struct uvm_vmem_slab *slab, NvU32 first, NvU32 count)
{
    uvm_gpu_t *gpu = c->vgpu->gpu;
    NvU64 address = slab->chunk->address + first * UVM_VMEM_GRANULE;
    NV_STATUS status;

    if (c->pushing && !uvm_push_has_space(&c->push, MEMSET_SPACE))
        push_end(c);

    if (!c->pushing) {
        status = uvm_push_begin_acquire(gpu->channel_manager, UVM_CHANNEL_TYPE_GPU_INTERNAL, &c->tracker, &c->push,
                                        "vMem zero from 0x%llx", address);
        if (status != NV_OK)
            return status;
        c->pushing = true;
    }

    // Nobody uses the memory yet, so the memsets need no order other than the end of the push, which the call waits
    // for.
    uvm_push_set_flag(&c->push, UVM_PUSH_FLAG_CE_NEXT_PIPELINED);
    uvm_push_set_flag(&c->push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
    gpu->parent->ce_hal->memset_8(&c->push, uvm_gpu_address_copy(gpu, uvm_gpu_phys_address(UVM_APERTURE_VID, address)),
                                  0, granules_size(count));
    return NV_OK;
}

// Zero new slabs completely, and assigned pages that were used before. Assigned pages count as dirty from now on.
static NV_STATUS pages_zero(struct create *c)
{
    struct uvm_vmem_slab *slab;
    NV_STATUS status = NV_OK;
    NvU32 i;

    list_for_each_entry(slab, &c->slabs, node) {
        if (!slab->dirty)
            continue;
        status = granules_zero(c, slab, 0, UVM_VMEM_GRANULES);
        if (status != NV_OK)
            break;
        slab->dirty = 0;
    }

    for (i = 0; i < c->count && status == NV_OK; i++) {
        NvU32 mask = handle_mask(c->handles[i]) & c->handles[i]->slab->dirty;
        unsigned int first, count;

        while (status == NV_OK && uvm_vmem_next_run(&mask, &first, &count))
            status = granules_zero(c, c->handles[i]->slab, first, count);
        c->handles[i]->slab->dirty |= handle_mask(c->handles[i]);
    }

    push_end(c);
    return status;
}

static void pages_take(struct create *c)
{
    struct list_head *slabs = &c->vgpu->slabs[c->class];
    struct uvm_vmem_slab *slab;

    while (c->num_taken < c->count && !list_empty(slabs)) {
        slab = list_first_entry(slabs, struct uvm_vmem_slab, node);
        if (uvm_vmem_slab_first_free(slab->used, c->granules) < 0)
            break;
        pages_take_from(c, slab);
        slab_sort(slab);
    }
    c->num_reused = c->num_taken;

    list_for_each_entry(slab, &c->slabs, node)
        pages_take_from(c, slab);
}

static NV_STATUS handles_store(struct create *c)
{
    for (; c->num_stored < c->count; c->num_stored++) {
        struct uvm_vmem_handle *handle = c->handles[c->num_stored];

        handle->id = c->space->next_handle + c->num_stored;
        if (xa_err(xa_store(&c->space->handles, handle->id, handle, NV_UVM_GFP_FLAGS)))
            return NV_ERR_NO_MEMORY;
    }
    return NV_OK;
}

// Undo everything. The GPU may still be zeroing: if a fatal error ends this wait for it, or ended one before, the memory
// that it may still write to has no owner any more, but stays until the GPU is unregistered.
static void create_unwind(struct create *c)
{
    bool idle = uvm_tracker_wait(&c->tracker) == NV_OK && uvm_global_get_status() == NV_OK;
    struct uvm_vmem_slab *slab, *next;

    while (c->num_stored)
        xa_erase(&c->space->handles, c->handles[--c->num_stored]->id);

    while (c->num_taken) {
        struct uvm_vmem_handle *handle = c->handles[--c->num_taken];

        c->vgpu->bytes_created -= granules_size(handle->granules);
        if (idle)
            handle->slab->used &= ~handle_mask(handle);
        if (c->num_taken < c->num_reused)
            slab_sort(handle->slab);
        handle->slab = NULL;
    }

    list_for_each_entry_safe(slab, next, &c->slabs, node) {
        if (idle) {
            slab_free(slab);
        } else {
            slab->used = ~0U;
            slab_sort(slab);
        }
    }
}

// Allocate, zero and store the pages, or undo everything. space->lock is held while the GPU zeroes, so that free memory
// in a slab is either zero or known to be dirty.
static NV_STATUS create_run(struct create *c)
{
    struct uvm_vmem_slab *slab, *next;
    NV_STATUS status;

    status = slabs_alloc(c);
    if (status == NV_OK) {
        pages_take(c);
        status = handles_store(c);
    }
    if (status == NV_OK)
        status = pages_zero(c);
    if (status == NV_OK)
        status = uvm_tracker_wait(&c->tracker);
    if (status != NV_OK) {
        create_unwind(c);
        return status;
    }

    list_for_each_entry_safe(slab, next, &c->slabs, node)
        slab_sort(slab);
    c->space->next_handle += c->count;
    return NV_OK;
}

NV_STATUS uvm_vmem_pages_create(struct uvm_vmem_gpu *vgpu, NvU32 granules, struct uvm_vmem_handle **handles,
                                NvU32 count, NvU64 *first)
{
    struct create *c = uvm_vmem_zalloc(sizeof(*c));
    NV_STATUS status;

    lockdep_assert_held(&vgpu->space->lock);

    if (!c)
        return NV_ERR_NO_MEMORY;

    c->space = vgpu->space;
    c->vgpu = vgpu;
    c->granules = granules;
    c->class = page_class(granules);
    c->handles = handles;
    c->count = count;
    INIT_LIST_HEAD(&c->slabs);
    uvm_tracker_init(&c->tracker);

    status = create_run(c);
    if (status == NV_OK)
        *first = handles[0]->id;
    uvm_tracker_deinit(&c->tracker);
    uvm_vmem_free(c);
    return status;
}
