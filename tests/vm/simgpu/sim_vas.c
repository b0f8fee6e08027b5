// nvUvmInterface*: address spaces, memory that RM maps into them.
//
// SPDX-License-Identifier: GPL-2.0
#include "sim.h"

static struct sim_vas *to_vas(uvmGpuAddressSpaceHandle h) { return (struct sim_vas *)h; }

struct sim_vas *sim_vas_find(const struct simgpu_vas_id *id)
{
    struct sim_vas *v;

    lockdep_assert_held(&sim_lock);
    list_for_each_entry(v, &sim_vas_list, node) {
        if (v->is_dup && v->gpu->index == id->gpu && v->h_vaspace == id->h_vaspace &&
            (!id->h_client || v->h_client == id->h_client))
            return v;
    }
    return NULL;
}

static NV_STATUS vas_new(struct sim_gpu *g, bool dup, u32 h_client, u32 h_vaspace, uvmGpuAddressSpaceHandle *out,
                         UvmGpuAddressSpaceInfo *info)
{
    struct sim_vas *v = kvzalloc(sizeof(*v), GFP_KERNEL);

    if (!v)
        return NV_ERR_NO_MEMORY;
    v->gpu = g;
    INIT_LIST_HEAD(&v->allocs);
    hash_init(v->tlb);
    v->next_va = g->arch->rm_va_base;
    v->is_dup = dup;
    v->h_client = h_client;
    v->h_vaspace = h_vaspace;
    mutex_lock(&sim_lock);
    list_add(&v->node, &sim_vas_list);
    mutex_unlock(&sim_lock);
    memset(info, 0, sizeof(*info));
    info->bigPageSize = 64 << 10;
    info->time0Offset = &v->time0;
    info->time1Offset = &v->time1;
    info->maxSubctxCount = 64;
    *out = (uvmGpuAddressSpaceHandle)v;
    return NV_OK;
}

#ifdef SIM_HAVE_ADDRESS_SPACE_ATS
NV_STATUS nvUvmInterfaceAddressSpaceCreate(uvmGpuDeviceHandle device, unsigned long long base, unsigned long long size,
                                           NvBool ats, uvmGpuAddressSpaceHandle *vas, UvmGpuAddressSpaceInfo *info)
#else
NV_STATUS nvUvmInterfaceAddressSpaceCreate(uvmGpuDeviceHandle device, unsigned long long base, unsigned long long size,
                                           uvmGpuAddressSpaceHandle *vas, UvmGpuAddressSpaceInfo *info)
#endif
{
    SIM_CALL_MAY_FAIL((struct sim_gpu *)device);
    return vas_new((struct sim_gpu *)device, false, 0, 0, vas, info);
}
EXPORT_SYMBOL(nvUvmInterfaceAddressSpaceCreate);

NV_STATUS nvUvmInterfaceDupAddressSpace(uvmGpuDeviceHandle device, NvHandle client, NvHandle vaspace,
                                        uvmGpuAddressSpaceHandle *vas, UvmGpuAddressSpaceInfo *info)
{
    SIM_CALL_MAY_FAIL((struct sim_gpu *)device);
    return vas_new((struct sim_gpu *)device, true, client, vaspace, vas, info);
}
EXPORT_SYMBOL(nvUvmInterfaceDupAddressSpace);

void nvUvmInterfaceAddressSpaceDestroy(uvmGpuAddressSpaceHandle h)
{
    struct sim_vas *v = to_vas(h);

    if (!v)
        return;
    SIM_CALL(v->gpu);
    WARN(!list_empty(&v->allocs), "simgpu: address space destroyed with live allocations\n");
    mutex_lock(&sim_lock);
    sim_post_land_vas(v->gpu, v);
    sim_loops_vas_gone(v);
    sim_tlb_drop_all(v);
    list_del(&v->node);
    mutex_unlock(&sim_lock);
    kvfree(v);
}
EXPORT_SYMBOL(nvUvmInterfaceAddressSpaceDestroy);

#ifdef SIM_HAVE_PAGE_DIRECTORY_DMA
NV_STATUS nvUvmInterfaceSetPageDirectory(uvmGpuAddressSpaceHandle h, NvU64 phys, unsigned entries, NvBool vid,
                                         NvU32 pasid, NvU64 *dma)
#else
NV_STATUS nvUvmInterfaceSetPageDirectory(uvmGpuAddressSpaceHandle h, NvU64 phys, unsigned entries, NvBool vid,
                                         NvU32 pasid)
#endif
{
    struct sim_vas *v = to_vas(h);

    SIM_CALL_MAY_FAIL(v->gpu);
#ifdef SIM_HAVE_PAGE_DIRECTORY_DMA
    *dma = phys;
#endif
    mutex_lock(&sim_lock);
    sim_tlb_drop_all(v);
    v->pdb = phys;
    v->pdb_vid = vid;
    v->has_pdb = true;
    mutex_unlock(&sim_lock);
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceSetPageDirectory);

NV_STATUS nvUvmInterfaceUnsetPageDirectory(uvmGpuAddressSpaceHandle h)
{
    struct sim_vas *v = to_vas(h);

    SIM_CALL(v->gpu);
    mutex_lock(&sim_lock);
    // RM preempts the channels and invalidates
    sim_post_land_vas(v->gpu, v);
    sim_tlb_drop_all(v);
    v->has_pdb = false;
    mutex_unlock(&sim_lock);
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceUnsetPageDirectory);

// Memory for channels and the like: an address of the GPU and a buffer of the host behind it.

