// Virtual memory management: reservations, allocations, mappings.
//
// SPDX-License-Identifier: MIT
#define _GNU_SOURCE
#include "simcuda.h"

#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>

struct handle {
    struct simcuda_device *device;
    uint64_t length;
    uint32_t memory; // RM's
    unsigned refs;   // the owner's and one per mapping
};

// A reservation (handle NULL) or a mapping; never overlapping others of its kind.
struct extent {
    uint64_t addr, length, offset;
    struct handle *handle;
};

struct prop {
    int type, handle_types;
    int location_type, location_id;
};

struct access {
    int location_type, location_id;
    int flags;
};

// Overlapping extents are equal, so that a look-up finds what it touches.
static int compare(const void *a, const void *b)
{
    const struct extent *x = a, *y = b;

    return x->addr + x->length <= y->addr ? -1 : y->addr + y->length <= x->addr;
}

static struct extent *find(void *tree, uint64_t addr, uint64_t length)
{
    struct extent key = {.addr = addr, .length = length}, **found = tfind(&key, &tree, compare);

    return found ? *found : NULL;
}

static void put(struct handle *h)
{
    if (--h->refs == 0) {
        simcuda_rm_free(h->memory);
        free(h);
    }
}

static bool aligned(uint64_t value) { return value % SIMCUDA_GRANULARITY == 0; }

