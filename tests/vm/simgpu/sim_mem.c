// RM's objects: what clients allocated through /dev/nvidiactl, and UVM's duplicates of their memory.
//
// SPDX-License-Identifier: GPL-2.0
#include <linux/mm.h>

#include "sim.h"
#include "sim_rm.h"

#ifdef SIM_HAVE_USER_TYPES
#define READ_ONLY UvmGpuMappingTypeReadOnly
#else
#define READ_ONLY UvmRmGpuMappingTypeReadOnly
#endif

struct sim_mem {
    struct sim_gpu *gpu;
    u64 page_size, size, count;
    u32 refs;
    u64 pages[];
};

struct object {
    struct list_head node;
    void *owner;         // the open file, or one of the two below
    struct sim_gpu *gpu; // of a device and what is under it
    u32 client, handle, parent, class_id;
    struct sim_mem *mem;
};
static int owner_uvm, owner_test;

static LIST_HEAD(objects); // under sim_lock; changed with rm_mutex held too, so that one may look, unlock and change
static DEFINE_MUTEX(rm_mutex);
static u32 next_client = 0xc1d00001, next_handle = 0xd0000001;

static struct object *find(u32 client, u32 handle)
{
    struct object *o;

    list_for_each_entry(o, &objects, node) {
        if (o->client == client && o->handle == handle)
            return o;
    }
    return NULL;
}

static NV_STATUS mem_new(struct sim_gpu *g, u64 size, u64 page_size, struct sim_mem **out)
{
    u64 count = size / page_size;
    struct sim_mem *m;
    NV_STATUS status;

    if (!size || size > g->fb_size)
        return size ? NV_ERR_NO_MEMORY : NV_ERR_INVALID_ARGUMENT;
    m = kvzalloc(struct_size(m, pages, count), GFP_KERNEL);
    if (!m)
        return NV_ERR_NO_MEMORY;
    status = sim_pma_rm_alloc(g, page_size, count, m->pages);
    if (status != NV_OK) {
        kvfree(m);
        return status;
    }
    m->gpu = g;
    m->page_size = page_size;
    m->size = size;
    m->count = count;
    m->refs = 1;
    *out = m;
    return NV_OK;
}

static void mem_put(struct sim_mem *m)
{
    bool last;

    if (!m)
        return;
    mutex_lock(&sim_lock);
    last = --m->refs == 0;
    mutex_unlock(&sim_lock);
    if (!last)
        return;
    sim_pma_rm_free(m->gpu, m->page_size, m->count, m->pages);
    kvfree(m);
}

static struct object *object_new(void *owner, struct sim_gpu *g, u32 client, u32 handle, u32 parent, u32 class_id)
{
    struct object *o = kzalloc(sizeof(*o), GFP_KERNEL);

    if (!o)
        return NULL;
    o->owner = owner;
    o->gpu = g;
    o->client = client;
    o->handle = handle;
    o->parent = parent;
    o->class_id = class_id;
    return o;
}

static void object_insert(struct object *o)
{
    mutex_lock(&sim_lock);
    list_add(&o->node, &objects);
    o->gpu->c.rm_objects++;
    mutex_unlock(&sim_lock);
}

// Frees o and all below it. rm_mutex held.
static void object_free(struct object *o)
{
    u32 client = o->client, handle = o->handle;
    void *owner = o->owner;
    struct object *child, *found;

    mutex_lock(&sim_lock);
    list_del(&o->node);
    o->gpu->c.rm_objects--;
    mutex_unlock(&sim_lock);
    mem_put(o->mem);
    kfree(o);
    do {
        found = NULL;
        list_for_each_entry(child, &objects, node) {
            if (child->owner == owner && child->client == client && child->parent == handle)
                found = child;
        }
        if (found)
            object_free(found);
    } while (found);
}

static NV_STATUS check_new(void *owner, u32 client, u32 parent, u32 *handle, u32 class_id, u32 instance,
                           struct sim_gpu **g)
{
    struct object *root = find(client, client), *up = find(client, parent);