void *sim_vas_rm_ptr(struct sim_vas *v, u64 va, u64 *contig)
{
    struct sim_alloc *a;

    list_for_each_entry(a, &v->allocs, node) {
        if (va >= a->va && va < a->va + a->size) {
            *contig = a->va + a->size - va;
            return a->cpu + (va - a->va);
        }
    }
    return NULL;
}

static void mem_put(struct sim_alloc *a)
{
    if (atomic_dec_and_test(a->users)) {
        vfree(a->cpu);
        kfree(a->users);
    }
    kfree(a);
}

static u64 mem_insert(struct sim_vas *v, struct sim_alloc *a, u64 align)
{
    mutex_lock(&sim_lock);
    a->va = ALIGN(v->next_va, max_t(u64, align, 64 << 10));
    v->next_va = a->va + a->size;
    list_add(&a->node, &v->allocs);
    mutex_unlock(&sim_lock);
    atomic_inc(&sim_n_allocs);
    return a->va;
}

static NV_STATUS mem_alloc(struct sim_vas *v, NvLength length, UvmGpuPointer *va, UvmGpuAllocInfo *info)
{
    struct sim_alloc *a = kzalloc(sizeof(*a), GFP_KERNEL);

    if (!a)
        return NV_ERR_NO_MEMORY;
    a->size = PAGE_ALIGN(max_t(u64, length, 1));
    a->cpu = vzalloc(a->size);
    a->users = kzalloc(sizeof(*a->users), GFP_KERNEL);
    if (!a->cpu || !a->users) {
        vfree(a->cpu);
        kfree(a->users);
        kfree(a);
        return NV_ERR_NO_MEMORY;
    }
    atomic_set(a->users, 1);
    *va = mem_insert(v, a, info->alignment);
    return NV_OK;
}

NV_STATUS nvUvmInterfaceMemoryAllocFB(uvmGpuAddressSpaceHandle h, NvLength length, UvmGpuPointer *va,
                                      UvmGpuAllocInfo *info)
{
    SIM_CALL_MAY_FAIL(to_vas(h)->gpu);
    return mem_alloc(to_vas(h), length, va, info);
}
EXPORT_SYMBOL(nvUvmInterfaceMemoryAllocFB);

NV_STATUS nvUvmInterfaceMemoryAllocSys(uvmGpuAddressSpaceHandle h, NvLength length, UvmGpuPointer *va,
                                       UvmGpuAllocInfo *info)
{
    SIM_CALL_MAY_FAIL(to_vas(h)->gpu);
    return mem_alloc(to_vas(h), length, va, info);
}
EXPORT_SYMBOL(nvUvmInterfaceMemoryAllocSys);

void nvUvmInterfaceMemoryFree(uvmGpuAddressSpaceHandle h, UvmGpuPointer va)
{
    struct sim_vas *v = to_vas(h);
    struct sim_alloc *a, *found = NULL;

    SIM_CALL(v->gpu);
    mutex_lock(&sim_lock);
    list_for_each_entry(a, &v->allocs, node) {
        if (a->va == va)
            found = a;
    }
    if (found)
        list_del(&found->node);
    mutex_unlock(&sim_lock);
    if (WARN(!found, "simgpu: MemoryFree of unknown address 0x%llx\n", (u64)va))
        return;
    mem_put(found);
    atomic_dec(&sim_n_allocs);
}
EXPORT_SYMBOL(nvUvmInterfaceMemoryFree);

NV_STATUS nvUvmInterfaceMemoryCpuMap(uvmGpuAddressSpaceHandle h, UvmGpuPointer va, NvLength length, void **cpu,
                                     NvU64 page_size)
{
    struct sim_vas *v = to_vas(h);
    u64 contig;

    SIM_CALL_MAY_FAIL(v->gpu);
    mutex_lock(&sim_lock);
    *cpu = sim_vas_rm_ptr(v, va, &contig);
    mutex_unlock(&sim_lock);
    return *cpu && length <= contig ? NV_OK : NV_ERR_INVALID_ARGUMENT;
}
EXPORT_SYMBOL(nvUvmInterfaceMemoryCpuMap);

void nvUvmInterfaceMemoryCpuUnMap(uvmGpuAddressSpaceHandle h, void *cpu) { SIM_CALL(to_vas(h)->gpu); }
EXPORT_SYMBOL(nvUvmInterfaceMemoryCpuUnMap);

// The same memory at an address of another GPU
NV_STATUS nvUvmInterfaceDupAllocation(uvmGpuAddressSpaceHandle src, NvU64 src_va, uvmGpuAddressSpaceHandle dst,
                                      NvU64 dst_align, NvU64 *dst_va)
{
    struct sim_vas *v = to_vas(src);
    struct sim_alloc *a, *copy;
    bool found = false;

    SIM_CALL_MAY_FAIL(v->gpu);
    copy = kzalloc(sizeof(*copy), GFP_KERNEL);
    if (!copy)
        return NV_ERR_NO_MEMORY;
    mutex_lock(&sim_lock);
    list_for_each_entry(a, &v->allocs, node) {
        if (a->va == src_va) {
            atomic_inc(a->users);
            *copy = *a;
            found = true;
            break;
        }
    }
    mutex_unlock(&sim_lock);
    if (!found) {
        kfree(copy);
        return NV_ERR_INVALID_ADDRESS;
    }
    *dst_va = mem_insert(to_vas(dst), copy, dst_align);
    return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceDupAllocation);
