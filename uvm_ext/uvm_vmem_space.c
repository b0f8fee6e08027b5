// The records of an open file and of its GPUs.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_space.h"

#include <linux/random.h>

static bool uvm_vmem_confidential;
module_param(uvm_vmem_confidential, bool, 0444);
MODULE_PARM_DESC(uvm_vmem_confidential, "vMem: allow with confidential computing (default: no). Not tested there.");

void uvm_vmem_space_free(struct uvm_vmem_space *space)
{
    UVM_ASSERT(list_empty(&space->gpus));
    UVM_ASSERT(xa_empty(&space->handles));

    uvm_vmem_free(space->reserve);
    xa_destroy(&space->handles);
    uvm_vmem_free(space);
}

struct uvm_vmem_space *uvm_vmem_space_alloc(uvm_va_space_t *va_space, struct uvm_vmem_reserve *reserve)
{
    struct uvm_vmem_space *space = uvm_vmem_zalloc(sizeof(*space));

    if (!space)
        return NULL;

    space->va_space = va_space;
    space->reserve = reserve;
    mutex_init(&space->lock);
    INIT_LIST_HEAD(&space->gpus);
    spin_lock_init(&space->records);
    xa_init_flags(&space->handles, XA_FLAGS_ACCOUNT);

    // Files start at different numbers, so a handle of another file is almost certainly not found.
    space->next_handle = (((NvU64)get_random_u32() & 0xFFFF) << 32) + 1;
    return space;
}

struct uvm_vmem_gpu *uvm_vmem_gpu_find(struct uvm_vmem_space *space, uvm_gpu_t *gpu)
{
    struct uvm_vmem_gpu *vgpu;

    lockdep_assert_held(&space->lock);

    list_for_each_entry(vgpu, &space->gpus, node) {
        if (vgpu->gpu == gpu)
            return vgpu;
    }
    return NULL;
}

struct uvm_vmem_gpu *uvm_vmem_gpu_find_or_add(struct uvm_vmem_space *space, uvm_gpu_t *gpu)
{
    struct uvm_vmem_gpu *vgpu = uvm_vmem_gpu_find(space, gpu);
    int i;

    if (vgpu)
        return vgpu;

    vgpu = uvm_vmem_zalloc(sizeof(*vgpu));
    if (!vgpu)
        return NULL;

    vgpu->space = space;
    vgpu->gpu = gpu;
    for (i = 0; i < UVM_VMEM_CLASSES; i++)
        INIT_LIST_HEAD(&vgpu->slabs[i]);
    list_add_tail(&vgpu->node, &space->gpus);
    return vgpu;
}

NV_STATUS uvm_vmem_gpu_check(uvm_gpu_t *gpu)
{
    uvm_page_tree_t *tree = &gpu->address_space_tree;

    // With SR-IOV heavy, page tables are written through a proxy, and vidmem is reached through mappings made on
    // demand.
    if (uvm_vmem_gpu_is_sriov_heavy(gpu) || !uvm_vmem_gpu_has_sparse(gpu) || !gpu->mem_info.size)
        return NV_ERR_NOT_SUPPORTED;
    if (uvm_vmem_gpu_is_coherent(gpu))
        return NV_ERR_NOT_SUPPORTED;
    if (uvm_vmem_gpu_is_confidential(gpu) && !uvm_vmem_confidential)
        return NV_ERR_NOT_SUPPORTED;

    // Pascal and later: a table of 64 KiB entries covers 2 MiB.
    if (!uvm_mmu_page_size_supported(tree, UVM_PAGE_SIZE_64K) ||
        uvm_mmu_pde_coverage(tree, UVM_PAGE_SIZE_64K) != UVM_VMEM_BLOCK)
        return NV_ERR_NOT_SUPPORTED;

    return NV_OK;
}

NV_STATUS uvm_vmem_gpu_lookup(uvm_va_space_t *va_space, const NvU8 *uuid, uvm_gpu_t **gpu, uvm_page_tree_t **tree)
{
    NvProcessorUuid id;

    uvm_assert_rwsem_locked(&va_space->lock);

    BUILD_BUG_ON(sizeof(id.uuid) != sizeof(((struct uvm_vmem_query *)0)->gpu_uuid));
    memcpy(id.uuid, uuid, sizeof(id.uuid));

    *gpu = tree ? uvm_va_space_get_gpu_by_uuid_with_gpu_va_space(va_space, &id)
                : uvm_va_space_get_gpu_by_uuid(va_space, &id);
    if (!*gpu)
        return NV_ERR_INVALID_DEVICE;
    if (tree)
        *tree = &uvm_gpu_va_space_get(va_space, *gpu)->page_tables;

    return uvm_vmem_gpu_check(*gpu);
}