    if (!root || root->owner != owner)
        return NV_ERR_INVALID_CLIENT;
    if (!up)
        return NV_ERR_INVALID_OBJECT_PARENT;
    if (!*handle)
        *handle = next_handle++;
    else if (find(client, *handle))
        return NV_ERR_INSERT_DUPLICATE_NAME;
    *g = up->gpu;
    switch (class_id) {
    case RM_CLASS_DEVICE:
        if (up != root)
            return NV_ERR_INVALID_OBJECT_PARENT;
        if (instance >= sim_gpu_count)
            return NV_ERR_INVALID_DEVICE;
        *g = &sim_gpus[instance];
        return NV_OK;
    case RM_CLASS_MEMORY:
    case RM_CLASS_SUBDEVICE:
    case RM_CLASS_VASPACE: return up->class_id == RM_CLASS_DEVICE ? NV_OK : NV_ERR_INVALID_OBJECT_PARENT;
    default: return NV_ERR_INVALID_CLASS;
    }
}

u32 sim_rm_alloc(void *owner, u32 client, u32 parent, u32 *handle, u32 class_id, u32 instance, struct rm_memory *memory)
{
    struct sim_gpu *g = &sim_gpus[0];
    struct object *o;
    NV_STATUS status = NV_OK;

    mutex_lock(&rm_mutex);
    if (class_id == RM_CLASS_CLIENT)
        *handle = client = next_client++;
    else
        status = check_new(owner, client, parent, handle, class_id, instance, &g);
    if (status != NV_OK)
        goto out;
    o = object_new(owner, g, client, *handle, parent, class_id);
    status = o ? NV_OK : NV_ERR_NO_MEMORY;
    if (o && class_id == RM_CLASS_MEMORY) {
        // Bits 24:23 of attr: 2 is big pages, 3 huge ones
        u64 page_size = ((memory->attr >> 23) & 3) == 2 ? 64 << 10 : 2 << 20;

        memory->size = ALIGN(memory->size, page_size);
        status = mem_new(g, memory->size, page_size, &o->mem);
        if (status == NV_OK) {
            memory->offset = o->mem->pages[0];
            memory->limit = memory->size - 1;
        }
    }
    if (status == NV_OK)
        object_insert(o);
    else
        kfree(o);
out:
    mutex_unlock(&rm_mutex);
    return status;
}

u32 sim_rm_free(void *owner, u32 client, u32 handle)
{
    struct object *o;
    NV_STATUS status = NV_OK;

    mutex_lock(&rm_mutex);
    o = find(client, handle);
    if (!o || o->owner != owner)
        status = NV_ERR_OBJECT_NOT_FOUND;
    else
        object_free(o);
    mutex_unlock(&rm_mutex);
    return status;
}

void sim_rm_release(void *owner)
{
    struct object *o, *found;

    mutex_lock(&rm_mutex);
    do {
        found = NULL;
        list_for_each_entry(o, &objects, node) {
            if (o->owner == owner)
                found = o;
        }
        if (found)
            object_free(found);
    } while (found);
    mutex_unlock(&rm_mutex);
}

u32 sim_mem_exit(void)
{
    struct object *o;
    u32 dups = 0;

    list_for_each_entry(o, &objects, node)
        dups += o->owner == &owner_uvm;
    sim_rm_release(&owner_test);
    sim_rm_release(&owner_uvm);
    return dups;
}

int sim_mem_ioctl(struct simgpu_mem *io)
{
    struct object *o;
    NV_STATUS status;
    int ret = 0;

    if (io->size && io->page_size != 64 << 10 && io->page_size != 2 << 20)
        return -EINVAL;
    mutex_lock(&rm_mutex);
    o = find(io->h_client, io->h_memory);
    if (!io->size) {
        if (o && o->owner == &owner_test)
            object_free(o);
        else
            ret = -ENOENT;
    } else if (o) {
        ret = -EEXIST;
    } else {
        o = object_new(&owner_test, &sim_gpus[io->gpu], io->h_client, io->h_memory, 0, RM_CLASS_MEMORY);
        status = o ? mem_new(o->gpu, ALIGN(io->size, io->page_size), io->page_size, &o->mem) : NV_ERR_NO_MEMORY;
        if (status == NV_OK) {
            io->phys = o->mem->pages[0];
            object_insert(o);
        } else {
            kfree(o);
            ret = -ENOMEM;
        }
    }
    mutex_unlock(&rm_mutex);
    return ret;
}

