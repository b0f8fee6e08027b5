// Virtual memory management: reservations, allocations, mappings.
//
// SPDX-License-Identifier: MIT
#define _GNU_SOURCE
#include "simcuda.h"

#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/mman.h>

struct handle {
    struct simcuda_device *device;
    uint64_t length;
    uint32_t memory; // RM's
    unsigned refs;   // the owner's and one per mapping
};

// A reservation (handle NULL; with its guard) or a mapping; never overlapping others of its kind.
struct extent {
    uint64_t addr, length, offset;
    struct handle *handle;
    struct simcuda_device *guard; // on which its guard is mapped; NULL: none
};

#define GUARD SIMCUDA_GRANULARITY
#define GUARD_BYTE 0x6a
#define STEP (64u << 10) // what the module maps and unmaps at least

// All reservations lie here, each where the first gap is. The host has nothing else in it.
#define ROOM (1ull << 46)
static uint64_t room;

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

static uint64_t guard_addr(const struct extent *r) { return r->addr + r->length - GUARD; }

// All guards of a device share their memory: what is lost is seen at the addresses of each.
static CUresult guard_begin(struct extent *r, struct simcuda_device *d)
{
    uint64_t addr = guard_addr(r);
    bool first = !d->guard;
    CUresult result = first ? simcuda_rm_memory(d, GUARD, &d->guard) : CUDA_SUCCESS;

    if (result)
        d->guard = 0;
    else
        result = simcuda_uvm_range(addr, GUARD);
    if (result)
        return result;
    result = simcuda_uvm_map(d, addr, GUARD, 0, d->guard);
    if (!result && first)
        result = simcuda_fill(d, addr, GUARD_BYTE, GUARD);
    if (result)
        simcuda_uvm_free(addr, GUARD);
    else
        r->guard = d;
    return result;
}

static void guard_check(const struct extent *r)
{
    for (uint64_t at = guard_addr(r); at < r->addr + r->length; at += STEP) {
        unsigned char got[2] = {0};

        if (!simcuda_read(r->guard, at, &got[0], 1) && !simcuda_read(r->guard, at + STEP - 1, &got[1], 1) &&
            got[0] == GUARD_BYTE && got[1] == GUARD_BYTE)
            continue;
        fprintf(stderr, "simcuda: the memory behind the reservation 0x%llx..0x%llx is lost at 0x%llx\n",
                (unsigned long long)r->addr, (unsigned long long)guard_addr(r), (unsigned long long)at);
        abort();
    }
}

static void guard_end(struct extent *r)
{
    if (!r->guard)
        return;
    guard_check(r);
    simcuda_uvm_free(guard_addr(r), GUARD);
    r->guard = NULL;
}

static struct simcuda_device *ending; // twalk() has no argument for it; NULL: check all, and end none

static void visit(const void *node, VISIT order, int depth)
{
    struct extent *r = *(struct extent *const *)node;

    (void)depth;
    if ((order != postorder && order != leaf) || !r->guard)
        return;
    if (!ending)
        guard_check(r);
    else if (r->guard == ending)
        guard_end(r);
}

void simcuda_guards_end(struct simcuda_device *d)
{
    ending = d;
    twalk(simcuda.reservations, visit);
    ending = NULL;
    d->guard = 0; // it goes with the device
}

__attribute__((destructor)) static void guards_check(void)
{
    if (simcuda.pid == getpid() && !pthread_mutex_trylock(&simcuda.lock))
        twalk(simcuda.reservations, visit);
}

// Places a reservation in the first gap, without one before it.
static bool room_for(struct extent *r, uint64_t align)
{
    if (!room) {
        void *p = mmap(NULL, ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (p == MAP_FAILED)
            return false;
        room = ((uintptr_t)p + SIMCUDA_GRANULARITY - 1) & ~(SIMCUDA_GRANULARITY - 1);
    }
    r->addr = (room + align - 1) & ~(align - 1);
    for (struct extent *other; (other = find(simcuda.reservations, r->addr, r->length));)
        r->addr = (other->addr + other->length + align - 1) & ~(align - 1);
    return r->addr + r->length <= room + ROOM - SIMCUDA_GRANULARITY;
}

SIMCUDA_API CUresult cuMemAddressReserve(uint64_t *addr, size_t length, size_t align, uint64_t hint,
                                         unsigned long long flags)
{
    CUresult result = begin();
    struct extent *r;

    (void)hint;
    if (result)
        return result;
    if (align < SIMCUDA_GRANULARITY)
        align = SIMCUDA_GRANULARITY;
    if (!length || !aligned(length) || (align & (align - 1)) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    r = calloc(1, sizeof(*r));
    if (!r)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r->length = length + GUARD;
    pthread_mutex_lock(&simcuda.lock);
    if (!room_for(r, align))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result)
        result = guard_begin(r, simcuda_current());
    if (!result)
        tsearch(r, &simcuda.reservations, compare);
    pthread_mutex_unlock(&simcuda.lock);
    *addr = r->addr;
    if (result)
        free(r);
    return result;
}

SIMCUDA_API CUresult cuMemAddressFree(uint64_t addr, size_t length)
{
    CUresult result = begin();
    struct extent *r;

    if (result)
        return result;
    pthread_mutex_lock(&simcuda.lock);
    r = find(simcuda.reservations, addr, length);
    if (!r || r->addr != addr || r->length - GUARD != length || find(simcuda.mappings, addr, length)) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        guard_end(r);
        tdelete(r, &simcuda.reservations, compare);
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

// Memory of one process alone.
SIMCUDA_API CUresult cuMemExportToShareableHandle(void *fd, uint64_t handle, int type, unsigned long long flags)
{
    (void)fd, (void)handle, (void)type, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

SIMCUDA_API CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int type)
{
    (void)handle, (void)fd, (void)type;
    return CUDA_ERROR_NOT_SUPPORTED;
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
    if (!r || addr < r->addr || addr + length > r->addr + r->length - GUARD || find(simcuda.mappings, addr, length))
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

static void free_mapping(void *node)
{
    struct extent *m = node;

    put(m->handle);
    free(m);
}

void simcuda_vmm_reset(void)
{
    tdestroy(simcuda.mappings, free_mapping);
    tdestroy(simcuda.reservations, free);
    simcuda.mappings = simcuda.reservations = NULL;
}