static CUresult begin(void)
{
    if (simcuda_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    return simcuda_current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

SIMCUDA_API CUresult cuMemGetAllocationGranularity(size_t *granularity, const struct prop *prop, int option)
{
    (void)prop;
    (void)option;
    *granularity = SIMCUDA_GRANULARITY;
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuMemAddressReserve(uint64_t *addr, size_t length, size_t align, uint64_t hint,
                                         unsigned long long flags)
{
    CUresult result = begin();
    struct extent *r;
    uint64_t base;
    char *p;

    (void)hint;
    if (result)
        return result;
    if (align < SIMCUDA_GRANULARITY)
        align = SIMCUDA_GRANULARITY;
    if (!length || !aligned(length) || (align & (align - 1)) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    r = calloc(1, sizeof(*r));
    p = mmap(NULL, length + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!r || p == MAP_FAILED) {
        if (p != MAP_FAILED)
            munmap(p, length + align);
        free(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    base = ((uintptr_t)p + align - 1) & ~(uint64_t)(align - 1);
    if (base > (uintptr_t)p)
        munmap(p, base - (uintptr_t)p);
    munmap((char *)(uintptr_t)base + length, (uintptr_t)p + align - base);
    r->addr = base;
    r->length = length;
    pthread_mutex_lock(&simcuda.lock);
    tsearch(r, &simcuda.reservations, compare);
    pthread_mutex_unlock(&simcuda.lock);
    *addr = base;
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuMemAddressFree(uint64_t addr, size_t length)
{
    CUresult result = begin();
    struct extent *r;

    if (result)
        return result;
    pthread_mutex_lock(&simcuda.lock);
    r = find(simcuda.reservations, addr, length);
    if (!r || r->addr != addr || r->length != length || find(simcuda.mappings, addr, length)) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        tdelete(r, &simcuda.reservations, compare);
        munmap((void *)(uintptr_t)addr, length);
        free(r);
    }
    pthread_mutex_unlock(&simcuda.lock);
    return result;
}

SIMCUDA_API CUresult cuMemCreate(uint64_t *handle, size_t length, const struct prop *prop, unsigned long long flags)
{
    CUresult result = begin();
    struct handle *h;

    if (result)
        return result;
    if (!length || !aligned(length) || flags || prop->type != 1 || prop->location_type != 1 || prop->location_id < 0 ||
        prop->location_id >= simcuda.count || !simcuda.devices[prop->location_id].refs)
        return CUDA_ERROR_INVALID_VALUE;
    h = calloc(1, sizeof(*h));
    if (!h)
        return CUDA_ERROR_OUT_OF_MEMORY;
    h->device = &simcuda.devices[prop->location_id];
    h->length = length;
    h->refs = 1;
    pthread_mutex_lock(&simcuda.lock);
    result = simcuda_rm_memory(h->device, length, &h->memory);
    pthread_mutex_unlock(&simcuda.lock);
    if (result)
        free(h);
    else
        *handle = (uintptr_t)h;
    return result;
}

SIMCUDA_API CUresult cuMemRelease(uint64_t handle)
{
    CUresult result = begin();

    if (result)
        return result;
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&simcuda.lock);
    put((struct handle *)(uintptr_t)handle);
    pthread_mutex_unlock(&simcuda.lock);
    return CUDA_SUCCESS;
}

SIMCUDA_API CUresult cuMemMap(uint64_t addr, size_t length, size_t offset, uint64_t handle, unsigned long long flags)
{
    struct handle *h = (struct handle *)(uintptr_t)handle;
    CUresult result = begin();
    struct extent *r, *m;

    if (result)
        return result;
    if (!h || flags || !length || !aligned(addr | length | offset) || offset > h->length || length > h->length - offset)
        return CUDA_ERROR_INVALID_VALUE;
    m = calloc(1, sizeof(*m));
    if (!m)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *m = (struct extent){.addr = addr, .length = length, .offset = offset, .handle = h};
    pthread_mutex_lock(&simcuda.lock);
    r = find(simcuda.reservations, addr, length);
    if (!r || addr < r->addr || addr + length > r->addr + r->length || find(simcuda.mappings, addr, length))
        result = CUDA_ERROR_INVALID_VALUE;
    if (!result)
        result = simcuda_uvm_range(addr, length);
    if (!result) {
        h->refs++;
        tsearch(m, &simcuda.mappings, compare);
    } else {
        free(m);
    }
    pthread_mutex_unlock(&simcuda.lock);
    return result;
}

// The mapping that starts at addr and ends by end; NULL: none.
static struct extent *next_mapping(uint64_t addr, uint64_t end)
{
    struct extent *m = find(simcuda.mappings, addr, 1);

    return m && m->addr == addr && m->addr + m->length <= end ? m : NULL;
}

static bool covered(uint64_t addr, uint64_t length)
{
    struct extent *m;

    for (uint64_t at = addr; at < addr + length; at += m->length) {
        m = next_mapping(at, addr + length);
        if (!m)
            return false;
    }
    return length != 0;
}

SIMCUDA_API CUresult cuMemUnmap(uint64_t addr, size_t length)
{
    CUresult result = begin();

    if (result)
        return result;
    pthread_mutex_lock(&simcuda.lock);
    if (!covered(addr, length))
        result = CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = addr; !result && at < addr + length;) {
        struct extent *m = next_mapping(at, addr + length);

        result = simcuda_uvm_free(m->addr, m->length);
        if (result)
            break;
        at += m->length;
        tdelete(m, &simcuda.mappings, compare);
        put(m->handle);
        free(m);
    }
    pthread_mutex_unlock(&simcuda.lock);
    return result;
}

SIMCUDA_API CUresult cuMemSetAccess(uint64_t addr, size_t length, const struct access *access, size_t count)
{
    CUresult result = begin();

    if (result)
        return result;
    if (count != 1 || access->location_type != 1 || access->location_id < 0 || access->location_id >= simcuda.count ||
        access->flags != 3)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&simcuda.lock);
    if (!covered(addr, length))
        result = CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = addr; !result && at < addr + length;) {
        struct extent *m = next_mapping(at, addr + length);

        result =
            simcuda_uvm_map(&simcuda.devices[access->location_id], m->addr, m->length, m->offset, m->handle->memory);
        at += m->length;
    }
    pthread_mutex_unlock(&simcuda.lock);
    return result;
}

static void free_reservation(void *node)
{
    struct extent *r = node;

    munmap((void *)(uintptr_t)r->addr, r->length);
    free(r);
}

static void free_mapping(void *node)
{
    struct extent *m = node;

    put(m->handle);
    free(m);
}

void simcuda_vmm_reset(void)
{
    tdestroy(simcuda.mappings, free_mapping);
    tdestroy(simcuda.reservations, free_reservation);
    simcuda.mappings = simcuda.reservations = NULL;
}
