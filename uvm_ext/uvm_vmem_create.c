// CREATE: pages of physical memory.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_api.h"
#include "uvm_vmem_check.h"
#include "uvm_vmem_file.h"
#include "uvm_vmem_memory.h"

static void handles_free(struct uvm_vmem_handle **handles, NvU32 count)
{
    NvU32 i;

    for (i = 0; handles && i < count; i++)
        uvm_vmem_free(handles[i]);
    uvm_vmem_free(handles);
}

static struct uvm_vmem_handle **handles_alloc(NvU32 count)
{
    struct uvm_vmem_handle **handles = uvm_vmem_zalloc(count * sizeof(*handles));
    NvU32 i;

    for (i = 0; handles && i < count; i++) {
        handles[i] = uvm_vmem_zalloc(sizeof(*handles[i]));
        if (!handles[i]) {
            handles_free(handles, i);
            return NULL;
        }
        INIT_LIST_HEAD(&handles[i]->entries);
    }
    return handles;
}

// LOCKING: the VA space lock in read mode.
static NV_STATUS pages_create(struct uvm_vmem_space *space, struct uvm_vmem_create *p, struct uvm_vmem_handle **handles)
{
    struct uvm_vmem_gpu *vgpu;
    uvm_gpu_t *gpu;
    NV_STATUS status = uvm_vmem_gpu_lookup(space->va_space, p->gpu_uuid, &gpu, NULL);

    if (status == NV_OK)
        status = space->fatal;
    if (status != NV_OK)
        return status;

    mutex_lock(&space->lock);
    vgpu = uvm_vmem_gpu_find_or_add(space, gpu);
    status = NV_ERR_NO_MEMORY;
    if (vgpu)
        status = uvm_vmem_pages_create(vgpu, uvm_vmem_page_granules(p->page_size), handles, p->count, &p->out_handle);
    mutex_unlock(&space->lock);
    return status;
}

NV_STATUS uvm_vmem_api_create(void *params, struct file *filp)
{
    struct uvm_vmem_create *p = params;
    struct uvm_vmem_space *space;
    struct uvm_vmem_handle **handles;
    NV_STATUS status;

    p->out_handle = 0;

    status = uvm_vmem_check_create(p);
    if (status != NV_OK)
        return status;

    space = uvm_vmem_file_space(filp);
    handles = space ? handles_alloc(p->count) : NULL;
    if (!handles)
        return NV_ERR_NO_MEMORY;

    uvm_va_space_down_read(space->va_space);
    status = pages_create(space, p, handles);
    uvm_va_space_up_read(space->va_space);

    if (status == NV_OK)
        uvm_vmem_free(handles);
    else
        handles_free(handles, p->count);
    return status;
}

// Pages whose handles the caller was told are its own from now on. Of others nobody could ever free one.
void uvm_vmem_api_create_end(void *params, struct file *filp, bool told)
{
    struct uvm_vmem_create *p = params;
    struct uvm_vmem_space *space = uvm_vmem_file_space(filp);
    NvU32 i;

    uvm_va_space_down_read(space->va_space);
    mutex_lock(&space->lock);
    for (i = 0; i < p->count; i++) {
        struct uvm_vmem_handle *handle = uvm_vmem_handle_find_hidden(space, p->out_handle + i);

        if (!handle)
            continue;
        handle->hidden = false;
        if (!told) {
            xa_erase(&space->handles, handle->id);
            uvm_vmem_handle_free(handle);
        }
    }
    mutex_unlock(&space->lock);
    uvm_va_space_up_read(space->va_space);
}
