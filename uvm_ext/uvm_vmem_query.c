// QUERY: what the module can do on a GPU, and what the file holds there.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_api.h"
#include "uvm_vmem_check.h"
#include "uvm_vmem_file.h"

#include "uvm_pmm_gpu.h"

static void query_gpu(struct uvm_vmem_space *space, uvm_gpu_t *gpu, struct uvm_vmem_query *p)
{
    const UvmPmaStatistics *stats = gpu->pmm.pma_stats;
    struct uvm_vmem_gpu *vgpu;

    p->out_caps = UVM_VMEM_CAP_LIVE_REPLACE | UVM_VMEM_CAP_SPARSE | UVM_VMEM_CAP_TAKEOVER;
    if (uvm_vmem_gpu_has_huge(gpu))
        p->out_caps |= UVM_VMEM_CAP_HUGE;
    p->out_page_sizes = UVM_VMEM_PAGE_SIZES;
    p->out_bytes_total = gpu->mem_info.size;
    if (stats)
        p->out_bytes_free = READ_ONCE(stats->numFreePages64k) * UVM_PAGE_SIZE_64K;

    mutex_lock(&space->lock);
    vgpu = uvm_vmem_gpu_find(space, gpu);
    if (vgpu) {
        p->out_bytes_held = vgpu->bytes_held;
        p->out_bytes_created = vgpu->bytes_created;
        p->out_bytes_mapped = atomic64_read(&vgpu->bytes_mapped);
    }
    mutex_unlock(&space->lock);
}

NV_STATUS uvm_vmem_api_query(void *params, struct file *filp)
{
    static const NvU8 no_gpu[sizeof(((struct uvm_vmem_query *)0)->gpu_uuid)];
    struct uvm_vmem_query *p = params;
    uvm_va_space_t *va_space = uvm_va_space_get(filp);
    struct uvm_vmem_space *space;
    uvm_gpu_t *gpu;
    NV_STATUS status;

    status = uvm_vmem_check_query(p);
    if (status != NV_OK)
        return status;

    space = uvm_vmem_file_space(filp);
    if (!space)
        return NV_ERR_NO_MEMORY;

    p->out_abi = UVM_VMEM_ABI;
    p->out_max_ops = UVM_VMEM_MAX_OPS;
    p->out_max_bytes = UVM_VMEM_MAX_BYTES;
    p->out_pad = 0;
    p->out_caps = 0;
    p->out_page_sizes = 0;
    p->out_bytes_held = 0;
    p->out_bytes_created = 0;
    p->out_bytes_mapped = 0;
    p->out_bytes_free = 0;
    p->out_bytes_total = 0;
    p->out_pushes = atomic64_read(&space->pushes);
    p->out_invalidates = atomic64_read(&space->invalidates);
    p->out_waits = atomic64_read(&space->waits);

    if (!memcmp(p->gpu_uuid, no_gpu, sizeof(no_gpu)))
        return NV_OK;

    uvm_va_space_down_read(va_space);
    status = uvm_vmem_gpu_lookup(va_space, p->gpu_uuid, &gpu, NULL);
    if (status == NV_OK)
        query_gpu(space, gpu, p);
    uvm_va_space_up_read(va_space);
    return status;
}