// UVM's side. A duplicate keeps the memory, whatever becomes of the original.

NV_STATUS nvUvmInterfaceDupMemory(uvmGpuDeviceHandle device, NvHandle client, NvHandle memory, NvHandle *dup,
                                  UvmGpuMemoryInfo *info)
{
    struct sim_gpu *g = (struct sim_gpu *)device;
    struct object *o, *copy;
    NV_STATUS status = NV_OK;
    u64 i;

    SIM_CALL_MAY_FAIL(g);
    mutex_lock(&rm_mutex);
    o = find(client, memory);
    if (!o || !o->mem) {
        status = NV_ERR_OBJECT_NOT_FOUND;
        goto out;
    }
    copy = object_new(&owner_uvm, o->gpu, 0, next_handle++, 0, RM_CLASS_MEMORY);
    if (!copy) {
        status = NV_ERR_NO_MEMORY;
        goto out;
    }
    mutex_lock(&sim_lock);
    o->mem->refs++;
    g->c.rm_dup_memory++;
    mutex_unlock(&sim_lock);
    copy->mem = o->mem;
    object_insert(copy);
    *dup = copy->handle;
    memset(info, 0, sizeof(*info));
    info->deviceDescendant = NV_TRUE;
    info->pageSize = o->mem->page_size;
    info->size = o->mem->size;
    info->physAddr = o->mem->pages[0];
    info->contig = NV_TRUE;
    for (i = 1; i < o->mem->count; i++) {
        if (o->mem->pages[i] != o->mem->pages[0] + i * o->mem->page_size)
            info->contig = NV_FALSE;
    }
    memcpy(info->uuid.uuid, o->mem->gpu->uuid, sizeof(o->mem->gpu->uuid));
out:
    mutex_unlock(&rm_mutex);
    return status;
}
EXPORT_SYMBOL(nvUvmInterfaceDupMemory);

NV_STATUS nvUvmInterfaceFreeDupedHandle(uvmGpuDeviceHandle device, NvHandle handle)
{
    SIM_CALL((struct sim_gpu *)device);
    return sim_rm_free(&owner_uvm, 0, handle);
}
EXPORT_SYMBOL(nvUvmInterfaceFreeDupedHandle);

NV_STATUS nvUvmInterfaceGetExternalAllocPtes(uvmGpuAddressSpaceHandle vas, NvHandle memory, NvU64 offset, NvU64 size,
                                             UvmGpuExternalMappingInfo *x)
{
    struct sim_gpu *g = ((struct sim_vas *)vas)->gpu;
    u64 page = x->mappingPageSize, stride, n, i;
    NV_STATUS status = NV_OK;
    struct sim_mem *m;
    struct object *o;

    SIM_CALL_MAY_FAIL(g);
    mutex_lock(&rm_mutex);
    mutex_lock(&sim_lock);
    o = find(0, memory);
    m = o && o->owner == &owner_uvm ? o->mem : NULL;
    if (m && !page)
        page = m->page_size;
    if (!m || offset > m->size || size > m->size - offset || page > m->page_size || !IS_ALIGNED(offset | size, page)) {
        status = NV_ERR_INVALID_ARGUMENT;
        goto out;
    }
    // A 2M entry lives in PDE0, whose entries are 16 bytes
    stride = page == 2 << 20 ? 16 : 8;
    n = size / page;
    for (i = 0; i < min_t(u64, n, x->pteBufferSize / stride); i++) {
        u64 *e = x->pteBuffer + i * stride / 8, at = offset + i * page;
        u64 phys = m->pages[at / m->page_size] + at % m->page_size;

        e[0] = g->arch->mmu->make_pte(phys, x->mappingType == READ_ONLY);
        if (stride == 16)
            e[1] = 0;
    }
    x->numWrittenPtes = i;
    x->numRemainingPtes = n - i;
    x->pteSize = stride;
out:
    mutex_unlock(&sim_lock);
    mutex_unlock(&rm_mutex);
    return status;
}
EXPORT_SYMBOL(nvUvmInterfaceGetExternalAllocPtes);
