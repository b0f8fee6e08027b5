// The state of one open file, created at its first call and freed at the last close, and its GPUs.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_space.h"
#include "uvm_vmem_api.h"
#include "uvm_vmem_check.h"
#include "uvm_vmem_hooks.h"
#include "uvm_vmem_memory.h"
#include "uvm_vmem_overlay.h"

#include "uvm_kvmalloc.h"
#include "uvm_pmm_gpu.h"

#include <linux/random.h>

static bool uvm_vmem_confidential;
module_param(uvm_vmem_confidential, bool, 0444);
MODULE_PARM_DESC(uvm_vmem_confidential, "vMem: allow with confidential computing (default: no). Not tested there.");

static LIST_HEAD(g_uvm_vmem_spaces);
static DEFINE_MUTEX(g_uvm_vmem_spaces_lock);

static void space_free(nv_kref_t *ref)
{
    struct uvm_vmem_space *space = container_of(ref, struct uvm_vmem_space, refs);

    uvm_vmem_release_room_free(space->release);
    xa_destroy(&space->handles);
    uvm_kvfree(space);
}

void uvm_vmem_space_put(struct uvm_vmem_space *space) { nv_kref_put(&space->refs, space_free); }

static struct uvm_vmem_space *space_alloc(struct file *filp)
{
    struct uvm_vmem_space *space = uvm_kvmalloc_zero(sizeof(*space));

    if (!space)
        return NULL;

    nv_kref_init(&space->refs);
    space->va_space = uvm_va_space_get(filp);
    mutex_init(&space->lock);
    INIT_LIST_HEAD(&space->gpus);
    spin_lock_init(&space->records);
    xa_init(&space->handles);

    // Files start at different numbers, so a handle of another file is almost certainly not found.
    space->next_handle = (((NvU64)get_random_u32() & 0xFFFF) << 32) + 1;
    space->tgid = task_tgid_nr(current);
    get_task_comm(space->comm, current);

    space->release = uvm_vmem_release_room_alloc();
    if (space->release)
        return space;
    uvm_vmem_space_put(space);
    return NULL;
}

struct uvm_vmem_space *uvm_vmem_space_get(struct file *filp)
{
    uvm_va_space_t *va_space = uvm_va_space_get(filp);
    struct uvm_vmem_space *space = smp_load_acquire(&va_space->vmem);
    struct uvm_vmem_space *made;

    if (space)
        return space;

    uvm_vmem_proc_init();

    made = space_alloc(filp);
    if (!made)
        return NULL;

    mutex_lock(&g_uvm_vmem_spaces_lock);
    space = va_space->vmem;
    if (!space) {
        space = made;
        list_add_tail(&space->node, &g_uvm_vmem_spaces);
        smp_store_release(&va_space->vmem, space);
    }
    mutex_unlock(&g_uvm_vmem_spaces_lock);

    if (space != made)
        uvm_vmem_space_put(made);
    return space;
}

struct uvm_vmem_space *uvm_vmem_space_nth(loff_t n)
{
    struct uvm_vmem_space *space, *found = NULL;

    mutex_lock(&g_uvm_vmem_spaces_lock);
    list_for_each_entry(space, &g_uvm_vmem_spaces, node) {
        if (!n--) {
            nv_kref_get(&space->refs);
            found = space;
            break;
        }
    }
    mutex_unlock(&g_uvm_vmem_spaces_lock);
    return found;
}

struct uvm_vmem_gpu *uvm_vmem_gpu_find(struct uvm_vmem_space *space, uvm_gpu_t *gpu, bool make)
{
    struct uvm_vmem_gpu *vgpu;
    int i;

    lockdep_assert_held(&space->lock);

    list_for_each_entry(vgpu, &space->gpus, node) {
        if (vgpu->gpu == gpu)
            return vgpu;
    }
    if (!make)
        return NULL;

    vgpu = uvm_kvmalloc_zero(sizeof(*vgpu));
    if (!vgpu)
        return NULL;

    vgpu->space = space;
    vgpu->gpu = gpu;
    for (i = 0; i < UVM_VMEM_CLASSES; i++)
        INIT_LIST_HEAD(&vgpu->slabs[i]);
    list_add_tail(&vgpu->node, &space->gpus);
    return vgpu;
}

NV_STATUS uvm_vmem_gpu_status(uvm_gpu_t *gpu)
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

    return uvm_vmem_gpu_status(*gpu);
}

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
    vgpu = uvm_vmem_gpu_find(space, gpu, false);
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

    space = uvm_vmem_space_get(filp);
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

void uvm_vmem_unregister_gpu(uvm_va_space_t *va_space, uvm_gpu_t *gpu)
{
    struct uvm_vmem_space *space = va_space->vmem;
    struct uvm_vmem_gpu *vgpu;

    uvm_assert_rwsem_locked_write(&va_space->lock);

    if (!space)
        return;

    mutex_lock(&space->lock);
    vgpu = uvm_vmem_gpu_find(space, gpu, false);
    if (vgpu) {
        UVM_ASSERT(!atomic64_read(&vgpu->overlays));
        uvm_vmem_memory_free_all(vgpu);
        list_del(&vgpu->node);
        uvm_kvfree(vgpu);
    }
    mutex_unlock(&space->lock);
}

void uvm_vmem_destroy(uvm_va_space_t *va_space)
{
    struct uvm_vmem_space *space = va_space->vmem;

    if (!space)
        return;

    mutex_lock(&g_uvm_vmem_spaces_lock);
    list_del(&space->node);
    mutex_unlock(&g_uvm_vmem_spaces_lock);

    UVM_ASSERT(list_empty(&space->gpus));
    UVM_ASSERT(xa_empty(&space->handles));

    va_space->vmem = NULL;
    uvm_vmem_space_put(space);
}
